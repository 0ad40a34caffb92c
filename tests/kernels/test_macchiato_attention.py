# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""A window and latents under one softmax against the definitions of the two, one after the other, in float64.

Triton runs on a GPU, and where TRITON_INTERPRET=1 is set in the interpreter too.
"""

import dataclasses
import warnings

import pytest
import torch
from comparison import BACKENDS, DTYPES, INTERPRETED, all_close, close, device, thinned

from hf_linattn.kernels.latent_attention import EMPTY, latent_attention, latent_attention_reference
from hf_linattn.kernels.macchiato_attention import macchiato_attention
from hf_linattn.kernels.sliding_window_attention import sliding_window_attention, sliding_window_attention_reference

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def shapes_of(heads, kv_heads, latents, dim):
    """Of each tensor's last dimensions, in the order of the arguments."""
    return dict(
        q=(heads, latents),
        theta=(kv_heads, latents),
        gate=(heads,),
        window_q=(heads, dim),
        window_k=(kv_heads, dim),
        v=(kv_heads, dim),
    )


def inputs(batch, time, heads, kv_heads, latents, dim, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(batch, time, *s, generator=g, dtype=torch.float64)
        for n, s in shapes_of(heads, kv_heads, latents, dim).items()
    }


def split(tensors, start, end):
    return {n: t[:, start:end] for n, t in tensors.items()}


def run(tensors, backend, dtype=None, **options):
    moved = {n: t.to(device(backend), dtype or DTYPES[backend]) for n, t in tensors.items()}
    options = {n: x.to(device(backend)) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    return macchiato_attention(**moved, **options, backend=backend)


def definition(tensors, *, window, scale=None, **options):
    """Output and final latents by the dense formulas."""
    q, theta, gate, window_q, window_k, v = tensors.values()
    exact, _ = sliding_window_attention_reference(window_q, window_k, v, window=window, scale=scale, **options)
    out = latent_attention_reference(q, theta, v, gate=gate, gate_value=exact, **options)
    if "cu_seqlens" in options:
        return out, None
    if "attention_mask" in options:
        theta = theta.masked_fill(~options["attention_mask"].bool()[:, :, None, None], EMPTY)
    held = theta > EMPTY / 2
    z = theta.where(held, EMPTY).logsumexp(1)
    shares = torch.where(held, (theta - z[:, None]).exp(), 0)
    return out, ((z, torch.einsum("bthl,bthd->bhld", shares, v)), None)


def differentiate(function, tensors, **options):
    """Output, final latents and the gradients of a random function of all, in float64."""
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    out, state = function(leaves, **options)
    results = dict(out=out) if state is None else dict(out=out, z=state[0][0], mean=state[0][1])
    results = {n: x.cpu().double() for n, x in results.items()}
    if state is not None:
        results["z"] = results["z"].where(results["z"] > EMPTY / 2, 0)
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in results.values()]
    grads = torch.autograd.grad(list(results.values()), list(leaves.values()), weights)
    found = {n: x.detach() for n, x in results.items()} | {"d " + n: x for n, x in zip(leaves, grads, strict=True)}
    assert all(x.isfinite().all() for x in found.values())
    return found


def same_state(found, expected, tolerance):
    """Of the latents and of the window."""
    for x, y in zip(found[0], expected[0], strict=True):
        close(x, y, tolerance)
    for field in dataclasses.fields(found[1]):
        x, y = getattr(found[1], field.name), getattr(expected[1], field.name)
        assert torch.equal(x.cpu().to(y.dtype), y.cpu()), field.name


def matches_the_definition(tensors, backend, dtype=None, **options):
    dtype = dtype or DTYPES[backend]
    tensors = {n: t.to(dtype).double() for n, t in tensors.items()}
    found = differentiate(lambda t, **o: run(t, backend, dtype, **o), tensors, **options)
    expected = differentiate(definition, tensors, **options)
    single = backend == "triton" and tensors["q"].shape[1] == 1  # PyTorch is exact there
    rounded = []
    if options["window"] == 1 or single:  # a choice of one: whatever the scores, but for rounding
        rounded += ["d window_q", "d window_k"]
    if single:  # among equal values
        rounded += ["d q", "d gate"]
    all_close(found, expected, TOLERANCES[dtype], rounded, beside="d v")
    return found


