# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Properties of gated linear attention (papers: GLA, section 7); the oracle is the recurrence in float64.

Triton runs on a GPU, and where TRITON_INTERPRET=1 is set in the interpreter too.
"""

import pytest
import torch
import torch.nn.functional as F
from comparison import BACKENDS, DTYPES, INTERPRETED, all_close, close, device, thinned

from hf_linattn.kernels.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_attention_parallel,
    gated_linear_attention_reference,
)
from hf_linattn.kernels.gated_linear_attention.chunked import gated_linear_attention_chunked

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
GATES = ["channel", "head", "constant", "none"]
NAMES = ("q", "k", "v", "log_decay", "initial_state")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def inputs(batch, time, heads, kv_heads, dim_k, dim_v, *, gate="channel", states=None, seed=0):
    """Arguments in float64; gates with half-lives from a token to a hundred."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    shapes = dict(channel=(batch, time, kv_heads, dim_k), head=(batch, time, kv_heads), constant=(kv_heads,))
    return dict(
        q=draw(batch, time, heads, dim_k),
        k=draw(batch, time, kv_heads, dim_k),
        v=draw(batch, time, kv_heads, dim_v),
        log_decay=None if gate == "none" else F.logsigmoid(2 * draw(*shapes[gate]) + 1) / 2,
        initial_state=draw(batch if states is None else states, kv_heads, dim_k, dim_v),
    )


def rounded(tensors, dtype):
    """The same values as after a cast to `dtype`, in float64; states stay as precise as float32."""
    widths = {n: torch.promote_types(dtype, torch.float32) if n == "initial_state" else dtype for n in tensors}
    return {n: None if t is None else t.to(widths[n]).double() for n, t in tensors.items()}


def run(tensors, backend, dtype=None, **options):
    dtype = dtype or DTYPES[backend]
    states = torch.promote_types(dtype, torch.float32)
    moved = {
        n: None if t is None else t.to(device(backend), states if n == "initial_state" else dtype)
        for n, t in tensors.items()
    }
    options = {n: x.to(device(backend)) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    return gated_linear_attention(**moved, **options, backend=backend)


def differentiate(function, tensors, **options):
    """Output, final state and the gradients of a random function of both, in float64."""
    leaves = {n: None if t is None else t.clone().requires_grad_() for n, t in tensors.items()}
    out, state = function(leaves, **options)
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in (out, state)]
    used = {n: t for n, t in leaves.items() if t is not None}
    grads = torch.autograd.grad([out.cpu().double(), state.cpu().double()], list(used.values()), weights)
    return dict(out=out.detach().cpu().double(), state=state.detach().cpu().double()) | dict(
        zip(used, grads, strict=True)
    )


def reference(tensors, **options):
    return gated_linear_attention_reference(**tensors, **options)


def matches_the_recurrence(tensors, backend, dtype=None, factor=1, **options):
    dtype = dtype or DTYPES[backend]
    tensors = rounded(tensors, dtype)
    found = differentiate(lambda t, **o: run(t, backend, dtype, **o), tensors, **options)
    assert all(x.isfinite().all() for x in found.values())
    all_close(found, differentiate(reference, tensors, **options), factor * TOLERANCES[dtype])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("time", thinned([1, 2, 15, 17, 16, 63, 65, 64, 130], 2))
def test_matches_the_recurrence(time, gate, backend):
    matches_the_recurrence(inputs(2, time, 4, 2, 5, 3, gate=gate, seed=time), backend)


@pytest.mark.parametrize(("heads", "kv_heads"), thinned([(6, 2), (3, 3), (4, 1)], 3))
@pytest.mark.parametrize(("dim_k", "dim_v"), [(1, 1), (5, 60), (60, 5), (16, 100), (100, 16), (128, 64)])
def test_dims_and_heads(dim_k, dim_v, heads, kv_heads, backend):
    matches_the_recurrence(inputs(1, 20, heads, kv_heads, dim_k, dim_v), backend)


