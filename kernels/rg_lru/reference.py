# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Definition of the RG-LRU: one step at a time, obvious, exact in float64. The oracle of every test."""

import torch
import torch.nn.functional as F


def rg_lru_reference(
    x: torch.Tensor,
    r: torch.Tensor,
    i: torch.Tensor,
    lam: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    is_start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequential form of `hf_linattn.kernels.rg_lru.rg_lru`, same arguments and results."""
    batch, time, dim = x.shape
    borders = [] if cu_seqlens is None else cu_seqlens.tolist()
    log_a = 8 * torch.sigmoid(r) * F.logsigmoid(-lam)  # logsigmoid(-lam) = -softplus(lam)
    outputs, finals = [], []
    for row in range(batch):
        starting = initial_state is None or (is_start is not None and bool(is_start[row]))
        state = x.new_zeros(dim) if starting else initial_state[row]
        for t in range(time):
            if t in borders:
                state, starting = x.new_zeros(dim), True
            if attention_mask is not None and not attention_mask[row, t]:
                outputs.append(x.new_zeros(dim))
                continue
            multiplier = 1 if starting else torch.sqrt(-torch.expm1(2 * log_a[row, t]))  # sqrt(1 - a^2)
            state = torch.exp(log_a[row, t]) * state + multiplier * torch.sigmoid(i[row, t]) * x[row, t]
            starting = False
            outputs.append(state)
        finals.append(state)
    return torch.stack(outputs).view(batch, time, dim), torch.stack(finals)
