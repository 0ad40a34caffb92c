# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The RG-LRU against its definition in float64.

Triton runs on a GPU, and where TRITON_INTERPRET=1 is set in the interpreter too.
"""

import pytest
import torch
from comparison import BACKENDS, DTYPES, INTERPRETED, all_close, close, device, differentiate

from hf_linattn.kernels.rg_lru import rg_lru, rg_lru_reference

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
TIMES = [1, 19] if INTERPRETED else [1, 2, 16, 37, 63, 64, 65, 70, 200]
NAMES = ("x", "r", "i", "lam", "initial_state")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(autouse=True)
def poison():
    """Memory that is not written holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(batch, time, dim, *, scale=1.0, seed=0, state=False):
    """Arguments in float64."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    x, r, i = (draw(batch, time, dim) for _ in range(3))
    lam = draw(dim) - 3  # softplus as at initialisation
    tensors = dict(x=x, r=r * scale, i=i * scale, lam=lam)
    return tensors | dict(initial_state=draw(batch, dim)) if state else tensors


def rounded(tensors, dtype):
    """The same values as after a cast to `dtype`, in float64; states and rates stay as precise as float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return {n: t.to(wide if n in ("lam", "initial_state") else dtype).double() for n, t in tensors.items()}


def run(tensors, backend, dtype=None, **options):
    dtype = dtype or DTYPES[backend]
    wide = torch.promote_types(dtype, torch.float32)
    moved = {n: t.to(device(backend), wide if n in ("lam", "initial_state") else dtype) for n, t in tensors.items()}
    options = {n: t.to(device(backend)) for n, t in options.items()}
    return rg_lru(**moved, **options, backend=backend)


def reference(tensors, **options):
    return rg_lru_reference(**tensors, **options)


def matches_the_definition(tensors, backend, dtype=None, **options):
    dtype = dtype or DTYPES[backend]
    tensors = rounded(tensors, dtype)
    found = differentiate(lambda t, **o: run(t, backend, dtype, **o), tensors, **options)
    all_close(found, differentiate(reference, tensors, **options), TOLERANCES[dtype])


def agrees_with_pytorch(tensors, backend, tolerance=TOLERANCES[torch.float32]):
    """Sizes and values for which the definition is too slow or not bounded; float32 against float64."""
    tensors = rounded(tensors, torch.float32)
    found = differentiate(lambda t: run(t, backend, torch.float32), tensors)
    all_close(found, differentiate(lambda t: run(t, "torch", torch.float64), tensors), tolerance)


def part(tensors, piece, rows=slice(None)):
    return {n: tensors[n][rows, piece] for n in "xri"} | dict(lam=tensors["lam"])


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize(
    "case", ["plain", "state", "state and starts", "padding", "padding, state and starts", "packed"]
)
def test_matches_the_definition_and_its_gradients(time, case, backend):
    g, options = torch.Generator().manual_seed(1), {}
    if "starts" in case:
        options["is_start"] = torch.tensor([True, False, True])
    if "padding" in case:
        options["attention_mask"] = torch.rand(3, time, generator=g) > 0.4
        options["attention_mask"][2] = False
    if case == "packed":
        options["cu_seqlens"] = torch.tensor([0, 0, time // 3, time // 3, time // 2, time, time], dtype=torch.int32)
        options["attention_mask"] = torch.rand(1, time, generator=g) > 0.3
    tensors = inputs(1 if case == "packed" else 3, time, 5, state="state" in case)
    matches_the_definition(tensors, backend, **options)


@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
@pytest.mark.parametrize("dim", [130] if INTERPRETED else [1, 130, 256, 1001])
def test_dims(dim, backend):
    agrees_with_pytorch(inputs(1, 9 if INTERPRETED else 150, dim, state=True), backend)


@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
def test_many_rows_take_one_walk_each(backend):
    agrees_with_pytorch(inputs(9, 9 if INTERPRETED else 100, 3 if INTERPRETED else 2000, state=True), backend)


@pytest.mark.parametrize("with_state", [False, True])
def test_gradcheck(with_state):
    tensors = inputs(2, 17, 1, state=with_state)
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[0, :5] = mask[1, 7:9] = False

    def call(*leaves):
        return rg_lru(**dict(zip(NAMES, leaves, strict=False)), attention_mask=mask)

    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in tensors.values()])


