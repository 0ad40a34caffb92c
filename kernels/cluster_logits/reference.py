# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Logits of clusters as they are defined, which is the PyTorch path too."""

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
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    grouped = x.to(dtype).unflatten(2, (weight.shape[0], -1))
    logits = torch.einsum("btkgd,kld->btkgl", grouped, weight.to(dtype))
    if square_weight is not None:
        logits = logits + torch.einsum("btkgd,kld->btkgl", grouped * grouped, square_weight.to(dtype))
    logits = logits.flatten(2, 3)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + bias.to(dtype)
    return torch.log_softmax(logits, dim=-1) if log_softmax else logits
