# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Causal latent attention in linear time and memory, in plain PyTorch.

Per chunk: one state from all earlier chunks (log-sum-exp and mean per latent), and a dyadic decomposition of the pairs
inside the chunk. Every exponential is of a number <= 0, so no logits, however large, overflow.
"""

import math

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..packing import chunk_layout, scatter_to_chunks
from ..scan import linear_scan
from .reference import EMPTY


class _LogCumSumExp(torch.autograd.Function):
    """Running log-sum-exp along dimension 1, with a backward pass that survives `EMPTY`."""

    @staticmethod
    def forward(ctx, x):
        z = torch.logcumsumexp(x, dim=1)
        ctx.save_for_backward(x, z)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, z = ctx.saved_tensors
        keep = F.pad(torch.exp(z[:, :-1] - z[:, 1:]).flip(1), (0, 0) * (z.dim() - 2) + (1, 0))
        return torch.exp(x - z) * linear_scan(keep, grad.flip(1)).flip(1)


def _log_cumsum_exp(x: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
    """Running log-sum-exp along dimension 1; `starts` (one flag per position) restarts it."""
    if starts is None:
        return _LogCumSumExp.apply(x)
    size, step = x.shape[1], 1
    reached = starts.view(1, -1, *[1] * (x.dim() - 2))
    while step < size:
        before = torch.cat([torch.full_like(x[:, :step], EMPTY), x[:, :-step]], 1).masked_fill(reached, EMPTY)
        reached = reached | torch.cat([torch.ones_like(reached[:, :step]), reached[:, :-step]], 1)
        x = torch.logaddexp(x, before)
        step *= 2
    return x


def latent_attention_chunked(
    q: torch.Tensor,
    theta: torch.Tensor,
    v: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    gate_value: torch.Tensor | None = None,
    use_mass: bool = False,
    mass_length: int | None = None,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: tuple[torch.Tensor, torch.Tensor] | None = None,
    chunk: int = 32,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """See `hf_linattn.kernels.latent_attention.latent_attention`. `chunk` is a power of two."""
    batch, time, heads, latents = q.shape
    kv_heads, dim = v.shape[2], v.shape[3]
    dtype, out_dtype = torch.promote_types(q.dtype, torch.float32), v.dtype
    q, theta, v = q.to(dtype), theta.to(dtype), v.to(dtype)
    if attention_mask is not None:
        ignored = ~attention_mask.bool()[:, :, None, None]
        theta, v = theta.masked_fill(ignored, EMPTY), v.masked_fill(ignored, 0)
    chunk = min(chunk, 1 << (time - 1).bit_length())

    layout = None if cu_seqlens is None else chunk_layout(cu_seqlens, chunk)
    if layout is None:
        pad = -time % chunk
        starts = None
        q, v = F.pad(q, (0, 0, 0, 0, 0, pad)), F.pad(v, (0, 0, 0, 0, 0, pad))
        theta = F.pad(theta, (0, 0, 0, 0, 0, pad), value=EMPTY)
    else:
        starts = layout.starts
        q, v = scatter_to_chunks(q, layout, chunk), scatter_to_chunks(v, layout, chunk)
        theta = scatter_to_chunks(theta, layout, chunk, EMPTY)
    n = q.shape[1] // chunk
    # (batch, chunks, kv heads, [query heads of the group,] position, ...)
    q = q.view(batch, n, chunk, kv_heads, heads // kv_heads, latents).permute(0, 1, 3, 4, 2, 5)
    theta = theta.view(batch, n, chunk, kv_heads, latents).transpose(2, 3)
    v = v.view(batch, n, chunk, kv_heads, dim).transpose(2, 3)
    if initial_state is None:
        z0 = theta.new_full((batch, kv_heads, latents), EMPTY)
        mean0 = theta.new_zeros(batch, kv_heads, latents, dim)
    else:
        z0, mean0 = (s.to(dtype) for s in initial_state)

    # States after each chunk, then shifted by one: what each chunk starts from.
    z_chunk = torch.logsumexp(theta, dim=3)
    shares = torch.exp(theta - z_chunk[..., None, :]) * (theta > EMPTY / 2)
    mean_chunk = shares.transpose(-1, -2) @ v
    z_after = _log_cumsum_exp(
        torch.cat([z0[:, None], z_chunk], dim=1), None if starts is None else F.pad(starts, (1, 0))
    )
    z_after = z_after[:, 1:]
    z_before = torch.cat([z0[:, None], z_after[:, :-1]], dim=1)
    if starts is not None:
        z_before = z_before.masked_fill(starts[None, :, None, None], EMPTY)
    keep = torch.exp(z_before - z_after)
    if starts is not None:
        keep = keep.masked_fill(starts[None, :, None, None], 0)
    mean_after = linear_scan(keep[..., None], torch.exp(z_chunk - z_after)[..., None] * mean_chunk, mean0)
    mean_before = torch.cat([mean0[:, None], mean_after[:, :-1]], dim=1)
    if starts is not None:
        mean_before = mean_before.masked_fill(starts[None, :, None, None, None], 0)

    inside = _log_cumsum_exp(theta.flatten(0, 2)).view_as(theta)
    z = torch.logaddexp(z_before[..., None, :], inside)  # (batch, chunks, kv heads, position, latents)
    logits = q + z[:, :, :, None] if use_mass else q
    if use_mass and mass_length is not None:
        absorbed = torch.logsumexp(z, dim=-1, keepdim=True)
        logits = logits - (absorbed - math.log(mass_length)).clamp(min=0)[:, :, :, None]
    occupied = (z > EMPTY / 2)[:, :, :, None]
    logits = logits.masked_fill(~occupied, EMPTY)
    if gate is None:
        a = torch.softmax(logits, dim=-1)
    else:
        gate = gate.to(dtype)
        gate = F.pad(gate, (0, 0, 0, pad)) if layout is None else scatter_to_chunks(gate, layout, chunk)
        gate = gate.view(batch, n, chunk, kv_heads, heads // kv_heads).permute(0, 1, 3, 4, 2)
        a = torch.softmax(torch.cat([gate[..., None], logits], dim=-1), dim=-1)
        a0, a = a[..., 0], a[..., 1:]
    a = a * occupied

    z, v_group = z[:, :, :, None], v[:, :, :, None]
    theta = theta[:, :, :, None]
    out = (a * torch.exp(z_before[:, :, :, None, None] - z)) @ mean_before[:, :, :, None]
    out = out + (a * torch.exp(theta - z)).sum(-1, keepdim=True) * v_group
    half = 1
    while half < chunk:  # pairs whose key is in the first and whose query is in the second half of a block
        blocks = (chunk // (2 * half), 2, half)
        (z_early, z_late), (keys, _), (values, _) = (x.unflatten(4, blocks).unbind(-3) for x in (z, theta, v_group))
        middle = z_early[..., -1:, :]
        queries = a.unflatten(4, blocks)[..., 1, :, :] * torch.exp(middle - z_late)
        late = (queries @ torch.exp(keys - middle).transpose(-1, -2)) @ values
        out = out + torch.stack([torch.zeros_like(late), late], dim=-3).flatten(4, 6)
        half *= 2

    out = out.permute(0, 1, 4, 2, 3, 5).reshape(batch, n * chunk, heads, dim)
    out = out[:, :time] if layout is None else out.index_select(1, layout.target)
    if gate is not None:
        a0 = a0.permute(0, 1, 4, 2, 3).reshape(batch, n * chunk, heads)
        a0 = a0[:, :time] if layout is None else a0.index_select(1, layout.target)
        out = out + a0[..., None] * gate_value
    return out.to(out_dtype), (z_after[:, -1], mean_after[:, -1])
