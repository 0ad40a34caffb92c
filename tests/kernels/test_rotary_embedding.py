# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Rotations against complex multiplication in float64.

Triton runs on a GPU, and where TRITON_INTERPRET=1 is set in the interpreter too.
"""

import pytest
import torch
from comparison import BACKENDS, DTYPES, all_close, device, differentiate

from hf_linattn.kernels.rotary_embedding import rotate

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def angles(batch, time, dim, *, alike=True, seed=0):
    """Cosines and sines in float64; those of both halves are the same in all models that there are."""
    g = torch.Generator().manual_seed(seed)
    turn = torch.randn(batch, time, dim // 2, generator=g, dtype=torch.float64) * 3
    other = turn if alike else turn + 1
    turn = torch.cat([turn, other], -1)
    return turn.cos(), turn.sin()


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def multiplied(x, cos, sin):
    first, second = x.chunk(2, -1)
    turned = torch.complex(first, second) * torch.complex(
        *(t[..., : x.shape[-1] // 2].unsqueeze(2) for t in (cos, sin))
    )
    return torch.cat([turned.real, turned.imag], -1)


def twice(x):
    """`differentiate` takes a state too."""
    return x, x[:, -1]


def run(x, cos, sin, backend, dtype):
    cos, sin = (t.to(device(backend), torch.promote_types(dtype, torch.float32)) for t in (cos, sin))
    return rotate(x.to(device(backend), dtype), cos, sin, backend=backend)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("batch", "own", "time", "heads", "dim"), [(2, 1, 17, 3, 8), (3, 3, 70, 1, 6), (1, 1, 33, 5, 128)]
)
def test_is_complex_multiplication(batch, own, time, heads, dim, dtype, backend):
    if dtype == torch.float64 and backend == "triton":
        dtype = torch.float32
    x, (cos, sin) = draw(batch, time, heads, dim).to(dtype).double(), angles(own, time, dim)
    cos, sin = cos.float().double(), sin.float().double()
    length = (cos * cos + sin * sin).sqrt()
    found = differentiate(lambda t: twice(run(t["x"], cos, sin, backend, dtype)), {"x": x})
    expected = differentiate(lambda t: twice(multiplied(t["x"], cos / length, sin / length)), {"x": x})
    all_close(found, expected, TOLERANCES[dtype])


def test_halves_may_differ_and_scales_are_dropped(backend):
    x, (cos, sin) = draw(2, 40, 3, 8), angles(2, 40, 8, alike=False)
    scaled = run(x, 1.7 * cos, 1.7 * sin, backend, DTYPES[backend])
    torch.testing.assert_close(scaled, run(x, cos, sin, backend, DTYPES[backend]), rtol=1e-5, atol=1e-5)
    first, second = x.chunk(2, -1)
    expected = x * cos.unsqueeze(2) + torch.cat([-second, first], -1) * sin.unsqueeze(2)
    torch.testing.assert_close(scaled.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_turning_back_gives_the_input(backend):
    x, (cos, sin) = draw(1, 50, 2, 16).float(), angles(1, 50, 16)
    turned = run(x, cos, sin, backend, torch.float32)
    torch.testing.assert_close(run(turned.cpu(), cos, -sin, backend, torch.float32).cpu(), x, rtol=1e-5, atol=1e-5)


def test_angles_may_be_trained():
    x, (cos, sin) = draw(1, 50, 2, 16), angles(1, 50, 16)
    leaves = cos.requires_grad_(), sin.requires_grad_()
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(rotate(x, *leaves).square()[..., 0].sum(), leaves))


def test_shapes_that_do_not_fit_are_named():
    x, (cos, sin) = draw(2, 5, 3, 8), angles(1, 5, 8)
    for wrong in ((x[..., :7], cos, sin), (x, cos[..., :4], sin[..., :4]), (x, cos[:, :4], sin[:, :4])):
        with pytest.raises(ValueError, match=r"expected x \(B, T, H, d\) with d even.*got x"):
            rotate(*wrong)


def test_strided_inputs(backend):
    x, (cos, sin) = draw(2, 3, 40, 8), angles(3, 40, 16)
    found = run(x.transpose(1, 2), cos[1:, :, ::2], sin[1:, :, ::2], backend, DTYPES[backend])
    expected = rotate(x.transpose(1, 2).contiguous(), cos[1:, :, ::2].contiguous(), sin[1:, :, ::2].contiguous())
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_a_decoding_step_compiles_without_a_break(backend):
    x, (cos, sin) = draw(2, 3, 2, 8), angles(1, 3, 8)
    arguments = [t.to(device(backend), DTYPES[backend]) for t in (x, cos, sin)]
    step = torch.compile(lambda *args: rotate(*args, backend=backend), fullgraph=True, backend="eager")
    torch.testing.assert_close(step(*arguments), rotate(*arguments, backend=backend))