@pytest.mark.parametrize("dtype", [torch.bfloat16] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("time", [17] if INTERPRETED else [1, 37, 300])
def test_precision(dtype, time, backend):
    tensors = inputs(2, time, 8)
    out, state = run(tensors, backend, dtype)
    assert out.dtype == dtype and state.dtype == torch.float32
    close(state, reference(rounded(tensors, dtype))[1], 1e-5)
    matches_the_definition(tensors, backend, dtype)


def test_types_may_differ(backend):
    """Inputs in half precision with gates in float32, as a model's projections give them; a strided input."""
    tensors = rounded(inputs(2, 20, 6), torch.bfloat16)
    leaves = {n: t.to(device(backend), torch.float32).requires_grad_() for n, t in tensors.items()}
    strided = leaves["r"].transpose(1, 2).contiguous().transpose(1, 2)
    out, _ = rg_lru(**leaves | dict(x=leaves["x"].bfloat16(), r=strided), backend=backend)
    assert out.dtype == torch.bfloat16
    close(out, reference(tensors)[0], 1e-2)
    grads = torch.autograd.grad(out.float().sum(), list(leaves.values()))
    exact = {n: t.requires_grad_() for n, t in tensors.items()}
    expected = torch.autograd.grad(reference(exact)[0].sum(), list(exact.values()))
    for grad, wanted in zip(grads, expected, strict=True):
        close(grad, wanted, 1e-2)


@pytest.mark.parametrize("cut", [17] if INTERPRETED else [1, 15, 16, 17, 36, 64, 99])
def test_split_anywhere(cut, backend):
    tensors = inputs(2, 35 if INTERPRETED else 100, 4)
    whole, final = run(tensors, backend)
    first, state = run(part(tensors, slice(None, cut)), backend)
    second, last = run(part(tensors, slice(cut, None)) | dict(initial_state=state), backend)
    close(torch.cat([first, second], 1), whole, TOLERANCES[DTYPES[backend]])
    close(last, final, TOLERANCES[DTYPES[backend]])


def test_gradients_pass_through_a_carried_state(backend):
    tensors = rounded(inputs(2, 20, 4), DTYPES[backend])

    def in_two(leaves):
        first, state = run(part(leaves, slice(None, 11)), backend)
        second, state = run(part(leaves, slice(11, None)) | dict(initial_state=state), backend)
        return torch.cat([first, second], 1), state

    all_close(differentiate(in_two, tensors), differentiate(reference, tensors), TOLERANCES[DTYPES[backend]])


def test_token_by_token_with_states_of_fixed_shape_and_padding(backend):
    tensors = inputs(2, 20, 4)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, :6] = False
    whole, final = run(tensors, backend, attention_mask=mask)
    state, outputs = torch.full((2, 4), 7.0, dtype=torch.float64), []  # what a reused buffer may hold
    for t in range(20):
        now = part(tensors, slice(t, t + 1)) | dict(initial_state=state)
        out, state = run(now, backend, attention_mask=mask[:, t : t + 1], is_start=~mask[:, :t].any(1))
        outputs.append(out)
    close(torch.cat(outputs, 1), whole, TOLERANCES[DTYPES[backend]])
    close(state, final, TOLERANCES[DTYPES[backend]])


def test_packed_equals_separate(backend):
    tensors = inputs(1, 60, 4)
    borders = [0, 1, 20, 20, 53, 60]
    packed, state = run(tensors, backend, cu_seqlens=torch.tensor(borders, dtype=torch.int32))
    pieces = [slice(a, b) for a, b in zip(borders, borders[1:], strict=False) if a < b]
    separate = torch.cat([run(part(tensors, piece), backend)[0] for piece in pieces], 1)
    close(packed, separate, TOLERANCES[DTYPES[backend]])
    assert state is None


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_is_as_if_absent(side, backend):
    tensors = rounded(inputs(1, 24, 4), DTYPES[backend])
    real = {
        "left": torch.arange(9, 24),
        "right": torch.arange(15),
        "middle": torch.cat([torch.arange(3), torch.arange(14, 24)]),
    }[side]
    mask = torch.zeros(1, 24, dtype=torch.long)
    mask[:, real] = 1
    padded = {n: t if n == "lam" else t.masked_fill(mask[..., None] == 0, torch.nan) for n, t in tensors.items()}
    leaves = {n: t.requires_grad_() for n, t in padded.items()}
    out, state = run(leaves, backend, attention_mask=mask)
    expected, expected_state = reference(part(tensors, real))
    close(out[:, real], expected, TOLERANCES[DTYPES[backend]])
    close(state, expected_state, TOLERANCES[DTYPES[backend]])
    assert not out[mask == 0].any()
    out.sum().backward()
    assert leaves["lam"].grad.isfinite().all() and all(not leaves[n].grad[mask == 0].any() for n in "xri")
    assert all(leaves[n].grad[mask == 1].isfinite().all() for n in "xri")


