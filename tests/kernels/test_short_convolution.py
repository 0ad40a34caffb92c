# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The short convolution against its definition in float64.

Triton runs on a GPU, and where TRITON_INTERPRET=1 is set in the interpreter too.
"""

import pytest
import torch
from comparison import BACKENDS, DTYPES, INTERPRETED, all_close, close, device, differentiate

from hf_linattn.kernels.short_convolution import short_convolution, short_convolution_reference

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
TIMES = [1, 2, 70] if INTERPRETED else [1, 2, 3, 16, 37, 63, 64, 65, 200]
NAMES = ("x", "weight", "bias", "initial_state")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(autouse=True)
def poison():
    """Memory that is not written holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(batch, time, dim, kernel, *, seed=0, bias=True, state=False):
    """Arguments in float64."""
    g = torch.Generator().manual_seed(seed)
    shapes = dict(x=(batch, time, dim), weight=(dim, kernel), bias=(dim,), initial_state=(batch, kernel - 1, dim))
    tensors = {n: torch.randn(*shape, generator=g, dtype=torch.float64) for n, shape in shapes.items()}
    return {n: t for n, t in tensors.items() if (n != "bias" or bias) and (n != "initial_state" or state)}


def rounded(tensors, dtype):
    return {n: t.to(dtype).double() for n, t in tensors.items()}


def run(tensors, backend, dtype=None, **options):
    moved = {n: t.to(device(backend), dtype or DTYPES[backend]) for n, t in tensors.items()}
    options = {n: t.to(device(backend)) for n, t in options.items()}
    return short_convolution(**moved, **options, backend=backend)


def reference(tensors, **options):
    return short_convolution_reference(**tensors, **options)


