# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Latte Macchiato on top of a pretrained attention layer: an exact window and sinks, and latents for everything before."""

import math
from dataclasses import dataclass, fields

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from ..kernels.cluster_logits import cluster_logits
from ..kernels.latent_attention import EMPTY, latent_attention
from ..kernels.rg_lru import rg_lru
from ..kernels.rotary_embedding import rotate
from ..kernels.short_convolution import short_convolution
from ..kernels.sliding_window_attention import WindowState, leaving_window, sliding_window_attention

CONV_KERNEL = 4
START_WINDOW_SHARE = 0.9  # share of the window at the start of the paper's form
WINDOW_FIELDS = tuple(f.name for f in fields(WindowState))


@dataclass(frozen=True)
class Variant:
    """Which components run: the whole mixer, or an ablation of it.

    Attributes:
        window, sinks: exact keys.
        latents: whether the long-range path runs.
        offset: relative position at which queries meet sinks and latents.
    """

    window: int
    sinks: int
    latents: bool
    offset: int


def _turned_back(
    at: tuple[torch.Tensor, torch.Tensor], cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the angles `at` minus those of cos and sin."""
    return at[0] * cos + at[1] * sin, at[1] * cos - at[0] * sin


def named(state: WindowState) -> dict[str, torch.Tensor]:
    """The fields of a window's state, as a cache layer keeps them."""
    return {name: getattr(state, name) for name in WINDOW_FIELDS}


def rg_lru_gates(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Gates r and i of an RG-LRU before their sigmoids, (2, B, T, D): block-diagonal in x (B, T, D).

    Args:
        x: input.
        weight: (2, blocks, D / blocks, D / blocks).
        bias: (2, D).
    """
    blocks = x.unflatten(-1, (weight.shape[1], -1))
    gates = torch.einsum("bthi,ghij->gbthj", blocks, weight.to(x.dtype)).flatten(-2)
    return gates + bias.to(gates.dtype)[:, None, None]


def init_rg_lru(weight: torch.Tensor, bias: torch.Tensor, decay: torch.Tensor) -> None:
    """Fresh weights of an RG-LRU: a = exp(-softplus(decay)) with a^2 uniform in [0.81, 0.998]."""
    init.normal_(weight, std=weight.shape[-1] ** -0.5)
    init.zeros_(bias)
    squared = torch.empty_like(decay, dtype=torch.float32).uniform_(0.9**2, 0.999**2)
    init.copy_(decay, torch.log(torch.expm1(-0.5 * torch.log(squared))).to(decay.dtype))


def _nothing_seen(states: dict[str, torch.Tensor]) -> torch.Tensor:
    """(B,) true for sequences that had only padding so far."""
    inside, kept = states["valid"].any(1), (states["sink_index"] >= 0).any(1)
    return ~(inside | kept | (states["mass"] > EMPTY / 2).flatten(1).any(1))


class LatteRMSNorm(nn.Module):
    """Root-mean-square norm with a gain, in float32."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()


class LatteMixer(nn.Module):
    """The new parameters of one converted layer and what they compute (papers: Latte, sections 2 and 9; DESIGN, 6).

    Latent logits are the sum of up to two parts. With `linattn_init="data"` a latent is a cluster of the teacher's keys:
    a query scores its mean and variance as it would score a key at the window's edge, a key is assigned to the nearest
    means. With `"random"`, or with a `linattn_source`, logits are linear in the normalised source of the layer's input.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        latents, width = config.linattn_latents, config.hidden_size
        self.heads, self.kv_heads, self.latents = heads, kv_heads, latents
        self.gate_kind, self.source = config.linattn_gate, config.linattn_source
        self.hard = config.linattn_assignment == "hard"
        self.from_data = config.linattn_init == "data"
        self.from_tokens = not self.from_data or self.source != "none"
        types = getattr(config, "layer_types", None)
        # A native local layer never saw sinks or more tokens than its window: neither does its conversion.
        self.native_window = config.sliding_window if types and types[layer_idx] == "sliding_attention" else None
        self.mass_length = config.linattn_mass_length
        if self.native_window is not None:
            outside = max(1, self.native_window - config.linattn_window)
            self.mass_length = outside if self.mass_length is None else min(outside, self.mass_length)

        self.latent_bias = nn.Parameter(torch.empty(heads, latents))
        if self.from_data:
            self.latent_key = nn.Parameter(torch.empty(kv_heads, latents, dim))
            self.latent_log_variance = nn.Parameter(torch.empty(kv_heads, latents, dim))
            self.assign_weight = nn.Parameter(torch.empty(kv_heads, latents, dim))
            self.assign_bias = nn.Parameter(torch.empty(kv_heads, latents))
        if self.from_tokens:
            self.q_latent = nn.Parameter(torch.empty(heads * latents, width))
            self.k_latent = nn.Parameter(torch.empty(kv_heads * latents, width))
        if self.gate_kind == "learned":
            self.gate_weight = nn.Parameter(torch.empty(heads, width))
            self.gate_bias = nn.Parameter(torch.empty(heads))
        if self.from_tokens or self.gate_kind == "learned":
            self.norm = LatteRMSNorm(width)
            if self.source == "conv":
                self.conv_weight = nn.Parameter(torch.empty(width, CONV_KERNEL))
            if self.source == "rglru":
                block = width // heads
                if width % heads:
                    raise ValueError(f"rglru needs hidden_size {width} to be a multiple of the {heads} heads")
                self.rglru_weight = nn.Parameter(torch.empty(2, heads, block, block))
                self.rglru_bias = nn.Parameter(torch.empty(2, width))
                self.rglru_lambda = nn.Parameter(torch.empty(width))

    def init_weights(self) -> None:
        """Values of a fresh layer; calibration then overwrites those that come from data."""
        init.zeros_(self.latent_bias)
        if self.from_data:
            init.normal_(self.latent_key)
            init.constant_(self.latent_log_variance, math.log(1e-6))
            init.normal_(self.assign_weight)
            init.zeros_(self.assign_bias)
        if self.from_tokens:
            width = self.q_latent.shape[1]
            init.zeros_(self.q_latent)  # distinct keys break the symmetry of the latents
            if self.from_data:
                init.zeros_(self.k_latent)
            else:
                init.normal_(self.k_latent, std=width**-0.5)
        if self.gate_kind == "learned":
            init.zeros_(self.gate_weight)
            init.constant_(self.gate_bias, math.log(self.latents * START_WINDOW_SHARE / (1 - START_WINDOW_SHARE)))
        if hasattr(self, "norm"):
            init.ones_(self.norm.weight)
        if hasattr(self, "conv_weight"):
            tap = torch.zeros_like(self.conv_weight)
            tap[:, 0] = 1
            init.copy_(self.conv_weight, tap)
        if hasattr(self, "rglru_lambda"):
            init_rg_lru(self.rglru_weight, self.rglru_bias, self.rglru_lambda)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        offsets: tuple[torch.Tensor, torch.Tensor],
        variant: Variant,
        *,
        scaling: float,
        softcap: float | None = None,
        states: dict[str, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Mix one call's tokens.

        Args:
            query, key: rotated, (B, T, H, d) and (B, T, H_kv, d).
            value: (B, T, H_kv, d).
            hidden: the layer's input, (B, T, D).
            rotary: cos and sin of the tokens' positions, (B or 1, T, d).
            offsets: cos and sin at relative positions `variant.window` and `variant.offset`, (1, 2, d).
            variant: components that run.
            scaling, softcap: of the family's attention.
            states: from the call on the tokens before.
            attention_mask: (B, T), zero at padding.
            cu_seqlens: borders of packed documents.

        Returns:
            (B, T, H, d) and the new states.
        """
        states = states or {}
        window, sinks = variant.window, variant.sinks
        if self.native_window is not None:
            window, sinks = min(window, self.native_window), 0
        window_state = WindowState(**{n: states[n] for n in WINDOW_FIELDS}) if states else None
        cos, sin = (r.float() for r in rotary)
        at_window, at_offset = ((offsets[0][:, i : i + 1].float(), offsets[1][:, i : i + 1].float()) for i in (0, 1))
        # Rotating by (offset - position) turns a query into one at `offset` from keys that are not rotated. As after the
        # family's own rotation, queries and keys are rounded to the model's type before they are scored.
        to_offset = _turned_back(at_offset, cos, sin)
        far_query = rotate(query, *to_offset)
        exact, lse, window_after = sliding_window_attention(
            query,
            key,
            value,
            window=window,
            sinks=sinks,
            q_sink=far_query if sinks else None,
            k_sink=rotate(key, cos, -sin) if sinks else None,
            scale=scaling,
            softcap=softcap,
            attention_mask=None if cu_seqlens is not None else attention_mask,
            cu_seqlens=cu_seqlens,
            initial_state=window_state,
        )
        if not variant.latents:
            return exact, {} if window_after is None else named(window_after)

        new_states: dict[str, torch.Tensor] = {}
        source = self._source(hidden, states, new_states, attention_mask, cu_seqlens)
        logits = self._query_logits(far_query, source, scaling, softcap)
        token_theta = None
        if self.from_tokens:
            token_theta = (source @ self.k_latent.float().T).unflatten(-1, (self.kv_heads, self.latents))

        if self.gate_kind == "lse":  # a token enters the latents when it leaves the window: nothing counts twice
            before = WindowState.empty(key, window, sinks) if window_state is None else window_state
            tokens, held = (key, value), (before.key, before.value)
            if token_theta is not None:
                empty = token_theta.new_zeros(key.shape[0], window, *token_theta.shape[2:])
                tokens, held = (*tokens, token_theta), (*held, states.get("token_theta", empty))
                new_states["token_theta"] = torch.cat([held[2], token_theta], 1)[:, -window:]
            after = before if window_after is None else window_after
            valid = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device)
            if attention_mask is not None:
                valid = attention_mask.bool()
            late, absorbed = leaving_window(tokens, held, valid, before, after.sink_index, cu_seqlens)
            late_key, value = late[:2]
            token_theta = late[2] if token_theta is not None else None
            # The token that leaves stands `window` before the current one: undo the rotation it got there.
            turned = to_offset if variant.window == variant.offset else _turned_back(at_window, cos, sin)
            unrotated = rotate(late_key, *turned)
            gate = lse
        else:
            unrotated, absorbed = rotate(key, cos, -sin), attention_mask
            gate = source @ self.gate_weight.float().T + self.gate_bias.float()

        out, latent_state = latent_attention(
            logits,
            self._key_logits(unrotated, token_theta),
            value,
            gate=gate,
            gate_value=exact,
            use_mass=self.gate_kind == "lse",
            mass_length=self.mass_length,
            attention_mask=absorbed,
            cu_seqlens=cu_seqlens,
            initial_state=(states["mass"], states["mean"]) if states else None,
        )
        if window_after is not None:
            new_states |= named(window_after)
            new_states["mass"], new_states["mean"] = latent_state
        return out.to(query.dtype), new_states

    def _source(self, hidden, states, new_states, attention_mask, cu_seqlens) -> torch.Tensor | None:
        """What the token-dependent logits are linear in, (B, T, D); its own state goes to `new_states`."""
        if not hasattr(self, "norm"):
            return None
        options = dict(attention_mask=attention_mask, cu_seqlens=cu_seqlens, initial_state=states.get("source"))
        y = hidden
        if self.source == "conv":
            y, new_states["source"] = short_convolution(hidden, self.conv_weight.to(hidden.dtype), **options)
        elif self.source == "rglru":
            r, i = rg_lru_gates(hidden.float(), self.rglru_weight, self.rglru_bias)
            # Chunks of nothing but padding leave a row before its start.
            options["is_start"] = _nothing_seen(states) if states else None
            y, new_states["source"] = rg_lru(hidden.float(), r, i, self.rglru_lambda.float(), **options)
        return self.norm(y)

    def _query_logits(self, far_query, source, scaling, softcap) -> torch.Tensor:
        """(B, T, H, L): how each query scores each latent, its mass aside."""
        logits = self.latent_bias.float()
        if self.from_data:
            logits = cluster_logits(
                far_query,
                self.latent_key.float() * scaling,
                logits,
                square_weight=self.latent_log_variance.float().exp() * (scaling**2 / 2),
                softcap=softcap,
            )
        if self.from_tokens:
            logits = logits + (source @ self.q_latent.float().T).unflatten(-1, (self.heads, self.latents))
        return logits

    def _key_logits(self, unrotated, token_theta) -> torch.Tensor:
        """(B, T, H_kv, L): log share of each token in each latent, or the paper's free logits."""
        if not self.from_data:
            return torch.log_softmax(token_theta, dim=-1) if self.gate_kind == "lse" else token_theta
        shares = token_theta is None and not self.hard
        theta = cluster_logits(unrotated, self.assign_weight.float(), self.assign_bias.float(), log_softmax=shares)
        if token_theta is not None:
            theta = theta + token_theta
        if self.hard:
            chosen = nn.functional.one_hot(theta.argmax(-1), self.latents).bool()
            return torch.where(chosen, 0.0, EMPTY)
        return theta if shares else torch.log_softmax(theta, dim=-1)
