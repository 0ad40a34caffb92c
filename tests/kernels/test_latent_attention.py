# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Properties of causal latent attention (papers: Latte, section 8); the oracle is the dense definition in float64.

Triton runs on a GPU, and where TRITON_INTERPRET=1 is set in the interpreter too.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from comparison import BACKENDS, DTYPES, INTERPRETED, all_close, close, device, thinned

from hf_linattn.kernels.latent_attention import EMPTY, MAX_STEPS, latent_attention, latent_attention_reference
from hf_linattn.kernels.latent_attention.chunked import latent_attention_chunked

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
STATES = ("z", "mean")
LOGITS = ("q", "theta", "gate")
MODES = {
    "latte": dict(),
    "macchiato": dict(gated=True),
    "mass": dict(use_mass=True),
    "one normaliser": dict(gated=True, use_mass=True),
    "held mass": dict(gated=True, use_mass=True, mass_length=5),
}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def inputs(batch, time, heads, kv_heads, latents, dim, *, gated=False, state=False, scale=1.0, seed=0):
    """Arguments in float64; with `state`, the initial one as `z` and `mean`."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    tensors = dict(
        q=draw(batch, time, heads, latents) * scale,
        theta=draw(batch, time, kv_heads, latents) * scale,
        v=draw(batch, time, kv_heads, dim),
    )
    if gated:
        tensors |= dict(gate=draw(batch, time, heads) * scale, gate_value=draw(batch, time, heads, dim))
    if state:
        tensors |= dict(z=draw(batch, kv_heads, latents) * scale, mean=draw(batch, kv_heads, latents, dim))
    return tensors


def mode_inputs(mode, *shape, **kwargs):
    options = dict(MODES[mode])
    return inputs(*shape, gated=options.pop("gated", False), **kwargs), options


def rounded(tensors, dtype):
    """The same values as after a cast to `dtype`, in float64; states stay as precise as float32."""
    return {
        n: t.to(torch.promote_types(dtype, torch.float32) if n in STATES else dtype).double()
        for n, t in tensors.items()
    }


def split(tensors, start, end):
    """Tokens from `start` to `end`, without initial state."""
    return {n: t[:, start:end] for n, t in tensors.items() if n not in STATES}


def with_state(tensors, state):
    return tensors | dict(zip(STATES, state, strict=True))


def run(tensors, backend, dtype=None, **options):
    """Output and final state."""
    dtype = dtype or DTYPES[backend]
    states = torch.promote_types(dtype, torch.float32)
    moved = {n: t.to(device(backend), states if n in STATES else dtype) for n, t in tensors.items()}
    options = {n: x.to(device(backend)) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    state = tuple(moved.pop(n) for n in STATES if n in moved) or None
    return latent_attention(**moved, initial_state=state, **options, backend=backend)


def definition(tensors, **options):
    """Output and final state by the dense formula; an initial state is one more token, of the values' mean."""
    t = dict(tensors)
    mask, borders = options.pop("attention_mask", None), options.pop("cu_seqlens", None)
    if mask is not None:
        ignored = ~mask.bool()[:, :, None, None]
        t |= dict(theta=t["theta"].masked_fill(ignored, EMPTY), v=t["v"].masked_fill(ignored, 0))
    state = tuple(t.pop(n) for n in STATES if n in t)
    if state:
        # one value per latent: latent l takes the token that holds its own mean
        z, mean = state
        latents = z.shape[-1]
        own = torch.eye(latents, dtype=torch.bool)[None, :, None]
        first = dict(theta=torch.where(own, z[:, None], EMPTY), v=mean.transpose(1, 2))
        first = {
            n: torch.cat([first.get(n, x[:, :1].expand(-1, latents, *x.shape[2:]).detach()), x], 1)
            for n, x in t.items()
        }
        out = latent_attention_reference(**first, **options)[:, latents:]
        t = first
    else:
        out = latent_attention_reference(**t, **options, cu_seqlens=borders)
    if borders is not None:
        return out, None
    theta = torch.where(t["theta"] > EMPTY / 2, t["theta"], EMPTY)
    z = theta.logsumexp(1)
    shares = torch.where(theta > EMPTY / 2, (theta - z[:, None]).exp(), 0)
    return out, (z, torch.einsum("bthl,bthd->bhld", shares, t["v"]))


