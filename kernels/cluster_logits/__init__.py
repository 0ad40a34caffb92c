# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""How queries score clusters of keys, and how keys are assigned to them: the latent logits of converted checkpoints."""

import torch

from ..dispatch import resolve_backend, traces_few
from .reference import cluster_logits_reference

__all__ = ["cluster_logits", "cluster_logits_reference"]

MAX_CLUSTERS = 128  # a Triton program holds those of one head


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
    r"""Logits of each token for each cluster: with y_tl = sum_c x_tc weight_lc + x_tc^2 square_weight_lc, y_tl + bias_l,
    softcap tanh(y_tl / softcap) + bias_l, or the logarithmic softmax of y_tl + bias_l over clusters.

    A query whose score with a key is x . k scores a cluster of keys with mean m and variance s^2 as x . m + sum_c x_c^2 s_c^2
    / 2, the logarithm of the mean of exp(x . k) over a normal distribution (DESIGN, 6).

    Args:
        x: queries or keys, (B, T, H, d).
        weight: (H_kv, L, d), H a multiple of H_kv; float32 as the other parameters.
        bias: (H, L). With a soft-cap it is to be no larger than some thousands: the gradient is formed from the logits.
        square_weight: (H_kv, L, d).
        softcap: bound of the logits before the bias.
        log_softmax: return logarithms of shares; excludes a soft-cap.
        backend: "auto", "triton" or "torch".

    Returns:
        (B, T, H, L) in float32 (float64 for float64 inputs), under autocast too.

    Raises:
        ValueError: for shapes that do not fit, `softcap` with `log_softmax`, or a backend that cannot run.
    """
    heads, (kv_heads, clusters, dim) = x.shape[2], weight.shape
    fits = square_weight is None or square_weight.shape == weight.shape
    if x.shape[3] != dim or heads % kv_heads or bias.shape != (heads, clusters) or not fits:
        squares = None if square_weight is None else tuple(square_weight.shape)
        raise ValueError(
            "expected x (B, T, H, d), weight and square_weight (H_kv, L, d) and bias (H, L) with H a multiple of H_kv, got "
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, square_weight {squares}, bias {tuple(bias.shape)}"
        )
    if softcap is not None and log_softmax:
        raise ValueError(f"log_softmax goes without a soft-cap, got softcap={softcap}: leave one of them out")
    limit, types = None, [t.dtype for t in (x, weight, bias, square_weight) if t is not None]
    if clusters > MAX_CLUSTERS or torch.float64 in types:
        limit = f"its kernels take up to {MAX_CLUSTERS} clusters and no float64, got {clusters} in {', '.join(map(str, types))}"
    chosen = resolve_backend("cluster_logits", backend, x.device, ("triton", "torch"), limit)
    run = cluster_logits_reference
    if chosen == "triton" and x.numel() and not traces_few(x.shape[1]):
        from .fused import cluster_logits_fused as run
    return run(x, weight, bias, square_weight, softcap, log_softmax)
