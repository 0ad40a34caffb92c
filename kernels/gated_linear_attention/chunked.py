# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Gated linear attention in linear time, in plain PyTorch (papers: GLA, sections 2.5, 2.6 and 5.4 d).

Between chunks a scan carries the state. Inside a chunk, pairs are met in a dyadic decomposition: blocks of two halves, the
first row of the late half as anchor. Decays are sums of consecutive gates, never differences of long sums, and every
exponential is of a number <= 0: no gate is too strong.
"""

import torch
import torch.nn.functional as F

from ..packing import chunk_layout, scatter_to_chunks
from ..scan import linear_scan


def _after(g: torch.Tensor) -> torch.Tensor:
    """Sum of the gates that follow each row, along the last dimension but one."""
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def gated_linear_attention_chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    *,
    scale: float,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    chunk: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_linattn.kernels.gated_linear_attention`; log_decay is (B, T, H_kv, dk or 1), `chunk` a power of two."""
    batch, time, heads, dim_k = q.shape
    kv_heads, dim_v = v.shape[2:]
    dtype, out_dtype = torch.promote_types(q.dtype, torch.float32), v.dtype
    q, k, v, g = (x.to(dtype) for x in (q, k, v, log_decay))
    chunk = min(chunk, 1 << (time - 1).bit_length())
    if cu_seqlens is None:
        q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, -time % chunk)) for x in (q, k, v, g))
        states = batch
    else:
        layout = chunk_layout(cu_seqlens, chunk)
        q, k, v, g = (scatter_to_chunks(x, layout, chunk) for x in (q, k, v, g))
        states = cu_seqlens.numel() - 1
    n = q.shape[1] // chunk
    # (batch, chunks, kv heads, query heads of the group, position, ...)
    q = q.view(batch, n, chunk, kv_heads, heads // kv_heads, dim_k).permute(0, 1, 3, 4, 2, 5) * scale
    k, v, g = (x.view(batch, n, chunk, kv_heads, 1, -1).permute(0, 1, 3, 4, 2, 5) for x in (k, v, g))

    if initial_state is None:
        initial_state = v.new_zeros(states, kv_heads, dim_k, dim_v)
    initial_state = initial_state.to(dtype)
    kept = (
        g.sum(-2).exp().squeeze(3)[..., None]
    )  # what a chunk keeps of the state, (batch, chunks, kv heads, dk or 1, 1)
    added = ((k * _after(g).exp()).transpose(-1, -2) @ v).squeeze(3)
    if cu_seqlens is None:
        after = linear_scan(kept, added, initial_state)
        before = torch.cat([initial_state[:, None], after[:, :-1]], 1)
        final = after[:, -1]
    else:
        occupied = cu_seqlens.diff() > 0
        first = layout.starts.nonzero().squeeze(1)
        last = torch.cat([first[1:], first.new_tensor([n])]) - 1
        starts = layout.starts[None, :, None, None, None]
        restart = torch.zeros_like(added).index_copy(1, first, initial_state[occupied][None])
        after = linear_scan(kept.masked_fill(starts, 0), added + kept * restart)
        before = torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], 1)
        before = torch.where(starts, restart, before)
        final = initial_state.index_put((occupied.nonzero().squeeze(1),), after[0, last])

    scores = (q * k).sum(-1)[..., None, None]  # blocks of one position
    size = 1
    while size < chunk:
        blocks = (chunk // (2 * size), 2, size)
        early, late = g.unflatten(4, blocks).unbind(-3)
        queries = q.unflatten(4, blocks)[..., 1, :, :] * F.pad(late[..., 1:, :], (0, 0, 1, 0)).cumsum(-2).exp()
        between = _after(torch.cat([early, late[..., :1, :]], -2))[..., :-1, :]
        keys = k.unflatten(4, blocks)[..., 0, :, :] * between.exp()
        cross = queries @ keys.transpose(-1, -2)
        first, second = scores.unflatten(4, blocks[:2]).unbind(5)
        scores = torch.cat([F.pad(first, (0, size)), torch.cat([cross, second], -1)], -2)
        size *= 2

    out = (q * g.cumsum(-2).exp()) @ before[:, :, :, None] + scores.squeeze(4) @ v
    out = out.permute(0, 1, 4, 2, 3, 5).reshape(batch, n * chunk, heads, dim_v)
    out = out[:, :time] if cu_seqlens is None else out.index_select(1, layout.target)
    return out.to(out_dtype), final
