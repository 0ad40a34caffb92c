# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from hf_linattn.kernels.rg_lru import rg_lru, rg_lru_reference

TIMES = [1, 2, 16, 37, 70]


def inputs(batch, time, dim, *, scale=1.0, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    x, r, i = (torch.randn(batch, time, dim, generator=g, dtype=torch.float64).to(dtype) for _ in range(3))
    lam = torch.randn(dim, generator=g, dtype=torch.float64).to(dtype) - 3  # softplus as at initialisation
    return x, r * scale, i * scale, lam


def part(tensors, piece, rows=slice(None)):
    return *(t[rows, piece] for t in tensors[:3]), tensors[3]


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize(
    "case", ["plain", "state", "state and starts", "padding", "padding, state and starts", "packed"]
)
def test_matches_the_definition_and_its_gradients(time, case):
    tensors = [t.requires_grad_() for t in inputs(1 if case == "packed" else 3, time, 4)]
    g, options, leaves = torch.Generator().manual_seed(1), {}, list(tensors)
    if "state" in case:
        options["initial_state"] = torch.randn(3, 4, generator=g, dtype=torch.float64).requires_grad_()
        leaves.append(options["initial_state"])
    if "starts" in case:
        options["is_start"] = torch.tensor([True, False, True])
    if "padding" in case:
        options["attention_mask"] = torch.rand(3, time, generator=g) > 0.4
        options["attention_mask"][2] = False
    if case == "packed":
        options["cu_seqlens"] = torch.tensor([0, time // 3, time // 3, time // 2, time], dtype=torch.int32)
        options["attention_mask"] = torch.rand(1, time, generator=g) > 0.3
        options["attention_mask"][:, -1] = True
    out, state = rg_lru(*tensors, **options)
    expected, expected_state = rg_lru_reference(*tensors, **options)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    if case == "packed":
        assert state is None
    else:
        torch.testing.assert_close(state, expected_state, rtol=1e-10, atol=1e-12)
    weight = torch.randn(out.shape, generator=g, dtype=torch.float64)
    grads, expected_grads = (
        torch.autograd.grad((h * weight).sum(), leaves, allow_unused=True) for h in (out, expected)
    )
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, torch.zeros_like(grad) if wanted is None else wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("with_state", [False, True])
def test_gradcheck(with_state):
    tensors = inputs(2, 17, 1)
    leaves = [t.requires_grad_() for t in (*tensors, *([tensors[0][:, 0] + 1] if with_state else []))]
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[0, :5] = mask[1, 7:9] = False

    def call(x, r, i, lam, state=None):
        return rg_lru(x, r, i, lam, initial_state=state, attention_mask=mask)

    assert torch.autograd.gradcheck(call, [leaf.detach().requires_grad_() for leaf in leaves])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("time", [1, 37, 300])
def test_precision(dtype, tolerance, time):
    low = [t.requires_grad_() for t in inputs(2, time, 8, dtype=dtype)]
    high = [t.detach().double().requires_grad_() for t in low]
    (out, state), (expected, expected_state) = rg_lru(*low), rg_lru_reference(*high)
    assert out.dtype == dtype and state.dtype == torch.float32
    assert error(out, expected) < tolerance and error(state, expected_state) < 1e-5
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (out * weight).sum().backward()
    (expected * weight.double()).sum().backward()
    for a, b in zip(low, high, strict=True):
        assert error(a.grad, b.grad) < tolerance if b.grad.any() else not a.grad.any()


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 36])
def test_split_anywhere(cut):
    tensors = inputs(2, 37, 4)
    whole, final = rg_lru(*tensors)
    first, state = rg_lru(*part(tensors, slice(None, cut)))
    second, last = rg_lru(*part(tensors, slice(cut, None)), initial_state=state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(last, final)


def test_token_by_token_with_states_of_fixed_shape_and_padding():
    tensors = inputs(2, 20, 4)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, :6] = False
    whole, final = rg_lru(*tensors, attention_mask=mask)
    state, outputs = torch.full((2, 4), 7.0, dtype=torch.float64), []  # what a reused buffer may hold
    for t in range(20):
        now = slice(t, t + 1)
        is_start = ~mask[:, :t].any(1)
        out, state = rg_lru(*part(tensors, now), attention_mask=mask[:, now], initial_state=state, is_start=is_start)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)
    torch.testing.assert_close(state, final)