@pytest.mark.parametrize("scale", [40] if INTERPRETED else [0, 40, 1e4])
def test_extreme_gates(scale, backend):
    tensors = inputs(2, 18 if INTERPRETED else 150, 8, scale=scale, state=True)
    tensors["lam"][:4] = torch.tensor([-1e4, -50.0, 50.0, 1e4])
    tensors = rounded(tensors, torch.float32)
    found = differentiate(lambda t: run(t, backend, torch.float32), tensors)
    expected = differentiate(reference, tensors)
    for name in ("out", "state", "x", "i", "initial_state"):
        close(found[name], expected[name], 1e-5, name)
    assert all(found[n].isfinite().all() for n in ("r", "lam"))  # autograd's own are not where the root is zero


@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
@pytest.mark.parametrize("strength", [-20, 20] if INTERPRETED else [-20, -10, 10, 20])
def test_strong_gates_and_their_gradients(strength, backend):
    """Where 1 - a^2 is tiny, or the sigmoid all but 1, in float32 as precise as elsewhere."""
    tensors = inputs(2, 18 if INTERPRETED else 150, 8)
    tensors["r"] = tensors["r"] + strength
    tensors["lam"] = tensors["lam"] + torch.linspace(0, 10, 8, dtype=torch.float64)
    agrees_with_pytorch(tensors, backend, 2e-5)


def test_gate_limits(backend):
    tensors = inputs(1, 20, 3)
    high, lam = torch.full_like(tensors["x"], 1e4), torch.zeros(3, dtype=torch.float64)
    held, _ = run(dict(x=tensors["x"], r=-high, i=high, lam=lam), backend)  # keeps the first input for ever
    x = rounded(tensors, DTYPES[backend])["x"]
    torch.testing.assert_close(held.cpu().double(), x[:, :1].expand_as(x), rtol=0, atol=1e-7)
    passed, _ = run(dict(x=tensors["x"], r=high, i=high, lam=lam + 1e4), backend)  # a decay of zero
    torch.testing.assert_close(passed.cpu().double(), x, rtol=1e-6 if backend == "triton" else 0, atol=0)


def test_derivative_of_the_root_is_bounded(backend):
    for lam in (-10.0, -20.0, -40.0):  # 1 - a^2 of 4e-4, 2e-8 and 3e-17 at r = 0
        x = torch.ones(1, 2, 1, dtype=torch.float64)
        leaf = torch.tensor([lam], dtype=torch.float64, requires_grad=True)
        out, _ = run(dict(x=x, r=torch.zeros_like(x), i=torch.full_like(x, 1e4), lam=leaf), backend)
        out[0, 1].sum().backward()
        decay = torch.tensor(lam, dtype=torch.float64).exp().log1p() * 4  # -log a
        slope = 4 * torch.sigmoid(torch.tensor(lam, dtype=torch.float64))  # its derivative
        kept = torch.exp(-2 * decay)
        root = min(1000.0, 0.5 * (-torch.expm1(-2 * decay)).rsqrt().item())
        expected = slope * (-torch.exp(-decay) + root * 2 * kept)
        close(leaf.grad[0], expected, TOLERANCES[DTYPES[backend]])


@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16])
def test_causal_to_the_bit(dtype, backend):
    time = 20 if INTERPRETED else 150
    tensors = inputs(2, time, 4)
    out, _ = run(tensors, backend, dtype)
    for t in (5, 16) if INTERPRETED else (1, 16, 30, 63, 64, 100, 149):
        changed = {n: tensor.clone() for n, tensor in tensors.items()}
        for name in "xri":
            changed[name][:, t] += 3
        after, _ = run(changed, backend, dtype)
        assert torch.equal(after[:, :t], out[:, :t]) and not torch.equal(after[:, t], out[:, t])


