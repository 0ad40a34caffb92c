# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Depthwise causal convolution over the last few tokens."""

import torch

from ..dispatch import needs_gradient, resolve_backend
from ..packing import check_packed
from .chunked import short_convolution_chunked
from .reference import short_convolution_reference

__all__ = ["short_convolution", "short_convolution_reference"]

MAX_LAGS = 8  # a Triton program repeats its loads for every lag
MAX_STEPS = 16  # so many tokens, where no gradient is wanted, take the PyTorch path, which torch.compile can trace


def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y_t = bias + sum over lags k = 0..K-1 of weight[:, k] * x_{t-k}, per channel; x is zero before its first token.

    Sums are formed in float32 (float64 for float64 inputs). Time and memory are linear in T.

    Args:
        x: inputs, (B, T, D).
        weight: (D, K); column k weighs the token k steps back, column 0 the current one.
        bias: (D,).
        cu_seqlens: (documents + 1,), borders of documents packed in one row; excludes `initial_state`.
        attention_mask: (B, T), zero at padding (anywhere), which counts as zero input and outputs 0.
        initial_state: (B, K-1, D) from the call on the tokens before; zero if not given.
        backend: "auto", "triton" or "torch".

    Returns:
        y (B, T, D), and the last K-1 inputs (B, K-1, D), zero at padding and before the first token (`None` when
        packed); both in the dtype of x.

    Raises:
        ValueError: for shapes that do not fit, packed rows with an initial state, or a backend that cannot run.
    """
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] == 0:
        raise ValueError(
            f"expected x (B, T, D) and weight (D, K) with K at least 1, got x {tuple(x.shape)}, "
            f"weight {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != x.shape[2:]:
        raise ValueError(f"bias must be (D,) = {tuple(x.shape[2:])}, got {tuple(bias.shape)}")
    if attention_mask is not None and attention_mask.shape != x.shape[:2]:
        raise ValueError(f"attention_mask must be (B, T) = {tuple(x.shape[:2])}, got {tuple(attention_mask.shape)}")
    state_shape = (x.shape[0], weight.shape[1] - 1, x.shape[2])
    if initial_state is not None and initial_state.shape != state_shape:
        raise ValueError(f"initial_state must be (B, K-1, D) = {state_shape}, got {tuple(initial_state.shape)}")
    if cu_seqlens is not None:
        check_packed(cu_seqlens, x.shape[0], x.shape[1])
        if initial_state is not None:
            raise ValueError("initial_state does not go with cu_seqlens: packed documents start empty")
    limit, inputs = None, (x, weight, bias)
    if torch.float64 in (t.dtype for t in inputs if t is not None) or weight.shape[1] > MAX_LAGS:
        limit = f"its kernels take up to {MAX_LAGS} lags and no float64, got {weight.shape[1]} lags on {x.dtype}"
    chosen = resolve_backend("short_convolution", backend, x.device, ("triton", "torch"), limit)
    run = short_convolution_chunked
    if chosen == "triton" and x.numel() and (x.shape[1] > MAX_STEPS or needs_gradient(*inputs, initial_state)):
        from .fused import short_convolution_fused as run
    out, state = run(
        *inputs,
        cu_seqlens=cu_seqlens,
        attention_mask=attention_mask,
        initial_state=initial_state,
    )
    return out, None if cu_seqlens is not None else state
