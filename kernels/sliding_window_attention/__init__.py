# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Exact softmax attention inside a sliding window, with attention sinks: the local half of every hybrid."""

import torch

from ..dispatch import resolve_backend, traces_few
from ..packing import check_packed
from .chunked import sliding_window_attention_chunked
from .reference import sliding_window_attention_reference
from .state import WindowState, leaving_window

__all__ = ["WindowState", "leaving_window", "sliding_window_attention", "sliding_window_attention_reference"]

MAX_DIM = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}  # a program holds all channels of its queries


def triton_limit(q: torch.Tensor) -> str | None:
    """Why the Triton kernels cannot take these queries, if they cannot."""
    if q.shape[3] <= MAX_DIM.get(q.dtype, 0):
        return None
    return f"its kernels take 256 channels in bfloat16 and float16 and 128 in float32, got {q.shape[3]} in {q.dtype}"


def sliding_window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int,
    sinks: int = 0,
    q_sink: torch.Tensor | None = None,
    k_sink: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: WindowState | None = None,
    causal: bool = True,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, WindowState | None]:
    """Softmax attention of each query to the last `window` tokens (itself included) and to the first `sinks` tokens.

    A sink inside the window is an ordinary key. Once the window has passed it, its score is `q_sink . k_sink`, which lets
    the caller hold it at a relative position that the model has met. Time and memory are linear in T.

    Args:
        q: queries, (B, T, H, d), rotated if the model rotates.
        k: keys, (B, T, H_kv, d), H a multiple of H_kv (grouped heads are not repeated).
        v: values, (B, T, H_kv, d).
        window: keys that a query sees, itself included; at least 1.
        sinks: first tokens of each sequence that stay visible.
        q_sink: queries that score sinks outside the window, (B, T, H, d); `q` if not given.
        k_sink: keys with which tokens become sinks, (B, T, H_kv, d); `k` if not given.
        scale: factor on the scores; d ** -0.5 if not given.
        softcap: scores become softcap * tanh(score / softcap).
        attention_mask: (B, T), zero at padding, which is never attended to.
        cu_seqlens: (documents + 1,), borders of documents packed in one row; excludes `initial_state`.
        initial_state: state returned by the call on the tokens before.
        causal: if false, a query sees the keys up to `window // 2` positions before and after it, without sinks or state.
        backend: "auto", "triton" or "torch".

    Returns:
        Output (B, T, H, d); log-sum-exp of the scores (B, T, H) in float32 (float64 for float64 inputs), -1e30 in rows that
        see nothing, whose output is zero; and the state after the last token, `None` when packed or not causal.

    Raises:
        ValueError: for shapes that do not fit, a window below 1, packed rows with an initial state, or sinks or an initial
            state where `causal` is false.
    """
    if (
        not q.shape[1]
        or k.shape != v.shape
        or q.shape[:2] != k.shape[:2]
        or q.shape[3] != k.shape[3]
        or q.shape[2] % k.shape[2]
    ):
        raise ValueError(
            f"expected q (B, T, H, d), k and v (B, T, H_kv, d) with T at least 1 and H a multiple of H_kv, "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if window < 1 or sinks < 0:
        raise ValueError(f"window must be at least 1 and sinks at least 0, got window={window}, sinks={sinks}")
    if not causal and (sinks or initial_state is not None):
        given = "an initial_state" if not sinks else f"sinks={sinks}"
        raise ValueError(f"causal=False goes with neither sinks nor a state, got {given}: leave it out")
    if cu_seqlens is not None:
        check_packed(cu_seqlens, q.shape[0], q.shape[1])
        if initial_state is not None or attention_mask is not None:
            raise ValueError("cu_seqlens goes with neither initial_state nor attention_mask: packed rows start empty")
    if initial_state is not None and (initial_state.key.shape[1], initial_state.sink_key.shape[1]) != (window, sinks):
        raise ValueError(
            f"initial_state holds a window of {initial_state.key.shape[1]} and {initial_state.sink_key.shape[1]} sinks, "
            f"the call asks for {window} and {sinks}"
        )
    chosen = resolve_backend("sliding_window_attention", backend, q.device, ("triton", "torch"), triton_limit(q))
    run = sliding_window_attention_chunked
    if chosen == "triton" and not (traces_few(q.shape[1]) and cu_seqlens is None):
        from .fused import sliding_window_attention_fused as run
    out, lse, state = run(
        q,
        k,
        v,
        window=window,
        sinks=sinks,
        q_sink=q_sink,
        k_sink=k_sink,
        scale=scale,
        softcap=softcap,
        attention_mask=attention_mask,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        causal=causal,
    )
    return out, lse, state if causal and cu_seqlens is None else None
