# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Logits of clusters in Triton: forward and backward.

`_forward` reads each token once and writes its logits, by products in TF32 (float32 for tokens in float32). Backward: `_change`
turns a gradient of logits into one of the products before them, `_grad_rows` brings it to tokens and biases, `_grad_weights`
sums it over the tokens of one part of the rows, in operands of 16 bits where tokens have no more.
"""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from ..compilation import backward_compiled_together, forward_compiled_together, run
from ..dispatch import on_own_device
from ..tiles import (
    LOG2E,
    dot,
    load_rows,
    place_in_grid,
    processors,
    product_precision,
    rounded_dot,
    store_rows,
    tile_width,
)

SUMMED = 64  # tokens of one head that `_grad_weights` takes at a time


@triton.jit
def _load_weight(pointer, head, clusters, columns, CLUSTERS: tl.constexpr, DIM: tl.constexpr):
    """(clusters, columns) of one head."""
    at = (head * CLUSTERS + clusters[:, None]) * DIM + columns[None, :]
    inside = (clusters < CLUSTERS)[:, None] & (columns < DIM)[None, :]
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    x, weight, squares, bias, out, softcap, tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CLUSTERS: tl.constexpr, DIM: tl.constexpr, SHARES: tl.constexpr,
    C: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n, head, _ = place_in_grid(tl.program_id(0), HEADS, 1)
    start, left = n.to(tl.int64) * C, tokens - n * C
    clusters = tl.arange(0, BL)
    logits = tl.zeros((C, BL), tl.float32)
    for slab in range(0, DIM, BK):
        columns = slab + tl.arange(0, BK)
        rows = load_rows(x, start, left, head, columns, C, HEADS, DIM).to(tl.float32)
        linear = _load_weight(weight, head // GROUP, clusters, columns, CLUSTERS, DIM)
        logits += rounded_dot(rows, tl.trans(linear), PRECISION)
        if squares is not None:
            square = _load_weight(squares, head // GROUP, clusters, columns, CLUSTERS, DIM)
            logits += rounded_dot(rows * rows, tl.trans(square), PRECISION)
    if softcap is not None:
        logits = (1 - 2 / (tl.exp2(logits * (2 * LOG2E / softcap)) + 1)) * softcap  # tanh
    logits += tl.load(bias + head * CLUSTERS + clusters, mask=clusters < CLUSTERS, other=0.0).to(tl.float32)[None, :]
    if SHARES:
        logits = tl.where((clusters < CLUSTERS)[None, :], logits, float("-inf"))
        logits -= tl.max(logits, 1)[:, None]
        logits -= tl.log2(tl.sum(tl.exp2(logits * LOG2E), 1))[:, None] / LOG2E
    store_rows(out, logits, start, left, head, clusters, C, HEADS, CLUSTERS)


@triton.jit
def _change(
    grad, out, bias, softcap, start, left, head, clusters,
    HEADS: tl.constexpr, CLUSTERS: tl.constexpr, SHARES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Gradients of the logits before shares were taken, and of what came before the soft-cap."""
    change = load_rows(grad, start, left, head, clusters, C, HEADS, CLUSTERS).to(tl.float32)
    inner = change
    if SHARES:
        y = load_rows(out, start, left, head, clusters, C, HEADS, CLUSTERS)
        change -= tl.exp2(y * LOG2E) * tl.sum(change, 1)[:, None]
        inner = change
    if softcap is not None:
        y = load_rows(out, start, left, head, clusters, C, HEADS, CLUSTERS)
        own = tl.load(bias + head * CLUSTERS + clusters, mask=clusters < CLUSTERS, other=0.0).to(tl.float32)
        capped = (y - own[None, :]) / softcap
        inner = change * (1 - capped * capped)
    return change, inner