def differentiate(function, tensors, leave_out=(), **options):
    """Output, final state and the gradients of a random function of all, in float64; the mass of empty latents is left out."""
    leaves = {n: t.clone().requires_grad_(n not in leave_out) for n, t in tensors.items()}
    out, state = function(leaves, **options)
    results = dict(out=out) | ({} if state is None else dict(zip(("end z", "end mean"), state, strict=True)))
    results = {n: x.cpu().double() for n, x in results.items()}
    if state is not None:
        held = results["end z"] > EMPTY / 2
        results["end z"] = results["end z"].where(held, 0)
        assert not results["end mean"].detach()[~held].any()
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in results.values()]
    wanted = {n: t for n, t in leaves.items() if t.requires_grad}
    grads = torch.autograd.grad(list(results.values()), list(wanted.values()), weights)
    found = {n: x.detach() for n, x in results.items()} | dict(zip(wanted, grads, strict=True))
    assert all(x.isfinite().all() for x in found.values())
    return found


def matches_the_definition(tensors, backend, dtype=None, tolerance=None, leave_out=(), **options):
    dtype = dtype or DTYPES[backend]
    tensors = rounded(tensors, dtype)
    found = differentiate(lambda t, **o: run(t, backend, dtype, **o), tensors, leave_out, **options)
    expected = differentiate(definition, tensors, leave_out, **options)
    # a choice among equal values, in which PyTorch is exact
    alone = backend == "triton" and tensors["q"].shape[1] == 1 and not {"gate", "z"} & tensors.keys()
    all_close(found, expected, tolerance or TOLERANCES[dtype], ["q"] if alone else [], beside="v")
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("time", thinned([70, 1, 2, 16, 5, 37, 65, 64, 130], 3))
def test_matches_the_definition(mode, time, backend):
    tensors, options = mode_inputs(mode, 2, time, 2, 1, 5, 3, seed=time)
    matches_the_definition(tensors, backend, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("time", thinned([65, 37, 1], 2))
def test_an_initial_state(mode, time, backend):
    tensors, options = mode_inputs(mode, 2, time, 2, 1, 5, 3, state=True, seed=time)
    matches_the_definition(tensors, backend, **options)


@pytest.mark.parametrize("mode", thinned(MODES, 4))
@pytest.mark.parametrize("time", [300, 700])
def test_several_segments(mode, time, backend):
    """So long that segments are walked side by side and joined."""
    tensors, options = mode_inputs(mode, 1, time, 1, 1, 4, 3, state=time == 300)
    matches_the_definition(tensors, backend, **options)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "latents", "dim"),
    [(6, 2, 2, 2), (3, 3, 33, 5), (4, 1, 16, 70), (1, 1, 64, 130), (2, 2, 40, 256)],
)
def test_heads_and_sizes(heads, kv_heads, latents, dim, backend):
    tensors = inputs(1, 20, heads, kv_heads, latents, dim, gated=True, state=True)
    matches_the_definition(tensors, backend, use_mass=True, mass_length=7)


@pytest.mark.parametrize(("latents", "scale"), [(128, 1), (100, 100)])
def test_many_latents(latents, scale, backend):
    """As converted models have them; large logits take the exact path."""
    tensors = inputs(1, 70, 2, 1, latents, 8, gated=True, scale=scale)
    tolerance = logit_tolerance(tensors) if backend == "triton" else None
    matches_the_definition(tensors, backend, tolerance=tolerance, use_mass=True, mass_length=30)


def test_grouped_heads_equal_repeated_ones(backend):
    tensors = inputs(1, 40, 6, 2, 5, 3, gated=True)
    repeated = tensors | {n: tensors[n].repeat_interleave(3, 2) for n in ("theta", "v")}
    out, state = run(tensors, backend, use_mass=True)
    expected, repeated_state = run(repeated, backend, use_mass=True)
    close(out, expected, TOLERANCES[DTYPES[backend]])
    for x, y in zip(state, repeated_state, strict=True):
        close(x, y[:, ::3], TOLERANCES[DTYPES[backend]])


def test_strided_inputs(backend):
    tensors = inputs(2, 20, 4, 2, 5, 3, gated=True)
    strided = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in tensors.items()}
    assert not any(t.is_contiguous() for t in strided.values())
    close(run(strided, backend)[0], definition(tensors)[0], TOLERANCES[DTYPES[backend]])


def test_one_result_may_go_unused(backend):
    """Gradients of the output alone and of each part of the final state alone add up."""
    tensors = rounded(inputs(1, 70, 2, 1, 5, 3, gated=True, state=True), DTYPES[backend])
    both = differentiate(lambda t: run(t, backend), tensors)
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    g = torch.Generator().manual_seed(1)  # the weights of `differentiate`
    sums = {n: torch.zeros_like(t) for n, t in tensors.items()}
    for part in range(3):
        out, state = run(leaves, backend)
        value = (out, *state)[part].cpu().double()
        weight = torch.randn(value.shape, generator=g, dtype=torch.float64)
        grads = torch.autograd.grad(value, list(leaves.values()), weight, allow_unused=True)
        sums = {n: x if grad is None else x + grad for (n, x), grad in zip(sums.items(), grads, strict=True)}
    all_close(sums, {n: both[n] for n in sums}, TOLERANCES[DTYPES[backend]])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 16, 64, 128])