@pytest.mark.parametrize(("gate", "dim_k"), [("channel", 8), ("head", 8), ("channel", 72)])
def test_many_chunks(gate, dim_k, backend):
    """With more than 64 key channels, the backward pass takes them in two parts."""
    tensors = inputs(1, 1500, 2, 1, dim_k, 8, gate=gate)
    found = differentiate(lambda t: run(t, backend), rounded(tensors, DTYPES[backend]))
    expected = differentiate(lambda t: run(t, "torch", torch.float64), rounded(tensors, DTYPES[backend]))
    recurrent, _ = reference(rounded(tensors, DTYPES[backend]))
    all_close(found, expected, TOLERANCES[DTYPES[backend]])
    close(expected["out"], recurrent, 1e-10)


def test_the_two_definitions_agree():
    tensors = inputs(2, 40, 3, 3, 5, 4)
    del tensors["initial_state"]
    close(gated_linear_attention_parallel(**tensors), reference(tensors)[0], 1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 16, 32, 64, 128, 256])
def test_chunk_size_does_not_matter(chunk, packed):
    options = dict(scale=0.3, cu_seqlens=torch.tensor([0, 33, 33, 100]) if packed else None)
    tensors = inputs(1, 100, 4, 2, 5, 3, states=3 if packed else None)
    found = differentiate(lambda t: gated_linear_attention_chunked(**t, **options, chunk=chunk), tensors)
    all_close(found, differentiate(reference, tensors, **options), 1e-10)


@pytest.mark.parametrize("gate", GATES)
def test_strided_inputs_and_scale(gate, backend):
    tensors = inputs(2, 20, 4, 2, 5, 3, gate=gate)
    expected, state = reference(rounded(tensors, DTYPES[backend]), scale=0.7)
    strided = {n: t.transpose(1, 2).contiguous().transpose(1, 2) if n in "qkv" else t for n, t in tensors.items()}
    assert not strided["q"].is_contiguous()
    out, final = run(strided, backend, scale=0.7)
    close(out, expected, TOLERANCES[DTYPES[backend]])
    close(final, state, TOLERANCES[DTYPES[backend]])


def split(tensors, start, end):
    """Tokens from `start` to `end`, without initial state."""
    keep = lambda n, t: t if t is None or t.dim() == 1 else t[:, start:end]  # noqa: E731
    return {n: keep(n, t) for n, t in tensors.items() if n != "initial_state"}


@pytest.mark.parametrize("gate", GATES)
def test_split_anywhere(gate, backend):
    tensors = inputs(2, 70, 4, 2, 5, 3, gate=gate)
    tolerance = TOLERANCES[DTYPES[backend]]
    with torch.no_grad():
        out, final = run(tensors, backend)
        for at in thinned((1, 2, 15, 16, 17, 40, 63, 64, 65, 69), 4):
            first, state = run(tensors | split(tensors, 0, at), backend)
            second, state = run(split(tensors, at, 70) | dict(initial_state=state), backend)
            close(torch.cat([first, second], 1), out, tolerance)
            close(state, final, tolerance)


def test_gradients_pass_through_a_carried_state(backend):
    tensors = rounded(inputs(2, 70, 4, 2, 5, 3), DTYPES[backend])

    def in_two(leaves):
        first, state = run(leaves | split(leaves, 0, 37), backend)
        second, state = run(split(leaves, 37, 70) | dict(initial_state=state), backend)
        return torch.cat([first, second], 1), state

    all_close(differentiate(in_two, tensors), differentiate(reference, tensors), TOLERANCES[DTYPES[backend]])


@pytest.mark.parametrize("gate", GATES)
def test_decode_one_token_at_a_time(gate, backend):
    tensors = inputs(2, 66, 4, 2, 5, 3, gate=gate)
    with torch.no_grad():
        expected, final = run(tensors, backend)
        state, outputs = tensors["initial_state"], []
        for t in range(66):
            out, state = run(split(tensors, t, t + 1) | dict(initial_state=state), backend)
            outputs.append(out)
    close(torch.cat(outputs, 1), expected, TOLERANCES[DTYPES[backend]])
    close(state, final, TOLERANCES[DTYPES[backend]])