def matches_the_definition(tensors, backend, dtype=None, **options):
    dtype = dtype or DTYPES[backend]
    tensors = rounded(tensors, dtype)
    found = differentiate(lambda t, **o: run(t, backend, dtype, **o), tensors, **options)
    all_close(found, differentiate(reference, tensors, **options), TOLERANCES[dtype])


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("kernel", [1, 4] if INTERPRETED else [1, 2, 3, 4, 8])
@pytest.mark.parametrize("case", ["plain", "no bias", "state", "padding", "padding and state", "packed"])
def test_matches_the_definition_and_its_gradients(time, kernel, case, backend):
    g, options = torch.Generator().manual_seed(1), {}
    if "padding" in case:
        options["attention_mask"] = torch.rand(3, time, generator=g) > 0.4
        options["attention_mask"][2] = False
    if case == "packed":
        options["cu_seqlens"] = torch.tensor([0, 0, time // 3, time // 3, time // 2, time, time], dtype=torch.int32)
        options["attention_mask"] = torch.rand(1, time, generator=g) > 0.3
    batch = 1 if case == "packed" else 3
    tensors = inputs(batch, time, 5, kernel, bias=case != "no bias", state="state" in case)
    matches_the_definition(tensors, backend, **options)


@pytest.mark.parametrize("dim", [1, 130] if INTERPRETED else [1, 66, 130, 1001])
def test_dims(dim, backend):
    matches_the_definition(inputs(2, 18, dim, 3, state=True), backend)


def test_matches_the_library(backend):
    tensors = rounded(inputs(2, 20, 4, 3), DTYPES[backend])
    padded = torch.nn.functional.pad(tensors["x"].transpose(1, 2), (2, 0))
    expected = torch.nn.functional.conv1d(padded, tensors["weight"].flip(1)[:, None], tensors["bias"], groups=4)
    close(run(tensors, backend)[0], expected.transpose(1, 2), TOLERANCES[DTYPES[backend]])


@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck(packed):
    x, weight, bias = (t.requires_grad_() for t in inputs(1 if packed else 2, 9, 2, 3).values())
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision(dtype, backend):
    tensors = inputs(2, 130, 8, 4, state=True)
    out, state = run(tensors, backend, dtype)
    assert out.dtype == state.dtype == dtype
    matches_the_definition(tensors, backend, dtype)


def test_types_may_differ(backend):
    """Inputs in half precision with weights in float32; a strided input."""
    tensors = rounded(inputs(2, 20, 6, 3), torch.bfloat16)
    leaves = {n: t.to(device(backend), torch.float32).requires_grad_() for n, t in tensors.items()}
    strided = leaves["x"].bfloat16().transpose(1, 2).contiguous().transpose(1, 2)
    out, _ = short_convolution(**leaves | dict(x=strided), backend=backend)
    assert out.dtype == torch.bfloat16
    close(out, reference(tensors)[0], 1e-2)
    grads = torch.autograd.grad(out.float().sum(), list(leaves.values()))
    exact = {n: t.requires_grad_() for n, t in tensors.items()}
    expected = torch.autograd.grad(reference(exact)[0].sum(), list(exact.values()))
    for grad, wanted in zip(grads, expected, strict=True):
        close(grad, wanted, 1e-2)


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("cuts", [[1], [2, 3], [17], [64], range(1, 20)])
def test_split_anywhere(kernel, cuts, backend):
    tensors = inputs(2, 90, 4, kernel)
    with torch.no_grad():
        whole, final = run(tensors, backend, torch.float32)
        state, outputs = {}, []
        for piece in torch.tensor_split(tensors["x"], list(cuts), dim=1):
            out, after = run(tensors | dict(x=piece) | state, backend, torch.float32)
            state = dict(initial_state=after)
            outputs.append(out)
    if backend == "torch":
        assert torch.equal(torch.cat(outputs, 1), whole)
    close(torch.cat(outputs, 1), whole, 1e-6)
    assert torch.equal(after, final)


@pytest.mark.parametrize("time", [1, 6, 20])
def test_state_is_the_last_inputs(time, backend):
    tensors = inputs(1, time, 3, 4, state=True)
    mask = torch.ones(1, time)
    mask[:, -2:-1] = 0
    state = run(tensors, backend, attention_mask=mask)[1].cpu()
    seen = torch.cat([tensors["initial_state"], tensors["x"] * mask[..., None]], 1)
    assert torch.equal(state, seen[:, -3:].to(state.dtype))
    early = run(inputs(1, 1, 3, 4), backend)[1].cpu()
    assert torch.equal(early[:, 2:], tensors["x"][:, :1].to(early.dtype)) == (time == 1) and not early[:, :2].any()


def test_packed_equals_separate(backend):
    tensors = inputs(1, 90, 4, 4)
    borders = [0, 1, 3, 3, 20, 90]
    packed, state = run(tensors, backend, torch.float32, cu_seqlens=torch.tensor(borders, dtype=torch.int32))
    pieces = [tensors["x"][:, a:b] for a, b in zip(borders, borders[1:], strict=False) if a < b]
    separate = torch.cat([run(tensors | dict(x=piece), backend, torch.float32)[0] for piece in pieces], 1)
    close(packed, separate, 0 if backend == "torch" else 1e-6)
    assert state is None


@pytest.mark.parametrize("left", [1, 2, 9])
def test_left_padding_is_as_if_absent(left, backend):
    tensors = rounded(inputs(2, 20, 4, 4), torch.float32)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :left] = 0
    padded = tensors | dict(x=tensors["x"].masked_fill(mask[..., None] == 0, torch.nan))
    leaves = {n: t.requires_grad_() for n, t in padded.items()}
    out, state = run(leaves, backend, attention_mask=mask)
    expected, expected_state = reference(tensors | dict(x=tensors["x"][:1, left:]))
    close(out[:1, left:], expected, TOLERANCES[DTYPES[backend]])
    assert torch.equal(state[:1].cpu().double(), expected_state)
    close(out[1:], reference(tensors | dict(x=tensors["x"][1:]))[0], TOLERANCES[DTYPES[backend]])
    assert not out[mask == 0].any()
    out.sum().backward()
    assert leaves["weight"].grad.isfinite().all() and not leaves["x"].grad[mask == 0].any()
    assert leaves["x"].grad[mask == 1].isfinite().all()


def test_causal_to_the_bit(backend):
    tensors = inputs(2, 80, 4, 4)
    out, _ = run(tensors, backend, torch.float32)
    for t in (1, 16, 63, 64, 79):
        changed = tensors | dict(x=tensors["x"].clone())
        changed["x"][:, t] += 3
        after, _ = run(changed, backend, torch.float32)
        assert torch.equal(after[:, :t], out[:, :t]) and not torch.equal(after[:, t], out[:, t])
        assert torch.equal(after[:, t + 4 :], out[:, t + 4 :])


def test_short_calls_without_gradient_compile_without_graph_breaks(backend):
    tensors = {n: t.to(device(backend), torch.float32) for n, t in inputs(2, 1, 4, 4, state=True).items()}
    compiled = torch.compile(lambda t: short_convolution(**t, backend=backend), fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(tensors), short_convolution(**tensors, backend=backend), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
@pytest.mark.parametrize(
    ("batch", "time", "dim", "kernel"), [(1, 16384, 768, 3), (2, 4096, 6144, 4), (70, 500, 2304, 8)]
)
def test_published_sizes_in_bfloat16(batch, time, dim, kernel):
    g = torch.Generator("cuda").manual_seed(0)
    shapes = (batch, time, dim), (dim, kernel), (dim,), (batch, kernel - 1, dim)
    tensors = [torch.randn(*shape, generator=g, device="cuda").bfloat16() for shape in shapes]
    weights = [torch.randn(*shape, generator=g, device="cuda").bfloat16() for shape in (shapes[0], shapes[3])]
    results = []
    for dtype, backend in ((None, "triton"), (None, "triton"), (torch.float64, "torch")):
        leaves = [x.to(dtype or x.dtype).requires_grad_() for x in tensors]
        found = short_convolution(*leaves[:3], initial_state=leaves[3], backend=backend)
        grads = torch.autograd.grad(found, leaves, [w.to(x.dtype) for w, x in zip(weights, found, strict=True)])
        results.append([*found, *grads])
    for name, ours, again, exact in zip(("out", "state", *NAMES), *results, strict=True):
        assert torch.equal(ours, again), name
        close(ours, exact, 5e-3, name)


def test_refuses_what_does_not_fit(backend):
    x, weight, bias = (t.float() for t in inputs(2, 5, 3, 4).values())
    state, borders = torch.zeros(2, 3, 3), torch.tensor([0, 5])
    for match, args, options in [
        (r"weight \(D, K\)", (x, weight.T), {}),
        (r"weight \(D, K\)", (x, weight[:, :0]), {}),
        ("bias", (x, weight, bias[:2]), {}),
        ("attention_mask", (x, weight), dict(attention_mask=torch.ones(2, 6))),
        ("initial_state", (x, weight), dict(initial_state=state[:, :2])),
        ("batch of 1", (x, weight), dict(cu_seqlens=borders)),
        ("initial_state", (x[:1], weight), dict(cu_seqlens=borders, initial_state=state[:1])),
        ("rise from 0", (x[:1], weight), dict(cu_seqlens=torch.tensor([0, 4]))),
    ]:
        with pytest.raises(ValueError, match=match):
            short_convolution(*args, **options, backend=backend)
    with pytest.raises(ValueError, match="unknown backend"):
        short_convolution(x, weight, backend="cuda")
    for args in ((x.double(), weight), (x, torch.zeros(3, 9))):
        with pytest.raises(ValueError, match="backend='triton' is not possible"):
            short_convolution(*args, backend="triton")


def test_nothing_gives_nothing(backend):
    for batch, time, dim in ((0, 20, 3), (2, 0, 3), (2, 20, 0)):
        leaves = {n: t.to(device(backend), torch.float32) for n, t in inputs(batch, time, dim, 4).items()}
        out, state = short_convolution(**{n: t.requires_grad_() for n, t in leaves.items()}, backend=backend)
        assert out.shape == (batch, time, dim) and state.shape == (batch, 3, dim)
        out.sum().backward()
        assert not leaves["weight"].grad.any()
