# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from hf_linattn.kernels.short_convolution import short_convolution, short_convolution_reference

TIMES = [1, 2, 3, 16, 37]


def inputs(batch, time, dim, kernel, *, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    shapes = (batch, time, dim), (dim, kernel), (dim,)
    return [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("kernel", [1, 3, 4])
@pytest.mark.parametrize("case", ["plain", "no bias", "state", "padding", "padding and state", "packed"])
def test_matches_the_definition(time, kernel, case):
    x, weight, bias = inputs(1 if case == "packed" else 3, time, 4, kernel)
    g, options = torch.Generator().manual_seed(1), {}
    if "state" in case:
        options["initial_state"] = torch.randn(3, kernel - 1, 4, generator=g, dtype=torch.float64)
    if "padding" in case:
        options["attention_mask"] = torch.rand(3, time, generator=g) > 0.4
    if case == "packed":
        options["cu_seqlens"] = torch.tensor([0, time // 3, time // 3, time // 2, time], dtype=torch.int32)
        options["attention_mask"] = torch.rand(1, time, generator=g) > 0.3
    bias = None if case == "no bias" else bias
    out, state = short_convolution(x, weight, bias, **options)
    expected, expected_state = short_convolution_reference(x, weight, bias, **options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert state is None if case == "packed" else torch.equal(state, expected_state)


def test_matches_the_library():
    x, weight, bias = inputs(2, 20, 4, 3)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (2, 0))
    expected = torch.nn.functional.conv1d(padded, weight.flip(1)[:, None], bias, groups=4).transpose(1, 2)
    torch.testing.assert_close(short_convolution(x, weight, bias)[0], expected)


@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck(packed):
    x, weight, bias = (t.requires_grad_() for t in inputs(1 if packed else 2, 9, 2, 3))
    if packed:
        options = dict(cu_seqlens=torch.tensor([0, 1, 5, 9]))
        assert torch.autograd.gradcheck(lambda *a: short_convolution(*a, **options)[0], (x, weight, bias))
        return
    mask = torch.ones(2, 9)
    mask[0, :3] = mask[1, 5] = 0
    state = torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w, b, s: short_convolution(x, w, b, initial_state=s, attention_mask=mask), (x, weight, bias, state)
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_precision(dtype, tolerance):
    low = [t.requires_grad_() for t in inputs(2, 130, 8, 4, dtype=dtype)]
    high = [t.detach().double().requires_grad_() for t in low]
    (out, state), (expected, _) = short_convolution(*low), short_convolution_reference(*high)
    assert out.dtype == state.dtype == dtype
    assert error(out, expected) < tolerance
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (out * weight).sum().backward()
    (expected * weight.double()).sum().backward()
    assert all(error(a.grad, b.grad) < tolerance for a, b in zip(low, high, strict=True))


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("cuts", [[1], [2, 3], [17], range(1, 20)])
def test_split_anywhere(kernel, cuts):
    x, weight, bias = inputs(2, 20, 4, kernel, dtype=torch.float32)
    whole, final = short_convolution(x, weight, bias)
    state, outputs = None, []
    for piece in torch.tensor_split(x, list(cuts), dim=1):
        out, state = short_convolution(piece, weight, bias, initial_state=state)
        outputs.append(out)
    assert torch.equal(torch.cat(outputs, 1), whole) and torch.equal(state, final)


def test_state_is_the_last_inputs():
    x, weight, _ = inputs(1, 6, 3, 4)
    mask = torch.tensor([[1, 1, 1, 1, 0, 1]])
    state = short_convolution(x, weight, attention_mask=mask)[1]
    assert torch.equal(state[:, [0, 2]], x[:, [3, 5]]) and not state[:, 1].any()
    early = short_convolution(x[:, :1], weight)[1]
    assert torch.equal(early[:, 2:], x[:, :1]) and not early[:, :2].any()


def test_packed_equals_separate():
    x, weight, bias = inputs(1, 30, 4, 4)
    borders = [0, 1, 3, 3, 20, 30]
    packed, state = short_convolution(x, weight, bias, cu_seqlens=torch.tensor(borders, dtype=torch.int32))
    pieces = [x[:, a:b] for a, b in zip(borders, borders[1:], strict=False) if a < b]
    assert torch.equal(packed, torch.cat([short_convolution(piece, weight, bias)[0] for piece in pieces], 1))
    assert state is None


@pytest.mark.parametrize("left", [1, 2, 9])
def test_left_padding_is_as_if_absent(left):
    x, weight, bias = inputs(2, 20, 4, 4)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :left] = 0
    padded = x.masked_fill(mask[..., None] == 0, torch.nan).requires_grad_()
    weight.requires_grad_()
    out, state = short_convolution(padded, weight, bias, attention_mask=mask)
    expected, expected_state = short_convolution(x[:1, left:], weight, bias)
    assert torch.equal(out[:1, left:], expected) and torch.equal(state[:1], expected_state)
    assert torch.equal(out[1:], short_convolution(x[1:], weight, bias)[0])
    assert not out[mask == 0].any()
    out.sum().backward()
    assert weight.grad.isfinite().all() and not padded.grad[mask == 0].any()


def test_causal_to_the_bit():
    x, weight, bias = inputs(2, 37, 4, 4, dtype=torch.float32)
    out, _ = short_convolution(x, weight, bias)
    for t in (1, 16, 36):
        changed = x.clone()
        changed[:, t] += 3
        after, _ = short_convolution(changed, weight, bias)
        assert torch.equal(after[:, :t], out[:, :t]) and not torch.equal(after[:, t], out[:, t])
        assert torch.equal(after[:, t + 4 :], out[:, t + 4 :])


def test_refuses_what_does_not_fit():
    x, weight, bias = inputs(2, 5, 3, 4)
    state, borders = torch.zeros(2, 3, 3, dtype=torch.float64), torch.tensor([0, 5])
    for match, args, options in [
        (r"weight \(D, K\)", (x, weight.T), {}),
        (r"weight \(D, K\)", (x, weight[:, :0]), {}),
        ("bias", (x, weight, bias[:2]), {}),
        ("attention_mask", (x, weight), dict(attention_mask=torch.ones(2, 6))),
        ("initial_state", (x, weight), dict(initial_state=state[:, :2])),
        ("batch of 1", (x, weight), dict(cu_seqlens=borders)),
        ("initial_state", (x[:1], weight), dict(cu_seqlens=borders, initial_state=state[:1])),
        ("rise from 0", (x[:1], weight), dict(cu_seqlens=torch.tensor([0, 4]))),
        ("unknown backend", (x, weight), dict(backend="cuda")),
    ]:
        with pytest.raises(ValueError, match=match):
            short_convolution(*args, **options)