def test_chunk_size_does_not_matter(chunk, packed):
    tensors, options = mode_inputs("held mass", 1, 70, 4, 2, 5, 3)
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 33, 33, 70])
    out, state = latent_attention_chunked(**tensors, **options, chunk=chunk)
    expected, expected_state = latent_attention_chunked(**tensors, **options, chunk=32)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(state, expected_state)


def logit_tolerance(tensors):
    """Of float32, whose logits are rounded: an error of a logit is a relative error of its weight."""
    return 1e-6 * max(t[t > EMPTY / 2].abs().max().item() for n, t in tensors.items() if n in LOGITS) + 1e-5


@pytest.mark.parametrize("scale", [1, 10, 100, 1000])
@pytest.mark.parametrize("mode", thinned(MODES, 4))
def test_large_logits_in_float32(mode, scale, backend):
    tensors, options = mode_inputs(mode, 1, 130, 2, 1, 8, 4, scale=scale)
    tolerance = logit_tolerance(tensors)
    matches_the_definition(tensors, backend, torch.float32, tolerance, **options)


STEEP = {
    "ramp up": lambda theta, t: theta + 100 * t,
    "ramp down": lambda theta, t: theta - 100 * t,
    "spike": lambda theta, t: theta + 1000 * (t == 40),
    "spike of one latent": lambda theta, t: theta + 1000 * (t == 40) * (torch.arange(4) == 2),
    "pit": lambda theta, t: theta - 1000 * (t == 40),
    "low": lambda theta, t: theta - 1e4,
    "high": lambda theta, t: theta + 1e4,
}


@pytest.mark.parametrize("shape", STEEP)
def test_steep_logits_in_float32(shape, backend):
    tensors = inputs(1, 100, 2, 1, 4, 3, gated=True)
    tensors["theta"] = STEEP[shape](tensors["theta"], torch.arange(100)[:, None, None])
    tensors = rounded(tensors, torch.float32)
    tolerance = logit_tolerance(tensors)
    found = differentiate(lambda t: run(t, backend, torch.float32), tensors)
    expected = differentiate(definition, tensors)
    # where one token has nearly all the weight, gradients of logits are what rounding left of larger terms
    found_theta, expected_theta = found.pop("theta"), expected.pop("theta")
    assert (found_theta - expected_theta).norm() <= tolerance * max(expected_theta.norm(), expected["v"].norm())
    all_close(found, expected, tolerance)


@pytest.mark.skipif(not INTERPRETED, reason="looks into the kernels, which the interpreter alone allows")
def test_triton_takes_the_fast_and_the_exact_path(monkeypatch):
    from hf_linattn.kernels.latent_attention import fused

    far, taken = fused._far_pairs, []

    def recorded(*arguments):
        taken.append(arguments)
        return far(*arguments)

    monkeypatch.setattr(fused, "_far_pairs", recorded)
    tensors = inputs(1, 100, 1, 1, 4, 3)
    tensors["theta"][:, :40] = EMPTY  # as in converted models, whose latents start when a token leaves the window
    run(tensors, "triton")
    assert not taken
    tensors["theta"][:, 70] += 1000
    run(tensors, "triton")
    assert len(taken) == 1  # of two chunks


@pytest.mark.skipif(not INTERPRETED, reason="changes the kernels, which the interpreter alone allows")
def test_triton_both_paths_give_the_same(monkeypatch):
    """Ordinary logits through the exact path, which otherwise only steep ones take."""
    import triton.language as tl

    from hf_linattn.kernels.latent_attention import fused

    monkeypatch.setattr(fused, "SPREAD", tl.constexpr(0.0))
    tensors = inputs(1, 100, 2, 1, 4, 3, gated=True, state=True)
    matches_the_definition(tensors, "triton", use_mass=True)


def test_some_of_many_chunks_are_far(backend, monkeypatch):
    """Where programs that look for far rows take several chunks each."""
    from hf_linattn.kernels import tiles

    monkeypatch.setattr(tiles, "processors", lambda device: 1)
    tensors = inputs(2, 64 * 11 + 5, 2, 1, 4, 3, gated=True, state=True)
    tensors["theta"][1, torch.tensor([0, 3, 4, 9]) * 64 + 20] += torch.tensor([50.0, 100, 150, 200])[:, None, None]
    matches_the_definition(tensors, backend, tolerance=logit_tolerance(tensors), use_mass=True)


