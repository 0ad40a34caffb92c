# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Window and latents in one pass in Triton, forward and backward (papers: Latte, sections 2.2 and 10.2).

Forward, the latents leave their states at the chunks' starts and the weights inside chunks; the window's kernel adds what they
give before it writes the output, once. Backward, the window's kernels take weights that have the window's share in them, form
the product of its output with the gradient again, and add the latents' part of the values' gradient to their own.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..compilation import backward_compiled_together, forward_compiled_together
from ..dispatch import on_own_device
from ..latent_attention.fused import TO_BASE_2, Latents, by_final_state
from ..packing import document_borders, document_index
from ..sliding_window_attention.fused import Band, Joined


class _MacchiatoAttention(torch.autograd.Function):
    @staticmethod
    @forward_compiled_together
    def forward(ctx, q, theta, gate, window_q, window_k, v, band, borders):
        latents = Latents(q, v, borders)
        masses, befores, final_mass = latents.masses(theta, None)
        ready, (own, *_) = latents.prepare(q, theta, gate, masses, befores, backward=False)
        start = latents.starts(None, ready.k, v, ready.kept, reverse=False)
        states, final_mean = latents.new_states(), latents.new_final()
        latents.walk(start, None, ready.k, v, ready, states=states, final=final_mean)
        joined = Joined(latents.plan.chunks, ready.q, ready.scores, states, own)
        out, lse = band.forward(window_q, window_k, v, joined=joined)
        ctx.save_for_backward(q, theta, gate, window_q, window_k, v, masses, befores, start, final_mean, lse)
        ctx.band, ctx.borders = band, borders
        ctx.set_materialize_grads(False)
        return out, final_mass, final_mean

    @staticmethod
    @once_differentiable
    @backward_compiled_together
    def backward(ctx, saved, grad_out, grad_mass, grad_mean):
        q, theta, gate, window_q, window_k, v, masses, befores, start, mean, lse = saved
        grad_out = torch.zeros_like(window_q) if grad_out is None else grad_out.contiguous()
        sinks = None, None, None
        by_mean, by_mass = by_final_state(grad_mass, grad_mean, mean)
        grad_window_q, *_, delta = ctx.band.grad_queries(window_q, window_k, v, sinks, None, lse, grad_out)
        grad_q, grad_theta, added, grad_gate, *_ = Latents(q, v, ctx.borders).backward(
            q, theta, gate, masses, befores, start, grad_out, by_mean, by_mass, exact_delta=delta
        )
        grad_window_k, grad_v = ctx.band.grad_keys(window_q, window_k, v, lse, delta, grad_out, added)
        return grad_q, grad_theta, grad_gate, grad_window_q, grad_window_k, grad_v, None, None


@torch.compiler.disable
@on_own_device
def macchiato_attention_fused(
    q: torch.Tensor,
    theta: torch.Tensor,
    gate: torch.Tensor,
    window_q: torch.Tensor,
    window_k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int,
    scale: float,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """See `hf_linattn.kernels.macchiato_attention`; output and final (z, M) of the latents."""
    (batch, time), dim = q.shape[:2], v.shape[3]
    packed = None, None
    if cu_seqlens is not None:
        starts = cu_seqlens.to(q.device, torch.int32)
        packed = document_index(starts, time).int(), starts
    band = Band(None, None, *packed, scale, None, 0, min(window - 1, time), 0)
    pad = -dim % 8  # as in `sliding_window_attention`
    window_q, window_k, v = (F.pad(x, (0, pad)) if pad else x for x in (window_q, window_k, v))
    inputs = (x.contiguous() for x in (q, theta, gate, window_q, window_k, v))
    out, z, mean = _MacchiatoAttention.apply(*inputs, band, document_borders(batch, time, cu_seqlens))
    return out[..., :dim], (z / TO_BASE_2, mean[..., :dim])
