# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Definition of gated linear attention, twice: token by token, and dense in time. The oracles of every test."""

import torch


def gated_linear_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Recurrent form (papers: GLA, section 2.2); arguments and results of `gated_linear_attention` in one dtype."""
    batch, time, heads, dim_k = q.shape
    kv_heads, dim_v = v.shape[2:]
    scale = dim_k**-0.5 if scale is None else scale
    if log_decay is None:
        log_decay = k.new_zeros(kv_heads)
    if log_decay.dim() != 4:
        log_decay = log_decay[..., None]
    log_decay = log_decay.expand(batch, time, kv_heads, dim_k)
    if cu_seqlens is None:
        rows = [(b, 0, time) for b in range(batch)]
    else:
        borders = cu_seqlens.tolist()
        rows = [(0, start, end) for start, end in zip(borders, borders[1:], strict=False)]
    outputs, states = [], []
    for n, (b, start, end) in enumerate(rows):
        state = k.new_zeros(kv_heads, dim_k, dim_v) if initial_state is None else initial_state[n]
        for t in range(start, end):
            state = log_decay[b, t].exp()[..., None] * state + k[b, t][..., None] * v[b, t][:, None]
            query = q[b, t].view(kv_heads, heads // kv_heads, dim_k)
            outputs.append(scale * (query @ state).reshape(heads, dim_v))
        states.append(state)
    return torch.stack(outputs).view(batch, time, heads, dim_v), torch.stack(states)


def gated_linear_attention_parallel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, *, scale: float | None = None
) -> torch.Tensor:
    """Dense form in log space (papers: GLA, section 2.4) for a per-channel gate and as many query as key heads."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    total = log_decay.cumsum(1)
    decay = (total[:, :, None] - total[:, None]).clamp(max=0).exp()  # (batch, query time, key time, heads, dk)
    weights = scale * torch.einsum("bthc,bshc,btshc->bhts", q, k, decay).tril()
    return torch.einsum("bhts,bshv->bthv", weights, v)