@pytest.mark.parametrize("time", thinned([70, 17, 64, 1, 16, 65, 130], 2))
@pytest.mark.parametrize("window", thinned([40, 1, 65, 128, 200], 1))
def test_windows(window, time, backend):
    matches_the_definition(inputs(1, time, 2, 1, 4, 5, seed=time), backend, window=window)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "latents", "dim"), [(6, 2, 3, 2), (3, 3, 33, 5), (4, 1, 16, 40), (1, 1, 64, 130)]
)
def test_heads_and_sizes(heads, kv_heads, latents, dim, backend):
    if dim > 128 and backend == "triton":
        dim = 128  # in float32 the window's kernels take no more
    matches_the_definition(inputs(2, 40, heads, kv_heads, latents, dim), backend, window=9, scale=0.3)


@pytest.mark.parametrize("window", [40, 100])
def test_several_segments(window, backend):
    """So long that segments are walked side by side; a window reaches back into the one before."""
    matches_the_definition(inputs(1, 300, 1, 1, 4, 3), backend, window=window)


@pytest.mark.parametrize("window", [1, 40, 65, 128])
def test_equals_the_two_operators(window, backend):
    """One after the other in float64, with the state that both leave."""
    tensors = {n: t.to(DTYPES[backend]).double() for n, t in inputs(2, 90, 4, 2, 5, 6).items()}
    q, theta, gate, window_q, window_k, v = tensors.values()
    exact, _, after = sliding_window_attention(window_q, window_k, v, window=window, scale=0.5)
    expected, latents = latent_attention(q, theta, v, gate=gate, gate_value=exact)
    out, state = run(tensors, backend, window=window, scale=0.5)
    close(out, expected, TOLERANCES[DTYPES[backend]])
    same_state(state, (latents, after), TOLERANCES[DTYPES[backend]])


LENGTHS = (0, 9, 1, 65, 0, 33, 4)
BORDERS = torch.tensor((0, *LENGTHS)).cumsum(0)


@pytest.mark.parametrize("window", [65, 5])
def test_packed_documents(window, backend):
    tensors = inputs(1, sum(LENGTHS), 4, 2, 3, 4)
    assert run(tensors, backend, window=window, cu_seqlens=BORDERS)[1] is None
    found = matches_the_definition(tensors, backend, window=window, cu_seqlens=BORDERS)
    start = int(BORDERS[3])
    alone, _ = run(split(tensors, start, start + 65), backend, window=window)
    close(found["out"][:, start : start + 65], alone, TOLERANCES[DTYPES[backend]])


def test_packed_documents_of_several_segments(backend):
    borders = torch.tensor([0, 10, 310, 310, 400])
    matches_the_definition(inputs(1, 400, 1, 1, 4, 3), backend, window=80, cu_seqlens=borders)


PADDING = dict(left=[0] * 23 + [1] * 47, right=[1] * 50 + [0] * 20)


@pytest.mark.parametrize("side", PADDING)
def test_padding(side, backend):
    """A masked token leaves no trace in what other tokens see."""
    mask = torch.tensor([PADDING[side], [1] * 70])
    tensors = inputs(2, 70, 2, 1, 4, 5)
    for name in ("theta", "window_k", "v"):
        tensors[name][0, mask[0] == 0] *= 1e4
    out, ((_, mean), _) = run(tensors, backend, window=30, attention_mask=mask)
    for row in (0, 1):
        seen = mask[row].bool()
        alone = {n: t[row, seen][None] for n, t in tensors.items()}
        expected, ((_, expected_mean), _) = definition(alone, window=30)
        close(out[row : row + 1, seen], expected, TOLERANCES[DTYPES[backend]])
        close(mean[row : row + 1], expected_mean, TOLERANCES[DTYPES[backend]])


def test_gradients_with_padding(backend):
    mask = torch.tensor([PADDING["right"]])
    matches_the_definition(inputs(1, 70, 2, 1, 4, 5), backend, window=30, attention_mask=mask)


@pytest.mark.parametrize("cuts", [[40, 30], [17, 1, 1, 51], [1, 16, 53]])
def test_split_anywhere(cuts, backend):
    tensors = inputs(2, 70, 4, 2, 3, 5)
    expected, final = run(tensors, backend, window=20)
    state, outs, start = None, [], 0
    for cut in cuts:
        out, state = run(split(tensors, start, start + cut), backend, window=20, initial_state=state)
        outs.append(out)
        start += cut
    close(torch.cat(outs, 1), expected, TOLERANCES[DTYPES[backend]])
    same_state(state, final, TOLERANCES[DTYPES[backend]])


def test_gradients_pass_through_a_carried_state(backend):
    tensors = {n: t.to(DTYPES[backend]).double() for n, t in inputs(1, 70, 2, 1, 4, 5).items()}

    def in_two(leaves):
        first, state = run(split(leaves, 0, 37), backend, window=20)
        second, state = run(split(leaves, 37, 70), backend, window=20, initial_state=state)
        return torch.cat([first, second], 1), state

    all_close(
        differentiate(in_two, tensors), differentiate(definition, tensors, window=20), TOLERANCES[DTYPES[backend]]
    )