LENGTHS = (0, 1, 15, 64, 0, 65, 3)
BORDERS = torch.tensor((0, *LENGTHS)).cumsum(0)


@pytest.mark.parametrize("gate", GATES)
def test_packed_documents(gate, backend):
    matches_the_recurrence(
        inputs(1, sum(LENGTHS), 4, 2, 5, 3, gate=gate, states=len(LENGTHS)), backend, cu_seqlens=BORDERS
    )


def test_packed_equals_each_alone(backend):
    tensors = inputs(1, sum(LENGTHS), 4, 2, 5, 3, states=len(LENGTHS))
    out, final = run(tensors, backend, cu_seqlens=BORDERS.int())
    for n, length in enumerate(LENGTHS):
        start, state = int(BORDERS[n]), tensors["initial_state"][n : n + 1]
        if length:
            alone, state = run(split(tensors, start, start + length) | dict(initial_state=state), backend)
            close(out[:, start : start + length], alone, TOLERANCES[DTYPES[backend]])
        close(final[n : n + 1], state, TOLERANCES[DTYPES[backend]])


def test_an_empty_document_passes_its_state_and_gradient(backend):
    tensors = rounded(inputs(1, sum(LENGTHS), 2, 2, 4, 3, states=len(LENGTHS)), DTYPES[backend])
    state = tensors["initial_state"].requires_grad_()
    _, final = run(tensors, backend, cu_seqlens=BORDERS)
    weight = torch.randn(final.shape, generator=torch.Generator().manual_seed(0)).double()
    (grad,) = torch.autograd.grad(final.cpu().double(), state, weight)
    for n in (0, 4):
        assert torch.equal(final[n].detach().cpu().double(), state[n].detach())
        assert torch.equal(grad[n], weight[n])


@pytest.mark.parametrize("gate", ["channel", "head"])
def test_no_leakage_between_documents(gate, backend):
    first, second = (inputs(1, sum(LENGTHS), 4, 2, 5, 3, gate=gate, states=len(LENGTHS), seed=seed) for seed in (0, 1))
    out, final = run(first, backend, cu_seqlens=BORDERS)
    for n in thinned((5, 2, 3), 3):
        start, end = int(BORDERS[n]), int(BORDERS[n + 1])
        changed = {name: t.clone() for name, t in first.items()}
        for name, t in changed.items():
            at = (slice(n, n + 1),) if name == "initial_state" else (slice(None), slice(start, end))
            t[at] = second[name][at]
        other, other_final = run(changed, backend, cu_seqlens=BORDERS)
        kept = torch.ones(sum(LENGTHS), dtype=torch.bool)
        kept[start:end] = False
        documents = torch.arange(len(LENGTHS)) != n
        assert torch.equal(other.cpu()[:, kept], out.cpu()[:, kept])
        assert torch.equal(other_final.cpu()[documents], final.cpu()[documents])
        assert not torch.equal(other_final[n], final[n])


MASKS = {"left": lambda t: t >= 23, "right": lambda t: t < 61, "holes": lambda t: (t % 7 < 4) & (t > 2)}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("mask", MASKS)
def test_attention_mask(mask, gate, backend):
    """A masked token leaves no trace, whatever it holds; a second row is not masked."""
    tensors = rounded(inputs(2, 80, 4, 2, 5, 3, gate=gate), DTYPES[backend])
    seen = torch.stack([MASKS[mask](torch.arange(80)), torch.ones(80, dtype=torch.bool)])
    dirty = {n: None if t is None else t.clone() for n, t in tensors.items()}
    for name in ("q", "k", "v", "log_decay")[: 4 if gate in ("channel", "head") else 3]:
        dirty[name][~seen] *= 1e4
    found = differentiate(lambda t: run(t, backend, attention_mask=seen.long()), dirty)
    for row in (0, 1):
        alone = {
            n: t
            if t is None or t.dim() == 1
            else t[row : row + 1]
            if n == "initial_state"
            else t[row, seen[row]][None]
            for n, t in tensors.items()
        }
        out, state = reference(alone)
        close(found["out"][row, seen[row]][None], out, TOLERANCES[DTYPES[backend]])
        close(found["state"][row : row + 1], state, TOLERANCES[DTYPES[backend]])
    for name in ("k", "log_decay")[: 2 if gate in ("channel", "head") else 1]:
        assert not found[name][~seen].any()
        assert found[name][seen].any()


