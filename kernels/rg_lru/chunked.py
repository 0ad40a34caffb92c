# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""RG-LRU in linear time and memory, in plain PyTorch."""

import torch
import torch.nn.functional as F

from ..packing import document_index
from ..scan import linear_scan

MAX_SQRT_DERIVATIVE = 1000.0


class _BoundedSqrt(torch.autograd.Function):
    """Square root whose derivative stops growing near zero: a gate that closes must not blow up the gradient."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return torch.sqrt(y)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * 0.5 * torch.rsqrt(y.clamp(min=0.25 * MAX_SQRT_DERIVATIVE**-2))


def _starts(real: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """First real token of each row or packed document, (B, T) bool."""
    seen = real.cumsum(1)
    if cu_seqlens is not None:
        first = cu_seqlens.long()[document_index(cu_seqlens, real.shape[1])]
        seen = seen - (seen - real.long())[:, first]
    return real & (seen == 1)


def rg_lru_chunked(
    x: torch.Tensor,
    r: torch.Tensor,
    i: torch.Tensor,
    lam: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    is_start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_linattn.kernels.rg_lru.rg_lru`."""
    out_dtype, dtype = x.dtype, torch.promote_types(x.dtype, torch.float32)
    x, r, i, lam = (t.to(dtype) for t in (x, r, i, lam))
    padding = None
    if attention_mask is not None:
        padding = ~attention_mask.bool()[..., None]
        x, r, i = (t.masked_fill(padding, 0) for t in (x, r, i))  # whatever padding holds, NaN too, stays out
    log_a = 8 * torch.sigmoid(r) * F.logsigmoid(-lam)  # logsigmoid(-lam) = -softplus(lam)
    a, multiplier = torch.exp(log_a), _BoundedSqrt.apply(-torch.expm1(2 * log_a))
    if initial_state is None or is_start is not None:
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if padding is None else ~padding[..., 0]
        start = _starts(real, cu_seqlens)
        if is_start is not None:
            start = start & is_start.bool()[:, None]
            initial_state = initial_state.masked_fill(is_start.bool()[:, None], 0)
        a, multiplier = a.masked_fill(start[..., None], 0), multiplier.masked_fill(start[..., None], 1)
    if padding is not None:
        a = a.masked_fill(padding, 1)
    h = linear_scan(a, multiplier * torch.sigmoid(i) * x, None if initial_state is None else initial_state.to(dtype))
    out = h if padding is None else h.masked_fill(padding, 0)
    return out.to(out_dtype), h[:, -1]
