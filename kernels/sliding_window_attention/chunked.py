# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Sliding-window attention in linear time and memory, in plain PyTorch: blocks of queries against a band of keys."""

import torch
import torch.nn.functional as F

from ..packing import document_index
from .reference import MASKED
from .state import WindowState


def _padded(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Zeros behind the last of x (B, T, ...); without any, `F.pad` would copy."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, tokens)) if tokens else x


def sliding_window_attention_chunked(
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
    initial_state: WindowState | None = None,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, WindowState]:
    """See `hf_linattn.kernels.sliding_window_attention.sliding_window_attention`."""
    batch, time, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    scale = dim**-0.5 if scale is None else scale
    k_sink, q_sink = (k if k_sink is None else k_sink), (q if q_sink is None else q_sink)
    state = initial_state if initial_state is not None else WindowState.empty(k, window, sinks)
    valid = torch.ones(batch, time, dtype=torch.bool, device=q.device)
    if attention_mask is not None:
        valid = attention_mask.bool()
    document = None if cu_seqlens is None else document_index(cu_seqlens, time)

    def capped(scores: torch.Tensor) -> torch.Tensor:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    # Blocks of queries, each against the keys around it that it may see and its own; a short text has none around it.
    before, after = (window - 1, 0) if causal else (window // 2, window // 2)
    block = min(window, time)
    alone = initial_state is None and time <= window
    past, ahead = 0 if alone else window, 0 if alone else after
    held = slice(window - past, None)
    pad = -time % block
    blocks = (time + pad) // block
    band = past + block + ahead
    keys, values, keys_valid = (
        _padded(torch.cat([old[:, held], new], 1), pad + ahead).unfold(1, band, block)
        for old, new in ((state.key, k), (state.value, v), (state.valid, valid))
    )
    queries = _padded(q, pad).view(batch, blocks, block, kv_heads, group, dim)
    # (batch, blocks, kv heads, group * block, ...)
    queries = queries.permute(0, 1, 3, 4, 2, 5).reshape(batch, blocks, kv_heads, group * block, dim)
    scores = capped(queries @ keys).unflatten(3, (group, block))
    offset = torch.arange(block, device=q.device)[:, None] + past - torch.arange(band, device=q.device)
    allowed = ((offset >= -after) & (offset <= before)) & keys_valid[:, :, None]
    if document is not None:
        of_keys = F.pad(document, (past, pad + ahead), value=-1).unfold(0, band, block)
        allowed = allowed & (F.pad(document, (0, pad)).view(blocks, block, 1) == of_keys[:, None])
    allowed = allowed[:, :, None, None]

    if sinks:
        in_group = q_sink.view(batch, time, kv_heads, group, dim)
        index = torch.arange(time, device=q.device)
        if document is None:
            state = state.with_sinks(k_sink, v, valid)
            sink_scores = torch.einsum("btkgd,bskd->btkgs", in_group, state.sink_key)
            sink_value, sink_index = state.sink_value[:, None], state.sink_index[:, None]
            index = state.length + index
        else:
            first = cu_seqlens.long()[:-1, None] + torch.arange(sinks, device=q.device)
            first = torch.where(first < cu_seqlens.long()[1:, None], first, time)
            gather = first.clamp(max=time - 1)
            sink_scores = torch.einsum("tkgd,tskd->tkgs", in_group[0], k_sink[0, gather][document])[None]
            sink_value, sink_index = v[0, gather][document][None], first[document][None]
        # A sink speaks through the far query once the window has passed it.
        seen = (sink_index >= 0) & (index[None, :, None] - sink_index >= window)
        sink_scores = _padded(capped(sink_scores), pad).view(batch, blocks, block, kv_heads, group, sinks)
        seen = _padded(seen, pad).view(batch, blocks, 1, 1, block, sinks)
        scores = torch.cat([scores, sink_scores.permute(0, 1, 3, 4, 2, 5)], -1)
        allowed = torch.cat([allowed, seen], -1)
    scores = scores.masked_fill(~allowed, MASKED)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None]).masked_fill(~allowed, 0).to(v.dtype)
    near = weights[..., :band].flatten(3, 4) @ values.transpose(-1, -2)
    out = near.unflatten(3, (group, block))
    if sinks:
        far = weights[..., band:]
        if document is None:
            out = out + torch.einsum("bnkgcs,bskd->bnkgcd", far, sink_value[:, 0])
        else:
            by_token = _padded(sink_value, pad).view(batch, blocks, block, sinks, kv_heads, dim)
            out = out + torch.einsum("bnkgcs,bncskd->bnkgcd", far, by_token)
    out = out.permute(0, 1, 4, 2, 3, 5).reshape(batch, blocks * block, heads, dim)[:, :time]
    lse = lse.permute(0, 1, 4, 2, 3).reshape(batch, blocks * block, heads)[:, :time]
    return out, lse, state.advance(k, v, valid)