@pytest.mark.parametrize("strength", [1, 1000])
@pytest.mark.parametrize(("gate", "dim_k"), thinned([("channel", 8), ("head", 8), ("channel", 130)], 2))
def test_bitwise_causality(gate, dim_k, strength, backend):
    first, second = (inputs(1, 130, 2, 1, dim_k, 4, gate=gate, seed=seed) for seed in (0, 1))
    second["log_decay"] = second["log_decay"] * strength
    for dtype in (torch.float32, torch.bfloat16):
        out, _ = run(first, backend, dtype)
        for at in thinned((17, 1, 16, 100, 63, 64, 65, 129), 3):
            changed = {
                n: t if n == "initial_state" else torch.cat([t[:, :at], second[n][:, at:]], 1)
                for n, t in first.items()
            }
            other, _ = run(changed, backend, dtype)
            assert torch.equal(other[:, :at], out[:, :at])
            assert not torch.equal(other[:, at:], out[:, at:])


def test_constant_decay_is_retention(backend):
    """RetNet's decay mask with its rates, and TransNormerLLM's rates in the same formula."""
    tensors = inputs(2, 70, 4, 4, 8, 6)
    heads = torch.arange(4, dtype=torch.float64)
    distance = torch.arange(70)[:, None] - torch.arange(70)
    for log_decay in (torch.log(1 - 2.0 ** (-5 - heads)), -8 * (heads + 1) / 4 * (1 - 3 / 12)):
        tensors |= dict(log_decay=log_decay, initial_state=None)
        t = rounded(tensors, DTYPES[backend])
        decay = torch.where(distance >= 0, torch.exp(t["log_decay"][:, None, None] * distance.clamp(min=0)), 0)
        weights = torch.einsum("bthc,bshc->bhts", t["q"], t["k"]) * decay * 8**-0.5
        expected = torch.einsum("bhts,bshd->bthd", weights, t["v"])
        close(run(tensors, backend)[0], expected, TOLERANCES[DTYPES[backend]])


@pytest.mark.parametrize("normalize", [False, True])
def test_plain_linear_attention(normalize, backend):
    tensors = inputs(2, 70, 4, 2, 5, 3, gate="none") | dict(initial_state=None)
    tensors |= {n: F.elu(tensors[n]) + 1 for n in "qk"}
    t = rounded(tensors, DTYPES[backend])
    weights = torch.einsum("bthc,bshc->bhts", t["q"], t["k"].repeat_interleave(2, 2)).tril()
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights * 5**-0.5
    expected = torch.einsum("bhts,bshd->bthd", weights, t["v"].repeat_interleave(2, 2))
    out, _ = run(tensors, backend, normalize=normalize)
    close(out, expected, TOLERANCES[DTYPES[backend]])


def test_the_normaliser_is_carried(backend):
    tensors = inputs(2, 70, 4, 2, 5, 3) | dict(initial_state=None)
    tensors |= {n: tensors[n].abs() for n in "qk"}
    tolerance = TOLERANCES[DTYPES[backend]]
    out, (state, norm) = run(tensors, backend, normalize=True)
    assert state.shape == (2, 2, 5, 3) and norm.shape == (2, 2, 5)
    first, carried = run(split(tensors, 0, 33), backend, normalize=True)
    options = dict(initial_state=carried, normalize=True, backend=backend)
    rest = {n: t.to(out) for n, t in split(tensors, 33, 70).items()}
    second, (last, last_norm) = gated_linear_attention(**rest, **options)
    for found, expected in ((torch.cat([first, second], 1), out), (last, state), (last_norm, norm)):
        close(found, expected, tolerance)
    ones = tensors | dict(v=torch.ones_like(tensors["v"]))
    close(run(ones, backend, normalize=True)[0], torch.ones(2, 70, 4, 3), tolerance)
    nothing = tensors | dict(k=torch.zeros_like(tensors["k"]))
    assert not run(nothing, backend, normalize=True)[0].any()


