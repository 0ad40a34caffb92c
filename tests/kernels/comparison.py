# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""How tests of operators choose a backend, and compare its results with others."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["torch", pytest.param("triton", marks=[] if INTERPRETED else pytest.mark.gpu)]
DTYPES = {"torch": torch.float64, "triton": torch.float32}  # most precise


def thinned(cases, step):
    """Some of the cases where the interpreter makes each slow."""
    return list(cases)[::step] if INTERPRETED else list(cases)


def device(backend):
    return "cuda" if backend == "triton" and not INTERPRETED else "cpu"


def differentiate(function, tensors, **options):
    """Output, final state (zero if packed) and the gradients of a random function of both, in float64."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in tensors.items()}
    out, state = function(leaves, **options)
    results = [out] if "cu_seqlens" in options else [out, state]
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=g, dtype=torch.float64) for t in results]
    value = sum((t.cpu().double() * w).sum() for t, w in zip(results, weights, strict=True))
    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    found = dict(zip(("out", "state"), (t.detach().cpu().double() for t in results), strict=False))
    return found | dict(zip(leaves, grads, strict=True))


def close(a, b, tolerance, name="it"):
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    assert a.shape == b.shape
    assert (a - b).norm() <= tolerance * b.norm() + 1e-30, f"{name}: relative error {(a - b).norm() / b.norm():.1e}"


def all_close(found, expected, tolerance, rounded=(), beside=None):
    """Each within its own size; those in `rounded` are zero but for the rounding of terms as large as the one `beside`."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if name in rounded:
            assert value.shape == expected[name].shape and expected[name].norm() < 1e-10
            assert value.norm() <= tolerance * expected[beside].norm(), f"{name}: {value.norm():.1e} in place of 0"
        else:
            close(value, expected[name], tolerance, name)
