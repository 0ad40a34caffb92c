# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""All operators under activation checkpointing, which allows a backward pass to read each saved tensor once.

Triton runs on a GPU, and where TRITON_INTERPRET=1 is set in the interpreter too.
"""

import pytest
import torch
from comparison import BACKENDS, DTYPES, device
from torch.utils.checkpoint import checkpoint

from hf_linattn.kernels.gated_linear_attention import gated_linear_attention
from hf_linattn.kernels.latent_attention import latent_attention
from hf_linattn.kernels.macchiato_attention import macchiato_attention
from hf_linattn.kernels.rg_lru import rg_lru
from hf_linattn.kernels.short_convolution import short_convolution
from hf_linattn.kernels.sliding_window_attention import sliding_window_attention

HEADS, WIDTH, LATENTS = 2, 8, 3
ATTENDING, READING = (HEADS, WIDTH), (HEADS, LATENTS)
OPERATORS = {  # with the shapes of their inputs behind batch and time
    "gated linear": (lambda q, k, v, g, **o: gated_linear_attention(q, k, v, -g.abs(), **o), (ATTENDING,) * 4),
    "latents": (latent_attention, (READING, READING, ATTENDING)),
    "one pass": (
        lambda *x, **o: macchiato_attention(*x, window=4, **o),
        (READING, READING, (HEADS,), *(ATTENDING,) * 3),
    ),
    "window": (lambda q, k, v, **o: sliding_window_attention(q, k, v, window=4, sinks=2, **o), (ATTENDING,) * 3),
    "rg_lru": (lambda x, r, i, **o: rg_lru(x, r, i, torch.ones_like(x[0, 0]), **o), ((WIDTH,),) * 3),
    "convolution": (lambda x, **o: short_convolution(x, x.new_ones(WIDTH, 3), **o), ((WIDTH,),)),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_are_those_without(name, backend, reentrant):
    operator, shapes = OPERATORS[name]
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 20, *shape, generator=g, dtype=torch.float64) for shape in shapes]
    leaves = [x.to(device(backend), DTYPES[backend]).requires_grad_() for x in tensors]

    def layer(*tensors):
        return operator(*tensors, backend=backend)[0].sin()

    expected = torch.autograd.grad(layer(*leaves).sum(), leaves)
    checkpoint(layer, *leaves, use_reentrant=reentrant).sum().backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, gradient)