def test_linear_in_queries_and_in_values_with_state(backend):
    a, b = inputs(1, 40, 4, 2, 5, 3, seed=0), inputs(1, 40, 4, 2, 5, 3, seed=1)
    tolerance = 10 * TOLERANCES[DTYPES[backend]]
    for linear in (("q",), ("v", "initial_state")):
        other = a | {n: b[n] for n in linear}
        both = a | {n: 2 * a[n] - 3 * b[n] for n in linear}
        close(run(both, backend)[0], 2 * run(a, backend)[0] - 3 * run(other, backend)[0], tolerance)


def test_permutations_and_rescaling(backend):
    tensors = inputs(3, 40, 4, 4, 6, 5)
    tolerance = TOLERANCES[DTYPES[backend]]
    out, final = run(tensors, backend)
    q, k, v, log_decay, state = (tensors[n] for n in NAMES)
    channels, values = torch.tensor([3, 0, 5, 1, 4, 2]), torch.tensor([4, 2, 0, 1, 3])
    permuted = (q[..., channels], k[..., channels], v[..., values], log_decay[..., channels])
    permuted_out, permuted_final = run(
        dict(zip(NAMES, (*permuted, state[:, :, channels][..., values]), strict=True)), backend
    )
    close(permuted_out, out[..., values], tolerance)
    close(permuted_final, final[:, :, channels][..., values], tolerance)
    order = torch.tensor([2, 0, 1])
    close(run({n: t[order] for n, t in tensors.items()}, backend)[0], out[order], tolerance)
    order = torch.tensor([1, 3, 0, 2])
    by_head = {n: t[:, order] if n == "initial_state" else t[:, :, order] for n, t in tensors.items()}
    close(run(by_head, backend)[0], out[:, :, order], tolerance)
    free = tensors | dict(initial_state=None)
    close(run(free | dict(q=7 * q, k=k / 7), backend)[0], run(free, backend)[0], tolerance)


def test_grouped_heads_equal_repeated_ones(backend):
    tensors = inputs(2, 70, 6, 2, 5, 3)
    repeated = {
        n: t if n == "q" else t.repeat_interleave(3, 1 if n == "initial_state" else 2) for n, t in tensors.items()
    }
    out, final = run(tensors, backend)
    expected, state = run(repeated, backend)
    close(out, expected, TOLERANCES[DTYPES[backend]])
    close(final, state[:, ::3], TOLERANCES[DTYPES[backend]])


