# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Latte as a token mixer, trained from scratch: hidden states in, hidden states out (papers: Latte, sections 2 and 3.1)."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Cache, PreTrainedConfig
from transformers import initialization as init

from ..kernels.latent_attention import EMPTY, latent_attention
from ..kernels.latent_attention.bidirectional import bidirectional_latent_attention
from ..kernels.macchiato_attention import macchiato_attention
from ..kernels.rg_lru import rg_lru
from ..kernels.rotary_embedding import rotate
from ..kernels.short_convolution import short_convolution
from ..kernels.sliding_window_attention import WindowState, sliding_window_attention
from .latte import WINDOW_FIELDS, init_rg_lru, named, rg_lru_gates


def rope_frequencies(dim: int, theta: float, device: torch.device | None = None) -> torch.Tensor:
    """Angle per step of each pair of channels, theta^(-2j / dim), (dim / 2,) in float32."""
    return theta ** -(torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def rotation(positions: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (1, T, 2 angles) in float32 of positions (T,) times angles, for `rotate`."""
    turn = (positions[:, None] * angles.float()).repeat(1, 2)[None]
    return turn.cos(), turn.sin()


def linear(inputs: int, outputs: int, init_std: float | None = None) -> nn.Linear:
    """Without a bias; `init_std` for its weights, where it is not the model's, is left for `_init_weights` to read."""
    layer = nn.Linear(inputs, outputs, bias=False)
    layer.init_std = init_std
    return layer


class Convolution(nn.Module):
    """Weights of a depthwise causal convolution, column k for the token k steps back."""

    def __init__(self, width: int, kernel_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, kernel_size))

    def init_weights(self) -> None:
        init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor | None]:
        options.pop("is_start", None)  # tokens before the first one count as zeros
        return short_convolution(x, self.weight.to(x.dtype), **options)


