# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""How queries score clusters of keys, and how keys are assigned to them: the latent logits of converted checkpoints."""

import torch

from ..dispatch import resolve_backend
from .reference import cluster_logits_reference

__all__ = ["cluster_logits", "cluster_logits_reference"]

MAX_CLUSTERS = 128  # a Triton program holds those of one head
MAX_STEPS = 16  # so many tokens take the PyTorch path where torch.compile traces


def cluster_logits(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    square_weight: torch.Tensor | None = None,
    softcap: float | None = None,
    log_softmax: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    r"""Logits of each token for each cluster, y_tl = sum_c x_tc weight_lc + x_tc^2 square_weight_lc, then softcap tanh(y /
    softcap), plus bias_l, then their logarithmic softmax.

    A query whose score with a key is x . k scores a cluster of keys with mean m and variance s^2 as x . m + sum_c x_c^2 s_c^2
    / 2, the logarithm of the mean of exp(x . k) over a normal distribution (DESIGN, 6).

    Args:
        x: queries or keys, (B, T, H, d).
        weight: (H_kv, L, d), H a multiple of H_kv; float32 as the other parameters.
        bias: (H, L).
        square_weight: (H_kv, L, d).
        softcap: bound of the logits before the bias.
        log_softmax: return logarithms of shares.
        backend: "auto", "triton" or "torch".

    Returns:
        (B, T, H, L) in float32 (float64 for float64 inputs).

    Raises:
        ValueError: for shapes that do not fit, or a backend that cannot run.
    """
    heads, (kv_heads, clusters, dim) = x.shape[2], weight.shape
    fits = square_weight is None or square_weight.shape == weight.shape
    if x.shape[3] != dim or heads % kv_heads or bias.shape != (heads, clusters) or not fits:
        squares = None if square_weight is None else tuple(square_weight.shape)
        raise ValueError(
            "expected x (B, T, H, d), weight and square_weight (H_kv, L, d) and bias (H, L) with H a multiple of H_kv, got "
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, square_weight {squares}, bias {tuple(bias.shape)}"
        )
    limit, inputs = None, (x, weight, bias, square_weight)
    if clusters > MAX_CLUSTERS or any(t is not None and t.dtype == torch.float64 for t in inputs):
        limit = f"its kernels take up to {MAX_CLUSTERS} clusters and no float64, got {clusters} in {x.dtype}"
    chosen = resolve_backend("cluster_logits", backend, x.device, ("triton", "torch"), limit)
    run = cluster_logits_reference
    if chosen == "triton" and x.numel() and not (torch.compiler.is_compiling() and x.shape[1] <= MAX_STEPS):
        from .fused import cluster_logits_fused as run
    return run(x, weight, bias, square_weight, softcap, log_softmax)
