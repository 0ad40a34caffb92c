# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
import itertools

import pytest
import torch

from hf_linattn.kernels.latent_attention import EMPTY, latent_attention, latent_attention_reference
from hf_linattn.kernels.latent_attention.chunked import latent_attention_chunked

MODES = {
    "latte": dict(),
    "macchiato": dict(gated=True),
    "one normaliser": dict(gated=True, use_mass=True),
    "held mass": dict(gated=True, use_mass=True, mass_length=5),
}


def inputs(batch, time, heads, kv_heads, latents, dim, *, gated=False, scale=1.0, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    tensors = dict(
        q=draw(batch, time, heads, latents) * scale,
        theta=draw(batch, time, kv_heads, latents) * scale,
        v=draw(batch, time, kv_heads, dim),
    )
    if gated:
        tensors |= dict(gate=draw(batch, time, heads) * scale, gate_value=draw(batch, time, heads, dim))
    return tensors


def mode_inputs(mode, *shape, **kwargs):
    options = dict(MODES[mode])
    return inputs(*shape, gated=options.pop("gated", False), **kwargs), options


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("time", [1, 2, 5, 16, 37, 70])
def test_matches_the_definition(mode, time):
    tensors, options = mode_inputs(mode, 2, time, 6, 2, 5, 3)
    out, _ = latent_attention(**tensors, **options)
    expected = latent_attention_reference(**tensors, **options)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 2, 16, 64, 128])
def test_chunk_size_does_not_matter(chunk):
    tensors, options = mode_inputs("held mass", 1, 70, 4, 2, 5, 3)
    out, state = latent_attention_chunked(**tensors, **options, chunk=chunk)
    expected, expected_state = latent_attention_chunked(**tensors, **options, chunk=32)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(state, expected_state)


@pytest.mark.parametrize("scale", [1, 10, 100, 1000])
@pytest.mark.parametrize("mode", MODES)
def test_large_logits_in_float32(mode, scale):
    tensors, options = mode_inputs(mode, 1, 130, 2, 1, 8, 4, scale=scale, dtype=torch.float32)
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    out, _ = latent_attention(**leaves, **options)
    expected = latent_attention_reference(**{n: t.detach().double() for n, t in tensors.items()}, **options)
    assert error(out, expected) < 1e-6 * scale + 1e-5
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in leaves.values())


@pytest.mark.parametrize("ramp", [100.0, -100.0, "spike"])
def test_ramps_and_spikes(ramp):
    tensors = inputs(1, 100, 2, 1, 4, 3, dtype=torch.float32)
    if ramp == "spike":
        tensors["theta"][:, 40] += 1000
    else:
        tensors["theta"] += ramp * torch.arange(100.0)[:, None, None]
    out, _ = latent_attention(**tensors)
    expected = latent_attention_reference(**{n: t.double() for n, t in tensors.items()})
    assert error(out, expected) < 1e-4


def test_bfloat16():
    tensors, options = mode_inputs("held mass", 1, 100, 4, 2, 16, 8, dtype=torch.bfloat16)
    out, (z, mean) = latent_attention(**tensors, **options)
    expected = latent_attention_reference(**{n: t.double() for n, t in tensors.items()}, **options)
    assert out.dtype == torch.bfloat16 and z.dtype == mean.dtype == torch.float32
    assert error(out, expected) < 1e-2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cuts", [[1] * 21, [13, 8], [1, 19, 1], [20, 1]])
def test_any_split_gives_the_same(mode, cuts):
    tensors, options = mode_inputs(mode, 2, 21, 4, 2, 3, 4)
    mask = torch.ones(2, 21)
    mask[0, :5] = 0
    expected, final = latent_attention(**tensors, **options, attention_mask=mask)
    state, outs, start = None, [], 0
    for cut in cuts:
        part = {n: t[:, start : start + cut] for n, t in tensors.items()}
        out, state = latent_attention(
            **part, **options, attention_mask=mask[:, start : start + cut], initial_state=state
        )
        outs.append(out)
        start += cut
    torch.testing.assert_close(torch.cat(outs, 1), expected)
    torch.testing.assert_close(state, final)


@pytest.mark.parametrize("mode", MODES)
def test_padding_and_packing(mode):
    lengths = [9, 1, 33, 4]
    tensors, options = mode_inputs(mode, 1, sum(lengths), 4, 2, 3, 4)
    borders = torch.tensor([0, *itertools.accumulate(lengths)])
    packed, state = latent_attention(**tensors, **options, cu_seqlens=borders)
    assert state is None
    torch.testing.assert_close(packed, latent_attention_reference(**tensors, **options, cu_seqlens=borders))
    for a, b in itertools.pairwise(borders.tolist()):
        part = {n: t[:, a:b] for n, t in tensors.items()}
        alone, _ = latent_attention(**part, **options)
        torch.testing.assert_close(packed[:, a:b], alone)
        padded = {
            n: torch.cat([torch.randn_like(t[:, :1]).expand(-1, 6, *t.shape[2:]) * 50, t], 1) for n, t in part.items()
        }
        mask = torch.cat([torch.zeros(1, 6), torch.ones(1, b - a)], 1)
        out, _ = latent_attention(**padded, **options, attention_mask=mask)
        torch.testing.assert_close(out[:, 6:], alone)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extra", ["mask", "packed", "state"])
