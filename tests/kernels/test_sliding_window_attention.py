# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Sliding-window attention against its definition, a dense mask in float64.

Triton runs on a GPU, and where TRITON_INTERPRET=1 is set in the interpreter too.
"""

import dataclasses

import pytest
import torch
from comparison import BACKENDS, DTYPES, INTERPRETED, all_close, close, device, thinned

import hf_linattn.kernels.sliding_window_attention as operator
from hf_linattn.kernels.sliding_window_attention import (
    WindowState,
    leaving_window,
    sliding_window_attention,
    sliding_window_attention_reference,
)

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
NAMES = ("q", "k", "v", "q_sink", "k_sink")
PADDING = dict(left=[0] * 37 + [1] * 43, right=[1] * 60 + [0] * 20, inside=[1, 0, 1] + [0, 1, 1, 0, 0, 1, 1] * 11)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def inputs(batch, time, heads, kv_heads, dim, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, dim), (heads, dim), (kv_heads, dim)]
    return {
        n: torch.randn(batch, time, *s, generator=g, dtype=torch.float64) for n, s in zip(NAMES, shapes, strict=True)
    }


def split(tensors, start, stop):
    return {n: t[:, start:stop] for n, t in tensors.items()}


def run(tensors, backend, dtype=None, **options):
    """Output, log-sum-exp and state."""
    moved = {n: t.to(device(backend), dtype or DTYPES[backend]) for n, t in tensors.items()}
    options = {n: x.to(device(backend)) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    return sliding_window_attention(**moved, **options, backend=backend)


def differentiate(function, tensors):
    """Output, log-sum-exp and the gradients of a random function of both, in float64; rows that see nothing have none."""
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    out, lse = function(leaves)[:2]
    out, lse = out.cpu().double(), lse.cpu().double()
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in (out, lse)]
    grads = torch.autograd.grad([out, lse], list(leaves.values()), weights, allow_unused=True)
    grads = [torch.zeros_like(t) if x is None else x for x, t in zip(grads, leaves.values(), strict=True)]
    assert ((lse < -1e29) == (out == 0).all(-1)).all()
    found = dict(out=out.detach(), lse=lse.detach().where(lse > -1e29, 0)) | dict(zip(leaves, grads, strict=True))
    assert all(x.isfinite().all() for x in found.values())
    return found


def matches_the_definition(tensors, backend, dtype=None, **options):
    dtype = dtype or DTYPES[backend]
    tensors = {n: t.to(dtype).double() for n, t in tensors.items()}
    found = differentiate(lambda t: run(t, backend, dtype, **options), tensors)
    expected = differentiate(lambda t: sliding_window_attention_reference(**t, **options), tensors)
    all_close(found, expected, TOLERANCES[dtype])


@pytest.mark.parametrize("time", thinned([1, 7, 2, 37, 9, 8, 40], 2))
@pytest.mark.parametrize("sinks", thinned([0, 4, 1], 2))
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_matches_the_definition(time, sinks, softcap, backend):
    tensors = inputs(2, time, 4, 2, 4)
    matches_the_definition(tensors, backend, window=8, sinks=sinks, softcap=softcap, scale=0.7)


@pytest.mark.parametrize(
    ("window", "sinks"), thinned([(w, s) for s in (0, 3) for w in (1, 64, 5, 128, 100, 200, 50)], 2)
)
def test_windows(window, sinks, backend):
    matches_the_definition(inputs(1, 150, 2, 1, 8), backend, window=window, sinks=sinks)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 1, 1), (3, 3, 5), (2, 1, 40), (2, 2, 64), (2, 1, 96), (4, 2, 128)]
)
def test_dims_and_heads(heads, kv_heads, dim, backend):
    matches_the_definition(inputs(1, 40, heads, kv_heads, dim), backend, window=9, sinks=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "time"), [(16, 130), (256, 40)])
def test_half_precision(dim, time, dtype, backend):
    tensors = inputs(1, time, 2, 1, dim)
    out, lse, _ = run(tensors, backend, dtype, window=16, sinks=4)
    assert out.dtype == dtype and lse.dtype == torch.float32
    matches_the_definition(tensors, backend, dtype, window=16, sinks=4)


@pytest.mark.parametrize("sinks", [0, 2])
def test_sinks_are_scored_by_the_queries_themselves_where_none_are_given(sinks, backend):
    tensors = {n: t for n, t in inputs(1, 70, 2, 1, 8).items() if "sink" not in n}
    matches_the_definition(tensors, backend, window=6, sinks=sinks, softcap=3.0)


def test_many_sinks(backend):
    matches_the_definition(inputs(1, 90, 2, 1, 4), backend, window=3, sinks=40)


def test_large_scores(backend):
    """The softmax is that of the largest score, and the cap holds scores below itself."""
    tensors = inputs(1, 70, 2, 1, 8)
    tensors = {n: t * 30 for n, t in tensors.items()}
    for softcap in (None, 5.0):
        out, lse, _ = run(tensors, backend, window=9, sinks=2, softcap=softcap)
        expected, expected_lse = sliding_window_attention_reference(**tensors, window=9, sinks=2, softcap=softcap)
        close(out, expected, 1e-4)
        close(lse, expected_lse, 1e-5)
    assert lse.max() <= 5 + torch.tensor(11.0).log()


def test_is_full_attention_when_the_window_covers_everything(backend):
    tensors = inputs(1, 40, 4, 2, 8)
    out, _, _ = run(tensors, backend, window=40)
    full = torch.nn.functional.scaled_dot_product_attention(
        *(tensors[n].transpose(1, 2) for n in "qkv"), is_causal=True, enable_gqa=True
    )
    close(out, full.transpose(1, 2), TOLERANCES[DTYPES[backend]])


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("causal", [True, False])
def test_padding(padding, causal, backend):
    mask = torch.tensor([PADDING[padding], [1] * 80])
    options = dict(window=9, sinks=4 if causal else 0, attention_mask=mask, causal=causal)
    tensors = inputs(2, 80, 2, 1, 8)
    matches_the_definition(tensors, backend, **options)
    ignored = (mask == 0)[..., None, None]
    noisy = {n: t if n in ("q", "q_sink") else torch.where(ignored, 1e3, t) for n, t in tensors.items()}
    for clean, dirty in zip(run(tensors, backend, **options)[:2], run(noisy, backend, **options)[:2], strict=True):
        assert torch.equal(clean, dirty)


def test_left_padding_changes_nothing(backend):
    tensors, noise = inputs(1, 20, 4, 2, 4), inputs(1, 7, 4, 2, 4, seed=1)
    alone, _, _ = run(tensors, backend, window=5, sinks=2)
    padded = {n: torch.cat([noise[n], t], 1) for n, t in tensors.items()}
    mask = torch.cat([torch.zeros(1, 7), torch.ones(1, 20)], 1)
    out, lse, _ = run(padded, backend, window=5, sinks=2, attention_mask=mask)
    close(out[:, 7:], alone, TOLERANCES[DTYPES[backend]])
    assert (out[:, :7] == 0).all() and (lse[:, :7] == -1e30).all()


@pytest.mark.parametrize("causal", [True, False])
def test_rows_that_see_nothing(causal, backend):
    mask = torch.ones(2, 70)
    mask[0] = 0
    tensors = inputs(2, 70, 2, 1, 4)
    found = differentiate(lambda t: run(t, backend, window=9, attention_mask=mask, causal=causal), tensors)
    assert not any(x[0].any() for x in found.values())
    assert all(found[n][1].any() for n in "qkv")
    out, lse, _ = run(tensors, backend, window=9, attention_mask=mask, causal=causal)
    assert not out[0].any() and (lse[0] == -1e30).all() and (lse[1] > -1e29).all()


@pytest.mark.parametrize("lengths", [[9, 1, 4, 16, 3], [0, 70, 0, 0, 1, 1, 1, 63, 30, 0]])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents_are_separate_documents(lengths, causal, backend):
    tensors = inputs(1, sum(lengths), 2, 1, 4)
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    options = dict(window=5, sinks=3 if causal else 0, causal=causal)
    matches_the_definition(tensors, backend, cu_seqlens=borders, **options)
    packed, lse, state = run(tensors, backend, cu_seqlens=borders, **options)
    assert state is None
    for a, b in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        if a < b:
            alone, alone_lse = sliding_window_attention_reference(**split(tensors, a, b), **options)
            close(packed[:, a:b], alone, TOLERANCES[DTYPES[backend]])
            close(lse[:, a:b], alone_lse, TOLERANCES[DTYPES[backend]])


@pytest.mark.parametrize("window", thinned([1, 2, 64, 9, 300], 2))
def test_both_directions(window, backend):
    matches_the_definition(inputs(1, 140, 2, 1, 8), backend, window=window, softcap=3.0, causal=False)


def test_a_window_of_both_directions_reads_the_same_backwards(backend):
    tensors = inputs(1, 80, 2, 1, 4)
    out, _, state = run(tensors, backend, window=10, causal=False)
    turned, _, _ = run({n: t.flip(1) for n, t in tensors.items()}, backend, window=10, causal=False)
    assert state is None
    close(turned.flip(1), out, TOLERANCES[DTYPES[backend]])


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("cuts", thinned([[5, 18, 27], [1] * 4 + [46], [8, 2, 40], [49, 1]], 2))
def test_any_split_gives_the_same(cuts, sinks, backend):
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[1, :6] = mask[0, 30:33] = 0
    options = dict(window=5, sinks=sinks)
    whole_state, state = [None], None

    def whole(tensors):
        out, lse, whole_state[0] = run(tensors, backend, attention_mask=mask, **options)
        return out, lse

    def pieces(tensors):
        nonlocal state
        state, results, start = None, [], 0
        for stop in torch.tensor(cuts).cumsum(0).tolist():
            piece = split(tensors, start, stop)
            out, lse, state = run(piece, backend, attention_mask=mask[:, start:stop], initial_state=state, **options)
            results.append((out, lse))
            start = stop
        return [torch.cat(x, 1) for x in zip(*results, strict=True)]

    tensors = inputs(2, 50, 2, 1, 4)
    all_close(differentiate(pieces, tensors), differentiate(whole, tensors), TOLERANCES[DTYPES[backend]])
    for name in ("key", "value", "valid", "sink_key", "sink_value", "sink_index", "length"):
        assert torch.equal(getattr(state, name), getattr(whole_state[0], name))


def test_gradients():
    tensors = [t.requires_grad_() for t in inputs(1, 11, 2, 1, 3).values()]

    def attend(q, k, v, q_sink, k_sink):
        out, lse, _ = sliding_window_attention(q, k, v, window=4, sinks=2, q_sink=q_sink, k_sink=k_sink, softcap=3.0)
        return out, lse

    assert torch.autograd.gradcheck(attend, tensors)


@pytest.mark.parametrize("used", ["out", "lse"])
def test_one_result_may_go_unused(used, backend):
    tensors = {n: t.float().double() for n, t in inputs(1, 70, 2, 1, 4).items()}
    options = dict(window=6, sinks=2)
    results = []
    for function in (
        lambda t: run(t, backend, **options),
        lambda t: sliding_window_attention_reference(**t, **options),
    ):
        leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
        value = function(leaves)[used == "lse"].cpu().double()
        grads = torch.autograd.grad(value.square().sum(), list(leaves.values()), allow_unused=True)
        results.append(
            {n: torch.zeros_like(leaves[n]) if x is None else x for n, x in zip(leaves, grads, strict=True)}
        )
    all_close(*results, TOLERANCES[DTYPES[backend]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitwise_causality(dtype, backend):
    first, second = inputs(1, 140, 2, 1, 8), inputs(1, 140, 2, 1, 8, seed=1)
    before, lse, _ = run(first, backend, dtype, window=20, sinks=2)
    for at in thinned((64, 17, 1, 63, 65, 128, 139), 3):
        changed = {n: torch.cat([t[:, :at], 100 * second[n][:, at:]], 1) for n, t in first.items()}
        after, after_lse, _ = run(changed, backend, dtype, window=20, sinks=2)
        assert torch.equal(before[:, :at], after[:, :at]) and torch.equal(lse[:, :at], after_lse[:, :at])
        assert not torch.equal(before[:, at], after[:, at])


def test_the_same_bits_every_time(backend):
    tensors = inputs(1, 100, 2, 1, 8)
    first, second = (differentiate(lambda t: run(t, backend, window=20, sinks=2), tensors) for _ in range(2))
    assert all(torch.equal(x, second[n]) for n, x in first.items())


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["plain", "sinks", "masked", "packed", "both directions"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 16, 128), (8, 2, 128), (32, 8, 64), (8, 4, 256)])
def test_published_sizes(heads, kv_heads, dim, kind, dtype):
    """Many tiles, as models have them, against PyTorch in float64 on the same GPU, twice."""
    if dim > operator.MAX_DIM[dtype]:
        pytest.skip("left to PyTorch")
    g = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, device="cuda").to(dtype)  # noqa: E731
    batch, time = 1 if kind == "packed" else 2, 2000
    tensors = [draw(batch, time, n, dim) for n in (heads, kv_heads, kv_heads, heads, kv_heads)]
    options = dict(window=128)
    if kind in ("sinks", "masked", "packed"):
        options |= dict(sinks=4)
    if kind == "masked":
        options |= dict(attention_mask=torch.rand(batch, time, generator=g, device="cuda") > 0.2, softcap=3.0)
    elif kind == "packed":
        options |= dict(cu_seqlens=torch.tensor([0, 700, 703, 703, 1500, 2000], device="cuda"))
    elif kind == "both directions":
        options |= dict(causal=False)
    weights = [draw(batch, time, heads, dim), draw(batch, time, heads).float()]
    results = []
    for exact in (False, False, True):
        leaves = [(x.double() if exact else x.clone()).requires_grad_() for x in tensors]
        found = sliding_window_attention(
            *leaves[:3],
            q_sink=leaves[3],
            k_sink=leaves[4],
            backend="torch" if exact else "triton",
            **options,
        )[:2]
        grads = torch.autograd.grad(
            found, leaves, [w.to(x.dtype) for w, x in zip(weights, found, strict=True)], allow_unused=True
        )
        results.append(
            [*found, *(torch.zeros_like(x) if y is None else y for x, y in zip(leaves, grads, strict=True))]
        )
    tolerance = 5e-3 if dtype == torch.bfloat16 else 1e-5
    for name, ours, again, exact in zip(("out", "lse", *NAMES), *results, strict=True):
        assert torch.equal(ours, again), name
        difference, size = (ours.double() - exact).norm(), exact.norm()
        assert difference <= tolerance * size, f"{name}: relative error {difference / size:.1e}"


def test_a_step_compiles_without_a_break():
    tensors = {n: t.float() for n, t in inputs(1, 5, 2, 1, 4).items()}
    _, _, state = sliding_window_attention(**split(tensors, 0, 4), window=3, sinks=1)

    def step(q, k, v, q_sink, k_sink, state):
        return sliding_window_attention(q, k, v, window=3, sinks=1, q_sink=q_sink, k_sink=k_sink, initial_state=state)[
            :2
        ]

    last = split(tensors, 4, 5).values()
    compiled = torch.compile(step, fullgraph=True, backend="eager")(*last, state)
    for found, expected in zip(compiled, step(*last, state), strict=True):
        assert torch.equal(found, expected)


def test_tokens_leave_the_window_once_and_sinks_never():
    k = torch.arange(14.0).view(1, 14, 1, 1)
    valid = torch.ones(1, 14, dtype=torch.bool)
    valid[:, :2] = False
    _, _, after = sliding_window_attention(k, k, k, window=4, sinks=3, attention_mask=valid)
    assert after.sink_index.tolist() == [[2, 3, 4]]
    (late,), leaves = leaving_window(
        (k,), (k.new_zeros(1, 4, 1, 1),), valid, WindowState.empty(k, 4, 3), after.sink_index
    )
    assert late[leaves].flatten().tolist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(("time", "window", "sinks"), [(10, 4, 3), (3, 4, 0), (2, 5, 4), (5, 5, 5), (1, 1, 1)])
def test_state_of_whole_rows_is_the_general_one(time, window, sinks):
    k, v, k_sink = torch.randn(3, 2, time, 2, 3, dtype=torch.float64)
    valid = torch.ones(2, time, dtype=torch.bool)
    general = WindowState.empty(k, window, sinks).with_sinks(k_sink, v, valid).advance(k, v, valid)
    short = WindowState.of_whole_rows(k, v, k_sink, window, sinks)
    for field in dataclasses.fields(WindowState):
        ours, expected = getattr(short, field.name), getattr(general, field.name)
        assert ours.dtype == expected.dtype and torch.equal(ours, expected), field.name
        # a cache that held a view would keep the whole prompt
        assert not ours.numel() or ours.untyped_storage().nbytes() == ours.nbytes, field.name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(window=0), "window must be at least 1"),
        (dict(window=4, cu_seqlens=torch.tensor([0, 5])), "cu_seqlens must rise from 0"),
        (dict(window=4, backend="cuda"), "cuda"),
        (dict(window=4, causal=False, sinks=2), "causal=False .* sinks=2"),
        (
            dict(window=4, causal=False, initial_state=WindowState.empty(torch.zeros(1, 1, 2, 4), 4, 0)),
            "initial_state",
        ),
        (dict(window=4, backend="triton"), "no float64|float32, got 4 in torch.float64"),
    ],
)
def test_bad_arguments(change, message):
    tensors = inputs(1, 6, 4, 2, 4)
    q, k, v = (tensors[n] for n in "qkv")
    with pytest.raises(ValueError, match=message):
        sliding_window_attention(q, k, v, **change)
    for shorter in (q[:, :, :3], q[:, :0]):
        with pytest.raises(ValueError, match="at least 1 and H a multiple of H_kv"):
            sliding_window_attention(shorter, k[:, : shorter.shape[1]], v[:, : shorter.shape[1]], window=2)


def test_a_decoding_step_compiles_without_a_break(backend):
    tensors = {n: t.to(device(backend), DTYPES[backend]) for n, t in inputs(1, 23, 4, 2, 8).items()}
    first, step = ({n: t[:, part] for n, t in tensors.items()} for part in (slice(20), slice(20, 23)))

    def run(tensors, state):
        return sliding_window_attention(**tensors, window=5, sinks=2, initial_state=state, backend=backend)

    state = run(first, None)[2]
    expected = run(step, state)
    found = torch.compile(run, fullgraph=True, backend="eager")(step, state)
    close(found[0], expected[0], 1e-5)
    close(found[1], expected[1], 1e-5)
    assert torch.equal(found[2].key, expected[2].key)
