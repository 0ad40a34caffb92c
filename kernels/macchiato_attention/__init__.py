# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Latte Macchiato: a sliding window and latents under one softmax, in one pass where no state comes in."""

import torch

from ..dispatch import resolve_backend
from ..latent_attention import MAX_STEPS, check_shapes, latent_attention
from ..latent_attention import triton_limit as latent_limit
from ..packing import check_packed
from ..sliding_window_attention import WindowState, sliding_window_attention
from ..sliding_window_attention import triton_limit as window_limit

MAX_LATENTS = 64  # of one pass, whose program holds their states beside the window's tiles

__all__ = ["macchiato_attention"]


def triton_limit(q: torch.Tensor, window_q: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why the kernels cannot take these in one pass, if they cannot."""
    limit = latent_limit(q, v) or window_limit(window_q)
    if limit is None and q.shape[3] > MAX_LATENTS:
        limit = f"one pass takes up to {MAX_LATENTS} latents, got {q.shape[3]} ('auto' makes two calls)"
    return limit


def macchiato_attention(
    q: torch.Tensor,
    theta: torch.Tensor,
    gate: torch.Tensor,
    window_q: torch.Tensor,
    window_k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int,
    scale: float | None = None,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: tuple[tuple[torch.Tensor, torch.Tensor], WindowState] | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, tuple[tuple[torch.Tensor, torch.Tensor], WindowState] | None]:
    r"""out_t = a_0 window_t + sum_l a_l M_tl, a = softmax([gate_t, q_t]) (papers: Latte, section 2.2).

    window_t is softmax attention to the last `window` tokens, M_tl the mean of all values so far, weighted by
    exp(theta_sl). The same as `sliding_window_attention` followed by `latent_attention`; on a GPU, without padding and
    state, more than 16 tokens of sizes that both kernels take, and up to 64 latents, run in one pass, which does not write the
    window's output.

    Args:
        q: latent logits of the queries, (B, T, H, L).
        theta: latent logits of the keys, (B, T, H_kv, L).
        gate: logit of the window, (B, T, H).
        window_q: queries of the window, (B, T, H, d), rotated if the model rotates.
        window_k: keys of the window, (B, T, H_kv, d).
        v: values of both, (B, T, H_kv, d).
        window: keys that a query sees, itself included; at least 1.
        scale: factor on the window's scores; d ** -0.5 if not given.
        attention_mask: (B, T), zero at padding.
        cu_seqlens: (documents + 1,), borders of documents packed in one row; excludes `initial_state` and a mask.
        initial_state: the state that the call on the tokens before returned.
        backend: "auto", "triton" or "torch".

    Returns:
        Output (B, T, H, d) in v's dtype, and the state after the last token, `None` when packed: of the latents (z, M) and of
        the window.

    Raises:
        ValueError: for shapes that do not fit, or packed rows with an initial state or a mask.
    """
    latents, before = (None, None) if initial_state is None else initial_state
    fits = attention_mask is None and initial_state is None and q.shape[1] > MAX_STEPS
    limit = triton_limit(q, window_q, v)
    if backend == "auto" and limit is not None:
        fits = False  # each operator chooses, and warns, for itself
    if not fits or resolve_backend("macchiato_attention", backend, v.device, ("triton", "torch"), limit) == "torch":
        exact, _, after = sliding_window_attention(
            window_q,
            window_k,
            v,
            window=window,
            scale=scale,
            attention_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            initial_state=before,
            backend=backend,
        )
        out, latents = latent_attention(
            q,
            theta,
            v,
            gate=gate,
            gate_value=exact,
            attention_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            initial_state=latents,
            backend=backend,
        )
        return out, None if cu_seqlens is not None else (latents, after)
    from .fused import macchiato_attention_fused

    check_shapes(q, theta, v)
    if cu_seqlens is not None:
        check_packed(cu_seqlens, *v.shape[:2])
    shapes = gate.shape, window_q.shape, window_k.shape
    if window < 1 or shapes != (q.shape[:3], (*q.shape[:3], v.shape[3]), v.shape):
        raise ValueError(
            f"expected a window of at least 1, gate (B, T, H), window_q (B, T, H, d) and window_k like v, got {window}, "
            f"{tuple(map(tuple, shapes))} and v {tuple(v.shape)}"
        )
    scale = v.shape[3] ** -0.5 if scale is None else scale
    out, latents = macchiato_attention_fused(
        q, theta, gate, window_q, window_k, v, window=window, scale=scale, cu_seqlens=cu_seqlens
    )
    if cu_seqlens is not None:
        return out, None
    return out, (latents, WindowState.of_whole_rows(window_k, v, window_k, window, 0))
