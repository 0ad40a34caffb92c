# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Gated linear attention (GLA), and with simpler gates RetNet, TransNormerLLM and plain linear attention."""

import torch
import torch.nn.functional as F

from ..dispatch import needs_gradient, resolve_backend
from ..packing import check_packed
from .chunked import gated_linear_attention_chunked
from .reference import gated_linear_attention_parallel, gated_linear_attention_reference

__all__ = ["gated_linear_attention", "gated_linear_attention_parallel", "gated_linear_attention_reference"]

SMALLEST_SUM = 1e-6  # of weights, with `normalize`
MAX_DIM_K = 256  # a Triton program holds all key channels of a state
MAX_STEPS = 16  # so many tokens, where no gradient is wanted, go through the recurrence one by one


def gated_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    normalize: bool = False,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    r"""Causal linear attention with a decaying matrix state (papers: GLA, section 2.2).

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T and out_t = scale S_t^T q_t, per key/value head. A decay that is constant over
    time gives RetNet and TransNormerLLM, none gives plain linear attention. Time and memory are linear in T.

    Args:
        q: queries, (B, T, H, dk).
        k: keys, (B, T, H_kv, dk); query head h reads the state of key/value head h // (H / H_kv).
        v: values, (B, T, H_kv, dv).
        log_decay: g, natural logarithm of the decay, <= 0: per channel (B, T, H_kv, dk), per head (B, T, H_kv), constant
            per head (H_kv,), or `None` for no decay. No value is too strong.
        scale: of the output, dk^-1/2 if not given.
        normalize: divide by the sum of the weights, out_t = scale S_t^T q_t / (scale z_t^T q_t) with z the state of ones in
            the place of values. For non-negative features; a sum below 1e-6 counts as 1e-6.
        attention_mask: (B, T), zero where a token must leave the state as it is.
        cu_seqlens: (documents + 1,), borders of documents packed in one row.
        initial_state: S before the first token, (B, H_kv, dk, dv), packed (documents, H_kv, dk, dv); with `normalize` the
            pair (S, z) with z (B, H_kv, dk). Zero if not given.
        backend: "auto", "triton" or "torch".

    Returns:
        Output (B, T, H, dv) in v's dtype, and the final state, shaped like `initial_state`, in float32 (float64 for float64
        inputs). Both are differentiable in q, k, v, log_decay and initial_state.

    Raises:
        ValueError: for shapes that do not fit.
    """
    batch, time, heads, dim_k = q.shape
    kv_heads, dim_v = v.shape[2:]
    if time == 0 or q.shape[:2] != k.shape[:2] or k.shape != (batch, time, kv_heads, dim_k) or heads % kv_heads:
        raise ValueError(
            "expected q (B, T, H, dk), k (B, T, H_kv, dk), v (B, T, H_kv, dv) with T at least 1 and H a multiple of H_kv, got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if v.shape[:2] != q.shape[:2]:
        raise ValueError(f"v {tuple(v.shape)} has another batch or length than q {tuple(q.shape)}")
    decays = ((batch, time, kv_heads, dim_k), (batch, time, kv_heads), (kv_heads,))
    if log_decay is not None and log_decay.shape not in decays:
        raise ValueError(f"log_decay {tuple(log_decay.shape)} must have one of the shapes {decays}, or be None")
    documents = batch
    if cu_seqlens is not None:
        check_packed(cu_seqlens, batch, time)
        documents = cu_seqlens.numel() - 1
    state, norm = initial_state if normalize and initial_state is not None else (initial_state, None)
    if state is not None and state.shape != (documents, kv_heads, dim_k, dim_v):
        raise ValueError(
            f"initial_state must be (B or documents, H_kv, dk, dv) = {(documents, kv_heads, dim_k, dim_v)}, "
            f"got {tuple(state.shape)}"
        )
    scale = dim_k**-0.5 if scale is None else scale
    if log_decay is not None and log_decay.dim() == 1:
        log_decay = log_decay.expand(batch, time, kv_heads)
    if attention_mask is not None:
        ignored = ~attention_mask.bool()[:, :, None]
        k = k.masked_fill(ignored[..., None], 0)
        if log_decay is not None:
            log_decay = log_decay.masked_fill(ignored[..., None] if log_decay.dim() == 4 else ignored, 0)
    options = dict(scale=scale, cu_seqlens=cu_seqlens)
    limit = None
    if q.dtype == torch.float64 or dim_k > MAX_DIM_K:
        limit = f"its kernels take up to {MAX_DIM_K} key channels and no float64, got {dim_k} in {q.dtype}"
    chosen = resolve_backend("gated_linear_attention", backend, q.device, ("triton", "torch"), limit)
    run = _triton if chosen == "triton" else _torch
    out, state = run(q, k, v, log_decay, initial_state=state, **options)
    if not normalize:
        return out, state
    norm = None if norm is None else norm[..., None]
    total, norm = run(q, k, torch.ones_like(v[..., :1], dtype=state.dtype), log_decay, initial_state=norm, **options)
    return (out / total.clamp(min=SMALLEST_SUM)).to(v.dtype), (state, norm.squeeze(-1))


def _torch(q, k, v, log_decay, **kwargs):
    if log_decay is None:
        log_decay = k.new_zeros(1, 1, 1, 1).expand(*k.shape[:3], 1)
    elif log_decay.dim() == 3:
        log_decay = log_decay[..., None]
    return gated_linear_attention_chunked(q, k, v, log_decay, **kwargs)


def _triton(q, k, v, log_decay, *, scale, cu_seqlens, initial_state):
    from .fused import gated_linear_attention_fused, gated_linear_attention_step

    if log_decay is None:
        log_decay = k.new_zeros(k.shape[:3])
    # Triton 3.6 reads beyond shared memory where a tensor has one number per token: a column of zeros changes nothing
    dim_v, pad_k, pad_v = v.shape[3], int(k.shape[3] == 1), int(v.shape[3] == 1)
    if pad_k or pad_v:
        q, k, v = F.pad(q, (0, pad_k)), F.pad(k, (0, pad_k)), F.pad(v, (0, pad_v))
        log_decay = F.pad(log_decay, (0, pad_k)) if log_decay.dim() == 4 else log_decay
        initial_state = None if initial_state is None else F.pad(initial_state, (0, pad_v, 0, pad_k))
    inputs = (q, k, v, log_decay)
    if cu_seqlens is None and q.shape[1] <= MAX_STEPS and not needs_gradient(*inputs, initial_state):
        out, state = gated_linear_attention_step(*inputs, scale=scale, initial_state=initial_state)
    else:
        out, state = gated_linear_attention_fused(
            *inputs, scale=scale, cu_seqlens=cu_seqlens, initial_state=initial_state
        )
    return (out[..., :dim_v], state[:, :, : state.shape[2] - pad_k, :dim_v]) if pad_k or pad_v else (out, state)