@pytest.mark.parametrize("gate", [1e4, -1e4, -1e30])
def test_gate_limits(gate, backend):
    """An open gate leaves the window alone, a closed one the latents, with their gradients."""
    tensors = inputs(1, 70, 2, 1, 4, 5)
    tensors["gate"] = torch.full_like(tensors["gate"], gate)
    found = matches_the_definition(tensors, backend, window=20)
    if gate > 0:
        exact, _ = sliding_window_attention_reference(
            tensors["window_q"], tensors["window_k"], tensors["v"], window=20
        )
        assert not found["d q"].any()
    else:
        exact = latent_attention_reference(tensors["q"], tensors["theta"], tensors["v"])
        assert not found["d window_q"].any() and not found["d window_k"].any()
    close(found["out"], exact, TOLERANCES[DTYPES[backend]])


def test_large_scores_and_logits(backend):
    tensors = inputs(1, 100, 2, 1, 4, 5)
    for name in ("q", "theta", "gate", "window_q"):
        tensors[name] *= 100
    tensors["theta"][:, 40] += 1000
    tensors = {n: t.float().double() for n, t in tensors.items()}
    tolerance = 1e-6 * 1500
    found = differentiate(lambda t: run(t, backend, torch.float32, window=30), tensors)
    expected = differentiate(lambda t: definition(t, window=30), tensors)
    # the gradient of nearly certain choices is what rounding left of larger terms
    size = max(expected["d v"].norm(), expected["d theta"].norm())
    assert (found.pop("d theta") - expected.pop("d theta")).norm() <= tolerance * size
    all_close(found, expected, tolerance)


def test_tokens_that_no_latent_absorbs(backend):
    tensors = inputs(1, 100, 2, 1, 4, 5)
    tensors["theta"][:, :70] = EMPTY
    tensors["theta"][..., 2] = EMPTY
    found = matches_the_definition(tensors, backend, window=30)
    exact, _ = sliding_window_attention_reference(tensors["window_q"], tensors["window_k"], tensors["v"], window=30)
    close(found["out"][:, :70], exact[:, :70], TOLERANCES[DTYPES[backend]])
    assert not found["d theta"][:, :70].any()


def test_constant_values_are_reproduced(backend):
    tensors = inputs(1, 100, 4, 2, 4, 5)
    tensors["v"] = torch.ones_like(tensors["v"])
    out, _ = run(tensors, backend, window=30)
    torch.testing.assert_close(out.cpu().double(), torch.ones_like(tensors["window_q"]), rtol=0, atol=1e-5)


def test_strided_inputs(backend):
    tensors = inputs(2, 30, 4, 2, 3, 5)
    strided = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in tensors.items()}
    assert not any(t.is_contiguous() for t in strided.values())
    close(run(strided, backend, window=8)[0], definition(tensors, window=8)[0], TOLERANCES[DTYPES[backend]])


def test_the_same_bits_every_time_and_without_gradients(backend):
    tensors = inputs(1, 300, 2, 1, 5, 3)
    first, second = (differentiate(lambda t: run(t, backend, torch.float32, window=70), tensors) for _ in range(2))
    assert all(torch.equal(x, second[n]) for n, x in first.items())
    assert torch.equal(run(tensors, backend, torch.float32, window=70)[0].cpu().double(), first["out"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, backend):
    tensors = inputs(1, 100, 4, 2, 8, 16)
    out, (latents, _) = run(tensors, backend, dtype, window=30)
    assert out.dtype == dtype and all(x.dtype == torch.float32 for x in latents)
    matches_the_definition(tensors, backend, dtype, window=30)


@pytest.mark.parametrize("kept", [0, 1, 63, 64, 99])
def test_causality(kept, backend):
    """Values and queries to come change no bit of what came before; logits of keys may change its rounding."""
    first, second = (inputs(1, 100, 2, 1, 4, 5, seed=seed) for seed in (0, 1))
    out, _ = run(first, backend, window=30)
    for names, exactly in ((("q", "gate", "window_q", "window_k", "v"), True), (tuple(first), False)):
        changed = {n: torch.cat([t[:, :kept], second[n][:, kept:]], 1) if n in names else t for n, t in first.items()}
        other, _ = run(changed, backend, window=30)
        if exactly:
            assert torch.equal(other[:, :kept], out[:, :kept])
        torch.testing.assert_close(other[:, :kept], out[:, :kept], rtol=0, atol=1e-5)
        assert not torch.equal(other[:, kept:], out[:, kept:])


@pytest.mark.parametrize("time", [8, 20])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(window=0), "window"),
        (dict(window_q=(4, 6)), "window_q|got q"),
        (dict(window_k=(1, 5)), "window_k|got q"),
        (dict(q=(3, 3)), "H a multiple of H_kv"),
        (dict(theta=(2, 4)), r"theta \(B, T, H_kv, L\)"),
        (dict(cu_seqlens=torch.tensor([0, 7])), "cu_seqlens must rise"),
        (dict(backend="cuda"), "unknown backend 'cuda'"),
    ],
)
def test_errors_name_the_value(change, message, time, backend):
    arguments = {n: t.to(device(backend), torch.float32) for n, t in inputs(1, time, 4, 2, 3, 5).items()}
    arguments |= dict(window=4, backend=backend)
    arguments |= {
        n: torch.zeros(1, time, *x, device=device(backend)) if isinstance(x, tuple) else x for n, x in change.items()
    }
    with pytest.raises(ValueError, match=message):
        macchiato_attention(**arguments)


