# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Logits of clusters as they are defined, which is the PyTorch path too."""

from contextlib import nullcontext

import torch


def cluster_logits_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    square_weight: torch.Tensor | None = None,
    softcap: float | None = None,
    log_softmax: bool = False,
) -> torch.Tensor:
    """See `hf_linattn.kernels.cluster_logits.cluster_logits`."""
    dtype = torch.float32
    for t in (x, weight, bias, square_weight):
        dtype = dtype if t is None else torch.promote_types(dtype, t.dtype)
    x, weight, bias = x.to(dtype).unflatten(2, (weight.shape[0], -1)), weight.to(dtype), bias.to(dtype)
    # autocast would form logits in 16 bits
    exact = nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False)
    with exact:
        logits = torch.einsum("btkgd,kld->btkgl", x, weight)
        if square_weight is not None:
            logits = logits + torch.einsum("btkgd,kld->btkgl", x * x, square_weight.to(dtype))
    logits = logits.flatten(2, 3)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + bias
    return torch.log_softmax(logits, dim=-1) if log_softmax else logits
