# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Definition of sliding-window attention with sinks: a dense mask, obvious, exact in float64."""

import torch

from ..packing import document_index

MASKED = -1e30


def sliding_window_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int,
    sinks: int = 0,
    q_sink: torch.Tensor | None = None,
    k_sink: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quadratic form of `hf_linattn.kernels.sliding_window_attention.sliding_window_attention` on a whole sequence."""
    batch, time, heads, dim = q.shape
    group = heads // k.shape[2]
    scale = dim**-0.5 if scale is None else scale
    k_sink, q_sink = (k if k_sink is None else k_sink), (q if q_sink is None else q_sink)
    k, v, k_sink = (x.repeat_interleave(group, 2) for x in (k, v, k_sink))

    def score(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        s = torch.einsum("bthd,bshd->bhts", queries, keys) * scale
        return s if softcap is None else softcap * torch.tanh(s / softcap)

    valid = torch.ones(batch, time, device=q.device) if attention_mask is None else attention_mask
    valid = valid.bool()
    document = torch.zeros(time, device=q.device) if cu_seqlens is None else document_index(cu_seqlens, time)
    position = torch.arange(time, device=q.device)
    distance = position[:, None] - position[None, :]
    same = document[:, None] == document[None, :]
    rank = torch.stack(
        [torch.stack([(row & (document == document[s]))[: s + 1].sum() for s in range(time)]) for row in valid]
    )
    is_sink = valid & (rank <= sinks)
    inside = (distance >= 0) & (distance < window) if causal else distance.abs() <= window // 2
    near = (same & inside)[None, None] & valid[:, None, None]
    far = (same & causal & (distance >= window))[None, None] & is_sink[:, None, None]
    scores = torch.where(near, score(q, k), torch.where(far, score(q_sink, k_sink), MASKED))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.where(near | far, (scores - lse[..., None]).exp(), 0)
    return torch.einsum("bhts,bshd->bthd", weights, v), lse.transpose(1, 2)
