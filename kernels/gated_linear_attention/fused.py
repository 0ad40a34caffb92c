# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Gated linear attention in Triton: forward, backward and the decode step (papers: GLA, sections 2.5, 2.7, 5 and 9).

Forward: `_scores` (weights inside each chunk), `_totals` and `_join` (state at the start of each segment, a run of chunks),
`_walk` (outputs, one segment a program, state in registers). Backward: the same four in reverse give the gradient of v and
the gradients D of the states, a walk without outputs gives the states S again, and `_gradients` the rest, chunk by chunk.

The tokens of all rows lie end to end; tables say where chunks, segments and documents begin. Logarithms of decays are sums of
consecutive gates, formed by products with matrices of zeros and ones, never differences of long sums. Only blocks that share
one anchor exponentiate a positive number, and only while it is below BOUND; stronger gates halve the block (section 5.4 d).
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

CHUNK = 64
SPACING = 128  # tokens from one stored state to the next in the backward pass
MAX_DIM_K = 256  # the walk holds all key channels of a state in registers
INTERPRETED = triton.knobs.runtime.interpret
MAX_STEPS = 16  # so many tokens, without gradients, are cheaper one by one
BOUND = tl.constexpr(86.0)  # in log2: leaves room below float32's 127
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(pointer, tokens, heads, head, columns, width, valid):
    """Rows `tokens` (int64) of one head of a (tokens, heads, width) tensor, zero where invalid."""
    offsets = (tokens[:, None] * heads + head) * width + columns[None, :]
    return tl.load(pointer + offsets, mask=valid[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _store(pointer, x, tokens, heads, head, columns, width, valid):
    offsets = (tokens[:, None] * heads + head) * width + columns[None, :]
    tl.store(pointer + offsets, x.to(pointer.dtype.element_ty), mask=valid[:, None] & (columns < width)[None, :])


@triton.jit
def _dot(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a.to(OPERAND), b.to(OPERAND), input_precision=PRECISION)


@triton.jit
def _gate_sums(mask, g, OPERAND: tl.constexpr, EXACT: tl.constexpr):
    """log2 of decays, (rows, channels): zeros and ones (rows, tokens) times gates (tokens, channels), to float32 precision."""
    if g.dtype == tl.bfloat16 and OPERAND == tl.bfloat16:
        sums = tl.dot(mask.to(tl.bfloat16), g)
    else:
        sums = tl.dot(mask.to(tl.float32), g.to(tl.float32), input_precision=EXACT)
    return sums * LOG2E


@triton.jit
def _load_gates(pointer, tokens, heads, head, columns, width, valid, CHANNEL: tl.constexpr):
    """Gates of one head, (tokens, channels), or (tokens,) for one gate per head."""
    if CHANNEL:
        gates = _load(pointer, tokens, heads, head, columns, width, valid)
    else:
        gates = tl.load(pointer + tokens * heads + head, mask=valid, other=0.0).to(tl.float32)
    return gates


@triton.jit
def _upto(g, CHANNEL: tl.constexpr, C: tl.constexpr, OPERAND: tl.constexpr, EXACT: tl.constexpr):
    """Decay from the chunk's start to each row, that row's gate included; (C, channels or 1)."""
    rows = tl.arange(0, C)
    inside = rows[:, None] >= rows[None, :]
    if CHANNEL:
        log = _gate_sums(inside, g, OPERAND, EXACT)
    else:
        log = tl.sum(tl.where(inside, g[None, :], 0.0), 1)[:, None] * LOG2E
    return tl.exp2(log)


@triton.jit
def _after(g, CHANNEL: tl.constexpr, C: tl.constexpr, OPERAND: tl.constexpr, EXACT: tl.constexpr):
    """Decay from each row to the chunk's end, that row's gate excluded; (C, channels or 1)."""
    rows = tl.arange(0, C)
    inside = rows[:, None] < rows[None, :]
    if CHANNEL:
        log = _gate_sums(inside, g, OPERAND, EXACT)
    else:
        log = tl.sum(tl.where(inside, g[None, :], 0.0), 1)[:, None] * LOG2E
    return tl.exp2(log)


@triton.jit
def _pair_decay(g, C: tl.constexpr, EXACT: tl.constexpr):
    """Decay from key row (second index) to query row (first index) for one gate per head; zero above the diagonal."""
    rows = tl.arange(0, C)
    causal = rows[:, None] >= rows[None, :]
    later = tl.where(rows[:, None] > rows[None, :], g[:, None], 0.0)
    return tl.where(causal, tl.exp2(tl.dot(causal.to(tl.float32), later, input_precision=EXACT) * LOG2E), 0.0)


@triton.jit
def _from_anchor(g, size, C: tl.constexpr, OPERAND: tl.constexpr, EXACT: tl.constexpr):
    """log2 of the decay from the first row of each aligned block of `size` rows to each of its rows, <= 0."""
    rows = tl.arange(0, C)
    first = rows // size * size
    return _gate_sums((rows[None, :] > first[:, None]) & (rows[None, :] <= rows[:, None]), g, OPERAND, EXACT)


@triton.jit
def _to_middle(g, size, C: tl.constexpr, OPERAND: tl.constexpr, EXACT: tl.constexpr):
    """Decay between each row and the first row of the late half of its aligned block of `size` rows."""
    rows = tl.arange(0, C)
    middle = rows // size * size + size // 2
    low, high = tl.minimum(rows, middle), tl.maximum(rows, middle)
    return tl.exp2(_gate_sums((rows[None, :] > low[:, None]) & (rows[None, :] <= high[:, None]), g, OPERAND, EXACT))


@triton.jit
def _scores(
    q, k, g, scores, chunks, scale, heads, total_tokens, DIM_K,
    GROUP: tl.constexpr, CHANNEL: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """scale * sum_c q_ic k_jc exp(G_ic - G_jc) for the pairs j <= i of one chunk and query head."""
    n, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunks + 2 * n), tl.load(chunks + 2 * n + 1)
    rows = tl.arange(0, C)
    tokens = (start + rows).to(tl.int64)
    valid = tokens < end
    kv_heads, kv_head = heads // GROUP, head // GROUP
    causal = rows[:, None] >= rows[None, :]
    acc = tl.zeros((C, C), tl.float32)
    for slab in range(0, DIM_K, BK):
        columns = slab + tl.arange(0, BK)
        q_rows = _load(q, tokens, heads, head, columns, DIM_K, valid)
        k_rows = _load(k, tokens, kv_heads, kv_head, columns, DIM_K, valid)
        if CHANNEL:
            q_rows, k_rows = q_rows.to(tl.float32), k_rows.to(tl.float32)
            gates = _load(g, tokens, kv_heads, kv_head, columns, DIM_K, valid)
            size = C
            waiting = C
            pending = rows >= 0
            for _ in range(LEVELS):
                if waiting > 0:
                    log = _from_anchor(gates, size, C, OPERAND, EXACT)
                    decay, growth = tl.exp2(log), tl.exp2(tl.minimum(-log, BOUND))
                    pairs = tl.dot(q_rows * decay, tl.trans(k_rows * growth), input_precision=PRECISION)
                    bounded = tl.min(log, 1) >= -BOUND
                    block = rows // size
                    same = block[:, None] == block[None, :]
                    acc += tl.where(same & causal & (pending & bounded)[:, None], pairs, 0.0)
                    pending = pending & (bounded == 0)
                    waiting = tl.sum(pending.to(tl.int32), 0)
                    if waiting > 0:
                        middle = _to_middle(gates, size, C, OPERAND, EXACT)
                        pairs = tl.dot(q_rows * middle, tl.trans(k_rows * middle), input_precision=PRECISION)
                        late = rows % size >= size // 2
                        acc += tl.where(same & (late & pending)[:, None] & (late == 0)[None, :], pairs, 0.0)
                    size = size // 2
        else:
            acc += _dot(q_rows, tl.trans(k_rows), OPERAND, PRECISION)
    if not CHANNEL:
        acc *= _pair_decay(_load_gates(g, tokens, kv_heads, kv_head, rows, C, valid, False), C, EXACT)
    place = (head.to(tl.int64) * total_tokens + tokens[:, None]) * C + rows[None, :]
    tl.store(scores + place, (acc * scale).to(scores.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _totals(
    writer, value, g, totals, decays, segments, scale, kv_heads, DIM_K, DIM_V,
    WRITERS: tl.constexpr, REVERSE: tl.constexpr, CHANNEL: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What one segment adds to the state, and the log2 of what it keeps of it."""
    n, kv_head = tl.program_id(0), tl.program_id(1)
    tiles = tl.cdiv(DIM_V, BV)
    columns = tl.program_id(2) // tiles * BK + tl.arange(0, BK)
    values = tl.program_id(2) % tiles * BV + tl.arange(0, BV)
    start, end = tl.load(segments + 3 * n), tl.load(segments + 3 * n + 1)
    rows = tl.arange(0, C)
    state = tl.zeros((BK, BV), tl.float32)
    width: tl.constexpr = BK if CHANNEL else 1
    kept = tl.zeros((width,), tl.float32)
    count = tl.cdiv(end - start, C)
    for i in range(count):
        at = count - 1 - i if REVERSE else i
        tokens = (start + at * C + rows).to(tl.int64)
        valid = tokens < end
        gates = _load_gates(g, tokens, kv_heads, kv_head, columns, DIM_K, valid, CHANNEL)
        if REVERSE:
            factor = _upto(gates, CHANNEL, C, OPERAND, EXACT) * scale
        else:
            factor = _after(gates, CHANNEL, C, OPERAND, EXACT)
        log = tl.sum(gates.to(tl.float32), 0) * LOG2E
        kept += log
        state *= tl.exp2(log)[:, None] if CHANNEL else tl.exp2(log)
        for w in range(WRITERS):
            head = kv_head * WRITERS + w
            written = _load(writer, tokens, kv_heads * WRITERS, head, columns, DIM_K, valid) * factor
            v_rows = _load(value, tokens, kv_heads * WRITERS, head, values, DIM_V, valid)
            state += _dot(tl.trans(written), v_rows, OPERAND, PRECISION)
    place = (n * kv_heads + kv_head).to(tl.int64)
    inside = (columns < DIM_K)[:, None] & (values < DIM_V)[None, :]
    tl.store(totals + (place * DIM_K + columns[:, None]) * DIM_V + values[None, :], state, mask=inside)
    if tl.program_id(2) % tiles == 0:
        if CHANNEL:
            tl.store(decays + place * DIM_K + columns, kept, mask=columns < DIM_K)
        else:
            tl.store(decays + place + tl.arange(0, 1), kept)


@triton.jit
def _join(
    totals, decays, initial, final, documents, kv_heads, DIM_K, DIM_V,
    REVERSE: tl.constexpr, CHANNEL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Replace each segment's total by the state that it starts from; the last one is the document's final state."""
    n, kv_head = tl.program_id(0), tl.program_id(1)
    tiles = tl.cdiv(DIM_V, BV)
    columns = tl.program_id(2) // tiles * BK + tl.arange(0, BK)
    values = tl.program_id(2) % tiles * BV + tl.arange(0, BV)
    inside = (columns < DIM_K)[:, None] & (values < DIM_V)[None, :]
    tile = columns[:, None] * DIM_V + values[None, :]
    first, count = tl.load(documents + 2 * n), tl.load(documents + 2 * n + 1)
    place = (n * kv_heads + kv_head).to(tl.int64)
    if initial is None:
        state = tl.zeros((BK, BV), tl.float32)
    else:
        state = tl.load(initial + place * DIM_K * DIM_V + tile, mask=inside, other=0.0)
    for i in range(count):
        segment = first + (count - 1 - i if REVERSE else i)
        at = (segment * kv_heads + kv_head).to(tl.int64)
        total = tl.load(totals + at * DIM_K * DIM_V + tile, mask=inside, other=0.0)
        if CHANNEL:
            keep = tl.exp2(tl.load(decays + at * DIM_K + columns, mask=columns < DIM_K, other=0.0))[:, None]
        else:
            keep = tl.exp2(tl.load(decays + at))
        tl.store(totals + at * DIM_K * DIM_V + tile, state, mask=inside)
        state = state * keep + total
    tl.store(final + place * DIM_K * DIM_V + tile, state, mask=inside)


@triton.jit
def _walk(
    reader, writer, value, g, scores, out, states, initial, final, segments, scale, kv_heads, total_tokens, DIM_K, DIM_V,
    READERS: tl.constexpr, WRITERS: tl.constexpr, REVERSE: tl.constexpr, CHANNEL: tl.constexpr, C: tl.constexpr,
    SPACING: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Carry the state through one segment: out = scores @ value + reader @ state, where out is wanted, and keep states.

    Forward, queries read, keys write and the values are v. In reverse, keys read, queries write, the values are the
    gradients of the output, the scores are transposed, and out is the gradient of v.
    """
    n, kv_head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, BK)
    values = tl.program_id(2) * BV + tl.arange(0, BV)
    inside = (columns < DIM_K)[:, None] & (values < DIM_V)[None, :]
    tile = columns[:, None] * DIM_V + values[None, :]
    start, end, stored = tl.load(segments + 3 * n), tl.load(segments + 3 * n + 1), tl.load(segments + 3 * n + 2)
    place = (n * kv_heads + kv_head).to(tl.int64)
    if initial is None:
        state = tl.zeros((BK, BV), tl.float32)
    else:
        state = tl.load(initial + place * DIM_K * DIM_V + tile, mask=inside, other=0.0)
    rows = tl.arange(0, C)
    count = tl.cdiv(end - start, C)
    for i in range(count):
        at = count - 1 - i if REVERSE else i
        tokens = (start + at * C + rows).to(tl.int64)
        valid = tokens < end
        if states is not None:
            if REVERSE:
                border = (at % (SPACING // C) == SPACING // C - 1) | (at == count - 1)
            else:
                border = at % (SPACING // C) == 0
            if border:
                slot = ((stored + at // (SPACING // C)) * kv_heads + kv_head).to(tl.int64)
                tl.store(states + slot * DIM_K * DIM_V + tile, state.to(states.dtype.element_ty), mask=inside)
        gates = _load_gates(g, tokens, kv_heads, kv_head, columns, DIM_K, valid, CHANNEL)
        if out is not None:
            if REVERSE:
                read = _after(gates, CHANNEL, C, OPERAND, EXACT)
            else:
                read = _upto(gates, CHANNEL, C, OPERAND, EXACT) * scale
            old = state.to(OPERAND)
            for r in range(READERS):
                head = kv_head * READERS + r
                queries = _load(reader, tokens, kv_heads * READERS, head, columns, DIM_K, valid) * read
                result = _dot(queries, old, OPERAND, PRECISION)
                for w in range(WRITERS):
                    pair = (kv_head * READERS * WRITERS + r * WRITERS + w).to(tl.int64) * total_tokens
                    weights = tl.load(scores + (pair + tokens[:, None]) * C + rows[None, :], mask=valid[:, None], other=0.0)
                    if REVERSE:
                        weights = tl.trans(weights)
                    v_rows = _load(value, tokens, kv_heads * WRITERS, kv_head * WRITERS + w, values, DIM_V, valid)
                    result += _dot(weights, v_rows, OPERAND, PRECISION)
                _store(out, result, tokens, kv_heads * READERS, head, values, DIM_V, valid)
        if REVERSE:
            write = _upto(gates, CHANNEL, C, OPERAND, EXACT) * scale
        else:
            write = _after(gates, CHANNEL, C, OPERAND, EXACT)
        log = tl.sum(gates.to(tl.float32), 0) * LOG2E
        state *= tl.exp2(log)[:, None] if CHANNEL else tl.exp2(log)
        for w in range(WRITERS):
            head = kv_head * WRITERS + w
            written = _load(writer, tokens, kv_heads * WRITERS, head, columns, DIM_K, valid) * write
            v_rows = _load(value, tokens, kv_heads * WRITERS, head, values, DIM_V, valid)
            state += _dot(tl.trans(written), v_rows, OPERAND, PRECISION)
    if final is not None:
        tl.store(final + place * DIM_K * DIM_V + tile, state, mask=inside)


@triton.jit
def _gradients(
    q, k, v, g, grad_out, before, later, grad_q, grad_k, grad_g, chunks, scale, kv_heads, total_tokens, DIM_K, DIM_V,
    GROUP: tl.constexpr, CHANNEL: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, keys and gates in one chunk, for one slab of key channels (papers: GLA, section 2.7)."""
    n, kv_head, slab = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(chunks + 2 * n), tl.load(chunks + 2 * n + 1)
    rows = tl.arange(0, C)
    tokens = (start + rows).to(tl.int64)
    valid = tokens < end
    heads = kv_heads * GROUP
    columns = slab * BK + tl.arange(0, BK)
    place = (n * kv_heads + kv_head).to(tl.int64) * DIM_K * DIM_V
    causal = rows[:, None] >= rows[None, :]

    gates = _load_gates(g, tokens, kv_heads, kv_head, columns, DIM_K, valid, CHANNEL)
    k_rows = _load(k, tokens, kv_heads, kv_head, columns, DIM_K, valid)
    dk = tl.zeros((C, BK), tl.float32)
    crossing = tl.zeros((BK,), tl.float32)  # sum over the value channels of state times its gradient
    for tile in range(0, DIM_V, BV):
        values = tile + tl.arange(0, BV)
        inside = (columns < DIM_K)[:, None] & (values < DIM_V)[None, :]
        offsets = place + columns[:, None] * DIM_V + values[None, :]
        s_tile = tl.load(before + offsets, mask=inside, other=0.0)
        d_tile = tl.load(later + offsets, mask=inside, other=0.0)
        v_rows = _load(v, tokens, kv_heads, kv_head, values, DIM_V, valid)
        dk += _dot(v_rows, tl.trans(d_tile), OPERAND, PRECISION)
        crossing += tl.sum(s_tile.to(tl.float32) * d_tile.to(tl.float32), 1)
    dk *= _after(gates, CHANNEL, C, OPERAND, EXACT)
    crossing *= tl.exp2(tl.sum(gates.to(tl.float32), 0) * LOG2E)
    crossing += tl.sum(k_rows.to(tl.float32) * dk, 0)

    change = tl.zeros((C, BK), tl.float32)
    for j in range(GROUP):
        head = kv_head * GROUP + j
        q_rows = _load(q, tokens, heads, head, columns, DIM_K, valid)
        dq = tl.zeros((C, BK), tl.float32)
        pairs = tl.zeros((C, C), tl.float32)  # gradient of the chunk's scores
        for tile in range(0, DIM_V, BV):
            values = tile + tl.arange(0, BV)
            inside = (columns < DIM_K)[:, None] & (values < DIM_V)[None, :]
            s_tile = tl.load(before + place + columns[:, None] * DIM_V + values[None, :], mask=inside, other=0.0)
            do_rows = _load(grad_out, tokens, heads, head, values, DIM_V, valid)
            v_rows = _load(v, tokens, kv_heads, kv_head, values, DIM_V, valid)
            pairs += _dot(do_rows, tl.trans(v_rows), OPERAND, PRECISION)
            dq += _dot(do_rows, tl.trans(s_tile), OPERAND, PRECISION)
        pairs = tl.where(causal, pairs * scale, 0.0)
        dq *= _upto(gates, CHANNEL, C, OPERAND, EXACT) * scale
        if CHANNEL:
            q_float, k_float = q_rows.to(tl.float32), k_rows.to(tl.float32)
            size = C
            waiting = C
            pending = rows >= 0
            for _ in range(LEVELS):
                if waiting > 0:
                    log = _from_anchor(gates, size, C, OPERAND, EXACT)
                    decay, growth = tl.exp2(log), tl.exp2(tl.minimum(-log, BOUND))
                    bounded = tl.min(log, 1) >= -BOUND
                    block = rows // size
                    same = block[:, None] == block[None, :]
                    part = tl.where(same & (pending & bounded)[:, None], pairs, 0.0)
                    dq += decay * tl.dot(part, k_float * growth, input_precision=PRECISION)
                    dk += growth * tl.dot(tl.trans(part), q_float * decay, input_precision=PRECISION)
                    pending = pending & (bounded == 0)
                    waiting = tl.sum(pending.to(tl.int32), 0)
                    if waiting > 0:
                        middle = _to_middle(gates, size, C, OPERAND, EXACT)
                        late = rows % size >= size // 2
                        part = tl.where(same & (late & pending)[:, None] & (late == 0)[None, :], pairs, 0.0)
                        dq += middle * tl.dot(part, k_float * middle, input_precision=PRECISION)
                        dk += middle * tl.dot(tl.trans(part), q_float * middle, input_precision=PRECISION)
                    size = size // 2
        else:
            part = pairs * _pair_decay(gates, C, EXACT)
            dq += tl.dot(part, k_rows.to(tl.float32), input_precision=PRECISION)
            dk += tl.dot(tl.trans(part), q_rows.to(tl.float32), input_precision=PRECISION)
        _store(grad_q, dq, tokens, heads, head, columns, DIM_K, valid)
        change += q_rows.to(tl.float32) * dq
    _store(grad_k, dk, tokens, kv_heads, kv_head, columns, DIM_K, valid)
    change -= k_rows.to(tl.float32) * dk
    onwards = (rows[:, None] <= rows[None, :]).to(tl.float32)
    if CHANNEL:
        dg = tl.dot(onwards, change, input_precision=EXACT) + crossing[None, :]
        _store(grad_g, dg, tokens, kv_heads, kv_head, columns, DIM_K, valid)
    else:
        dg = tl.sum(tl.where(rows[:, None] <= rows[None, :], tl.sum(change, 1)[None, :], 0.0), 1) + tl.sum(crossing, 0)
        tl.store(grad_g + (slab.to(tl.int64) * total_tokens + tokens) * kv_heads + kv_head, dg, mask=valid)


@triton.jit
def _step(
    q, k, v, g, out, initial, final, scale, time, kv_heads, DIM_K, DIM_V,
    GROUP: tl.constexpr, CHANNEL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A few tokens through the recurrence, the state read and written once."""
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    kv_head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    columns = tl.arange(0, BK)
    inside = (columns < DIM_K)[:, None] & (values < DIM_V)[None, :]
    tile = (row * kv_heads + kv_head) * DIM_K * DIM_V + columns[:, None] * DIM_V + values[None, :]
    if initial is None:
        state = tl.zeros((BK, BV), tl.float32)
    else:
        state = tl.load(initial + tile, mask=inside, other=0.0)
    for t in range(time):
        at = (row * time + t) * kv_heads + kv_head
        keys = tl.load(k + at * DIM_K + columns, mask=columns < DIM_K, other=0.0).to(tl.float32)
        v_row = tl.load(v + at * DIM_V + values, mask=values < DIM_V, other=0.0).to(tl.float32)
        if CHANNEL:
            gates = tl.load(g + at * DIM_K + columns, mask=columns < DIM_K, other=0.0).to(tl.float32)
            state *= tl.exp2(gates * LOG2E)[:, None]
        else:
            state *= tl.exp2(tl.load(g + at).to(tl.float32) * LOG2E)
        state += keys[:, None] * v_row[None, :]
        for j in range(GROUP):
            query = tl.load(q + (at * GROUP + j) * DIM_K + columns, mask=columns < DIM_K, other=0.0).to(tl.float32)
            result = tl.sum(query[:, None] * state, 0) * scale
            tl.store(
                out + (at * GROUP + j) * DIM_V + values, result.to(out.dtype.element_ty), mask=values < DIM_V
            )
    tl.store(final + tile, state, mask=inside)


class _Plan(NamedTuple):
    """Tables of token positions, int32: chunks and stored states (start, end), segments (start, end, first stored state),
    documents (first segment, number of segments). `joined`: some document has several segments."""

    chunks: torch.Tensor
    stored: torch.Tensor
    segments: torch.Tensor
    documents: torch.Tensor
    joined: bool


@functools.lru_cache(maxsize=64)
def _plan(borders: tuple[int, ...], segment: int, device: torch.device) -> _Plan:
    chunks, stored, segments, documents = [], [], [], []
    for start, end in zip(borders, borders[1:], strict=False):
        chunks += [(at, min(at + CHUNK, end)) for at in range(start, end, CHUNK)]
        pieces = -(-(end - start) // segment)
        length = -(-(end - start) // max(pieces, 1) // SPACING) * SPACING
        documents.append((len(segments), max(pieces, 1)))
        cuts = range(start, end, length) if pieces else [start]
        for at in cuts:
            stop = min(at + length, end) if pieces else end
            segments.append((at, stop, len(stored)))
            stored += [(x, min(x + SPACING, stop)) for x in range(at, stop, SPACING)]
    tables = (torch.tensor(t, dtype=torch.int32).to(device) for t in (chunks, stored, segments, documents))
    return _Plan(*tables, len(segments) > len(documents))


class _Launch(NamedTuple):
    """Tile sizes and warps of the kernels; the state of one walk has to fit into the registers of one program."""

    scores: dict
    totals: dict
    join: dict
    walk: dict
    gradients: dict


def _power(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


@functools.lru_cache(maxsize=64)
def _launch(dim_k: int, dim_v: int) -> _Launch:
    wide_k, wide_v = _power(dim_k), _power(dim_v)
    walk_v = min(wide_v, 128, max(16, 16384 // wide_k))
    return _Launch(
        scores=dict(BK=min(wide_k, 64), num_warps=4, num_stages=2),
        totals=dict(BK=min(wide_k, 64), BV=min(wide_v, 128), num_warps=4, num_stages=3),
        join=dict(BK=16, BV=min(wide_v, 128), num_warps=4, num_stages=3),
        walk=dict(BK=wide_k, BV=walk_v, num_warps=8 if wide_k * walk_v > 4096 else 4, num_stages=2),
        gradients=dict(BK=min(wide_k, 64), BV=min(wide_v, 64), num_warps=8, num_stages=2),
    )


def _precision(dtype: torch.dtype) -> dict:
    """Type of the matrix products' operands and how products of float32 operands are formed."""
    if INTERPRETED or dtype == torch.float32:  # the interpreter's products of bfloat16 are wrong
        return dict(OPERAND=tl.float32, PRECISION="ieee", EXACT="ieee")
    # float16 would overflow in sums over the whole sequence
    return dict(OPERAND=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32, PRECISION="tf32", EXACT="tf32x3")


def _programs(device: torch.device) -> int:
    """How many programs keep the device busy."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


class _Problem:
    """One call's tensors, laid end to end, and everything that its kernels share."""

    def __init__(self, q, k, v, g, scale, borders):
        self.q, self.k, self.v, self.g = (x.contiguous() for x in (q, k, v, g))
        self.heads, self.dim_k = q.shape[2:]
        self.kv_heads, self.dim_v = v.shape[2:]
        self.group = self.heads // self.kv_heads
        self.channel = g.dim() == 4
        self.scale, self.tokens, self.borders = scale, q.shape[0] * q.shape[1], borders
        self.launch = _launch(self.dim_k, self.dim_v)
        programs = _programs(q.device)
        tiles = self.kv_heads * triton.cdiv(self.dim_v, self.launch.walk["BV"])
        segment = max(8 * CHUNK, triton.cdiv(self.tokens * tiles, programs * SPACING) * SPACING)
        self.plan = _plan(borders, segment, q.device)
        self.shared = dict(CHANNEL=self.channel, C=CHUNK, **_precision(q.dtype))

    def scores(self) -> torch.Tensor:
        dtype = torch.bfloat16 if self.shared["OPERAND"] == tl.bfloat16 else torch.float32
        scores = self.q.new_empty(self.heads, self.tokens, CHUNK, dtype=dtype)
        _scores[(len(self.plan.chunks), self.heads)](
            self.q, self.k, self.g, scores, self.plan.chunks, self.scale, self.heads, self.tokens, self.dim_k,
            GROUP=self.group, LEVELS=CHUNK.bit_length(), **self.shared, **self.launch.scores,
        )  # fmt: skip
        return scores

    def starts(self, initial, value, reverse: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """State at the start of each segment (in reverse, at its end) and after the last; None if segments are documents."""
        if not self.plan.joined:
            return initial, None
        sizes = self.kv_heads, self.dim_k, self.dim_v
        totals = self.q.new_empty(len(self.plan.segments), *sizes, dtype=torch.float32)
        decays = totals.new_empty(*totals.shape[:2], self.dim_k if self.channel else 1)
        final = totals.new_empty(len(self.plan.documents), *sizes)
        config, join = self.launch.totals, self.launch.join
        tiles = triton.cdiv(self.dim_k, config["BK"]) * triton.cdiv(self.dim_v, config["BV"])
        _totals[(len(self.plan.segments), self.kv_heads, tiles)](
            self.q if reverse else self.k, value, self.g, totals, decays, self.plan.segments, self.scale,
            self.kv_heads, self.dim_k, self.dim_v, WRITERS=self.group if reverse else 1, REVERSE=reverse,
            **self.shared, **config,
        )  # fmt: skip
        tiles = triton.cdiv(self.dim_k, join["BK"]) * triton.cdiv(self.dim_v, join["BV"])
        _join[(len(self.plan.documents), self.kv_heads, tiles)](
            totals, decays, initial, final, self.plan.documents, self.kv_heads, self.dim_k, self.dim_v,
            REVERSE=reverse, CHANNEL=self.channel, **join,
        )  # fmt: skip
        return totals, final

    def walk(self, start, value, *, scores=None, out=None, states=None, final=None, reverse: bool = False) -> None:
        config = self.launch.walk
        _walk[(len(self.plan.segments), self.kv_heads, triton.cdiv(self.dim_v, config["BV"]))](
            self.k if reverse else self.q, self.q if reverse else self.k, value, self.g, scores, out, states, start, final,
            self.plan.segments, self.scale, self.kv_heads, self.tokens, self.dim_k, self.dim_v,
            READERS=1 if reverse else self.group, WRITERS=self.group if reverse else 1, REVERSE=reverse, SPACING=SPACING,
            **self.shared, **config,
        )  # fmt: skip

    def new_states(self) -> torch.Tensor:
        """Where a walk keeps its states."""
        dtype = torch.bfloat16 if self.shared["OPERAND"] == tl.bfloat16 else torch.float32
        return self.q.new_empty(len(self.plan.stored), self.kv_heads, self.dim_k, self.dim_v, dtype=dtype)

    def new_final(self) -> torch.Tensor:
        return self.q.new_empty(len(self.plan.documents), self.kv_heads, self.dim_k, self.dim_v, dtype=torch.float32)


class _GatedLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, initial, scale, borders):
        problem = _Problem(q, k, v, g, scale, borders)
        start, final = problem.starts(initial, problem.v, reverse=False)
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=v.dtype, device=v.device)
        scores = problem.scores()
        if final is None:
            final = problem.new_final()
            problem.walk(start, problem.v, scores=scores, out=out, final=final)
        else:
            problem.walk(start, problem.v, scores=scores, out=out)
        ctx.save_for_backward(q, k, v, g, initial, None if start is initial else start)
        ctx.scale, ctx.borders = scale, borders
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_final):
        q, k, v, g, initial, start = ctx.saved_tensors
        start = initial if start is None else start
        grad_out = torch.zeros(*q.shape[:3], v.shape[3], dtype=v.dtype, device=v.device) if grad_out is None else grad_out
        grad_out = grad_out.contiguous()
        grad_final = None if grad_final is None else grad_final.contiguous()
        problem = _Problem(q, k, v, g, ctx.scale, ctx.borders)

        end, grad_initial = problem.starts(grad_final, grad_out, reverse=True)
        later, grad_v = problem.new_states(), torch.empty_like(problem.v)
        done = problem.new_final() if grad_initial is None else None
        problem.walk(end, grad_out, scores=problem.scores(), out=grad_v, states=later, final=done, reverse=True)
        grad_initial = done if grad_initial is None else grad_initial
        del end
        before = problem.new_states()
        problem.walk(start, problem.v, states=before)

        config = problem.launch.gradients
        slabs = triton.cdiv(problem.dim_k, config["BK"])
        grad_q, grad_k = torch.empty_like(problem.q), torch.empty_like(problem.k)
        if problem.channel:
            grad_g = torch.empty_like(problem.g)
        else:
            grad_g = problem.g.new_empty(slabs, *g.shape, dtype=torch.float32)
        _gradients[(len(problem.plan.stored), problem.kv_heads, slabs)](
            problem.q, problem.k, problem.v, problem.g, grad_out, before, later, grad_q, grad_k, grad_g,
            problem.plan.stored, problem.scale, problem.kv_heads, problem.tokens, problem.dim_k, problem.dim_v,
            GROUP=problem.group, LEVELS=SPACING.bit_length(), **(problem.shared | dict(C=SPACING)), **config,
        )  # fmt: skip
        grad_g = grad_g if problem.channel else grad_g.sum(0).to(g.dtype)
        return grad_q, grad_k, grad_v, grad_g, None if initial is None else grad_initial, None, None


def gated_linear_attention_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A few tokens without gradients; arguments as in `gated_linear_attention_fused`."""
    q, k, v, g = (x.contiguous() for x in (q, k, v, log_decay))
    (batch, time, heads, dim_k), (kv_heads, dim_v) = q.shape, v.shape[2:]
    out = torch.empty(batch, time, heads, dim_v, dtype=v.dtype, device=v.device)
    final = q.new_empty(batch, kv_heads, dim_k, dim_v, dtype=torch.float32)
    columns = min(_power(dim_v), 32)
    _step[(triton.cdiv(dim_v, columns), kv_heads, batch)](
        q, k, v, g, out, None if initial_state is None else initial_state.contiguous(), final, scale, time, kv_heads,
        dim_k, dim_v, GROUP=heads // kv_heads, CHANNEL=g.dim() == 4, BK=_power(dim_k), BV=columns, num_warps=4,
    )  # fmt: skip
    return out, final


@torch.compiler.disable
def gated_linear_attention_fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    *,
    scale: float,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_linattn.kernels.gated_linear_attention`; log_decay is (B, T, H_kv, dk) or (B, T, H_kv)."""
    batch, time = q.shape[:2]
    borders = tuple(range(0, batch * time + 1, time)) if cu_seqlens is None else tuple(cu_seqlens.tolist())
    initial_state = None if initial_state is None else initial_state.float().contiguous()
    return _GatedLinearAttention.apply(q, k, v, log_decay, initial_state, scale, borders)
