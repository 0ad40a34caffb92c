# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from hf_linattn.kernels.scan import BLOCK, linear_scan

TIMES = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3, 2 * BLOCK * BLOCK + BLOCK + 5]


def draw(shape, seed, uniform=False, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return (torch.rand if uniform else torch.randn)(*shape, generator=g, dtype=torch.float64).to(dtype)


def step_by_step(a, b, initial=None):
    h = torch.zeros_like(b[:, 0]) if initial is None else initial
    out = []
    for a_t, b_t in zip(a.expand_as(b).unbind(1), b.unbind(1), strict=True):
        h = a_t * h + b_t
        out.append(h)
    return torch.stack(out, 1)


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("with_initial", [False, True])
def test_matches_the_recurrence_and_its_gradients(time, with_initial):
    for a_shape in [(2, time, 3, 4), (2, time, 3, 1), (1, time, 1, 1), (2, 1, 3, 4), (4,)]:
        leaves = [draw(a_shape, 0, uniform=True), draw((2, time, 3, 4), 1)]
        leaves += [draw((2, 3, 4), 2)] if with_initial else []
        leaves = [leaf.requires_grad_() for leaf in leaves]
        out, expected = linear_scan(*leaves), step_by_step(*leaves)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        weight = draw(out.shape, 3)
        grads, expected_grads = (torch.autograd.grad((h * weight).sum(), leaves) for h in (out, expected))
        torch.testing.assert_close(grads, expected_grads, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("time", [1, 7, 2 * BLOCK + 3])
def test_gradcheck(time):
    a, b, initial = draw((2, time, 2, 1), 0, uniform=True), draw((2, time, 2, 2), 1), draw((2, 2, 2), 2)
    a[0, time // 2] = 0
    leaves = [t.requires_grad_() for t in (a, b, initial)]
    assert torch.autograd.gradcheck(linear_scan, leaves)
    assert torch.autograd.gradcheck(linear_scan, leaves[:2])


def test_zeros_are_resets_and_ones_are_sums():
    time, cut = 5 * BLOCK + 1, 2 * BLOCK + 5
    b = draw((1, time, 3), 0, dtype=torch.float32)
    torch.testing.assert_close(linear_scan(torch.ones(1), b), b.cumsum(1))
    assert torch.equal(linear_scan(torch.zeros(1), b), b)
    a = draw((1, time, 3), 1, uniform=True, dtype=torch.float32)
    a[:, cut] = 0
    b[:, :cut] *= 1e30
    torch.testing.assert_close(linear_scan(a, b)[:, cut:], linear_scan(a[:, cut:], b[:, cut:]))


@pytest.mark.parametrize("low", [0.0, 1e-30, 0.999])
def test_float32_over_many_blocks(low):
    time = 4 * BLOCK * BLOCK + 3
    a, b = low + (1 - low) * draw((1, time, 4), 0, uniform=True), draw((1, time, 4), 1)
    a[:, ::7] = low
    out, expected = linear_scan(a.float(), b.float()), step_by_step(a.float().double(), b.float().double())
    assert out.dtype == torch.float32
    assert (out - expected).norm() / expected.norm() < 1e-5


def test_causal_to_the_bit():
    time = 3 * BLOCK + 2
    a, b = draw((2, time, 3), 0, uniform=True, dtype=torch.float32), draw((2, time, 3), 1, dtype=torch.float32)
    out = linear_scan(a, b)
    for t in (1, BLOCK - 1, BLOCK, BLOCK + 1, time - 1):
        changed_a, changed_b = a.clone(), b.clone()
        changed_a[:, t], changed_b[:, t] = 0.5, 1e6
        changed = linear_scan(changed_a, changed_b)
        assert torch.equal(changed[:, :t], out[:, :t]) and not torch.equal(changed[:, t], out[:, t])


def test_inputs_are_left_alone_and_memory_is_linear():
    a, b = draw((1, 50, 3), 0, uniform=True), draw((1, 50, 3), 1).requires_grad_()
    copies = a.clone(), b.detach().clone()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        linear_scan(a, b).sum().backward()
    assert torch.equal(a, copies[0]) and torch.equal(b, copies[1])
    assert 0 < sum(saved) <= a.numel() + b.numel()  # the decay and the states, no intermediate


def test_widest_dtype_wins():
    out = linear_scan(torch.ones(1, 3, 1), torch.ones(1, 3, 2, dtype=torch.bfloat16), torch.zeros(1, 2))
    assert out.dtype == torch.float32


def test_compiles_without_graph_breaks():
    a, b = draw((2, 2 * BLOCK + 1, 3), 0, uniform=True), draw((2, 2 * BLOCK + 1, 3), 1)
    compiled = torch.compile(linear_scan, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a, b), linear_scan(a, b))


def test_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="does not broadcast"):
        linear_scan(torch.ones(2, 4, 3), torch.ones(2, 5, 3))
    with pytest.raises(ValueError, match="does not broadcast"):
        linear_scan(torch.ones(2, 5, 3, 1), torch.ones(2, 5, 3))
    with pytest.raises(ValueError, match="at least 1"):
        linear_scan(torch.ones(2, 0, 3), torch.ones(2, 0, 3))
