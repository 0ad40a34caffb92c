# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Logits of clusters against their definition in float64.

Triton runs on a GPU, and where TRITON_INTERPRET=1 is set in the interpreter too.
"""

import math

import pytest
import torch
from comparison import BACKENDS, DTYPES, INTERPRETED, all_close, close, device, differentiate, thinned

from hf_linattn.kernels.cluster_logits import MAX_CLUSTERS, cluster_logits, cluster_logits_reference

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
# batch, time, heads, key/value heads, channels, clusters
SHAPES = [
    (2, 17, 4, 2, 8, 5),
    (1, 130, 3, 1, 20, 33),
    (3, 43, 2, 2, 6, 1),
    (1, 200, 2, 1, 72, 128),
    (2, 1, 2, 2, 64, 16),
]
OPTIONS = {
    "queries": dict(squares=True),
    "queries of Gemma 2": dict(squares=True, softcap=1.5),
    "capped": dict(softcap=2.0),
    "keys": dict(log_softmax=True),
    "hard keys": {},
}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def inputs(batch, time, heads, kv_heads, dim, clusters, *, squares=False, seed=0):
    """Arguments in float64."""
    g = torch.Generator().manual_seed(seed)
    shapes = dict(x=(batch, time, heads, dim), weight=(kv_heads, clusters, dim), bias=(heads, clusters))
    if squares:
        shapes["square_weight"] = shapes["weight"]
    scales = dict(x=1, weight=dim**-0.5, bias=1, square_weight=dim**-0.5)
    return {n: torch.randn(*s, generator=g, dtype=torch.float64) * scales[n] for n, s in shapes.items()}


def defined(x, weight, bias, square_weight=None, softcap=None, log_softmax=False):
    """Head by head."""
    out = []
    for head in range(x.shape[2]):
        kv_head = head // (x.shape[2] // weight.shape[0])
        y = (x[:, :, head, None] * weight[kv_head]).sum(-1)
        if square_weight is not None:
            y = y + (x[:, :, head, None] ** 2 * square_weight[kv_head]).sum(-1)
        y = y if softcap is None else softcap * torch.tanh(y / softcap)
        y = y + bias[head]
        out.append(y - y.logsumexp(-1, keepdim=True) if log_softmax else y)
    return torch.stack(out, 2)


def run(tensors, backend, dtype, **options):
    moved = {
        n: t.to(device(backend), dtype if n == "x" else torch.promote_types(dtype, torch.float32))
        for n, t in tensors.items()
    }
    return cluster_logits(**moved, **options, backend=backend)


def matches_the_definition(tensors, backend, dtype, **options):
    tensors = {n: t.to(dtype if n == "x" else torch.float32).double() for n, t in tensors.items()}
    found = differentiate(lambda t: (y := run(t, backend, dtype, **options), y[:, -1]), tensors)
    expected = differentiate(lambda t: (y := defined(**t, **options), y[:, -1]), tensors)
    all_close(found, expected, TOLERANCES[dtype])


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("shape", thinned(SHAPES, 2), ids=str)
def test_matches_the_definition_and_its_gradients(shape, case, backend):
    options = dict(OPTIONS[case])
    if shape[-1] == 1 and options.get("log_softmax"):
        pytest.skip("one cluster has all of every token, see below")
    tensors = inputs(*shape, squares=options.pop("squares", False))
    matches_the_definition(tensors, backend, DTYPES[backend], **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", OPTIONS)
def test_half_precision(case, dtype, backend):
    if INTERPRETED and backend == "triton":
        dtype = torch.float32  # the interpreter's products of 16 bits are wrong
    options = dict(OPTIONS[case])
    tensors = inputs(2, 150, 4, 2, 64, 128, squares=options.pop("squares", False))
    matches_the_definition(tensors, backend, dtype, **options)


def test_logits_in_half_precision_are_exact_to_ten_bits(backend):
    """A logit that is off by a hundredth is off by a percent as a share: 16 bits would not do for large ones."""
    dtype = torch.float32 if INTERPRETED and backend == "triton" else torch.bfloat16
    tensors = inputs(1, 100, 2, 2, 64, 128, squares=True)
    tensors = {
        n: (t * (20 if n == "weight" else 1)).to(dtype if n == "x" else torch.float32).double()
        for n, t in tensors.items()
    }
    close(run(tensors, backend, dtype), defined(**tensors), 5e-4)


def test_shares_sum_to_one_however_large_the_logits(backend):
    tensors = inputs(2, 40, 2, 2, 16, 7)
    tensors["weight"] *= 1000
    shares = run(tensors, backend, DTYPES[backend], log_softmax=True).exp()
    torch.testing.assert_close(shares.sum(-1), torch.ones_like(shares[..., 0]), rtol=0, atol=1e-5)


def test_one_cluster_takes_every_token(backend):
    tensors = inputs(2, 40, 2, 2, 16, 1)
    leaves = {n: t.to(device(backend), DTYPES[backend]).requires_grad_() for n, t in tensors.items()}
    logits = cluster_logits(**leaves, log_softmax=True, backend=backend)
    assert not logits.any()
    for gradient in torch.autograd.grad(logits.sin().sum(), list(leaves.values())):
        assert gradient.abs().max() < 1e-5


def test_a_cluster_is_scored_as_its_keys_are_on_average():
    """log E exp(x k) over keys k of a normal distribution, by quadrature."""
    keys = torch.linspace(-30, 30, 60001, dtype=torch.float64)
    mean, deviation, x = 0.7, 1.3, torch.tensor([-2.0, -0.3, 0.0, 1.1, 2.5], dtype=torch.float64)
    density = torch.exp(-((keys - mean) ** 2) / (2 * deviation**2)) / (deviation * math.sqrt(2 * math.pi))
    expected = torch.log((torch.exp(x[:, None] * keys) * density).sum(1) * (keys[1] - keys[0]))
    weight, square = (torch.tensor([[[w]]], dtype=torch.float64) for w in (mean, deviation**2 / 2))
    found = cluster_logits(
        x[None, :, None, None], weight, torch.zeros(1, 1, dtype=torch.float64), square_weight=square
    )
    torch.testing.assert_close(found.flatten(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("frozen", ["x", "weights"])
def test_gradients_do_not_depend_on_what_is_frozen(frozen, backend):
    tensors = {n: t.to(device(backend), DTYPES[backend]) for n, t in inputs(1, 30, 2, 1, 8, 5, squares=True).items()}
    trained = [n for n in tensors if (n == "x") != (frozen == "x")]
    for name in trained:
        tensors[name].requires_grad_()
    expected = torch.autograd.grad(cluster_logits_reference(**tensors).sin().sum(), [tensors[n] for n in trained])
    found = torch.autograd.grad(cluster_logits(**tensors, backend=backend).sin().sum(), [tensors[n] for n in trained])
    for a, b in zip(found, expected, strict=True):
        close(a, b, 1e-5)


def test_shapes_that_do_not_fit_are_named():
    tensors = inputs(1, 5, 4, 2, 8, 3, squares=True)
    for name, wrong in (("x", (1, 5, 4, 7)), ("weight", (3, 3, 8)), ("bias", (2, 3)), ("square_weight", (2, 2, 8))):
        with pytest.raises(ValueError, match=r"expected x \(B, T, H, d\).*got x"):
            cluster_logits(**tensors | {name: torch.zeros(wrong, dtype=torch.float64)})


def test_what_the_kernels_cannot_take_goes_through_pytorch():
    tensors = inputs(1, 20, 2, 2, 8, MAX_CLUSTERS + 1)
    with pytest.raises(ValueError, match=f"up to {MAX_CLUSTERS} clusters"):
        cluster_logits(**tensors, backend="triton")
    assert cluster_logits(**tensors).shape == (1, 20, 2, MAX_CLUSTERS + 1)


def test_a_soft_cap_excludes_shares():
    with pytest.raises(ValueError, match="log_softmax goes without a soft-cap, got softcap=2.0"):
        cluster_logits(**inputs(1, 5, 2, 2, 8, 3), softcap=2.0, log_softmax=True)


def test_autocast_leaves_logits_in_float32():
    tensors = {n: t.float() for n, t in inputs(1, 40, 2, 2, 16, 7, squares=True).items()}
    expected = cluster_logits(**tensors)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cluster_logits(**tensors), expected)


def test_any_input_in_float64_makes_the_logits_so():
    tensors = inputs(1, 40, 2, 2, 16, 7, squares=True)
    for name in tensors:
        mixed = {n: t if n == name else t.float() for n, t in tensors.items()}
        assert cluster_logits(**mixed).dtype == torch.float64


def test_strided_inputs(backend):
    tensors = inputs(2, 40, 4, 2, 8, 5)
    moved = {n: t.to(device(backend), DTYPES[backend]) for n, t in tensors.items()}
    turned = {n: t.transpose(-1, -2).contiguous().transpose(-1, -2) for n, t in moved.items()}
    assert not any(t.is_contiguous() for t in turned.values())
    torch.testing.assert_close(cluster_logits(**turned, backend=backend), cluster_logits(**moved, backend=backend))


def test_a_decoding_step_compiles_without_a_break(backend):
    tensors = {n: t.to(device(backend), DTYPES[backend]) for n, t in inputs(2, 3, 4, 2, 8, 5, squares=True).items()}
    step = torch.compile(lambda **args: cluster_logits(**args, backend=backend), fullgraph=True, backend="eager")
    torch.testing.assert_close(step(**tensors), cluster_logits(**tensors, backend=backend), rtol=1e-5, atol=1e-5)