EXTREME = {
    "-5": lambda g: torch.full_like(g, -5),
    "-30": lambda g: torch.full_like(g, -30),
    "-1000": lambda g: torch.full_like(g, -1000),
    "-1e4": lambda g: torch.full_like(g, -1e4),
    "alternating": lambda g: torch.where(torch.arange(g.shape[1]) % 2 == 0, 0, -1e4)[:, None].expand(g.shape[:3]),
    "one reset": lambda g: torch.where(torch.arange(g.shape[1]) == 37, -1e4, -0.01)[:, None].expand(g.shape[:3]),
    "some channels": lambda g: torch.where(g < g.median(), -1000, -1e-4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["channel", "head"])
@pytest.mark.parametrize("gate", EXTREME)
def test_extreme_gates(gate, kind, dtype, backend):
    tensors = inputs(1, 100, 2, 1, 8, 6)
    values = EXTREME[gate](tensors["log_decay"]).double()
    if kind == "head":
        values = values[..., 0] if values.dim() == 4 else values
    elif values.dim() == 3:
        values = values[..., None].expand_as(tensors["log_decay"])
    tensors["log_decay"] = rounded(dict(log_decay=values), dtype)["log_decay"]
    tensors = rounded(tensors, dtype)
    found = differentiate(lambda t: run(t, backend, dtype), tensors)
    expected = differentiate(reference, tensors)
    assert all(x.isfinite().all() for x in found.values())
    # where the gates close everything, their gradients are nothing but what rounding left of larger terms
    larger = max(expected["q"].norm(), expected["k"].norm())
    gate_error = (found.pop("log_decay") - expected["log_decay"]).norm()
    assert gate_error <= TOLERANCES[dtype] * max(larger, expected.pop("log_decay").norm())
    all_close(found, expected, TOLERANCES[dtype])


def test_some_of_many_chunks_are_strong(backend, monkeypatch):
    """Where programs that look for strong chunks take several each."""
    from hf_linattn.kernels import tiles

    monkeypatch.setattr(tiles, "processors", lambda device: 1)
    tensors = inputs(1, 64 * 10 + 5, 3, 3, 8, 6)  # 33 numbers, eight to a program
    strong = torch.tensor([0, 3, 4, 9]) * 64 + 20
    tensors["log_decay"][:, strong] = -1000
    matches_the_recurrence(tensors, backend)


@pytest.mark.parametrize("processors", [1, 4, 132])
def test_few_programs_look_through_every_number(processors, monkeypatch):
    tiles = pytest.importorskip("hf_linattn.kernels.tiles")
    monkeypatch.setattr(tiles, "processors", lambda device: processors)
    for count in [*range(1, 700), 8192, 17_001, 100_003]:
        (programs,), rounds = tiles.few_programs(count, torch.device("cpu"))
        assert 1 <= rounds <= tiles.MOST_ROUNDS.value and count <= programs * rounds < count + rounds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", GATES)
def test_half_precision(gate, dtype, backend):
    tensors = inputs(1, 130, 2, 1, 16, 24, gate=gate)
    out, state = run(tensors, backend, dtype)
    assert out.dtype == dtype and state.dtype == torch.float32
    matches_the_recurrence(tensors, backend, dtype)


def test_large_states_do_not_overflow_in_float16(backend):
    tensors = {n: torch.full((1, 300, 1, 16), 30.0) for n in "qkv"} | dict(log_decay=None, initial_state=None)
    out, state = run(tensors, backend, torch.float16, scale=1e-5)
    assert state.max() > 65504
    close(out, reference({n: t if t is None else t.double() for n, t in tensors.items()}, scale=1e-5)[0], 1e-2)


def test_a_long_sequence_with_a_long_memory(backend):
    tensors = inputs(1, 16384, 1, 1, 4, 4) | dict(initial_state=None)
    tensors["log_decay"] = -torch.rand_like(tensors["log_decay"]) * 2 * torch.log(torch.tensor(2.0)).double() / 1e5
    tensors = rounded(tensors, torch.float32)
    with torch.no_grad():
        out, state = run(tensors, backend, torch.float32)
        expected, expected_state = reference(tensors)
    close(out[:, -64:], expected[:, -64:], 1e-5)
    close(state, expected_state, 1e-5)


def test_conservation_law(backend):
    """Without initial state and gradient of the final one, the first decay has no effect (papers: GLA, section 2.7)."""
    tensors = rounded(inputs(2, 100, 2, 2, 5, 3), DTYPES[backend]) | dict(initial_state=None)
    leaves = {n: t.requires_grad_() for n, t in tensors.items() if t is not None}
    out, _ = run(leaves, backend)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grads = dict(zip(leaves, torch.autograd.grad(out.cpu().double(), list(leaves.values()), weight), strict=True))
    terms = leaves["q"] * grads["q"] - leaves["k"] * grads["k"]
    assert terms.sum(1).norm() < 10 * TOLERANCES[DTYPES[backend]] * terms.norm()
    assert grads["log_decay"][:, 0].norm() < 10 * TOLERANCES[DTYPES[backend]] * grads["log_decay"].norm()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
@pytest.mark.parametrize("strength", [1 / 16, 10])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim_k", "dim_v"), [(16, 16, 128, 128), (4, 4, 256, 512), (8, 2, 128, 128), (8, 8, 64, 64)]
)
def test_published_sizes_in_bfloat16(heads, kv_heads, dim_k, dim_v, strength):
    """Loops of several tiles and segments, as models have them, against PyTorch in float64 on the same GPU."""
    g = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, device="cuda")  # noqa: E731
    batch, time = 2, 2000
    tensors = [draw(batch, time, n, d).bfloat16() for n, d in ((heads, dim_k), (kv_heads, dim_k), (kv_heads, dim_v))]
    tensors.append((strength * F.logsigmoid(draw(batch, time, kv_heads, dim_k))).bfloat16())
    tensors.append(draw(batch, kv_heads, dim_k, dim_v))
    weights = [draw(batch, time, heads, dim_v).bfloat16(), draw(batch, kv_heads, dim_k, dim_v)]
    results = []
    for dtype, backend in ((None, "triton"), (None, "triton"), (torch.float64, "torch")):
        leaves = [x.to(dtype or x.dtype).requires_grad_() for x in tensors]
        found = gated_linear_attention(*leaves[:4], initial_state=leaves[4], backend=backend)
        grads = torch.autograd.grad(found, leaves, [w.to(x.dtype) for w, x in zip(weights, found, strict=True)])
        results.append([*found, *grads])
    for name, ours, again, exact in zip(("out", "state", *NAMES), *results, strict=True):
        assert torch.equal(ours, again), name
        difference, size = (ours.double() - exact).norm(), exact.norm()
        assert difference <= 5e-3 * size, f"{name}: relative error {difference / size:.1e}"


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
@pytest.mark.parametrize(("heads", "dim_k", "dim_v", "batch"), [(16, 128, 128, 8), (4, 256, 512, 4)])
def test_without_gradients_at_published_sizes(heads, dim_k, dim_v, batch):
    """Rows that fill the GPU unsplit are walked as a whole where no gradient is to come."""
    from hf_linattn.kernels.gated_linear_attention.fused import Recurrence

    g = torch.Generator("cuda").manual_seed(0)
    draw = lambda dim: torch.randn(batch, 1000, heads, dim, generator=g, device="cuda")  # noqa: E731
    tensors = [draw(dim).bfloat16() for dim in (dim_k, dim_k, dim_v)]
    tensors.append((F.logsigmoid(draw(dim_k)) / 16).bfloat16())
    borders = tuple(range(0, 1000 * batch + 1, 1000))
    plans = [Recurrence(tensors[2], heads, dim_k, True, 1.0, borders, alone).plan for alone in (False, True)]
    assert [plan.joined for plan in plans] == [True, False]
    out, state = gated_linear_attention(*tensors)
    exact, exact_state = gated_linear_attention(*(x.double() for x in tensors), backend="torch")
    close(out, exact, 5e-3)
    close(state, exact_state, 5e-3)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="rounding of operands that the interpreter does not do")
