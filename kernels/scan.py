# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""First-order linear recurrence over time: the scan that every recurrent operator here is built on."""

import torch
from torch.autograd.function import once_differentiable

BLOCK = 16  # steps taken one after the other; blocks run side by side, and their ends are scanned in the same way


def _scan_(a: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Overwrite h (B, T, ...) by h_t += a_t * h_{t-1}. Nothing is divided, so zeros in `a` are exact resets."""
    time = h.shape[1]
    blocks, done = time // BLOCK, 1
    if blocks > 1:
        done = blocks * BLOCK
        inside = h[:, :done].unflatten(1, (blocks, BLOCK))
        decay = a[:, :done].unflatten(1, (blocks, BLOCK)).clone()  # becomes the product of `a` since the block began
        for t in range(1, BLOCK):
            inside[:, :, t].addcmul_(decay[:, :, t], inside[:, :, t - 1])
            decay[:, :, t].mul_(decay[:, :, t - 1])
        ends = _scan_(decay[:, :, -1], inside[:, :, -1])
        inside[:, 1:, :-1].addcmul_(decay[:, 1:, :-1], ends[:, :-1, None])
    for t in range(done, time):
        h[:, t].addcmul_(a[:, t], h[:, t - 1])
    return h


class _LinearScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, initial):
        h = b.clone(memory_format=torch.contiguous_format)
        if initial is not None:
            h[:, 0].addcmul_(a[:, 0], initial)
        _scan_(a, h)
        ctx.save_for_backward(a, initial, h)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, initial, h = ctx.saved_tensors
        # The same recurrence backwards: what h_t receives is its own gradient and a_{t+1} times what h_{t+1} receives.
        later = torch.cat([torch.zeros_like(a[:, :1]), a[:, 1:].flip(1)], 1)
        grad_b = _scan_(later, grad.flip(1)).flip(1)
        grad_a = grad_initial = None
        if ctx.needs_input_grad[0]:
            first = torch.zeros_like(h[:, 0]) if initial is None else initial.expand_as(h[:, 0])
            grad_a = (grad_b * torch.cat([first[:, None], h[:, :-1]], 1)).sum_to_size(a.shape)
        if ctx.needs_input_grad[2]:
            grad_initial = (a[:, 0] * grad_b[:, 0]).sum_to_size(initial.shape)
        return grad_a, grad_b, grad_initial


def linear_scan(a: torch.Tensor, b: torch.Tensor, initial: torch.Tensor | None = None) -> torch.Tensor:
    """h_t = a_t * h_{t-1} + b_t along dimension 1, in linear time and memory, once differentiable in all arguments.

    Only products and sums are formed: for a in [0, 1] nothing overflows, and a zero in `a` is an exact reset.

    Args:
        a: decay, broadcastable to `b` (for example (B, T, H, 1) against (B, T, H, d)).
        b: what each step adds, (B, T, ...), T at least 1.
        initial: h before the first step, broadcastable to (B, ...); zero if not given.

    Returns:
        h, shape of `b`, in the widest dtype of the arguments.

    Raises:
        ValueError: if T is 0 or `a` does not broadcast to `b`.
    """
    if b.dim() < 2 or b.shape[1] == 0:
        raise ValueError(f"linear_scan needs b (B, T, ...) with T at least 1, got {tuple(b.shape)}")
    shape = (1,) * (b.dim() - a.dim()) + tuple(a.shape)
    if len(shape) != b.dim() or any(n not in (1, m) for n, m in zip(shape, b.shape, strict=True)):
        raise ValueError(
            f"a {tuple(a.shape)} does not broadcast to b {tuple(b.shape)}: its sizes must be 1 or those of b"
        )
    dtype = torch.promote_types(a.dtype, b.dtype)
    if initial is not None:
        dtype = torch.promote_types(dtype, initial.dtype)
        initial = initial.to(dtype)
    a = a.reshape(shape).expand(-1, b.shape[1], *shape[2:])
    return _LinearScan.apply(a.to(dtype), b.to(dtype), initial)