def test_packed_rows_take_neither_state_nor_mask(backend):
    tensors = inputs(1, 20, 4, 2, 3, 5)
    _, state = run(tensors, backend, window=4)
    for extra in (dict(initial_state=state), dict(attention_mask=torch.ones(1, 20))):
        with pytest.raises(ValueError, match="neither initial_state nor attention_mask"):
            run(tensors, backend, window=4, cu_seqlens=torch.tensor([0, 20]), **extra)
    with pytest.raises(ValueError, match="batch of 1"):
        run(inputs(2, 20, 4, 2, 3, 5), backend, window=4, cu_seqlens=torch.tensor([0, 20]))


def test_what_the_kernels_cannot_take_goes_through_pytorch():
    wide = {n: t.float() for n, t in inputs(1, 20, 2, 1, 3, 130).items()}
    many = {n: t.float() for n, t in inputs(1, 20, 2, 1, 65, 4).items()}
    for tensors, message in (
        (inputs(1, 20, 2, 1, 3, 4), "float64"),
        (wide, "128 in float32, got 130"),
        (many, "one pass takes up to 64 latents, got 65"),
    ):
        assert macchiato_attention(**tensors, window=4)[0].isfinite().all()
        with pytest.raises(ValueError, match=message):
            macchiato_attention(**tensors, window=4, backend="triton")


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter is never chosen by itself")
def test_more_latents_than_one_pass_takes_go_through_both_kernels_without_a_warning():
    tensors = inputs(1, 100, 4, 2, 128, 64)
    moved = {n: t.to("cuda", torch.float32) for n, t in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, (latents, _) = macchiato_attention(**moved, window=30)
    expected, (expected_latents, _) = definition({n: t.cpu().double() for n, t in moved.items()}, window=30)
    for x, y in zip((out, *latents), (expected, *expected_latents), strict=True):
        close(x, y, TOLERANCES[torch.float32])


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "latents", "dim"), [(16, 16, 16, 128), (8, 4, 16, 256), (32, 8, 64, 64), (8, 8, 16, 96)]
)
def test_published_sizes_in_bfloat16(heads, kv_heads, latents, dim, packed):
    """Loops of several tiles and segments, as models have them, against PyTorch in float64 on the same GPU."""
    g = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, device="cuda")  # noqa: E731
    batch, time = (1, 4000) if packed else (2, 2000)
    options = dict(window=128)
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 1300, 1300, 1301, 4000], device="cuda")
    tensors = {n: draw(batch, time, *s).bfloat16() for n, s in shapes_of(heads, kv_heads, latents, dim).items()}
    weights = [
        draw(batch, time, heads, dim).bfloat16(),
        draw(batch, kv_heads, latents),
        draw(batch, kv_heads, latents, dim),
    ]
    results = []
    for dtype, backend in ((None, "triton"), (None, "triton"), (torch.float64, "torch")):
        leaves = {n: t.to(dtype or t.dtype).requires_grad_() for n, t in tensors.items()}
        out, state = macchiato_attention(**leaves, **options, backend=backend)
        found = (out,) if packed else (out, *state[0])
        used = [w.to(x.dtype) for w, x in zip(weights, found, strict=False)]
        results.append([*found, *torch.autograd.grad(found, list(leaves.values()), used)])
    names = ("out",) if packed else ("out", "z", "mean")
    for name, ours, again, exact in zip((*names, *tensors), *results, strict=True):
        assert torch.equal(ours, again), name
        difference, size = (ours.double() - exact).norm(), exact.norm()
        assert difference <= 5e-3 * size, f"{name}: relative error {difference / size:.1e}"
