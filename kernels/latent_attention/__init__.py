# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Causal latent attention (Latte), the compressed long-range path of Latte Macchiato."""

import torch

from ..dispatch import needs_gradient, resolve_backend
from ..packing import check_packed
from .chunked import latent_attention_chunked
from .reference import EMPTY, latent_attention_reference

MAX_DIM = 256  # a Triton program holds all value channels of a mean
MAX_LATENTS = 128
MAX_STEPS = 16  # so many tokens, where no gradient is wanted, go through the recurrence one by one

__all__ = ["EMPTY", "latent_attention", "latent_attention_reference"]


def check_shapes(q: torch.Tensor, theta: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse latent logits and values that do not belong together."""
    if q.shape[:2] != v.shape[:2] or theta.shape != (*v.shape[:3], q.shape[3]) or q.shape[2] % v.shape[2]:
        raise ValueError(
            f"expected q (B, T, H, L), theta (B, T, H_kv, L), v (B, T, H_kv, d) with H a multiple of H_kv, got "
            f"q {tuple(q.shape)}, theta {tuple(theta.shape)}, v {tuple(v.shape)}"
        )


def triton_limit(q: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why the Triton kernels cannot take these, if they cannot."""
    if v.dtype != torch.float64 and 1 < v.shape[3] <= MAX_DIM and 1 < q.shape[3] <= MAX_LATENTS:
        return None
    return (
        f"its kernels take 2 to {MAX_DIM} value channels, 2 to {MAX_LATENTS} latents and no float64, "
        f"got {v.shape[3]} and {q.shape[3]} in {v.dtype}"
    )


def latent_attention(
    q: torch.Tensor,
    theta: torch.Tensor,
    v: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    gate_value: torch.Tensor | None = None,
    use_mass: bool = False,
    mass_length: int | None = None,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    r"""Causal Latte with an optional exact branch under the same softmax (papers: Latte, section 2).

    With z_tl the log-sum-exp of theta_sl over s <= t and M_tl the mean of v_s weighted by exp(theta_sl - z_tl):
    a = softmax([gate_t, s_tl]), out_t = a_0 gate_value_t + sum_l a_l M_tl, where s_tl = q_tl (Latte), or q_tl + z_tl with
    `use_mass` (one normaliser over tokens: the latent counts as often as tokens went into it). Latents that hold nothing
    take no part. Time and memory are linear in T, and no bit of an output depends on later tokens.

    Args:
        q: latent logits of the queries, (B, T, H, L).
        theta: latent logits of the keys, (B, T, H_kv, L); values <= -5e29 mean "not absorbed by this latent".
        v: values, (B, T, H_kv, d).
        gate: logit of the exact branch, (B, T, H); with `use_mass` its log-sum-exp. Needs `gate_value`.
        gate_value: output of the exact branch, (B, T, H, d).
        use_mass: add z to the query logits.
        mass_length: with `use_mass`, the number of tokens up to which mass counts in full; beyond it the latents' total
            is held, s_tl -= log(max(1, sum_l exp(z_tl) / mass_length)).
        attention_mask: (B, T), zero where a token must not be absorbed.
        cu_seqlens: (documents + 1,), borders of documents packed in one row; excludes `initial_state`.
        initial_state: (z (B, H_kv, L), M (B, H_kv, L, d)) from an earlier call.
        backend: "auto", "triton" or "torch".

    Returns:
        Output (B, T, H, d) in v's dtype, and the final (z, M) in float32 (float64 for float64 inputs), `None` when packed.

    Raises:
        ValueError: for shapes that do not fit, half a gate, or packed rows with an initial state.
    """
    check_shapes(q, theta, v)
    if (gate is None) != (gate_value is None):
        raise ValueError("gate and gate_value belong together: pass both or neither")
    if gate is not None and (gate.shape != q.shape[:3] or gate_value.shape != (*q.shape[:3], v.shape[3])):
        raise ValueError(
            f"gate must be (B, T, H) = {tuple(q.shape[:3])} and gate_value (B, T, H, d) = {(*q.shape[:3], v.shape[3])}, got "
            f"{tuple(gate.shape)} and {tuple(gate_value.shape)}"
        )
    held = (v.shape[0], v.shape[2], q.shape[3])
    if initial_state is not None and (initial_state[0].shape, initial_state[1].shape) != (held, (*held, v.shape[3])):
        raise ValueError(
            f"initial_state must be z (B, H_kv, L) = {held} and M (B, H_kv, L, d) = {(*held, v.shape[3])}, got "
            f"{tuple(initial_state[0].shape)} and {tuple(initial_state[1].shape)}"
        )
    if cu_seqlens is not None:
        check_packed(cu_seqlens, q.shape[0], q.shape[1])
        if initial_state is not None:
            raise ValueError("initial_state does not go with cu_seqlens: packed documents start empty")
    tensors = (q, theta, v)
    options = dict(
        gate=gate, gate_value=gate_value, use_mass=use_mass, mass_length=mass_length, initial_state=initial_state
    )
    gradients = needs_gradient(*tensors, gate, gate_value, *(initial_state or ()))
    few = cu_seqlens is None and q.shape[1] <= MAX_STEPS and not gradients
    if resolve_backend("latent_attention", backend, q.device, ("triton", "torch"), triton_limit(q, v)) == "torch":
        out, state = latent_attention_chunked(
            *tensors, **options, attention_mask=attention_mask, cu_seqlens=cu_seqlens
        )
        return out, None if cu_seqlens is not None else state
    from .fused import latent_attention_fused, latent_attention_step

    if attention_mask is not None:
        ignored = ~attention_mask.bool()[:, :, None, None]
        tensors = q, theta.masked_fill(ignored, EMPTY), v.masked_fill(ignored, 0)
    if few:
        return latent_attention_step(*tensors, **options)
    out, state = latent_attention_fused(*tensors, **options, cu_seqlens=cu_seqlens)
    return out, None if cu_seqlens is not None else state
