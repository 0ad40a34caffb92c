# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Rotary position embedding."""

import torch

from ..dispatch import needs_gradient, resolve_backend, traces_few
from .reference import rotate_reference

__all__ = ["rotate", "rotate_reference"]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Rotary embedding in the half-split layout: channels c and c + d / 2 turn together. Where both have the same angle, as in
    all families here, lengths are kept, also where cos and sin are scaled, as long-context variants do. The arithmetic is in
    float32 (float64 for float64 inputs).

    Args:
        x: (B, T, H, d), d even.
        cos, sin: of the angles, (B or 1, T, d); -sin turns back.
        backend: "auto", "triton" or "torch"; where cos or sin needs a gradient, PyTorch runs whatever it says.

    Returns:
        (B, T, H, d) in the dtype of x.

    Raises:
        ValueError: for shapes that do not fit, or a backend that cannot run.
    """
    batch, time, _, dim = x.shape
    if dim % 2 or cos.shape != sin.shape or cos.shape not in ((1, time, dim), (batch, time, dim)):
        raise ValueError(
            f"expected x (B, T, H, d) with d even, cos and sin (B or 1, T, d), got x {tuple(x.shape)}, cos "
            f"{tuple(cos.shape)}, sin {tuple(sin.shape)}"
        )
    limit = "its kernels take no float64" if torch.float64 in (x.dtype, cos.dtype, sin.dtype) else None
    chosen = resolve_backend("rotate", backend, x.device, ("triton", "torch"), limit)
    if chosen == "triton" and x.numel() and not traces_few(time) and not needs_gradient(cos, sin):
        from .fused import rotate_fused

        return rotate_fused(x, cos, sin)
    return rotate_reference(x, cos, sin)
