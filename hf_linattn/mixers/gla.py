# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Gated linear attention as a token mixer: hidden states in, hidden states out (papers: GLA, sections 2.8 and 2.9)."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Cache, PreTrainedConfig
from transformers.activations import ACT2FN

from ..kernels.gated_linear_attention import gated_linear_attention
from ..kernels.short_convolution import short_convolution
from .latte import LatteRMSNorm


class ShortConvolution(nn.Module):
    """Weights of a depthwise causal convolution, column k for the token k steps back, followed by SiLU."""

    def __init__(self, size: int, kernel_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, kernel_size))

    def forward(self, x: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, state = short_convolution(x, self.weight.to(x.dtype), **options)
        return F.silu(y), state


class GLAMixer(nn.Module):
    """Linear attention whose matrix state forgets per channel, at a rate that depends on the token.

    Keys, values, decays and states live on key/value heads. Decays are formed and kept as logarithms in float32, states
    in float32.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.dim_k, self.dim_v = config.key_head_dim, config.value_head_dim
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
        self.sizes = [heads * self.dim_k, kv_heads * self.dim_k, kv_heads * self.dim_v]
        self.gate_logit_normalizer, self.clamp_min = config.gate_logit_normalizer, config.clamp_min
        self.feature_map = None if config.feature_map is None else ACT2FN[config.feature_map]
        self.gate_act = ACT2FN[config.hidden_act]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, size, bias=False) for size in self.sizes)
        self.conv = ShortConvolution(sum(self.sizes), config.conv_size) if config.use_short_conv else None
        self.decay_down_proj = nn.Linear(width, config.gate_low_rank_dim, bias=False)
        self.decay_up_proj = nn.Linear(config.gate_low_rank_dim, kv_heads * self.dim_k)
        self.gate_proj = nn.Linear(width, heads * self.dim_v, bias=False) if config.use_output_gate else None
        self.norm = LatteRMSNorm(self.dim_v, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(heads * self.dim_v, width, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Mix one call's tokens.

        Args:
            hidden_states: (B, T, D).
            attention_mask: (B, T), zero at padding, which leaves the state as it is. (A convolution sees zeros there.)
            past_key_values: a cache whose layer `layer_idx` is a `StateLayer`; read and written.
            cu_seqlens: (documents + 1,), borders of documents in the batch's rows laid end to end; excludes a cache.

        Returns:
            (B, T, D).

        Raises:
            ValueError: for packed documents with a cache.
        """
        shape, layer, states = hidden_states.shape, None, {}
        if past_key_values is not None:
            layer = past_key_values.layers[self.layer_idx]
            states = layer.states
        if cu_seqlens is not None:
            if layer is not None:
                raise ValueError(
                    "packed documents (cu_seqlens) start empty and leave no state: pass no cache with them"
                )
            hidden_states = hidden_states.reshape(1, -1, shape[-1])
            attention_mask = None if attention_mask is None else attention_mask.reshape(1, -1)
        options = dict(attention_mask=attention_mask, cu_seqlens=cu_seqlens)

        qkv = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        new_states = {}
        if self.conv is not None:
            mixed, new_states["conv"] = self.conv(torch.cat(qkv, -1), initial_state=states.get("conv"), **options)
            qkv = mixed.split(self.sizes, -1)
        q, k, v = (
            x.unflatten(-1, (-1, dim)) for x, dim in zip(qkv, (self.dim_k, self.dim_k, self.dim_v), strict=True)
        )
        if self.feature_map is not None:
            q, k = self.feature_map(q), self.feature_map(k)
        logits = self.decay_up_proj(self.decay_down_proj(hidden_states)).float()
        log_decay = F.logsigmoid(logits) / self.gate_logit_normalizer
        if self.clamp_min is not None:
            log_decay = log_decay.clamp(min=self.clamp_min)
        out, new_states["state"] = gated_linear_attention(
            q, k, v, log_decay.view_as(k), initial_state=states.get("state"), **options
        )
        if layer is not None:
            new_states["length"] = shape[1] + states.get(
                "length", torch.zeros((), dtype=torch.long, device=out.device)
            )
            layer.store(new_states)

        out = self.norm(out).flatten(-2)
        if self.gate_proj is not None:
            out = out * self.gate_act(self.gate_proj(hidden_states).float())
        return self.o_proj(out.to(hidden_states.dtype)).view(shape)