class RGLRU(nn.Module):
    """Weights of a real-gated linear recurrent unit with block-diagonal gates."""

    def __init__(self, width: int, blocks: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, blocks, width // blocks, width // blocks))
        self.bias = nn.Parameter(torch.empty(2, width))
        self.decay = nn.Parameter(torch.empty(width))

    def init_weights(self) -> None:
        init_rg_lru(self.weight, self.bias, self.decay)

    def forward(self, x: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor | None]:
        return rg_lru(x, *rg_lru_gates(x, self.weight, self.bias), self.decay, **options)


class LatteAttention(nn.Module):
    """A mixture of an exact window and latents, under one softmax per head over [window, latents].

    Logits of the latents and of the window's share are linear in the source: the input, a convolution of it or the norm
    of an RG-LRU over it. Values are linear in the input and shared. Without a window this is plain Latte; without latents
    it is a window whose queries and keys come from the source. Bidirectional layers run a source in each direction, with
    its own weights, and take the mean: one set of weights could not tell a text from its reversal.

    Keys, key logits, values and states live on key/value heads; states are in float32.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        width, latents = config.hidden_size, config.num_latents_per_head
        self.dim, self.latents, self.window = dim, latents, config.window_size
        self.is_causal, self.dropout, self.rope_theta = config.is_causal, config.dropout, config.rope_theta

        directions = 1 if config.is_causal else 2
        self.sources = self.source_norm = None
        if config.source == "conv":
            self.sources = nn.ModuleList(Convolution(width, config.conv_kernel_size) for _ in range(directions))
        elif config.source == "rglru":
            self.sources = nn.ModuleList(RGLRU(width, config.rglru_blocks) for _ in range(directions))
            self.source_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        if latents:
            # Latents first, then the gates of the window.
            self.logit_sizes = [heads * latents] if self.window is None else [heads * latents, heads]
            unit = width**-0.5  # logits of unit variance
            self.q_latent = linear(width, sum(self.logit_sizes), init_std=unit)
            self.k_latent = linear(width, kv_heads * latents, init_std=unit)
        if self.window is not None:
            self.q_proj, self.k_proj = linear(width, heads * dim), linear(width, kv_heads * dim)
        self.v_proj = linear(width, kv_heads * dim)
        self.o_proj = linear(heads * dim, width, init_std=config.branch_initializer_range)
        self.vapor_angles = nn.Parameter(torch.empty(dim // 2, dtype=torch.float32)) if config.vapor else None

    def init_weights(self) -> None:
        """Only what belongs to this module: `_init_weights` visits those inside by themselves."""
        if self.vapor_angles is not None:
            init.copy_(self.vapor_angles, rope_frequencies(self.dim, self.rope_theta, self.vapor_angles.device))

    def forward(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Mix one call's tokens.

        Args:
            hidden_states: (B, T, D).
            positions: (T,), or (B * T,) with `cu_seqlens`; only differences between tokens of a sequence matter.
            rotary: cosines and sines of the positions for the window, from `rotation`.
            attention_mask: (B, T), zero at padding, which leaves the state as it is. (A convolution sees zeros there, and
                the window counts it.)
            past_key_values: a cache whose layer `layer_idx` is a `StateLayer`; read and written.
            cu_seqlens: (documents + 1,), borders of documents in the batch's rows laid end to end; excludes a cache and
                a mask.

        Returns:
            (B, T, D).

        Raises:
            ValueError: for packed documents with a cache or a mask.
        """
        shape, layer, states = hidden_states.shape, None, {}
        if past_key_values is not None:
            layer = past_key_values.layers[self.layer_idx]
            states = layer.states
        if cu_seqlens is not None:
            if layer is not None or attention_mask is not None:
                raise ValueError(
                    "packed documents (cu_seqlens) start empty, leave no state and hold no padding: pass no cache and no "
                    "attention_mask with them"
                )
            hidden_states = hidden_states.reshape(1, -1, shape[-1])
        options = dict(attention_mask=attention_mask, cu_seqlens=cu_seqlens)

        source, new_states = self._source(hidden_states, states, options)
        v = self.v_proj(hidden_states).unflatten(-1, (-1, self.dim))
        if self.vapor_angles is not None:
            cos, sin = rotation(positions, self.vapor_angles)
            v = rotate(v, cos, -sin)
        window = latents = None
        if self.window is not None:
            # Without latents the source is all that reaches beyond the window, so queries and keys see it.
            seen = hidden_states if self.latents else source
            window = [p(seen).unflatten(-1, (-1, self.dim)) for p in (self.q_proj, self.k_proj)]
            window = [rotate(x, *rotary) for x in window]
        if self.latents:
            q, *gate = self.q_latent(source).split(self.logit_sizes, -1)
            q, theta = (x.unflatten(-1, (-1, self.latents)) for x in (q, self.k_latent(source)))
            latents = q, theta, gate[0] if gate else None
        out, carried = self._attend(window, latents, v, states, options)
        if layer is not None:
            length = states.get("length", torch.zeros((), dtype=torch.long, device=out.device))
            layer.store(new_states | carried | {"length": length + shape[1]})

        if self.vapor_angles is not None:
            out = rotate(out, cos, sin)
        return self.o_proj(out.to(hidden_states.dtype).flatten(-2)).view(shape)

    def _source(
        self, x: torch.Tensor, states: dict[str, torch.Tensor], options: dict
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What logits are linear in, (B, T, D), and its state."""
        if self.sources is None:
            return x, {}
        mask, borders = options["attention_mask"], options["cu_seqlens"]
        seen = x.new_ones(x.shape[0], dtype=torch.bool) if mask is None else mask.bool().any(1)
        is_start = None
        if states:  # calls on nothing but padding leave a row before its start
            is_start, seen = ~states["seen"], states["seen"] | seen
        y, state = self.sources[0](x, initial_state=states.get("source"), is_start=is_start, **options)
        if not self.is_causal:
            mask = None if mask is None else mask.flip(1)
            borders = None if borders is None else x.shape[1] - borders.flip(0)
            back, _ = self.sources[1](x.flip(1), attention_mask=mask, cu_seqlens=borders)
            y = (y + back.flip(1)) / 2
        if self.source_norm is not None:
            y = self.source_norm(y)
        return y, {} if state is None else {"source": state, "seen": seen}

    def _attend(
        self,
        window: list[torch.Tensor] | None,
        latents: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None,
        v: torch.Tensor,
        states: dict[str, torch.Tensor],
        options: dict,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The mixture of window and latents, and what it carries on.

        Args:
            window: rotated queries (B, T, H, d) and keys (B, T, H_kv, d).
            latents: logits of queries (B, T, H, L), of keys (B, T, H_kv, L) and of the window (B, T, H).
            v: values, (B, T, H_kv, d).
            states: from the call on the tokens before.
            options: `attention_mask` and `cu_seqlens`.

        Returns:
            (B, T, H, d) and the new states.
        """
        held = passed = None
        if states and window is not None:
            passed = WindowState(**{name: states[name] for name in WINDOW_FIELDS})
        if states and latents is not None:
            held = states["mass"], states["mean"]
        after = kept = None
        if latents is not None:
            q, theta, gate = latents
            if self.training and self.dropout:
                q, gate, kept = self._drop(q, gate)
        if window is not None and latents is not None and self.is_causal:
            before = (held, passed) if states else None
            out, both = macchiato_attention(
                q, theta, gate, *window, v, window=self.window, initial_state=before, **options
            )
            held, after = both or (None, None)
        else:
            out = None
            if window is not None:
                out, _, after = sliding_window_attention(
                    *window, v, window=self.window, causal=self.is_causal, initial_state=passed, **options
                )
            if latents is not None and self.is_causal:
                out, held = latent_attention(q, theta, v, initial_state=held, **options)
            elif latents is not None:
                out = bidirectional_latent_attention(q, theta, v, gate=gate, gate_value=out, **options)
        carried = {} if after is None else named(after)
        if latents is not None and held is not None:
            carried["mass"], carried["mean"] = held
        return out if kept is None else out * kept.to(out.dtype), carried

    def _drop(
        self, q: torch.Tensor, gate: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Dropout on p(l|t): logits without the dropped states, and what their softmax is to be multiplied by, (B, T, H, 1)."""
        logits = (q if gate is None else torch.cat([gate[..., None], q], -1)).float()
        scale = F.dropout(torch.ones_like(logits), self.dropout)
        kept = (torch.softmax(logits, -1) * scale).sum(-1, keepdim=True)
        logits = logits.masked_fill(scale == 0, EMPTY)
        return (logits, None, kept) if gate is None else (logits[..., 1:], logits[..., 0], kept)
