# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Bidirectional latent attention: every token sees one mean per latent, in linear time and memory, in plain PyTorch."""

import torch

from ..packing import check_packed, chunk_layout, scatter_to_chunks
from .reference import EMPTY

CHUNK = 64  # positions of a document that are summed by one product


def bidirectional_latent_attention(
    q: torch.Tensor,
    theta: torch.Tensor,
    v: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    gate_value: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """out_t = a_0 gate_value_t + sum_l a_tl M_l with a_t = softmax([gate_t, q_t]), M_l = sum_s softmax_s(theta_sl) v_s.

    The softmax over s is over the whole sequence or packed document. Latents that hold nothing take no part. Time and
    memory are linear in T; the arithmetic is in float32 (float64 for float64 inputs).

    Args:
        q: latent logits of the queries, (B, T, H, L).
        theta: latent logits of the keys, (B, T, H_kv, L), H a multiple of H_kv; values <= -5e29 mean "not absorbed".
        v: values, (B, T, H_kv, d).
        gate: logit of the exact branch, (B, T, H). Needs `gate_value`.
        gate_value: output of the exact branch, (B, T, H, d).
        attention_mask: (B, T), zero where a token must not be absorbed.
        cu_seqlens: (documents + 1,), borders of documents packed in one row.

    Returns:
        Output (B, T, H, d) in v's dtype.

    Raises:
        ValueError: for shapes that do not fit, half a gate, or borders that do not describe one packed row.
    """
    if q.shape[:2] != v.shape[:2] or theta.shape != (*v.shape[:3], q.shape[3]) or q.shape[2] % v.shape[2]:
        raise ValueError(
            f"expected q (B, T, H, L), theta (B, T, H_kv, L), v (B, T, H_kv, d) with H a multiple of H_kv, got "
            f"q {tuple(q.shape)}, theta {tuple(theta.shape)}, v {tuple(v.shape)}"
        )
    if (gate is None) != (gate_value is None):
        raise ValueError("gate and gate_value belong together: pass both or neither")
    out_dtype, dtype = v.dtype, torch.promote_types(q.dtype, torch.float32)
    q, theta, v = (x.to(dtype) for x in (q, theta, v))
    if attention_mask is not None:
        ignored = ~attention_mask.bool()[:, :, None, None]
        theta, v = theta.masked_fill(ignored, EMPTY), v.masked_fill(ignored, 0)
    time, kv_heads = v.shape[1:3]
    layout = None
    if cu_seqlens is not None:
        check_packed(cu_seqlens, q.shape[0], time)
        layout = chunk_layout(cu_seqlens, CHUNK)
        q, v = scatter_to_chunks(q, layout, CHUNK), scatter_to_chunks(v, layout, CHUNK)
        theta = scatter_to_chunks(theta, layout, CHUNK, EMPTY)
        q, theta, v = (x[0].unflatten(0, (-1, CHUNK)) for x in (q, theta, v))

    # Log-sum-exp and mean of each row, or of each chunk of a packed row.
    z = torch.logsumexp(theta, dim=1)
    shares = torch.exp(theta - z[:, None]).masked_fill(theta <= EMPTY / 2, 0)
    mean = torch.einsum("nckl,nckd->nkld", shares, v).to(dtype)  # autocast may have made it less
    if layout is not None:
        document = layout.starts.cumsum(0) - 1
        index, fixed = document[:, None, None].expand_as(z), z.detach()
        top = fixed.new_full((int(document[-1]) + 1, *z.shape[1:]), EMPTY).scatter_reduce(0, index, fixed, "amax")
        weight = torch.exp(z - top[document])
        total = torch.zeros_like(top).index_add(0, document, weight)
        mean = mean.new_zeros(*top.shape, mean.shape[-1]).index_add(0, document, weight[..., None] * mean)
        mean, z = (mean / total[..., None])[document], top[document]  # of the highest chunk: only asked whether empty

    logits = q.unflatten(2, (kv_heads, -1))
    occupied = (z > EMPTY / 2)[:, None, :, None]
    logits = logits.masked_fill(~occupied, EMPTY)
    if gate is not None:
        gate = gate.to(dtype)[..., None]
        if layout is not None:
            gate = scatter_to_chunks(gate, layout, CHUNK)[0].unflatten(0, (-1, CHUNK))
        logits = torch.cat([gate.unflatten(2, (kv_heads, -1)), logits], -1)
    a = torch.softmax(logits, dim=-1)

    def in_rows(x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(2, 3)
        return x if layout is None else x.flatten(0, 1)[None].index_select(1, layout.target)

    out = in_rows(torch.einsum("nckgl,nkld->nckgd", a[..., -q.shape[-1] :] * occupied, mean))
    if gate is not None:
        out = out + in_rows(a[..., :1]) * gate_value
    return out.to(out_dtype)
