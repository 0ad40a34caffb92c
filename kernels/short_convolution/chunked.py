# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Short causal convolution as one shifted multiply-add per lag, in plain PyTorch."""

import torch

from ..packing import document_index


def short_convolution_chunked(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_linattn.kernels.short_convolution.short_convolution`."""
    batch, time, dim = x.shape
    before = weight.shape[1] - 1
    padding = None if attention_mask is None else ~attention_mask.bool()[..., None]
    if padding is not None:
        x = x.masked_fill(padding, 0)
    past = x.new_zeros(batch, before, dim) if initial_state is None else initial_state.to(x.dtype)
    past = torch.cat([past, x], dim=1)
    inputs = past.to(torch.promote_types(x.dtype, torch.float32))
    weight = weight.to(inputs.dtype)
    if cu_seqlens is not None:
        age = torch.arange(time, device=x.device) - cu_seqlens.long()[document_index(cu_seqlens, time)]
    y = 0 if bias is None else bias.to(inputs.dtype)
    for lag in range(before + 1):
        lagged = inputs[:, before - lag : before - lag + time]
        if cu_seqlens is not None and lag > 0:
            lagged = lagged.masked_fill((age < lag)[:, None], 0)
        y = y + weight[:, lag] * lagged
    if padding is not None:
        y = y.masked_fill(padding, 0)
    return y.to(x.dtype), past[:, time:]
