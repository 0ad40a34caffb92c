# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Short causal convolution in Triton, forward and backward.

A program takes a tile of tokens and channels of one row and loads it once for every lag, shifted: all but the first come from
the cache near the program. Backward, the same of the outputs' gradients gives the gradients of the inputs and, tile by tile,
of the weights, which PyTorch sums: no atomics.
"""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from ..dispatch import on_own_device
from ..packing import document_index

TOKENS = 64
CHANNELS = 64


@triton.jit
def _place(time, past: tl.constexpr, D: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """Number of the tile, its row (int64), its first token within the row (from -past on) and its channels."""
    blocks: tl.constexpr = (D + C - 1) // C
    tile = tl.program_id(0) // blocks
    tiles = tl.cdiv(time + past, N)
    columns = tl.program_id(0) % blocks * C + tl.arange(0, C)
    return tile, (tile // tiles).to(tl.int64), tile % tiles * N - past, columns


@triton.jit
def _real(kept, row, tokens, time):
    """Which of a row's `tokens` there are, and are no padding."""
    real = (tokens >= 0) & (tokens < time)
    if kept is not None:
        real = real & (tl.load(kept + row * time + tokens, mask=real, other=0) != 0)
    return real


@triton.jit
def _load(pointer, start, shift, columns, wanted, D: tl.constexpr, N: tl.constexpr):
    """N rows of a (rows, D) tensor from `start` (int64) + `shift` on, zero where not `wanted`."""
    tile = (tl.arange(0, N) + shift)[:, None] * D + columns[None, :]
    mask = wanted[:, None] & (columns < D)[None, :]
    return tl.load(pointer + start * D + tile, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, x, start, columns, wanted, D: tl.constexpr, N: tl.constexpr):
    tile = tl.arange(0, N)[:, None] * D + columns[None, :]
    mask = wanted[:, None] & (columns < D)[None, :]
    tl.store(pointer + start * D + tile, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _inputs(x, initial, kept, row, first, shift, columns, time, D: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    """N inputs from token `first` + `shift` on: zero at padding, those of the call before at negative tokens."""
    tokens = first + shift + tl.arange(0, N)
    values = _load(x, row * time + first, shift, columns, _real(kept, row, tokens, time), D, N)
    if initial is not None:
        if first < K:  # the first tiles only
            older = (tokens < 0) & (tokens >= 1 - K)
            values += _load(initial, (row + 1) * (K - 1) + first, shift, columns, older, D, N)
    return values


@triton.jit(do_not_specialize=["time"])
def _forward(
    x, weight, bias, initial, kept, firsts, out, time,
    D: tl.constexpr, K: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Outputs of one tile. `firsts`: first token of each token's document, where documents are packed."""
    tile, row, first, columns = _place(time, 0, D, N, C)
    tokens = first + tl.arange(0, N)
    y = tl.zeros((N, C), tl.float32)
    if bias is not None:
        y += tl.load(bias + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    if firsts is not None:
        document = tl.load(firsts + tokens, mask=tokens < time, other=0)
    for lag in tl.static_range(K):
        values = _inputs(x, initial, kept, row, first, -lag, columns, time, D, K, N)
        if firsts is not None:
            values = tl.where((tokens - lag >= document)[:, None], values, 0.0)
        y += tl.load(weight + columns * K + lag, mask=columns < D, other=0.0).to(tl.float32)[None, :] * values
    if kept is not None:
        y = tl.where(_real(kept, row, tokens, time)[:, None], y, 0.0)
    _store(out, y, row * time + first, columns, tokens < time, D, N)


@triton.jit(do_not_specialize=["time"])
def _backward(
    x, weight, initial, kept, firsts, grad_out, grad_x, grad_weight, grad_bias, grad_initial, time,
    D: tl.constexpr, K: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of inputs, those of the call before included, and its share of the others'."""
    past: tl.constexpr = 0 if initial is None else K - 1
    tile, row, first, columns = _place(time, past, D, N, C)
    tokens = first + tl.arange(0, N)
    values = _inputs(x, initial, kept, row, first, 0, columns, time, D, K, N)
    grad = tl.zeros((N, C), tl.float32)
    for lag in tl.static_range(K):
        reached = _real(kept, row, tokens + lag, time)
        if firsts is not None:
            reached = reached & (tokens >= tl.load(firsts + tokens + lag, mask=reached, other=0))
        due = _load(grad_out, row * time + first, lag, columns, reached, D, N)
        grad += tl.load(weight + columns * K + lag, mask=columns < D, other=0.0).to(tl.float32)[None, :] * due
        tl.store(grad_weight + (tile * K + lag).to(tl.int64) * D + columns, tl.sum(due * values, 0), mask=columns < D)
        if lag == 0:
            if grad_bias is not None:
                tl.store(grad_bias + tile.to(tl.int64) * D + columns, tl.sum(due, 0), mask=columns < D)
    if initial is not None:
        if first < K:
            _store(grad_initial, grad, (row + 1) * (K - 1) + first, columns, (tokens < 0) & (tokens >= 1 - K), D, N)
    if kept is not None:
        grad = tl.where(_real(kept, row, tokens, time)[:, None], grad, 0.0)
    _store(grad_x, grad, row * time + first, columns, (tokens >= 0) & (tokens < time), D, N)


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, initial, kept, firsts):
        batch, time, width = x.shape
        out = torch.empty_like(x)
        narrow = weight.shape[1] > 4 or width % 8  # many loads, or loads of single numbers: fewer to a thread
        ctx.config = dict(D=width, K=weight.shape[1], N=TOKENS, C=CHANNELS, num_warps=8 if narrow else 4)
        grid = batch * triton.cdiv(time, TOKENS) * triton.cdiv(width, CHANNELS)
        _forward[(grid,)](x, weight, bias, initial, kept, firsts, out, time, **ctx.config)
        ctx.save_for_backward(x, weight, bias, initial, kept, firsts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        x, weight, bias, initial, kept, firsts = ctx.saved_tensors
        (batch, time, width), lags = x.shape, weight.shape[1]
        tiles = batch * triton.cdiv(time + (0 if initial is None else lags - 1), TOKENS)
        grad_weight = weight.new_empty(tiles, lags, width, dtype=torch.float32)
        grad_bias = None if bias is None else grad_weight.new_empty(tiles, width)
        grad_x, grad_initial = torch.empty_like(x), None if initial is None else torch.empty_like(initial)
        _backward[(tiles * triton.cdiv(width, CHANNELS),)](
            x, weight, initial, kept, firsts, grad_out.contiguous(), grad_x, grad_weight, grad_bias, grad_initial, time,
            **ctx.config,
        )  # fmt: skip
        grad_bias = None if bias is None else grad_bias.sum(0).to(bias.dtype)
        return grad_x, grad_weight.sum(0).T.to(weight.dtype), grad_bias, grad_initial, None, None


@torch.compiler.disable
@on_own_device
def short_convolution_fused(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_linattn.kernels.short_convolution.short_convolution`."""
    (batch, time, width), before = x.shape, weight.shape[1] - 1
    kept = firsts = initial = None
    recent = x[:, max(time - before, 0) :]
    if attention_mask is not None:
        kept = attention_mask.ne(0).int().contiguous()
        recent = recent.masked_fill(kept[:, time - recent.shape[1] :, None] == 0, 0)
    if cu_seqlens is not None:
        firsts = cu_seqlens[document_index(cu_seqlens, time)].int()
    if initial_state is not None and before:
        initial = initial_state.to(x.dtype).contiguous()
    inputs = *(t.contiguous() for t in (x, weight)), None if bias is None else bias.contiguous()
    out = _ShortConvolution.apply(*inputs, initial, kept, firsts)
    older = x.new_zeros(batch, before, width) if initial is None else initial
    return out, torch.cat([older, recent], dim=1)[:, recent.shape[1] :]