def hard_assignments(batch, time, kv_heads, latents, seed=0):
    code = torch.randint(latents, (batch, time, kv_heads), generator=torch.Generator().manual_seed(seed))
    return torch.where(F.one_hot(code, latents).bool(), 0.0, EMPTY).double()


@pytest.mark.parametrize("options", [dict(), dict(use_mass=True), dict(use_mass=True, mass_length=8)])
def test_hard_assignments(options, backend):
    tensors = inputs(1, 100, 2, 1, 4, 3, gated=True) | dict(theta=hard_assignments(1, 100, 1, 4))
    if "mass_length" in options:
        tensors["theta"] += 0.1  # off the kink: the mass of eight tokens would be mass_length exactly
    found = matches_the_definition(tensors, backend, **options)
    assert not found["theta"][tensors["theta"] < 0].any()


@pytest.mark.parametrize("mode", thinned(MODES, 4))
@pytest.mark.parametrize("delay", thinned([70, 1, 64, 5, 100], 2))
def test_empty_first_tokens(delay, mode, backend):
    """As values that enter the latents when they leave a window; a delay of 100 is a text that never does."""
    tensors, options = mode_inputs(mode, 1, 100, 2, 1, 4, 3)
    tensors["theta"][:, :delay] = EMPTY
    found = matches_the_definition(tensors, backend, **options)
    expected = tensors["gate_value"][:, :delay] if "gate" in tensors else torch.zeros(1, delay, 2, 3).double()
    torch.testing.assert_close(found["out"][:, :delay], expected.to(DTYPES[backend]).double(), rtol=0, atol=1e-6)
    assert not found["theta"][:, :delay].any() and not found["v"][:, :delay].any()