@pytest.mark.parametrize("name", [0, 1])
def test_nan_in_queries_and_keys_is_seen_from_its_token_on(name):
    tensors = [torch.randn(1, 64, 2, 64, device="cuda").bfloat16() for _ in range(3)]
    tensors.append(F.logsigmoid(torch.randn(1, 64, 2, 64, device="cuda")).bfloat16())
    tensors[name][0, 10, 0, 0] = torch.nan
    out, _ = gated_linear_attention(*tensors)
    assert out[:, :10].isfinite().all() and out[:, 10, 0].isnan().all()


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_nothing_is_loaded_ahead_where_shared_memory_is_small(dim):
    fused = pytest.importorskip("hf_linattn.kernels.gated_linear_attention.fused")
    few, many = (fused._launch(dim, dim, 2, ample) for ample in (False, True))
    assert few.walk["num_stages"] == few.gradients["num_stages"] == 1
    assert (many.walk["num_stages"], many.gradients["num_stages"]) == (2, 3)


def test_the_same_bits_every_time(backend):
    tensors = inputs(1, 130, 4, 2, 5, 3)
    first, second = (differentiate(lambda t: run(t, backend, torch.float32), tensors) for _ in range(2))
    assert all(torch.equal(x, second[n]) for n, x in first.items())


