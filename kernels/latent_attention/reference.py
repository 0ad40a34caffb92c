# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Definition of causal latent attention: dense in time, obvious, exact in float64. The oracle of every test."""

import torch

EMPTY = -1e30  # logit of "nothing": finite, so that differences of two of them are numbers


def latent_attention_reference(
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
) -> torch.Tensor:
    """Quadratic form of `hf_linattn.kernels.latent_attention.latent_attention`, same arguments and result."""
    batch, time, heads, _ = q.shape
    group = heads // theta.shape[2]
    theta, v = theta.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    allowed = torch.ones(time, time, dtype=torch.bool, device=q.device).tril().expand(batch, time, time)
    if attention_mask is not None:
        allowed = allowed & attention_mask.bool()[:, None, :]
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens[1:].contiguous(), torch.arange(time, device=q.device), right=True)
        allowed = allowed & (document[:, None] == document[None, :])
    # (batch, query time, key time, heads, latents)
    scores = torch.where(allowed[..., None, None] & (theta > EMPTY / 2)[:, None], theta[:, None], EMPTY)
    z = torch.logsumexp(scores, dim=2)
    occupied = z > EMPTY / 2
    within = torch.where(scores > EMPTY / 2, (scores - z[:, :, None]).exp(), 0)
    logits = q + z if use_mass else q
    if use_mass and mass_length is not None:
        absorbed = torch.logsumexp(z, dim=-1, keepdim=True)
        logits = logits - (absorbed - torch.log(torch.tensor(float(mass_length), dtype=q.dtype))).clamp(min=0)
    logits = torch.where(occupied, logits, EMPTY)
    if gate is not None:
        logits = torch.cat([gate[..., None], logits], dim=-1)
    weights = torch.softmax(logits, dim=-1)
    latent_weights = torch.where(occupied, weights if gate is None else weights[..., 1:], 0)
    out = torch.einsum("bthl,btshl,bshd->bthd", latent_weights, within, v)
    return out if gate is None else out + weights[..., :1] * gate_value
