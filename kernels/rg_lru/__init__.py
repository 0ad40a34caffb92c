# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Real-gated linear recurrent unit (RG-LRU), bare: the gates' projections belong to the caller."""

import torch

from ..dispatch import needs_gradient, resolve_backend
from ..packing import check_packed
from .chunked import rg_lru_chunked
from .reference import rg_lru_reference

__all__ = ["rg_lru", "rg_lru_reference"]

MAX_STEPS = 16  # so many tokens, where no gradient is wanted, take the PyTorch path, which torch.compile can trace


def rg_lru(
    x: torch.Tensor,
    r: torch.Tensor,
    i: torch.Tensor,
    lam: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    is_start: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(i_t) x_t with log a_t = -8 sigmoid(r_t) softplus(lam), per channel.

    At the start of a sequence or packed document h is sigmoid(i_t) x_t of its first real token (multiplier 1 instead
    of the square root). The derivative of the square root is held at 1000 at most. Time and memory are linear in T;
    the arithmetic is in float32 (float64 for float64 inputs).

    Args:
        x: inputs, (B, T, D).
        r: recurrence gate before its sigmoid, (B, T, D).
        i: input gate before its sigmoid, (B, T, D).
        lam: decay parameter, (D,).
        cu_seqlens: (documents + 1,), borders of documents packed in one row; excludes `initial_state`.
        attention_mask: (B, T), zero at padding (anywhere), which leaves the state as it is and outputs 0.
        initial_state: (B, D) from the call on the tokens before; if not given, sequences start here.
        is_start: (B,) bool, rows that start here whatever `initial_state` holds: for states of fixed shape, and for
            rows of which the calls before saw only padding.
        backend: "auto", "triton" or "torch".

    Returns:
        h (B, T, D) in the dtype of x, and the state after the last token (B, D) in float32 (float64 for float64
        inputs), `None` when packed.

    Raises:
        ValueError: for shapes that do not fit, packed rows with an initial state, `is_start` without one, or a backend
            that cannot run.
    """
    if x.dim() != 3 or not x.shape[1] or r.shape != x.shape or i.shape != x.shape or lam.shape != x.shape[2:]:
        raise ValueError(
            f"expected x, r, i (B, T, D) with T at least 1 and lam (D,), got x {tuple(x.shape)}, r {tuple(r.shape)}, "
            f"i {tuple(i.shape)}, lam {tuple(lam.shape)}"
        )
    if attention_mask is not None and attention_mask.shape != x.shape[:2]:
        raise ValueError(f"attention_mask must be (B, T) = {tuple(x.shape[:2])}, got {tuple(attention_mask.shape)}")
    state_shape = (x.shape[0], x.shape[2])
    if initial_state is not None and initial_state.shape != state_shape:
        raise ValueError(f"initial_state must be (B, D) = {state_shape}, got {tuple(initial_state.shape)}")
    if is_start is not None and (initial_state is None or is_start.shape != x.shape[:1]):
        raise ValueError("is_start is (B,) and goes with initial_state: without a state every sequence starts here")
    if cu_seqlens is not None:
        check_packed(cu_seqlens, x.shape[0], x.shape[1])
        if initial_state is not None:
            raise ValueError("initial_state does not go with cu_seqlens: packed documents start empty")
    limit, inputs = None, (x, r, i, lam)
    if torch.float64 in (t.dtype for t in inputs):
        limit = f"its kernels take no float64, got x, r, i, lam in {', '.join(str(t.dtype) for t in inputs)}"
    chosen = resolve_backend("rg_lru", backend, x.device, ("triton", "torch"), limit)
    run = rg_lru_chunked
    if chosen == "triton" and x.numel() and (x.shape[1] > MAX_STEPS or needs_gradient(*inputs, initial_state)):
        from .fused import rg_lru_fused as run
    out, state = run(
        *inputs,
        cu_seqlens=cu_seqlens,
        attention_mask=attention_mask,
        initial_state=initial_state,
        is_start=is_start,
    )
    return out, None if cu_seqlens is not None else state