def test_a_latent_that_stays_empty(backend):
    tensors = inputs(1, 70, 2, 1, 4, 3, gated=True)
    tensors["theta"][..., 1] = EMPTY
    found = matches_the_definition(tensors, backend)
    assert not found["q"][..., 1].any() and not found["end mean"][:, :, 1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", MODES)
def test_half_precision(mode, dtype, backend):
    tensors, options = mode_inputs(mode, 1, 100, 4, 2, 16, 8, state=True)
    out, state = run(tensors, backend, dtype, **options)
    assert out.dtype == dtype and all(x.dtype == torch.float32 for x in state)
    matches_the_definition(tensors, backend, dtype, **options)


@pytest.mark.parametrize("mode", thinned(MODES, 2))
@pytest.mark.parametrize("cuts", [[1] * 21, [13, 8], [1, 19, 1], [20, 1]])
def test_split_anywhere(mode, cuts, backend):
    """Up to 16 tokens go through the recurrence, more through the kernels."""
    tensors, options = mode_inputs(mode, 2, 21, 4, 2, 3, 4)
    mask = torch.ones(2, 21)
    mask[0, :5] = 0
    expected, final = run(tensors, backend, **options, attention_mask=mask)
    carried, outs, start = {}, [], 0
    for cut in cuts:
        end = start + cut
        out, state = run(split(tensors, start, end) | carried, backend, **options, attention_mask=mask[:, start:end])
        carried = dict(zip(STATES, state, strict=True))
        outs.append(out)
        start = end
    close(torch.cat(outs, 1), expected, TOLERANCES[DTYPES[backend]])
    for x, y in zip(state, final, strict=True):
        close(x, y, TOLERANCES[DTYPES[backend]])


@pytest.mark.parametrize("mode", thinned(MODES, 4))
@pytest.mark.parametrize(("time", "state"), thinned([(1, False), (1, True), (16, False), (16, True)], 3))
def test_a_few_steps(mode, time, state, backend):
    """Without gradients, from empty and from given states."""
    tensors, options = mode_inputs(mode, 2, time, 2, 1, 5, 70, state=state)
    tensors["theta"][0, :4] = EMPTY
    tensors = rounded(tensors, DTYPES[backend])
    out, final = run(tensors, backend, **options)
    expected, expected_final = definition(tensors, **options)
    close(out, expected, TOLERANCES[DTYPES[backend]])
    held = expected_final[0] > EMPTY / 2
    assert torch.equal(final[0].cpu() > EMPTY / 2, held)
    close(final[0].cpu().where(held, 0), expected_final[0].where(held, 0), TOLERANCES[DTYPES[backend]])
    close(final[1], expected_final[1], TOLERANCES[DTYPES[backend]])


def test_a_few_steps_of_many_latents(backend):
    tensors = rounded(inputs(2, 3, 4, 2, 100, 70, gated=True, state=True), DTYPES[backend])
    found, expected = (
        f(tensors, use_mass=True, mass_length=30) for f in (lambda *t, **o: run(*t, backend, **o), definition)
    )
    for x, y in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        close(x, y, TOLERANCES[DTYPES[backend]])


@pytest.mark.parametrize("length", [1500, 16])
def test_constants_do_not_drift_behind_a_long_text(length, backend):
    """Equal steps of a large float32 sum all round the same way; shares of old and new do not add up to one."""
    g = torch.Generator().manual_seed(0)
    z = torch.full((1, 1, 2), 19 * math.log(2), dtype=torch.float64)
    tensors = dict(
        q=torch.randn(1, length, 1, 2, generator=g, dtype=torch.float64),
        theta=torch.zeros(1, length, 1, 2, dtype=torch.float64),
        v=torch.ones(1, length, 1, 2, dtype=torch.float64),
        z=z,
        mean=torch.ones(1, 1, 2, 2, dtype=torch.float64),
    )
    out, (z, mean) = run(tensors, backend, torch.float32)
    for x in (out, mean):
        torch.testing.assert_close(x.cpu(), torch.ones_like(x.cpu()), rtol=0, atol=2e-5)
    if length <= MAX_STEPS and backend == "triton":
        # each token of a text may come in a call of its own, so nothing may be lost
        assert torch.equal(mean.cpu(), torch.ones_like(mean.cpu()))


@pytest.mark.parametrize("time", [40, 3])
def test_padding_that_neither_branch_takes(time, backend):
    """Rows before the text, where the exact branch saw nothing either, stay finite and pass nothing on."""
    tensors = inputs(1, time, 2, 1, 4, 3, gated=True)
    tensors["theta"][:, :2] = EMPTY
    tensors["gate"][:, :2] = -1e30
    tensors["gate_value"][:, :2] = 0
    out, _ = run(tensors, backend, use_mass=True)
    assert not out[:, :2].any()
    close(out[:, 2:], definition(split(tensors, 2, time), use_mass=True)[0], TOLERANCES[DTYPES[backend]])
    found = differentiate(lambda t: run(t, backend, use_mass=True), tensors)
    assert not any(found[n][:, :2].any() for n in ("q", "theta", "v", "gate"))


def test_steep_logits_step_by_step(backend):
    tensors = inputs(1, 30, 2, 1, 4, 3, scale=300)
    out, state = run(split(tensors, 0, 14), backend, torch.float32)
    rest, _ = run(with_state(split(tensors, 14, 30), state), backend, torch.float32)
    expected, _ = definition(rounded(tensors, torch.float32))
    close(torch.cat([out, rest], 1), expected, logit_tolerance(tensors))


def test_gradients_pass_through_a_carried_state(backend):
    tensors = rounded(inputs(1, 70, 2, 1, 5, 3, gated=True, state=True), DTYPES[backend])

    def in_two(leaves):
        first, state = run(split(leaves, 0, 37) | {n: leaves[n] for n in STATES}, backend, use_mass=True)
        second, state = run(with_state(split(leaves, 37, 70), state), backend, use_mass=True)
        return torch.cat([first, second], 1), state

    expected = differentiate(definition, tensors, use_mass=True)
    all_close(differentiate(in_two, tensors), expected, TOLERANCES[DTYPES[backend]])


LENGTHS = (0, 9, 1, 65, 0, 33, 4)
BORDERS = torch.tensor((0, *LENGTHS)).cumsum(0)


@pytest.mark.parametrize("mode", thinned(MODES, 4))
def test_packed_documents(mode, backend):
    tensors, options = mode_inputs(mode, 1, sum(LENGTHS), 2, 1, 3, 4)
    out, state = run(tensors, backend, **options, cu_seqlens=BORDERS)
    assert state is None
    matches_the_definition(tensors, backend, **options, cu_seqlens=BORDERS)
    start, end = BORDERS[3:5]
    alone, _ = run(split(tensors, start, end), backend, **options)
    close(out[:, start:end], alone, TOLERANCES[DTYPES[backend]])


def test_packed_documents_of_several_segments(backend):
    borders = torch.tensor([0, 10, 310, 310, 500])
    tensors, options = mode_inputs("held mass", 1, 500, 1, 1, 4, 3)
    matches_the_definition(tensors, backend, **options, cu_seqlens=borders)


def test_no_leakage_between_documents(backend):
    first, second = (inputs(1, sum(LENGTHS), 2, 1, 3, 4, gated=True, seed=seed) for seed in (0, 1))
    out, _ = run(first, backend, cu_seqlens=BORDERS)
    for n in thinned((3, 1, 2, 6), 2):
        kept = torch.ones(sum(LENGTHS), dtype=torch.bool)
        kept[BORDERS[n] : BORDERS[n + 1]] = False
        changed = {
            name: torch.where(kept.view(1, -1, *[1] * (t.dim() - 2)), t, second[name]) for name, t in first.items()
        }
        other, _ = run(changed, backend, cu_seqlens=BORDERS)
        assert torch.equal(other.cpu()[:, kept], out.cpu()[:, kept])
        assert not torch.equal(other.cpu()[:, ~kept], out.cpu()[:, ~kept])


MASKS = {"left": lambda t: t >= 23, "right": lambda t: t < 61, "holes": lambda t: (t % 7 < 4) & (t > 2)}


@pytest.mark.parametrize("mode", thinned(MODES, 3))
@pytest.mark.parametrize("mask", MASKS)
def test_attention_mask(mask, mode, backend):
    """A masked token leaves no trace, whatever it holds; a second row is not masked."""
    tensors, options = mode_inputs(mode, 2, 80, 2, 1, 4, 3)
    tensors = rounded(tensors, DTYPES[backend])
    seen = torch.stack([MASKS[mask](torch.arange(80)), torch.ones(80, dtype=torch.bool)])
    dirty = {n: t.clone() for n, t in tensors.items()}
    for name in ("theta", "v"):
        dirty[name][~seen] *= 1e4
    found = differentiate(lambda t, **o: run(t, backend, **o), dirty, **options, attention_mask=seen.long())
    for row in (0, 1):
        alone = {n: t[row, seen[row]][None] for n, t in tensors.items()}
        out, (_, mean) = definition(alone, **options)
        close(found["out"][row, seen[row]][None], out, TOLERANCES[DTYPES[backend]])
        close(found["end mean"][row : row + 1], mean, TOLERANCES[DTYPES[backend]])
    for name in ("theta", "v"):
        assert not found[name][~seen].any() and found[name][seen].any()
    expected = differentiate(definition, tensors, **options, attention_mask=seen)
    all_close(found, expected, TOLERANCES[DTYPES[backend]])


@pytest.mark.parametrize("mode", thinned(MODES, 5))
@pytest.mark.parametrize("at", thinned([64, 17, 1, 63, 65, 129], 3))
def test_causality(at, mode, backend):
    first, options = mode_inputs(mode, 1, 130, 2, 1, 4, 3)
    second, _ = mode_inputs(mode, 1, 130, 2, 1, 4, 3, seed=1)
    steep = second | dict(theta=second["theta"] + 1000)
    first["theta"][:, :3, :, ::2] = EMPTY  # latents start later than the chunk
    out, _ = run(first, backend, **options)
    for later in (second, steep):
        changed = {n: torch.cat([t[:, :at], later[n][:, at:]], 1) for n, t in first.items()}
        other, _ = run(changed, backend, **options)
        assert torch.equal(other[:, :at], out[:, :at])
        assert not torch.equal(other[:, at:], out[:, at:])


def test_the_same_bits_every_time(backend):
    tensors = inputs(1, 300, 2, 1, 5, 3, gated=True, state=True)
    first, second = (differentiate(lambda t: run(t, backend, torch.float32), tensors) for _ in range(2))
    assert all(torch.equal(x, second[n]) for n, x in first.items())


@pytest.mark.parametrize("scale", [1, 100])
@pytest.mark.parametrize("options", [dict(), dict(use_mass=True), dict(use_mass=True, mass_length=3)])
def test_rows_are_distributions(options, scale, backend):
    tensors = inputs(1, 80, 4, 2, 5, 2, gated=True, scale=scale)
    ones = tensors | {n: torch.ones_like(tensors[n]) for n in ("v", "gate_value")}
    out, (_, mean) = run(ones, backend, **options)
    tolerance = logit_tolerance(tensors) if backend == "triton" else 1e-10
    torch.testing.assert_close(out.cpu().double(), ones["gate_value"], rtol=0, atol=tolerance)
    torch.testing.assert_close(mean.cpu().double(), torch.ones_like(mean.cpu().double()), rtol=0, atol=tolerance)
    out, _ = run(tensors, backend, **options)
    highest = torch.maximum(tensors["v"].cummax(1).values.repeat_interleave(2, 2), tensors["gate_value"])
    lowest = torch.minimum(tensors["v"].cummin(1).values.repeat_interleave(2, 2), tensors["gate_value"])
    assert (out.cpu() <= highest + 4 * tolerance).all() and (out.cpu() >= lowest - 4 * tolerance).all()


def test_shift_invariance(backend):
    tensors = rounded(inputs(1, 100, 2, 1, 4, 3), torch.float32)
    out, _ = run(tensors, backend)
    shift = torch.tensor([1e3, -1e3, 3, 0])
    shifted, _ = run(tensors | dict(q=tensors["q"] + 7, theta=tensors["theta"] + shift), backend)
    close(shifted, out, 1e-3 if backend == "triton" else 1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_sum_to_zero(mode, backend):
    tensors, options = mode_inputs(mode, 1, 100, 2, 1, 4, 3)
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    out, _ = run(leaves, backend, **options)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (out.cpu() * weight).sum().backward()
    total = leaves["q"].grad.sum(-1)
    if "gate" in leaves:
        total = total + leaves["gate"].grad
    tolerance = 10 * TOLERANCES[DTYPES[backend]]
    assert total.norm() <= tolerance * leaves["q"].grad.norm()
    if not options:  # mass changes with the logits of keys
        assert leaves["theta"].grad.sum(1).norm() <= tolerance * leaves["theta"].grad.norm()


def test_limits(backend):
    tensors = inputs(1, 70, 2, 2, 3, 4, gated=True)
    q, v = tensors["q"], tensors["v"]
    tolerance = TOLERANCES[DTYPES[backend]]
    steps = torch.arange(70.0, dtype=torch.float64)[:, None, None]
    close(run(dict(q=q, theta=1e3 * steps.expand(1, 70, 2, 3), v=v), backend)[0], v, tolerance)
    first, _ = run(dict(q=q, theta=-1e3 * steps.expand(1, 70, 2, 3), v=v), backend)
    close(first, v[:, :1].expand_as(v), tolerance)
    close(run(dict(q=q, theta=torch.zeros_like(q), v=v), backend)[0], v.cumsum(1) / (steps + 1), tolerance)
    open_gate = tensors | dict(gate=torch.full_like(tensors["gate"], 1e4))
    out, _ = run(open_gate, backend)
    assert torch.equal(out.cpu(), tensors["gate_value"].to(DTYPES[backend]))
    closed = tensors | dict(gate=torch.full_like(tensors["gate"], -1e30))
    close(run(closed, backend)[0], run({n: tensors[n] for n in ("q", "theta", "v")}, backend)[0], tolerance)
    # The seed paper's example of why one global maximum is wrong; two latents alike.
    theta = torch.tensor([1.0, 10, 1000]).view(1, 3, 1, 1).expand(-1, -1, -1, 2)
    out, _ = run(dict(q=torch.zeros(1, 3, 1, 2), theta=theta, v=torch.eye(3)[None, :, None]), backend, torch.float32)
    expected = torch.tensor([[1, 0, 0], [1 / (1 + torch.e**9), 1 / (1 + torch.e**-9), 0], [0, 0, 1]])
    torch.testing.assert_close(out[0, :, 0].cpu(), expected)


def test_one_normaliser_is_softmax_over_codes(backend):
    # Hard assignments with use_mass: a token in latent l is a key of score q_l, so weights are softmax over all tokens.
    theta = hard_assignments(1, 70, 1, 4)
    tensors = inputs(1, 70, 2, 1, 4, 3, gated=True) | dict(theta=theta)
    out, _ = run(tensors, backend, use_mass=True)
    code = theta[0, :, 0].argmax(-1)
    scores = tensors["q"][0][:, :, code].transpose(0, 1).masked_fill(~torch.ones(70, 70).tril().bool(), -torch.inf)
    scores = torch.cat([tensors["gate"][0].T[..., None], scores], -1).softmax(-1)
    expected = scores[..., 1:] @ tensors["v"][0, :, 0] + scores[..., :1] * tensors["gate_value"][0].transpose(0, 1)
    close(out[0].transpose(0, 1), expected, TOLERANCES[DTYPES[backend]])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extra", ["mask", "packed", "state"])
def test_gradcheck(mode, extra):
    tensors, options = mode_inputs(mode, 1, 11, 2, 1, 3, 2, state=extra == "state")
    if extra == "mask":
        options["attention_mask"] = torch.tensor([[0.0] * 3 + [1.0] * 8])
    elif extra == "packed":
        options["cu_seqlens"] = torch.tensor([0, 4, 5, 11])

    def function(*args):
        out, state = run(dict(zip(tensors, args, strict=True)), "torch", **options)
        return (out, *state) if extra == "state" else out

    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in tensors.values()])


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
@pytest.mark.parametrize("mode", ["latte", "macchiato", "held mass"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "latents", "dim"),
    [
        (16, 16, 16, 128),
        (8, 4, 16, 256),
        (32, 8, 64, 64),
        (32, 8, 16, 64),
        (32, 8, 128, 64),
        (16, 8, 128, 128),
        (8, 4, 128, 256),
    ],
)
def test_published_sizes(heads, kv_heads, latents, dim, dtype, mode):
    """Loops of several tiles and segments, as models have them, against PyTorch in float64 on the same GPU."""
    g = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, device="cuda")  # noqa: E731
    batch, time = 2, 2000
    options = dict(MODES[mode])
    tensors = dict(
        q=2 * draw(batch, time, heads, latents),
        theta=2 * draw(batch, time, kv_heads, latents),
        v=draw(batch, time, kv_heads, dim),
    )
    if options.pop("gated", False):
        tensors |= dict(gate=draw(batch, time, heads), gate_value=draw(batch, time, heads, dim))
    if "mass_length" in options:
        options["mass_length"] = 512
    tensors = {n: t.to(dtype) for n, t in tensors.items()}
    tensors |= dict(z=draw(batch, kv_heads, latents), mean=draw(batch, kv_heads, latents, dim))
    weights = [
        draw(batch, time, heads, dim).to(dtype),
        draw(batch, kv_heads, latents),
        draw(batch, kv_heads, latents, dim),
    ]
    results = []
    for kind, backend in ((None, "triton"), (None, "triton"), (torch.float64, "torch")):
        leaves = {n: t.to(kind or t.dtype).requires_grad_() for n, t in tensors.items()}
        state = leaves["z"], leaves["mean"]
        given = {n: t for n, t in leaves.items() if n not in STATES}
        out, state = latent_attention(**given, **options, initial_state=state, backend=backend)
        found = (out, *state)
        grads = torch.autograd.grad(
            found, list(leaves.values()), [w.to(x.dtype) for w, x in zip(weights, found, strict=True)]
        )
        results.append([*found, *grads])
    for name, ours, again, exact in zip(("out", "end z", "end mean", *tensors), *results, strict=True):
        assert torch.equal(ours, again), name
        difference, size = (ours.double() - exact).norm(), exact.norm()
        assert difference <= (5e-3 if dtype == torch.bfloat16 else 1e-5) * size, (
            f"{name}: relative error {difference / size:.1e}"
        )