def test_packed_equals_separate():
    tensors = inputs(1, 60, 4)
    borders = [0, 1, 20, 20, 53, 60]
    packed, state = rg_lru(*tensors, cu_seqlens=torch.tensor(borders, dtype=torch.int32))
    pieces = [slice(a, b) for a, b in zip(borders, borders[1:], strict=False) if a < b]
    separate = torch.cat([rg_lru(*part(tensors, piece))[0] for piece in pieces], 1)
    torch.testing.assert_close(packed, separate)
    assert state is None


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_is_as_if_absent(side):
    tensors = inputs(1, 40, 4)
    real = {
        "left": torch.arange(9, 40),
        "right": torch.arange(31),
        "middle": torch.cat([torch.arange(7), torch.arange(20, 40)]),
    }
    mask = torch.zeros(1, 40, dtype=torch.long)
    mask[:, real[side]] = 1
    padded = [t.masked_fill(mask[..., None] == 0, torch.nan).requires_grad_() for t in tensors[:3]]
    lam = tensors[3].requires_grad_()
    out, state = rg_lru(*padded, lam, attention_mask=mask)
    expected, expected_state = rg_lru(*part(tensors, real[side]))
    torch.testing.assert_close(out[:, real[side]], expected)
    torch.testing.assert_close(state, expected_state)
    assert not out[mask == 0].any()
    out.sum().backward()
    assert lam.grad.isfinite().all() and all(not t.grad[mask == 0].any() for t in padded)


@pytest.mark.parametrize("scale", [0, 30, 1e4])
def test_extreme_gates(scale):
    low = inputs(2, 50, 8, scale=scale, dtype=torch.float32)
    low[3][:4] = torch.tensor([-1e4, -50.0, 50.0, 1e4])
    leaves = [t.requires_grad_() for t in low]
    state = torch.ones(2, 8)
    out, _ = rg_lru(*leaves, initial_state=state)
    expected, _ = rg_lru_reference(*(t.detach().double() for t in leaves), initial_state=state.double())
    assert error(out, expected) < 1e-5
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in leaves)


def test_gate_limits():
    x = inputs(1, 20, 3)[0]
    high, lam = torch.full_like(x, 1e4), torch.zeros(3, dtype=torch.float64)
    held, _ = rg_lru(x, -high, high, lam)  # a closed recurrence gate keeps the first input for ever
    torch.testing.assert_close(held, x[:, :1].expand_as(x), rtol=0, atol=0)
    passed, _ = rg_lru(x, high, high, lam + 1e4)  # a decay of zero passes every input through
    torch.testing.assert_close(passed, x, rtol=0, atol=0)


def test_derivative_of_the_root_is_bounded():
    x = torch.ones(1, 2, 1, dtype=torch.float64)
    i = torch.full_like(x, 1e4)
    for lam in (-10.0, -20.0, -40.0):  # 1 - a^2 of 4e-4, 2e-8 and 3e-17 at r = 0
        leaf = torch.tensor([lam], dtype=torch.float64, requires_grad=True)
        out, _ = rg_lru(x, torch.zeros_like(x), i, leaf)
        out[0, 1].backward()
        decay = torch.tensor(lam, dtype=torch.float64).exp().log1p() * 4  # -log a
        slope = 4 * torch.sigmoid(torch.tensor(lam, dtype=torch.float64))  # its derivative
        kept = torch.exp(-2 * decay)
        root = min(1000.0, 0.5 * (-torch.expm1(-2 * decay)).rsqrt().item())
        expected = slope * (-torch.exp(-decay) + root * 2 * kept)
        torch.testing.assert_close(leaf.grad[0], expected)


def test_causal_to_the_bit():
    tensors = inputs(2, 37, 4, dtype=torch.float32)
    out, _ = rg_lru(*tensors)
    for t in (1, 16, 30, 36):
        changed = [tensor.clone() for tensor in tensors]
        for tensor in changed[:3]:
            tensor[:, t] += 3
        after, _ = rg_lru(*changed)
        assert torch.equal(after[:, :t], out[:, :t]) and not torch.equal(after[:, t], out[:, t])


def test_refuses_what_does_not_fit():
    x, r, i, lam = inputs(2, 5, 3)
    state, borders = x[:, 0], torch.tensor([0, 5])
    for match, args, options in [
        (r"lam \(D,\)", (x, r, i, lam[:2]), {}),
        (r"lam \(D,\)", (x, r[:, :4], i, lam), {}),
        ("attention_mask", (x, r, i, lam), dict(attention_mask=torch.ones(2, 6))),
        ("initial_state", (x, r, i, lam), dict(initial_state=state[:1])),
        ("is_start", (x, r, i, lam), dict(is_start=torch.tensor([True, False]))),
        ("is_start", (x, r, i, lam), dict(is_start=torch.tensor([True]), initial_state=state)),
        ("batch of 1", (x, r, i, lam), dict(cu_seqlens=borders)),
        ("initial_state", (x[:1], r[:1], i[:1], lam), dict(cu_seqlens=borders, initial_state=state[:1])),
        ("rise from 0", (x[:1], r[:1], i[:1], lam), dict(cu_seqlens=torch.tensor([0, 4]))),
        ("unknown backend", (x, r, i, lam), dict(backend="cuda")),
    ]:
        with pytest.raises(ValueError, match=match):
            rg_lru(*args, **options)
