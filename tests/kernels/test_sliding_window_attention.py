# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from hf_linattn.kernels.sliding_window_attention import (
    WindowState,
    leaving_window,
    sliding_window_attention,
    sliding_window_attention_reference,
)


def inputs(batch, time, heads, kv_heads, dim, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, dim), (heads, dim), (kv_heads, dim)]
    return [torch.randn(batch, time, *s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("time", [1, 2, 7, 8, 9, 37])
@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_matches_the_definition(time, sinks, softcap):
    q, k, v, q_sink, k_sink = inputs(2, time, 6, 2, 4)
    options = dict(window=8, sinks=sinks, q_sink=q_sink, k_sink=k_sink, softcap=softcap, scale=0.7)
    out, lse, _ = sliding_window_attention(q, k, v, **options)
    expected, expected_lse = sliding_window_attention_reference(q, k, v, **options)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_precision(dtype, tolerance):
    tensors = inputs(1, 70, 4, 2, 16, dtype)
    q, k, v, q_sink, k_sink = tensors
    out, _, _ = sliding_window_attention(q, k, v, window=16, sinks=4, q_sink=q_sink, k_sink=k_sink)
    q, k, v, q_sink, k_sink = (t.double() for t in tensors)
    expected, _ = sliding_window_attention_reference(q, k, v, window=16, sinks=4, q_sink=q_sink, k_sink=k_sink)
    assert out.dtype == dtype
    assert error(out, expected) < tolerance


def test_is_full_attention_when_the_window_covers_everything():
    q, k, v, _, _ = inputs(1, 12, 4, 2, 8)
    out, _, _ = sliding_window_attention(q, k, v, window=12)
    full = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, full.transpose(1, 2))


@pytest.mark.parametrize("cuts", [[1] * 23, [5, 18], [8, 8, 7], [22, 1]])
def test_any_split_gives_the_same(cuts):
    q, k, v, q_sink, k_sink = inputs(2, 23, 4, 2, 4)
    mask = torch.ones(2, 23, dtype=torch.long)
    mask[1, :6] = 0
    expected, expected_lse, final = sliding_window_attention(
        q, k, v, window=5, sinks=3, q_sink=q_sink, k_sink=k_sink, attention_mask=mask
    )
    state, outs, lses, start = None, [], [], 0
    for cut in cuts:
        part = slice(start, start + cut)
        out, lse, state = sliding_window_attention(
            q[:, part], k[:, part], v[:, part], window=5, sinks=3, q_sink=q_sink[:, part], k_sink=k_sink[:, part],
            attention_mask=mask[:, part], initial_state=state,
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
        start += cut
    torch.testing.assert_close(torch.cat(outs, 1), expected)
    torch.testing.assert_close(torch.cat(lses, 1), expected_lse)
    for name in ("key", "value", "valid", "sink_key", "sink_index", "length"):
        torch.testing.assert_close(getattr(state, name), getattr(final, name))


def test_left_padding_changes_nothing():
    q, k, v, q_sink, k_sink = inputs(1, 20, 4, 2, 4)
    alone, _, _ = sliding_window_attention(q, k, v, window=5, sinks=2, q_sink=q_sink, k_sink=k_sink)
    noise = inputs(1, 7, 4, 2, 4, seed=1)
    padded = [torch.cat([n, t], 1) for n, t in zip(noise, (q, k, v, q_sink, k_sink), strict=True)]
    mask = torch.cat([torch.zeros(1, 7), torch.ones(1, 20)], 1)
    out, lse, _ = sliding_window_attention(
        *padded[:3], window=5, sinks=2, q_sink=padded[3], k_sink=padded[4], attention_mask=mask
    )
    torch.testing.assert_close(out[:, 7:], alone)
    assert (out[:, :7] == 0).all() and (lse[:, :7] == -1e30).all()


def test_packed_documents_are_separate_documents():
    lengths = [9, 1, 4, 16, 3]
    q, k, v, q_sink, k_sink = inputs(1, sum(lengths), 4, 2, 4)
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    options = dict(window=5, sinks=3)
    packed, lse, state = sliding_window_attention(q, k, v, q_sink=q_sink, k_sink=k_sink, cu_seqlens=borders, **options)
    assert state is None
    for a, b in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        alone, alone_lse, _ = sliding_window_attention(
            q[:, a:b], k[:, a:b], v[:, a:b], q_sink=q_sink[:, a:b], k_sink=k_sink[:, a:b], **options
        )
        torch.testing.assert_close(packed[:, a:b], alone)
        torch.testing.assert_close(lse[:, a:b], alone_lse)


def test_gradients():
    tensors = [t.requires_grad_() for t in inputs(1, 11, 2, 1, 3)]

    def run(q, k, v, q_sink, k_sink):
        out, lse, _ = sliding_window_attention(q, k, v, window=4, sinks=2, q_sink=q_sink, k_sink=k_sink, softcap=3.0)
        return out, lse

    assert torch.autograd.gradcheck(run, tensors)


def test_future_tokens_do_not_matter():
    q, k, v, _, _ = inputs(1, 30, 4, 2, 4, torch.float32)
    before, _, _ = sliding_window_attention(q, k, v, window=6, sinks=2)
    k[:, 17] += 100
    v[:, 17] = -5
    after, _, _ = sliding_window_attention(q, k, v, window=6, sinks=2)
    assert torch.equal(before[:, :17], after[:, :17])
    assert not torch.equal(before[:, 17], after[:, 17])


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(window=0), "window must be at least 1"),
        (dict(window=4, cu_seqlens=torch.tensor([0, 5])), "cu_seqlens must rise from 0"),
        (dict(window=4, backend="cuda"), "cuda"),
    ],
)
def test_bad_arguments(change, message):
    q, k, v, _, _ = inputs(1, 6, 4, 2, 4)
    with pytest.raises(ValueError, match=message):
        sliding_window_attention(q, k, v, **change)
    with pytest.raises(ValueError, match="multiple of H_kv"):
        sliding_window_attention(q[:, :, :3], k, v, window=2)
