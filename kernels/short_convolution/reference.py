# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Definition of the short convolution: one output at a time, obvious, exact in float64. The oracle of every test."""

import torch


def short_convolution_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequential form of `hf_linattn.kernels.short_convolution.short_convolution`, same arguments and results."""
    batch, time, dim = x.shape
    before = weight.shape[1] - 1
    real = torch.ones(batch, time, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    x = torch.where(real[..., None], x, 0)
    past = x.new_zeros(batch, before, dim) if initial_state is None else initial_state
    past = torch.cat([past, x], dim=1)
    borders = [0] if cu_seqlens is None else cu_seqlens.tolist()
    outputs = []
    for row in range(batch):
        for t in range(time):
            document = max(border for border in borders if border <= t)
            y = x.new_zeros(dim)
            for lag in range(before + 1):
                if cu_seqlens is None or t - lag >= document:
                    y = y + weight[:, lag] * past[row, before + t - lag]
            y = y if bias is None else y + bias
            outputs.append(y if real[row, t] else torch.zeros_like(y))
    return torch.stack(outputs).view(batch, time, dim), past[:, time:]
