# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Rotary position embedding as it is defined, which is the PyTorch path too."""

import torch


def rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `hf_linattn.kernels.rotary_embedding.rotate`."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    cos, sin = cos.to(dtype), sin.to(dtype)
    scale = torch.rsqrt(cos * cos + sin * sin)
    cos, sin = (cos * scale).unsqueeze(2), (sin * scale).unsqueeze(2)
    first, second = x.to(dtype).chunk(2, dim=-1)
    return (x.to(dtype) * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