def test_the_same_bits_every_time(backend):
    tensors = inputs(2, 20, 5, state=True)
    first, second = (differentiate(lambda t: run(t, backend, torch.float32), tensors) for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_one_result_may_go_unused(backend):
    """Gradients of the output alone and of the final state alone add up."""
    tensors = rounded(inputs(1, 10, 5, state=True), DTYPES[backend])
    both = differentiate(lambda t: run(t, backend), tensors)
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    g = torch.Generator().manual_seed(1)  # the weights of `differentiate`
    alone = []
    for value in run(leaves, backend):
        weight = torch.randn(value.shape, generator=g, dtype=torch.float64)
        alone.append(
            torch.autograd.grad((value.cpu().double() * weight).sum(), list(leaves.values()), retain_graph=True)
        )
    for name, first, second in zip(leaves, *alone, strict=True):
        close(first + second, both[name], TOLERANCES[DTYPES[backend]])


def test_short_calls_without_gradient_compile_without_graph_breaks(backend):
    tensors = {n: t.to(device(backend), torch.float32) for n, t in inputs(2, 1, 4, state=True).items()}
    compiled = torch.compile(lambda t: rg_lru(**t, backend=backend), fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(tensors), rg_lru(**tensors, backend=backend), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
@pytest.mark.parametrize(("batch", "time", "dim"), [(1, 16384, 768), (2, 4096, 2304), (64, 512, 2048)])
def test_published_sizes_in_bfloat16(batch, time, dim):
    """Many segments and whole rows, against PyTorch in float64 on the same GPU."""
    g = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, device="cuda")  # noqa: E731
    tensors = [*(draw(batch, time, dim).bfloat16() for _ in range(3)), draw(dim) - 5, draw(batch, dim)]
    weights = [draw(batch, time, dim).bfloat16(), draw(batch, dim)]
    results = []
    for dtype, backend in ((None, "triton"), (None, "triton"), (torch.float64, "torch")):
        leaves = [x.to(dtype or x.dtype).requires_grad_() for x in tensors]
        found = rg_lru(*leaves[:4], initial_state=leaves[4], backend=backend)
        grads = torch.autograd.grad(found, leaves, [w.to(x.dtype) for w, x in zip(weights, found, strict=True)])
        results.append([*found, *grads])
    for name, ours, again, exact in zip(("out", "state", *NAMES), *results, strict=True):
        assert torch.equal(ours, again), name
        close(ours, exact, 5e-3, name)


def test_refuses_what_does_not_fit(backend):
    x, r, i, lam = (t.float() for t in inputs(2, 5, 3).values())
    state, borders = x[:, 0], torch.tensor([0, 5])
    for match, args, options in [
        (r"lam \(D,\)", (x, r, i, lam[:2]), {}),
        (r"lam \(D,\)", (x, r[:, :4], i, lam), {}),
        ("T at least 1", (x[:, :0], r[:, :0], i[:, :0], lam), {}),
        ("attention_mask", (x, r, i, lam), dict(attention_mask=torch.ones(2, 6))),
        ("initial_state", (x, r, i, lam), dict(initial_state=state[:1])),
        ("is_start", (x, r, i, lam), dict(is_start=torch.tensor([True, False]))),
        ("is_start", (x, r, i, lam), dict(is_start=torch.tensor([True]), initial_state=state)),
        ("batch of 1", (x, r, i, lam), dict(cu_seqlens=borders)),
        ("initial_state", (x[:1], r[:1], i[:1], lam), dict(cu_seqlens=borders, initial_state=state[:1])),
        ("rise from 0", (x[:1], r[:1], i[:1], lam), dict(cu_seqlens=torch.tensor([0, 4]))),
    ]:
        with pytest.raises(ValueError, match=match):
            rg_lru(*args, **options, backend=backend)
    with pytest.raises(ValueError, match="unknown backend"):
        rg_lru(x, r, i, lam, backend="cuda")
    with pytest.raises(ValueError, match="no float64|does not run|not installed"):
        rg_lru(x.double(), r, i, lam, backend="triton")


def test_nothing_gives_nothing(backend):
    for batch, dim in ((0, 3), (2, 0)):
        leaves = {n: t.to(device(backend), torch.float32) for n, t in inputs(batch, 20, dim).items()}
        out, state = rg_lru(**{n: t.requires_grad_() for n, t in leaves.items()}, backend=backend)
        assert out.shape == (batch, 20, dim) and state.shape == (batch, dim)
        (out.sum() + state.sum()).backward()
        assert not leaves["lam"].grad.any()
