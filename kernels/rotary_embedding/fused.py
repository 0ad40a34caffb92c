# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Rotary position embedding in Triton, forward and backward: each channel is read and written once."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from ..dispatch import on_own_device
from ..tiles import place_in_grid

ROWS = 32  # tokens that one program takes


@triton.jit
def _load_turn(cos, sin, at, inside):
    """Cosine and sine of one half of the channels, divided by their length."""
    c = tl.load(cos + at, mask=inside, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(c * c + s * s)
    return c * scale, s * scale


@triton.jit(do_not_specialize=["tokens", "time"])
def _rotate(
    x, cos, sin, out, tokens, time,
    HEADS: tl.constexpr, HALF: tl.constexpr, SHARED: tl.constexpr, BACK: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """N tokens of one head; `SHARED`: all sequences have the same angles, `BACK`: times the transposed matrix."""
    block, head, _ = place_in_grid(tl.program_id(0), HEADS, 1)
    rows, columns = block.to(tl.int64) * N + tl.arange(0, N), tl.arange(0, W)
    inside = (rows < tokens)[:, None] & (columns < HALF)[None, :]
    turn = (rows % time if SHARED else rows)[:, None] * (2 * HALF) + columns[None, :]
    cos_1, sin_1 = _load_turn(cos, sin, turn, inside)
    cos_2, sin_2 = _load_turn(cos, sin, turn + HALF, inside)
    at = (rows * HEADS + head)[:, None] * (2 * HALF) + columns[None, :]
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        turned_1, turned_2 = first * cos_1 + second * sin_2, second * cos_2 - first * sin_1
    else:
        turned_1, turned_2 = first * cos_1 - second * sin_1, second * cos_2 + first * sin_2
    tl.store(out + at, turned_1.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + HALF, turned_2.to(out.dtype.element_ty), mask=inside)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool) -> torch.Tensor:
    batch, time, heads, dim = x.shape
    out = torch.empty_like(x)
    _rotate[(triton.cdiv(batch * time, ROWS) * heads,)](
        x, cos, sin, out, batch * time, time, HEADS=heads, HALF=dim // 2, SHARED=cos.shape[0] == 1,
        BACK=back, N=ROWS, W=triton.next_power_of_2(dim // 2), num_warps=4,
    )  # fmt: skip
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        return _turned(grad_out.contiguous(), *ctx.saved_tensors, back=True), None, None


@torch.compiler.disable
@on_own_device
def rotate_fused(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `hf_linattn.kernels.rotary_embedding.rotate`."""
    return _Rotate.apply(x.contiguous(), cos.contiguous(), sin.contiguous())