def test_gradients(mode, extra):
    tensors, options = mode_inputs(mode, 1, 11, 2, 1, 3, 2)
    names = list(tensors)
    leaves = [t.requires_grad_() for t in tensors.values()]
    if extra == "mask":
        options["attention_mask"] = torch.tensor([[0.0] * 3 + [1.0] * 8])
    elif extra == "packed":
        options["cu_seqlens"] = torch.tensor([0, 4, 5, 11])
    else:
        g = torch.Generator().manual_seed(3)
        leaves += [torch.randn(1, 1, 3, generator=g, dtype=torch.float64).requires_grad_()]
        leaves += [torch.randn(1, 1, 3, 2, generator=g, dtype=torch.float64).requires_grad_()]

    def run(*args):
        given = dict(zip(names, args, strict=False))
        initial = args[len(names) :] or None
        out, state = latent_attention(**given, **options, initial_state=initial)
        return (out, *state) if initial else out

    assert torch.autograd.gradcheck(run, leaves)


def test_gradients_with_hard_assignments():
    tensors = inputs(1, 40, 2, 1, 4, 3, gated=True)
    chosen = torch.nn.functional.one_hot(torch.randint(4, (1, 40, 1)), 4).bool()
    tensors["theta"] = torch.where(chosen, 0.0, EMPTY).double()
    leaves = {n: t.requires_grad_(n != "theta") for n, t in tensors.items()}
    wanted = [t for n, t in leaves.items() if n != "theta"]
    results = []
    for run in (lambda **t: latent_attention(**t)[0], latent_attention_reference):
        out = run(**leaves, use_mass=True, mass_length=8)
        results.append((out, torch.autograd.grad((out * torch.linspace(0, 1, 3)).sum(), wanted)))
    torch.testing.assert_close(*results)


def test_rows_are_distributions():
    tensors = inputs(1, 50, 4, 2, 5, 1, gated=True)
    tensors["v"], tensors["gate_value"] = torch.ones_like(tensors["v"]), torch.ones_like(tensors["gate_value"])
    for options in (dict(), dict(use_mass=True), dict(use_mass=True, mass_length=3)):
        out, _ = latent_attention(**tensors, **options)
        torch.testing.assert_close(out, torch.ones_like(out))


def test_shift_invariance_and_zero_gradient_sums():
    tensors = inputs(1, 60, 2, 1, 4, 3)
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    out, _ = latent_attention(**leaves)
    shifted, _ = latent_attention(tensors["q"] + 7, tensors["theta"] + torch.tensor([1e3, -1e3, 3, 0]), tensors["v"])
    torch.testing.assert_close(out, shifted)
    (out * torch.randn_like(out)).sum().backward()
    assert tensors["theta"].grad.sum(1).abs().max() < 1e-10
    assert tensors["q"].grad.sum(-1).abs().max() < 1e-10


def test_limits():
    tensors = inputs(1, 40, 2, 2, 3, 4, gated=True)
    steps = torch.arange(40.0, dtype=torch.float64)[:, None, None]
    v = tensors["v"]
    last, _ = latent_attention(tensors["q"], 1e3 * steps.expand(1, 40, 2, 3), v)
    torch.testing.assert_close(last, v)
    first, _ = latent_attention(tensors["q"], -1e3 * steps.expand(1, 40, 2, 3), v)
    torch.testing.assert_close(first, v[:, :1].expand_as(v))
    mean, _ = latent_attention(tensors["q"][..., :1], torch.zeros(1, 40, 2, 1, dtype=torch.float64), v)
    torch.testing.assert_close(mean, v.cumsum(1) / (steps + 1))
    gated = {**tensors, "gate": torch.full_like(tensors["gate"], 1e4)}
    assert torch.equal(latent_attention(**gated)[0], tensors["gate_value"])
    # The seed paper's example of why one global maximum is wrong.
    out, _ = latent_attention(
        torch.zeros(1, 3, 1, 1), torch.tensor([1.0, 10, 1000]).view(1, 3, 1, 1), torch.eye(3)[None, :, None]
    )
    expected = torch.tensor([[1, 0, 0], [1 / (1 + torch.e**9), 1 / (1 + torch.e**-9), 0], [0, 0, 1]])
    torch.testing.assert_close(out[0, :, 0], expected)


def test_one_normaliser_is_softmax_over_codes():
    # Hard assignments with use_mass: a token in latent l is a key of score q_l, so weights are softmax over all tokens.
    g = torch.Generator().manual_seed(5)
    tensors = inputs(1, 30, 2, 1, 4, 3, gated=True)
    code = torch.randint(4, (30,), generator=g)
    theta = torch.where(torch.nn.functional.one_hot(code, 4).bool(), 0.0, EMPTY).double()[None, :, None]
    out, _ = latent_attention(**{**tensors, "theta": theta}, use_mass=True)
    scores = tensors["q"][0][:, :, code].transpose(0, 1).masked_fill(~torch.ones(30, 30).tril().bool(), -torch.inf)
    scores = torch.cat([tensors["gate"][0].T[..., None], scores], -1).softmax(-1)
    expected = scores[..., 1:] @ tensors["v"][0, :, 0] + scores[..., :1] * tensors["gate_value"][0].transpose(0, 1)
    torch.testing.assert_close(out[0].transpose(0, 1), expected)


def test_bad_arguments():
    tensors = inputs(1, 6, 4, 2, 3, 4, gated=True)
    with pytest.raises(ValueError, match="H a multiple of H_kv"):
        latent_attention(tensors["q"][:, :, :3], tensors["theta"], tensors["v"])
    with pytest.raises(ValueError, match="gate and gate_value"):
        latent_attention(tensors["q"], tensors["theta"], tensors["v"], gate=tensors["gate"])
    with pytest.raises(ValueError, match="cu_seqlens"):
        latent_attention(tensors["q"], tensors["theta"], tensors["v"], cu_seqlens=torch.tensor([0, 9]))