def test_one_result_may_go_unused(backend):
    """Gradients of the output alone and of the final state alone add up."""
    tensors = rounded(inputs(1, 70, 2, 1, 5, 3), DTYPES[backend])
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    both = differentiate(lambda t: run(t, backend), {n: t.detach() for n, t in tensors.items()})
    g = torch.Generator().manual_seed(1)  # the weights of `differentiate`
    alone = []
    for result in (0, 1):
        value = run(leaves, backend)[result].cpu().double()
        weight = torch.randn(value.shape, generator=g, dtype=torch.float64)
        alone.append(torch.autograd.grad(value, list(leaves.values()), weight, allow_unused=True))
    for name, first, second in zip(leaves, *alone, strict=True):
        close(first if second is None else first + second, both[name], TOLERANCES[DTYPES[backend]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=(1, 0, 4, 5), k=(1, 0, 2, 5), v=(1, 0, 2, 3), log_decay=(1, 0, 2, 5)), "T at least 1"),
        (dict(q=(1, 8, 3, 5)), "multiple of H_kv"),
        (dict(k=(1, 8, 2, 4)), r"k \(1, 8, 2, 4\)"),
        (dict(k=(1, 7, 2, 5)), r"k \(1, 7, 2, 5\)"),
        (dict(v=(1, 7, 2, 3)), r"v \(1, 7, 2, 3\)"),
        (dict(log_decay=(1, 8, 4, 5)), r"log_decay \(1, 8, 4, 5\)"),
        (dict(log_decay=(1, 8, 2, 1)), r"log_decay \(1, 8, 2, 1\)"),
        (dict(log_decay=(4,)), r"log_decay \(4,\)"),
        (dict(initial_state=(1, 4, 5, 3)), r"got \(1, 4, 5, 3\)"),
        (dict(initial_state=(1, 2, 3, 5)), r"got \(1, 2, 3, 5\)"),
        (dict(cu_seqlens=torch.tensor([0, 3, 7])), r"\[0, 3, 7\]"),
        (dict(cu_seqlens=torch.tensor([0, 3, 8])), r"initial_state must be .* \(2, 2, 5, 3\)"),
        (dict(backend="cuda"), "unknown backend 'cuda'"),
    ],
)
def test_errors_name_the_value(change, message):
    arguments = inputs(1, 8, 4, 2, 5, 3)
    arguments |= {n: torch.zeros(x) if isinstance(x, tuple) else x for n, x in change.items()}
    with pytest.raises(ValueError, match=message):
        gated_linear_attention(**arguments)


def test_the_printed_listing_is_another_function():
    """The paper's listing adds a chunk's own product to the state it reads and leaves chunk 0's out (errata 4 and 5)."""
    tensors = inputs(1, 48, 1, 1, 4, 3) | dict(initial_state=None)
    expected, _ = reference(tensors)
    q, k, v, g = (tensors[n][0, :, 0].unflatten(0, (3, 16)) for n in NAMES[:4])
    total = g.cumsum(1)
    inside = torch.cat([reference(split(tensors, at, at + 16))[0] for at in (0, 16, 32)], 1)[0, :, 0]
    state, outputs = torch.zeros(4, 3, dtype=torch.float64), [torch.zeros(16, 3, dtype=torch.float64)]
    for n in (1, 2):
        own = (k[n] * (total[n, -1:] - total[n]).exp()).T @ v[n]
        state = total[n, -1].exp()[:, None] * state + own
        outputs.append(0.5 * (q[n] * (total[n] - total[n, :1]).exp()) @ state)
    listing = (inside + torch.cat(outputs)).unflatten(0, (3, 16))
    error = (listing - expected[0, :, 0].unflatten(0, (3, 16))).norm(dim=(1, 2))
    assert error[0] < 1e-12 and (error[1:] > 0.1).all()