def test_what_the_kernels_cannot_take_goes_through_pytorch():
    for tensors in (
        inputs(1, 6, 2, 1, 1, 4),
        inputs(1, 6, 2, 1, 129, 4),
        inputs(1, 6, 2, 1, 3, 1),
        inputs(1, 6, 2, 1, 3, 257),
    ):
        small = {n: t.float() for n, t in tensors.items()}
        assert latent_attention(**small)[0].isfinite().all()
        with pytest.raises(ValueError, match="latents and no float64"):
            latent_attention(**small, backend="triton")
    with pytest.raises(ValueError, match="float64"):
        latent_attention(**inputs(1, 6, 2, 1, 3, 4), backend="triton")


def test_bad_arguments():
    tensors = inputs(1, 6, 4, 2, 3, 4, gated=True)
    three = {n: tensors[n] for n in ("q", "theta", "v")}
    with pytest.raises(ValueError, match="H a multiple of H_kv"):
        latent_attention(tensors["q"][:, :, :3], tensors["theta"], tensors["v"])
    with pytest.raises(ValueError, match="gate and gate_value"):
        latent_attention(**three, gate=tensors["gate"])
    with pytest.raises(ValueError, match="gate and gate_value"):
        latent_attention(**three, gate_value=tensors["gate_value"])
    with pytest.raises(ValueError, match="cu_seqlens"):
        latent_attention(**three, cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(ValueError, match="batch of 1"):
        latent_attention(**inputs(2, 6, 4, 2, 3, 4), cu_seqlens=torch.tensor([0, 6]))
    state = torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="packed documents start empty"):
        latent_attention(**three, cu_seqlens=torch.tensor([0, 6]), initial_state=state)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(gate=(1, 40, 1)), "gate must be"),
        (dict(gate_value=(1, 40, 1, 3)), "gate must be"),
        (dict(z=(1, 2, 4)), "initial_state must be"),
        (dict(mean=(1, 1, 4, 5)), "initial_state must be"),
    ],
)
def test_shapes_that_do_not_fit_are_named(changed, message):
    shapes = dict(gate=(1, 40, 2), gate_value=(1, 40, 2, 3), z=(1, 1, 4), mean=(1, 1, 4, 3)) | changed
    gate, gate_value, z, mean = (torch.zeros(shape) for shape in shapes.values())
    q, theta, v = torch.zeros(1, 40, 2, 4), torch.zeros(1, 40, 1, 4), torch.zeros(1, 40, 1, 3)
    with pytest.raises(ValueError, match=message):
        latent_attention(q, theta, v, gate=gate, gate_value=gate_value, initial_state=(z, mean))
