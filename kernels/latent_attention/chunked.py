# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Causal latent attention in linear time and memory, in plain PyTorch.

Per chunk: one state from all earlier chunks (log-sum-exp and mean per latent), and a dyadic decomposition of the pairs
inside the chunk. Every exponential is of a number <= 0, so no logits, however large, overflow.
"""

import math

import torch
import torch.nn.functional as F

from ..packing import chunk_layout, scatter_to_chunks
from ..scan import linear_scan
from .reference import EMPTY


def _log_cumsum_exp(x: torch.Tensor, dim: int, starts: torch.Tensor | None = None) -> torch.Tensor:
    """Running log-sum-exp along `dim` by doubling; `starts` (one flag per position) restarts it."""
    x = x.movedim(dim, -1)
    size, step = x.shape[-1], 1
    while step < size:
        shifted = F.pad(x[..., :-step], (step, 0), value=EMPTY)
        if starts is not None:
            shifted = shifted.masked_fill(starts, EMPTY)
            starts = starts | F.pad(starts[:-step], (step, 0), value=True)
        x = torch.logaddexp(x, shifted)
        step *= 2
    return x.movedim(-1, dim)


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
    theta = theta.clamp(min=EMPTY)
    if attention_mask is not None:
        theta = theta.masked_fill(~attention_mask.bool()[:, :, None, None], EMPTY)
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
    filled = theta > EMPTY / 2

    def weight(reference: torch.Tensor, keys: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        return torch.exp(keys - reference) * present

    if initial_state is None:
        z0 = theta.new_full((batch, kv_heads, latents), EMPTY)
        mean0 = theta.new_zeros(batch, kv_heads, latents, dim)
    else:
        z0, mean0 = (s.to(dtype) for s in initial_state)

    # States after each chunk, then shifted by one: what each chunk starts from.
    z_chunk = torch.logsumexp(theta, dim=3)
    mean_chunk = weight(z_chunk[..., None, :], theta, filled).transpose(-1, -2) @ v
    z_after = _log_cumsum_exp(torch.cat([z0[:, None], z_chunk], dim=1), 1, starts if starts is None else F.pad(starts, (1, 0)))[:, 1:]
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

    z = torch.logaddexp(z_before[..., None, :], _log_cumsum_exp(theta, 3))  # (batch, chunks, kv heads, position, latents)
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
    theta, filled = theta[:, :, :, None], filled[:, :, :, None]
    out = (a * torch.exp(z_before[:, :, :, None, None] - z)) @ mean_before[:, :, :, None]
    out = out + (a * weight(z, theta, filled)).sum(-1, keepdim=True) * v_group
    half = 1
    while half < chunk:  # pairs whose key is in the first and whose query is in the second half of a block

        def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = x.unflatten(4, (chunk // (2 * half), 2, half))
            return x[..., 0, :, :], x[..., 1, :, :]

        z_early, z_late = halves(z)
        middle = z_early[..., -1:, :]
        queries = halves(a)[1] * torch.exp(middle - z_late)
        keys = weight(middle, halves(theta)[0], halves(filled)[0])
        late = (queries @ keys.transpose(-1, -2)) @ halves(v_group)[0]
        out = out + torch.stack([torch.zeros_like(late), late], dim=-3).flatten(4, 6)
        half *= 2

    out = out.permute(0, 1, 4, 2, 3, 5).reshape(batch, n * chunk, heads, dim)
    out = out[:, :time] if layout is None else out.index_select(1, layout.target)
    if gate is not None:
        a0 = a0.permute(0, 1, 4, 2, 3).reshape(batch, n * chunk, heads)
        a0 = a0[:, :time] if layout is None else a0.index_select(1, layout.target)
        out = out + a0[..., None] * gate_value
    return out.to(out_dtype), (z_after[:, -1], mean_after[:, -1])