@triton.jit(do_not_specialize=["tokens"])
def _grad_rows(
    x, weight, squares, bias, out, grad, grad_x, grad_bias, softcap, tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CLUSTERS: tl.constexpr, DIM: tl.constexpr, SHARES: tl.constexpr,
    C: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of C tokens of one head, and their share of the bias's."""
    n, head, _ = place_in_grid(tl.program_id(0), HEADS, 1)
    start, left = n.to(tl.int64) * C, tokens - n * C
    clusters = tl.arange(0, BL)
    change, inner = _change(grad, out, bias, softcap, start, left, head, clusters, HEADS, CLUSTERS, SHARES, C)
    tl.store(grad_bias + (n * HEADS + head) * CLUSTERS + clusters, tl.sum(change, 0), mask=clusters < CLUSTERS)
    if grad_x is not None:
        for slab in range(0, DIM, BK):
            columns = slab + tl.arange(0, BK)
            linear = _load_weight(weight, head // GROUP, clusters, columns, CLUSTERS, DIM)
            result = dot(inner, linear, OPERAND, PRECISION)
            if squares is not None:
                rows = load_rows(x, start, left, head, columns, C, HEADS, DIM).to(tl.float32)
                square = _load_weight(squares, head // GROUP, clusters, columns, CLUSTERS, DIM)
                result += 2 * rows * dot(inner, square, OPERAND, PRECISION)
            store_rows(grad_x, result, start, left, head, columns, C, HEADS, DIM)


@triton.jit(do_not_specialize=["tokens", "length"])
def _grad_weights(
    x, bias, out, grad, grad_weight, grad_squares, softcap, tokens, length,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CLUSTERS: tl.constexpr, DIM: tl.constexpr, SHARES: tl.constexpr,
    C: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums over `length` tokens, of one slab of channels."""
    kv_heads: tl.constexpr = HEADS // GROUP
    n, kv_head, slab = place_in_grid(tl.program_id(0), kv_heads, (DIM + BK - 1) // BK)
    clusters, columns = tl.arange(0, BL), slab * BK + tl.arange(0, BK)
    linear = tl.zeros((BL, BK), tl.float32)
    square = tl.zeros((BL, BK), tl.float32)
    first = n.to(tl.int64) * length
    last = tl.minimum(first + length, tokens)
    for start in range(first, last, C):
        left = (last - start).to(tl.int32)
        for j in range(GROUP):
            head = kv_head * GROUP + j
            _, inner = _change(grad, out, bias, softcap, start, left, head, clusters, HEADS, CLUSTERS, SHARES, C)
            rows = load_rows(x, start, left, head, columns, C, HEADS, DIM)
            linear += dot(tl.trans(inner), rows, OPERAND, PRECISION)
            if grad_squares is not None:
                rows = rows.to(tl.float32)
                square += dot(tl.trans(inner), rows * rows, OPERAND, PRECISION)
    at = ((n * kv_heads + kv_head) * CLUSTERS + clusters[:, None]) * DIM + columns[None, :]
    inside = (clusters < CLUSTERS)[:, None] & (columns < DIM)[None, :]
    tl.store(grad_weight + at, linear, mask=inside)
    if grad_squares is not None:
        tl.store(grad_squares + at, square, mask=inside)


class _ClusterLogits(torch.autograd.Function):
    @staticmethod
    @forward_compiled_together
    def forward(ctx, x, weight, bias, squares, softcap, shares):
        (batch, time, heads, dim), (kv_heads, clusters, _) = x.shape, weight.shape
        tokens, precision, tile = batch * time, product_precision(x.dtype), tile_width(clusters)
        whole = x.dtype == torch.float32  # products without tensor cores: larger tiles would not fit into registers
        ctx.rows, ctx.softcap, ctx.operand = 32 if whole else 128, softcap, precision["OPERAND"]
        ctx.options = dict(
            HEADS=heads, GROUP=heads // kv_heads, CLUSTERS=clusters, DIM=dim, SHARES=shares, BL=tile, BK=16 if whole else 64,
            PRECISION=precision["PRECISION"], num_warps=8 if whole or tile > 64 else 4,
        )  # fmt: skip
        out = torch.empty(batch, time, heads, clusters, dtype=torch.float32, device=x.device)
        run(
            _forward, (triton.cdiv(tokens, ctx.rows) * heads,),
            x, weight, squares, bias, out, softcap, tokens, C=ctx.rows, num_stages=2, **ctx.options,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, squares, out if shares or softcap is not None else None)
        return out

    @staticmethod
    @once_differentiable
    @backward_compiled_together
    def backward(ctx, saved, grad):
        x, weight, bias, squares, out = saved
        grad = grad.contiguous()
        (batch, time, heads, dim), kv_heads = x.shape, weight.shape[0]
        tokens, options = batch * time, ctx.options | {"OPERAND": ctx.operand}
        blocks = triton.cdiv(tokens, ctx.rows)
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_bias = grad.new_empty(blocks, *bias.shape)
        run(
            _grad_rows, (blocks * heads,),
            x, weight, squares, bias, out, grad, grad_x, grad_bias, ctx.softcap, tokens, C=ctx.rows, num_stages=1, **options,
        )  # fmt: skip
        grads = [None, None]
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[3]:
            slabs = triton.cdiv(dim, options["BK"])
            parts = max(1, 2 * processors(x.device) // (kv_heads * slabs))
            length = triton.cdiv(tokens, parts * SUMMED) * SUMMED
            parts = triton.cdiv(tokens, length)
            sums = [None if w is None else grad.new_empty(parts, *w.shape) for w in (weight, squares)]
            run(
                _grad_weights, (parts * kv_heads * slabs,),
                x, bias, out, grad, *sums, ctx.softcap, tokens, length, C=SUMMED,
                num_stages=2 if squares is None else 1,  # Triton 3.6 overwrites a tile that products and others read
                **options,
            )  # fmt: skip
            grads = [None if s is None else s.sum(0).to(w.dtype) for s, w in zip(sums, (weight, squares), strict=True)]
        return grad_x, grads[0], grad_bias.sum(0).to(bias.dtype), grads[1], None, None


@torch.compiler.disable
@on_own_device
def cluster_logits_fused(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    square_weight: torch.Tensor | None = None,
    softcap: float | None = None,
    log_softmax: bool = False,
) -> torch.Tensor:
    """See `hf_linattn.kernels.cluster_logits.cluster_logits`."""
    inputs = (None if t is None else t.contiguous() for t in (x, weight, bias, square_weight))
    return _ClusterLogits.apply(*inputs, softcap, log_softmax)
