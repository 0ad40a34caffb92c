# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Gated linear attention in Triton: forward, backward and the decode step (papers: GLA, sections 2.5, 2.7, 5 and 9).

Forward: `_prepare` (weights inside each chunk, decayed keys), `_totals` and `join_segments` (state at the start of each
segment, a run of chunks), `_walk` (outputs, one segment a program, state in registers). Backward: the same four in reverse give
the gradient of v and the gradients D of the states, a walk without outputs gives the states S again, and `_gradients` the rest,
chunk by chunk.

The tokens of all rows lie end to end; tables say where chunks, segments and documents begin. Logarithms of decays are sums of
consecutive gates, formed by products with matrices of zeros and ones, never differences of long sums. Only blocks that share
one anchor exponentiate a positive number, and only while it is below BOUND; stronger gates halve the block (section 5.4 d).
"""

import functools
import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from ..compilation import backward_compiled_together, forward_compiled_together, run
from ..dispatch import needs_gradient, on_own_device
from ..packing import document_borders
from ..tiles import (
    CHUNK,
    HALF_WIDTH,
    LOG2E,
    Plan,
    dot,
    few_programs,
    has_ample_memory,
    join_segments,
    load_rows,
    load_state,
    make_plan,
    marked_number,
    marked_rounds,
    place_in_grid,
    precise_dot,
    processors,
    product_precision,
    selected_sums,
    store_rows,
    store_state,
    tile_width,
)

BOUND = tl.constexpr(86.0)  # in log2: leaves room below float32's 127


@triton.jit
def _load_gates(
    pointer,
    start,
    left,
    head,
    columns,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNEL: tl.constexpr,
):
    """Gates of one head, (tokens, channels), or (tokens,) for one gate per head."""
    if CHANNEL:
        gates = load_rows(pointer, start, left, head, columns, C, HEADS, WIDTH)
    else:
        rows = tl.arange(0, C)
        gates = tl.load(pointer + start * HEADS + head + rows * HEADS, mask=rows < left, other=0.0).to(tl.float32)
    return gates


@triton.jit
def _load_kept(pointer, chunk, kv_head, columns, KV_HEADS: tl.constexpr, DIM_K: tl.constexpr, CHANNEL: tl.constexpr):
    """log2 of the decay of a whole chunk, (channels,)."""
    place = chunk * KV_HEADS + kv_head
    if CHANNEL:
        log = tl.load(pointer + place * DIM_K + columns, mask=columns < DIM_K, other=0.0)
    else:
        log = tl.load(pointer + place + columns * 0)
    return log


@triton.jit
def _next_chunk(i, count, REVERSE: tl.constexpr):
    """Which chunk of a segment comes after step i: its decay is loaded a step ahead, as nothing else hides that latency."""
    step = tl.minimum(i + 1, count - 1)
    return count - 1 - step if REVERSE else step


@triton.jit
def _upto(g, CHANNEL: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr):
    """log2 of the decay from the chunk's start to each row, that row's gate included; (C, channels or 1)."""
    rows = tl.arange(0, C)
    inside = rows[:, None] >= rows[None, :]
    if CHANNEL:
        log = selected_sums(inside, g, EXACT) * LOG2E
    else:
        log = tl.sum(tl.where(inside, g[None, :], 0.0), 1)[:, None] * LOG2E
    return log


@triton.jit
def _after(g, upto, CHANNEL: tl.constexpr, C: tl.constexpr, ROUGH: tl.constexpr, EXACT: tl.constexpr):
    """log2 of the decay from each row to the chunk's end, that row's gate excluded; (C, channels or 1). `ROUGH`: a difference
    of sums will do, as for bfloat16 where the sums are small."""
    rows = tl.arange(0, C)
    inside = rows[:, None] < rows[None, :]
    if CHANNEL and ROUGH:
        log = tl.sum(tl.where(rows[:, None] == C - 1, upto, 0.0), 0)[None, :] - upto
    elif CHANNEL:
        log = selected_sums(inside, g, EXACT) * LOG2E
    else:
        log = tl.sum(tl.where(inside, g[None, :], 0.0), 1)[:, None] * LOG2E
    return log


@triton.jit
def _pair_decay(g, C: tl.constexpr, EXACT: tl.constexpr):
    """Decay from key row (second index) to query row (first index) for one gate per head; zero above the diagonal."""
    rows = tl.arange(0, C)
    causal = rows[:, None] >= rows[None, :]
    later = tl.where(rows[:, None] > rows[None, :], g[:, None], 0.0)
    return tl.where(causal, tl.exp2(selected_sums(causal, later, EXACT) * LOG2E), 0.0)


@triton.jit
def _in_block(g, size, C: tl.constexpr, EXACT: tl.constexpr):
    """`_upto` for each aligned block of `size` rows; zero for single rows, which need no anchor."""
    rows = tl.arange(0, C)
    first = rows // size * size
    inside = (rows[None, :] >= first[:, None]) & (rows[None, :] <= rows[:, None]) & (size > 1)
    return selected_sums(inside, g, EXACT) * LOG2E


@triton.jit
def _to_middle(g, size, C: tl.constexpr, EXACT: tl.constexpr):
    """Decay between each row and the first row of the late half of its aligned block of `size` rows."""
    rows = tl.arange(0, C)
    middle = rows // size * size + size // 2
    low, high = tl.minimum(rows, middle), tl.maximum(rows, middle)
    inside = (rows[None, :] > low[:, None]) & (rows[None, :] <= high[:, None])
    return tl.exp2(selected_sums(inside, g, EXACT) * LOG2E)


@triton.jit
def store_scores(pointer, rest, x, start, left, head, total_tokens, C: tl.constexpr):
    """Weights of one chunk, (queries, keys). Given `rest`, what rounding takes away from a weight goes to the other side of the
    diagonal, which is empty (from the diagonal itself, to `rest`): products of both parts are as good as with 16 bits."""
    rows = tl.arange(0, C)
    high = x.to(pointer.dtype.element_ty)
    if rest is not None:
        low = x - high.to(tl.float32)
        own = tl.sum(tl.where(rows[:, None] == rows[None, :], low, 0.0), 1)
        tl.store(rest + head.to(tl.int64) * total_tokens + start + rows, own, mask=rows < left)
        high = tl.where(rows[:, None] >= rows[None, :], high, tl.trans(low).to(tl.bfloat16))
    store_rows(pointer + head.to(tl.int64) * total_tokens * C, high, start, left, 0, rows, C, 1, C)


@triton.jit
def _prepare(
    q, k, g, scores, rest, strong, decayed_q, decayed_k, kept, chunks, scale, total_tokens,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM_K: tl.constexpr, CHANNEL: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One chunk and query head: scale * sum_c q_ic k_jc exp(G_ic - G_jc) for the pairs j <= i, anchored at the chunk's start;
    queries decayed from the start and keys decayed to the end; log2 of the whole chunk's decay.

    Where that is below -BOUND, `strong` is set and `_prepare_strong` forms scores and keys again.
    """
    n, head, _ = place_in_grid(tl.program_id(0), KV_HEADS * GROUP, 1)
    kv_head = head // GROUP
    start, end = tl.load(chunks + 2 * n).to(tl.int64), tl.load(chunks + 2 * n + 1)
    left = (end - start).to(tl.int32)
    rows = tl.arange(0, C)
    acc = tl.zeros((C, C), tl.float32)
    least = 0.0
    for slab in range(0, DIM_K, BK):
        columns = slab + tl.arange(0, BK)
        queries = load_rows(q, start, left, head, columns, C, KV_HEADS * GROUP, DIM_K)
        keys = load_rows(k, start, left, kv_head, columns, C, KV_HEADS, DIM_K)
        gates = _load_gates(g, start, left, kv_head, columns, C, KV_HEADS, DIM_K, CHANNEL)
        log = _upto(gates, CHANNEL, C, EXACT)
        total = tl.sum(gates.to(tl.float32), 0) * LOG2E
        faded = queries.to(tl.float32) * tl.exp2(log)
        if CHANNEL:
            grown = keys.to(tl.float32) * tl.exp2(tl.minimum(-log, BOUND))
            pairs = precise_dot(faded, tl.trans(grown), PRECISION)
        else:
            pairs = dot(queries, tl.trans(keys), OPERAND, PRECISION)
        if CHANNEL and OPERAND == tl.bfloat16:
            ended = grown * tl.exp2(total)[None, :]
        else:
            ended = keys.to(tl.float32) * tl.exp2(_after(gates, log, CHANNEL, C, False, EXACT))
        acc += tl.where(rows[:, None] >= rows[None, :], pairs, 0.0)  # slab by slab, rounded as in `_prepare_strong`
        if decayed_q is not None:
            store_rows(decayed_q, faded * scale, start, left, head, columns, C, KV_HEADS * GROUP, DIM_K)
        if head % GROUP == 0:
            store_rows(decayed_k, ended, start, left, kv_head, columns, C, KV_HEADS, DIM_K)
            if CHANNEL:
                tl.store(kept + (n * KV_HEADS + kv_head) * DIM_K + columns, total, mask=columns < DIM_K)
            else:
                tl.store(kept + n * KV_HEADS + kv_head, total)
        if CHANNEL:
            least = tl.minimum(least, tl.min(total, 0))
    if CHANNEL:
        # a little early: sums of the same gates in another order may lie on the other side of the bound
        tl.store(strong + tl.program_id(0), (least < -BOUND + 0.001).to(tl.int32))
    else:
        acc *= _pair_decay(_load_gates(g, start, left, kv_head, rows, C, KV_HEADS, 1, False), C, EXACT)
    store_scores(scores, rest, acc * scale, start, left, head, total_tokens, C)


@triton.jit
def _strong_scores(
    number, q, k, g, scores, rest, decayed_k, chunks, scale, total_tokens,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM_K: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    n, head, _ = place_in_grid(number, KV_HEADS * GROUP, 1)
    start, end = tl.load(chunks + 2 * n).to(tl.int64), tl.load(chunks + 2 * n + 1)
    left = (end - start).to(tl.int32)
    rows = tl.arange(0, C)
    acc = tl.zeros((C, C), tl.float32)
    for slab in range(0, DIM_K, BK):
        columns = slab + tl.arange(0, BK)
        queries = load_rows(q, start, left, head, columns, C, KV_HEADS * GROUP, DIM_K).to(tl.float32)
        keys = load_rows(k, start, left, head // GROUP, columns, C, KV_HEADS, DIM_K).to(tl.float32)
        gates = load_rows(g, start, left, head // GROUP, columns, C, KV_HEADS, DIM_K)
        if head % GROUP == 0:
            ended = keys * tl.exp2(_after(gates, None, True, C, False, EXACT))
            store_rows(decayed_k, ended, start, left, head // GROUP, columns, C, KV_HEADS, DIM_K)
        size = C
        waiting = C
        pending = rows >= 0
        for _ in range(LEVELS):
            if waiting > 0:
                log = _in_block(gates, size, C, EXACT)
                growth = tl.exp2(tl.minimum(-log, BOUND))
                pairs = precise_dot(queries * tl.exp2(log), tl.trans(keys * growth), PRECISION)
                bounded = tl.min(log, 1) >= -BOUND
                block = rows // size
                same = block[:, None] == block[None, :]
                causal = rows[:, None] >= rows[None, :]
                acc += tl.where(same & causal & (pending & bounded)[:, None], pairs, 0.0)
                pending = pending & (bounded == 0)
                waiting = tl.sum(pending.to(tl.int32), 0)
                if waiting > 0:
                    decay = _to_middle(gates, size, C, EXACT)
                    pairs = precise_dot(queries * decay, tl.trans(keys * decay), PRECISION)
                    late = rows % size >= size // 2
                    acc += tl.where(same & (late & pending)[:, None] & (late == 0)[None, :], pairs, 0.0)
                size = size // 2
    store_scores(scores, rest, acc * scale, start, left, head, total_tokens, C)


@triton.jit(do_not_specialize=["count", "rounds"])
def _prepare_strong(
    q, k, g, scores, rest, strong, decayed_k, chunks, scale, total_tokens, count, rounds,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM_K: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Scores and keys of `_prepare` where one anchor does not do.

    Rows whose decay since the anchor is bounded are finished; for the others the block is halved: pairs across its middle
    take the middle as anchor, the rest is left to the halves. What becomes of a row depends on no later gate.
    """
    for i in range(marked_rounds(strong, count, rounds, 1)):
        number, marked = marked_number(strong, count, i, 1)
        if marked:
            _strong_scores(
                number, q, k, g, scores, rest, decayed_k, chunks, scale, total_tokens,
                KV_HEADS, GROUP, DIM_K, C, LEVELS, BK, PRECISION, EXACT,
            )  # fmt: skip


@triton.jit
def _totals(
    writer, value, kept, totals, decays, segments,
    KV_HEADS: tl.constexpr, WRITERS: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr,
    REVERSE: tl.constexpr, CHANNEL: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What one segment adds to the state, and the log2 of what it keeps of it."""
    tiles: tl.constexpr = (DIM_V + BV - 1) // BV
    n, kv_head, tile = place_in_grid(tl.program_id(0), KV_HEADS, tiles * ((DIM_K + BK - 1) // BK))
    columns = tile // tiles * BK + tl.arange(0, BK)
    values = tile % tiles * BV + tl.arange(0, BV)
    start, end = tl.load(segments + 6 * n).to(tl.int64), tl.load(segments + 6 * n + 1)
    chunk, to_end = tl.load(segments + 6 * n + 2), tl.load(segments + (6 * n + (3 if REVERSE else 4)))
    if to_end == 0:  # no segment starts where this one ends
        return
    state = tl.zeros((BK, BV), tl.float32)
    total = tl.zeros((BK,), tl.float32)
    count = tl.cdiv((end - start).to(tl.int32), C)
    log = _load_kept(kept, chunk + (count - 1 if REVERSE else 0), kv_head, columns, KV_HEADS, DIM_K, CHANNEL)
    for i in range(count):
        at = count - 1 - i if REVERSE else i
        first = start + at * C
        left = (end - first).to(tl.int32)
        following = _load_kept(
            kept, chunk + _next_chunk(i, count, REVERSE), kv_head, columns, KV_HEADS, DIM_K, CHANNEL
        )
        total += log
        state *= tl.exp2(log)[:, None]
        log = following
        for w in range(WRITERS):
            head = kv_head * WRITERS + w
            written = load_rows(writer, first, left, head, columns, C, KV_HEADS * WRITERS, DIM_K)
            v_rows = load_rows(value, first, left, head, values, C, KV_HEADS * WRITERS, DIM_V)
            state += dot(tl.trans(written), v_rows, OPERAND, PRECISION)
    place = n * KV_HEADS + kv_head
    store_state(totals, state, place, columns, values, DIM_K, DIM_V)
    if tile % tiles == 0:
        tl.store(decays + place * DIM_K + columns, total, mask=columns < DIM_K)


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=["segments"])
def _walk(
    reader, writer, value, g, kept, scores, rest, other, shares, out, states, base, initial, final, segments, scale,
    total_tokens,
    KV_HEADS: tl.constexpr, READERS: tl.constexpr, WRITERS: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr,
    REVERSE: tl.constexpr, CHANNEL: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Carry the state through one segment: out = scale * (scores @ value + reader @ state), where out is wanted, plus shares *
    other if given (a share per row and head); keep the states, the one that chunk number `base` meets as the first.

    Forward, queries read (decayed here, if `g` is given), keys write and the values are v. In reverse, keys read, queries
    write, the values are the gradients of the output, the scores are transposed, and out is the gradient of v.
    """
    n, kv_head, tile = place_in_grid(tl.program_id(0), KV_HEADS, (DIM_V + BV - 1) // BV)
    columns = tl.arange(0, BK)
    values = tile * BV + tl.arange(0, BV)
    start, end = tl.load(segments + 6 * n).to(tl.int64), tl.load(segments + 6 * n + 1)
    chunk = tl.load(segments + 6 * n + 2)
    place = n * KV_HEADS + kv_head
    if initial is None:
        state = tl.zeros((BK, BV), tl.float32)
    else:
        state = load_state(initial, place, columns, values, DIM_K, DIM_V)
    rows = tl.arange(0, C)
    count = tl.cdiv((end - start).to(tl.int32), C)
    log = _load_kept(
        kept, chunk + tl.maximum(count - 1 if REVERSE else 0, 0), kv_head, columns, KV_HEADS, DIM_K, CHANNEL
    )
    for i in range(count):
        following = _load_kept(
            kept, chunk + _next_chunk(i, count, REVERSE), kv_head, columns, KV_HEADS, DIM_K, CHANNEL
        )
        at = count - 1 - i if REVERSE else i
        first = start + at * C
        left = (end - first).to(tl.int32)
        if states is not None:
            store_state(states, state, (chunk + at - base) * KV_HEADS + kv_head, columns, values, DIM_K, DIM_V)
        if out is not None:
            old = state.to(OPERAND)
            for r in range(READERS):
                head = kv_head * READERS + r
                read = load_rows(reader, first, left, head, columns, C, KV_HEADS * READERS, DIM_K)
                if g is not None:
                    gates = _load_gates(g, first, left, kv_head, columns, C, KV_HEADS, DIM_K, CHANNEL)
                    read = read * tl.exp2(_upto(gates, CHANNEL, C, EXACT))
                result = dot(read, old, OPERAND, PRECISION)
                for w in range(WRITERS):
                    at_head = (kv_head * READERS * WRITERS + r * WRITERS + w).to(tl.int64) * total_tokens
                    pair = scores + at_head * C
                    weights = load_rows(pair, first, left, 0, rows, C, 1, C)
                    v_rows = load_rows(value, first, left, kv_head * WRITERS + w, values, C, KV_HEADS * WRITERS, DIM_V)
                    if REVERSE and rest is not None:  # see `store_scores`
                        high = tl.where(rows[:, None] <= rows[None, :], tl.trans(weights), 0.0)
                        result += dot(high, v_rows, OPERAND, PRECISION)
                        own = tl.load(rest + at_head + first + rows, mask=rows < left, other=0.0)
                        low = tl.where(rows[:, None] == rows[None, :], own[:, None], weights)
                        low = tl.where(rows[:, None] <= rows[None, :], low, 0.0)
                        result += dot(low, v_rows, OPERAND, PRECISION)
                    elif REVERSE:
                        result += dot(tl.trans(weights), v_rows, OPERAND, PRECISION)
                    else:
                        result += dot(weights, v_rows, OPERAND, PRECISION)
                result *= scale
                if other is not None:
                    share = tl.load(shares + (first + rows) * (KV_HEADS * READERS) + head, mask=rows < left, other=0.0)
                    rest_of = load_rows(other, first, left, head, values, C, KV_HEADS * READERS, DIM_V)
                    result += share[:, None] * rest_of.to(tl.float32)
                store_rows(out, result, first, left, head, values, C, KV_HEADS * READERS, DIM_V)
        state *= tl.exp2(log)[:, None]
        log = following
        for w in range(WRITERS):
            head = kv_head * WRITERS + w
            written = load_rows(writer, first, left, head, columns, C, KV_HEADS * WRITERS, DIM_K)
            v_rows = load_rows(value, first, left, head, values, C, KV_HEADS * WRITERS, DIM_V)
            state += dot(tl.trans(written), v_rows, OPERAND, PRECISION)
    if final is not None:
        if tl.load(segments + (6 * n + (3 if REVERSE else 4))) == 0:
            document = tl.load(segments + 6 * n + 5)
            store_state(final, state, document * KV_HEADS + kv_head, columns, values, DIM_K, DIM_V)


@triton.jit
def _slab_gradients(
    number, q, k, v, g, grad_out, before, later, grad_q, grad_k, grad_g, strong, chunks, scale, total_tokens,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr, CHANNEL: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    n, kv_head, slab = place_in_grid(number, KV_HEADS, (DIM_K + BK - 1) // BK)
    start, end = tl.load(chunks + 2 * n).to(tl.int64), tl.load(chunks + 2 * n + 1)
    left = (end - start).to(tl.int32)
    rows = tl.arange(0, C)
    columns = slab * BK + tl.arange(0, BK)
    place = n * KV_HEADS + kv_head

    dq = tl.zeros((C, BK), tl.float32)
    dk = tl.zeros((C, BK), tl.float32)
    pairs = tl.zeros((C, C), tl.float32)  # gradient of the chunk's scores
    # The state after the chunk times its gradient, summed over the value channels: what every gate of the chunk is due.
    # A product of which the diagonal counts: Triton 3.6 overwrites a tile that products and others read in one loop.
    crossings = tl.zeros((BK, BK), tl.float32)
    for tile in range(0, DIM_V, BV):
        values = tile + tl.arange(0, BV)
        d_tile = load_state(later, place, columns, values, DIM_K, DIM_V)
        s_tile = load_state(before, place, columns, values, DIM_K, DIM_V)
        v_rows = load_rows(v, start, left, kv_head, values, C, KV_HEADS, DIM_V)
        dk += dot(v_rows, tl.trans(d_tile), OPERAND, PRECISION)
        if grad_g is not None:
            crossings += dot(s_tile, tl.trans(d_tile), OPERAND, PRECISION)
        if GROUP == 1:  # values are read once
            do_rows = load_rows(grad_out, start, left, kv_head, values, C, KV_HEADS, DIM_V)
            pairs += dot(do_rows, tl.trans(v_rows), OPERAND, PRECISION)
            dq += dot(do_rows, tl.trans(s_tile), OPERAND, PRECISION)
    channels = tl.arange(0, BK)
    crossing = tl.sum(tl.where(channels[:, None] == channels[None, :], crossings, 0.0), 1)
    gates = _load_gates(g, start, left, kv_head, columns, C, KV_HEADS, DIM_K, CHANNEL)
    keys = load_rows(k, start, left, kv_head, columns, C, KV_HEADS, DIM_K).to(tl.float32)
    log = _upto(gates, CHANNEL, C, EXACT)
    dk *= tl.exp2(_after(gates, log, CHANNEL, C, OPERAND == tl.bfloat16 and LEVELS == 1, EXACT))
    crossing = crossing * tl.exp2(tl.sum(gates.to(tl.float32), 0) * LOG2E) + tl.sum(keys * dk, 0)

    # A token's own weight has no gate in it: apart from the rest, its large equal shares do not blur the gate's gradient.
    # There a pair counts once with its query and once, negative, with its key, and gates that both passed see it cancel.
    change = tl.zeros((C, BK), tl.float32)
    own = tl.zeros((C, BK), tl.float32)
    for j in range(GROUP):
        head = kv_head * GROUP + j
        if GROUP > 1:
            dq = tl.zeros((C, BK), tl.float32)
            pairs = tl.zeros((C, C), tl.float32)  # gradient of the chunk's scores
            for tile in range(0, DIM_V, BV):
                values = tile + tl.arange(0, BV)
                s_tile = load_state(before, place, columns, values, DIM_K, DIM_V)
                do_rows = load_rows(grad_out, start, left, head, values, C, KV_HEADS * GROUP, DIM_V)
                v_rows = load_rows(v, start, left, kv_head, values, C, KV_HEADS, DIM_V)
                pairs += dot(do_rows, tl.trans(v_rows), OPERAND, PRECISION)
                dq += dot(do_rows, tl.trans(s_tile), OPERAND, PRECISION)
        diagonal = tl.sum(tl.where(rows[:, None] == rows[None, :], pairs, 0.0), 1)[:, None] * scale
        pairs = tl.where(rows[:, None] > rows[None, :], pairs * scale, 0.0)
        queries = load_rows(q, start, left, head, columns, C, KV_HEADS * GROUP, DIM_K).to(tl.float32)
        dq *= tl.exp2(log) * scale
        if CHANNEL and LEVELS == 1:
            decay, growth = tl.exp2(log), tl.exp2(tl.minimum(-log, BOUND))
            dq += decay * precise_dot(pairs, keys * growth, PRECISION)
        elif CHANNEL:
            size = C
            waiting = C
            pending = rows >= 0
            for _ in range(LEVELS):
                if waiting > 0:
                    inside = _in_block(gates, size, C, EXACT)
                    decay, growth = tl.exp2(inside), tl.exp2(tl.minimum(-inside, BOUND))
                    bounded = tl.min(inside, 1) >= -BOUND
                    block = rows // size
                    same = block[:, None] == block[None, :]
                    part = tl.where(same & (pending & bounded)[:, None], pairs, 0.0)
                    dq += decay * precise_dot(part, keys * growth, PRECISION)
                    dk += growth * precise_dot(tl.trans(part), queries * decay, PRECISION)
                    pending = pending & (bounded == 0)
                    waiting = tl.sum(pending.to(tl.int32), 0)
                    if waiting > 0:
                        decay = _to_middle(gates, size, C, EXACT)
                        late = rows % size >= size // 2
                        part = tl.where(same & (late & pending)[:, None] & (late == 0)[None, :], pairs, 0.0)
                        dq += decay * precise_dot(part, keys * decay, PRECISION)
                        dk += decay * precise_dot(tl.trans(part), queries * decay, PRECISION)
                    size = size // 2
        else:
            pairs *= _pair_decay(gates, C, EXACT)
            dq += precise_dot(pairs, keys, PRECISION)
        change += queries * dq
        dq += diagonal * keys
        store_rows(grad_q, dq, start, left, head, columns, C, KV_HEADS * GROUP, DIM_K)
        # only now, when the registers of the queries' gradient are free
        if CHANNEL and LEVELS == 1:
            dk += growth * precise_dot(tl.trans(pairs), queries * decay, PRECISION)
        elif not CHANNEL:
            dk += precise_dot(tl.trans(pairs), queries, PRECISION)
        if grad_g is None:
            dk += diagonal * queries
        else:
            own += diagonal * queries
    change -= keys * dk
    store_rows(grad_k, dk + own, start, left, kv_head, columns, C, KV_HEADS, DIM_K)
    if CHANNEL and LEVELS == 1:
        tl.store(strong + number, (tl.min(tl.sum(gates.to(tl.float32), 0), 0) * LOG2E < -BOUND).to(tl.int32))
    if grad_g is not None:
        onwards = rows[:, None] <= rows[None, :]
        if CHANNEL:
            dg = selected_sums(onwards, change, EXACT) + crossing[None, :]
            store_rows(grad_g, dg, start, left, kv_head, columns, C, KV_HEADS, DIM_K)
        else:
            dg = tl.sum(tl.where(onwards, tl.sum(change, 1)[None, :], 0.0), 1) + tl.sum(crossing, 0)
            place = (slab.to(tl.int64) * total_tokens + start + rows) * KV_HEADS + kv_head
            tl.store(grad_g + place, dg, mask=rows < left)


@triton.jit(do_not_specialize=["count", "rounds"], do_not_specialize_on_alignment=["chunks"])
def _gradients(
    q, k, v, g, grad_out, before, later, grad_q, grad_k, grad_g, strong, chunks, scale, total_tokens, count, rounds,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr, CHANNEL: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, keys and gates in one chunk, for one slab of key channels (papers: GLA, section 2.7).

    With LEVELS = 1, one anchor serves the chunk, and where it does not `strong` is set; with more, only chunks so marked are
    done, as in `_prepare_strong`. Without `grad_g`, gates get no gradient.
    """
    if LEVELS == 1:
        _slab_gradients(
            tl.program_id(0), q, k, v, g, grad_out, before, later, grad_q, grad_k, grad_g, strong, chunks, scale, total_tokens,
            KV_HEADS, GROUP, DIM_K, DIM_V, CHANNEL, C, LEVELS, BK, BV, OPERAND, PRECISION, EXACT,
        )  # fmt: skip
    else:
        for i in range(marked_rounds(strong, count, rounds, 1)):
            number, marked = marked_number(strong, count, i, 1)
            if marked:
                _slab_gradients(
                    number, q, k, v, g, grad_out, before, later, grad_q, grad_k, grad_g, strong, chunks, scale, total_tokens,
                    KV_HEADS, GROUP, DIM_K, DIM_V, CHANNEL, C, LEVELS, BK, BV, OPERAND, PRECISION, EXACT,
                )  # fmt: skip


@triton.jit
def _step(
    q, k, v, g, out, initial, final, scale, time,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr, CHANNEL: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A few tokens through the recurrence, the state read and written once."""
    tiles: tl.constexpr = (DIM_V + BV - 1) // BV
    row, kv_head = tl.program_id(0) // (tiles * KV_HEADS), tl.program_id(0) // tiles % KV_HEADS
    values = tl.program_id(0) % tiles * BV + tl.arange(0, BV)
    columns = tl.arange(0, BK)
    k_inside, v_inside = columns < DIM_K, values < DIM_V
    if initial is None:
        state = tl.zeros((BK, BV), tl.float32)
    else:
        state = load_state(initial, row * KV_HEADS + kv_head, columns, values, DIM_K, DIM_V)
    for t in range(time):
        at = (row.to(tl.int64) * time + t) * KV_HEADS + kv_head
        key = tl.load(k + at * DIM_K + columns, mask=k_inside, other=0.0).to(tl.float32)
        v_row = tl.load(v + at * DIM_V + values, mask=v_inside, other=0.0).to(tl.float32)
        if CHANNEL:
            gate = tl.load(g + at * DIM_K + columns, mask=k_inside, other=0.0).to(tl.float32)
            state *= tl.exp2(gate * LOG2E)[:, None]
        else:
            state *= tl.exp2(tl.load(g + at).to(tl.float32) * LOG2E)
        state += key[:, None] * v_row[None, :]
        for j in range(GROUP):
            query = tl.load(q + (at * GROUP + j) * DIM_K + columns, mask=k_inside, other=0.0).to(tl.float32)
            result = tl.sum(query[:, None] * state, 0) * scale
            tl.store(out + (at * GROUP + j) * DIM_V + values, result.to(out.dtype.element_ty), mask=v_inside)
    store_state(final, state, row * KV_HEADS + kv_head, columns, values, DIM_K, DIM_V)


class _Launch(NamedTuple):
    """Tile sizes and warps of the kernels; the state of one walk has to fit into the registers of one program."""

    prepare: dict
    totals: dict
    join: dict
    walk: dict
    gradients: dict


@functools.lru_cache(maxsize=64)
def _launch(dim_k: int, dim_v: int, itemsize: int, ample: bool) -> _Launch:
    """Measured on an H200 in bfloat16 at 16 heads of 128 x 128, 4 of 256 x 512 and as latents use it (16 x 64, 128 and 256);
    float32 fits, unmeasured. Where shared memory is not `ample`, walks and gradients do without loads under way."""
    wide_k, wide_v = tile_width(dim_k), tile_width(dim_v)
    if itemsize == 4:
        return _Launch(
            prepare=dict(BK=min(wide_k, 32), num_warps=4, num_stages=1),
            totals=dict(BK=min(wide_k, 64), BV=min(wide_v, 64), num_warps=4, num_stages=1),
            join=dict(BK=16, BV=min(wide_v, 64), num_warps=4),
            walk=dict(BK=wide_k, BV=32, num_warps=8, num_stages=1),
            gradients=dict(BK=min(wide_k, 32), BV=min(wide_v, 32), num_warps=4, num_stages=1),
        )
    wide_v = max(wide_v, HALF_WIDTH.value)
    walk_v = min(wide_v, 128, 16384 // wide_k)
    return _Launch(
        prepare=dict(BK=min(wide_k, 64), num_warps=4, num_stages=3),
        totals=dict(
            BK=min(wide_k, 128), BV=min(wide_v, 128), num_warps=8 if min(wide_k, wide_v) > 64 else 4, num_stages=3
        ),
        join=dict(BK=16, BV=min(wide_v, 64), num_warps=4),
        walk=dict(
            BK=wide_k,
            BV=walk_v,
            num_warps=8 if wide_k * walk_v > 8192 else 4,
            num_stages=1 if not ample else 3 if wide_k * walk_v <= 2048 else 2,
        ),
        gradients=dict(
            BK=min(wide_k, 64),
            BV=min(wide_v, 64),
            num_warps=4,
            num_stages=3 if ample else 1,
        ),
    )


class Prepared(NamedTuple):
    """What walks take, in the type of the products' operands: weights inside chunks (heads, tokens, CHUNK) and the rest that
    their rounding took away (or none); queries decayed from their chunk's start (or none) and keys decayed to its end;
    log2 of the decays of whole chunks, (chunks + 1, ...), the last of which an empty last document looks at."""

    scores: torch.Tensor
    rest: torch.Tensor | None
    q: torch.Tensor | None
    k: torch.Tensor
    kept: torch.Tensor


class Recurrence:
    """A gated recurrence over one call's values, laid end to end: its tables, launches and walks, forward and in reverse.

    `channel`: one gate per key channel, else per head. `forward_only`: no gradients are to come, which are formed for half of
    the segments at a time.
    """

    def __init__(
        self,
        v: torch.Tensor,
        heads: int,
        dim_k: int,
        channel: bool,
        scale: float,
        borders: tuple[int, ...],
        forward_only: bool = False,
    ):
        self.v = v.contiguous()
        self.kv_heads, self.dim_v = v.shape[2:]
        self.heads, self.group, self.dim_k = heads, heads // self.kv_heads, dim_k
        self.channel, self.scale, self.tokens = channel, scale, v.shape[0] * v.shape[1]
        self.precision = product_precision(v.dtype)
        self.launch = _launch(self.dim_k, self.dim_v, self.state_dtype.itemsize, has_ample_memory(v.device))
        tiles = self.kv_heads * triton.cdiv(self.dim_v, self.launch.walk["BV"])
        self.plan = self.planned(borders, 2 * processors(v.device) // tiles)
        if forward_only and self.plan.joined and self.launch.walk["BK"] * self.launch.walk["BV"] > 8192:
            # one program, whose state is that large, runs on a processor at a time: where documents fill these unsplit, nothing
            # is to join
            whole = self.planned(borders, processors(v.device) // tiles)
            if not whole.joined and 4 * len(whole.segments) * tiles >= 3 * processors(v.device):
                self.plan = whole
        self.kind = dict(KV_HEADS=self.kv_heads, DIM_K=self.dim_k)
        self.shape = dict(**self.kind, DIM_V=self.dim_v)

    def planned(self, borders: tuple[int, ...], segments: int) -> Plan:
        """Tables for about so many segments."""
        length = triton.cdiv(self.tokens, max(segments, 1) * CHUNK) * CHUNK
        return make_plan(borders, max(length, 8 * CHUNK), self.v.device)

    def new_prepared(self, queries: bool, rest: bool) -> Prepared:
        """Room for what walks take."""
        batch, time = self.v.shape[:2]
        chunks = len(self.plan.chunks)
        return Prepared(
            scores=self.v.new_empty(self.heads, self.tokens, CHUNK, dtype=self.state_dtype),
            rest=self.v.new_empty(self.heads, self.tokens, dtype=self.state_dtype) if rest else None,
            q=self.v.new_empty(batch, time, self.heads, self.dim_k, dtype=self.state_dtype) if queries else None,
            k=self.v.new_empty(batch, time, self.kv_heads, self.dim_k, dtype=self.state_dtype),
            kept=self.v.new_empty(chunks + 1, self.kv_heads, self.dim_k if self.channel else 1, dtype=torch.float32),
        )

    def starts(self, initial, writer, value, kept, reverse: bool) -> torch.Tensor | None:
        """States at the start of the segments (in reverse, at their end)."""
        if not self.plan.joined:
            return initial
        segments, documents = self.plan.segments, self.plan.documents
        totals = self.v.new_empty(len(segments), self.kv_heads, self.dim_k, self.dim_v, dtype=torch.float32)
        decays = totals.new_empty(len(segments), self.kv_heads, self.dim_k)
        starts = torch.empty_like(totals)
        config, join = self.launch.totals, self.launch.join
        tiles = triton.cdiv(self.dim_k, config["BK"]) * triton.cdiv(self.dim_v, config["BV"])
        products = dict(OPERAND=self.precision["OPERAND"], PRECISION=self.precision["PRECISION"])
        run(
            _totals, (len(segments) * self.kv_heads * tiles,),
            writer, value, kept, totals, decays, segments, WRITERS=self.group if reverse else 1, REVERSE=reverse,
            C=CHUNK, CHANNEL=self.channel, **self.shape, **products, **config,
        )  # fmt: skip
        tiles = triton.cdiv(self.dim_k, join["BK"]) * triton.cdiv(self.dim_v, join["BV"])
        run(
            join_segments, (len(documents), self.kv_heads, tiles),
            totals, decays, initial, starts, documents, REVERSE=reverse, **self.shape, **join,
        )  # fmt: skip
        return starts

    def walk(
        self, start, reader, writer, value, ready, *, gates=None, other=None, shares=None, out=None, states=None,
        final=None, reverse=False, part=None,
    ):  # fmt: skip
        """Walk through all segments, or those of one part of the plan, whose states are then kept in `states`. `gates` decay
        the readers on the way; `shares` (tokens, heads) of `other` are added to the output."""
        config = self.launch.walk
        (first, base), (last, _) = part or (self.plan.cuts[0], self.plan.cuts[-1])
        run(
            _walk, ((last - first) * self.kv_heads * triton.cdiv(self.dim_v, config["BV"]),),
            reader, writer, value, gates, ready.kept, ready.scores, ready.rest, other, shares, out, states, base,
            None if start is None else start[first:], final, self.plan.segments[first:],
            1.0 if reverse else self.scale, self.tokens,
            READERS=1 if reverse else self.group, WRITERS=self.group if reverse else 1, REVERSE=reverse,
            C=CHUNK, CHANNEL=self.channel, **self.shape, **self.precision, **config,
        )  # fmt: skip

    def gradients(self, q, k, g, ready, start, grad_out, grad_final, grad_q, grad_k, grad_g):
        """Fill the gradients of queries, keys and (unless `None`) gates; return those of values and of the initial state.

        `start`: the states that segments start from, `grad_q` and `grad_k` may be the memory of `ready.q` and `ready.k`.
        """
        end = self.starts(grad_final, ready.q, grad_out, ready.kept, reverse=True)
        grad_v, grad_initial = torch.empty_like(self.v), self.new_final()
        later, before = self.new_states(), self.new_states()
        for part in self.parts:
            self.walk(
                end, ready.k, ready.q, grad_out, ready, out=grad_v, states=later, final=grad_initial, reverse=True, part=part
            )  # fmt: skip
            self.walk(start, None, ready.k, self.v, ready, states=before, part=part)
            (_, first), (_, stop) = part
            count = (stop - first) * self.kv_heads * self.slabs
            strong = torch.empty(count, dtype=torch.int32, device=q.device)
            grid, rounds = few_programs(count, q.device)
            passes = ((1, (count,)), (CHUNK.bit_length(), grid)) if self.channel else ((1, (count,)),)
            for levels, programs in passes:
                run(
                    _gradients, programs,
                    q, k, self.v, g, grad_out, before, later, grad_q, grad_k, grad_g, strong,
                    self.plan.chunks[first:], self.scale, self.tokens, count, rounds, GROUP=self.group, C=CHUNK, LEVELS=levels,
                    CHANNEL=self.channel, **self.shape, **self.precision, **self.launch.gradients,
                )  # fmt: skip
        return grad_v, grad_initial

    @property
    def parts(self) -> tuple:
        """Beginnings and ends of what the backward pass takes one after the other, for states kept at a time to take less
        memory; all at once where the state of a chunk is no larger than its values."""
        cuts = self.plan.cuts if self.dim_k > CHUNK else (self.plan.cuts[0], self.plan.cuts[-1])
        return tuple(itertools.pairwise(cuts))

    @property
    def slabs(self) -> int:
        """Programs that share the key channels of a chunk's gradients."""
        return triton.cdiv(self.dim_k, self.launch.gradients["BK"])

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision["OPERAND"] == tl.bfloat16 else torch.float32

    def new_states(self) -> torch.Tensor:
        """Where walks keep the states of one part's chunks, as operands of products."""
        size = max(end[1] - start[1] for start, end in self.parts)
        return self.v.new_empty(size, self.kv_heads, self.dim_k, self.dim_v, dtype=self.state_dtype)

    def new_final(self) -> torch.Tensor:
        return self.v.new_empty(len(self.plan.documents), self.kv_heads, self.dim_k, self.dim_v, dtype=torch.float32)


def _prepared(problem: Recurrence, q, k, g, scale: float, queries: bool, rest: bool) -> Prepared:
    """Scores and queries times `scale`."""
    ready = problem.new_prepared(queries, rest)
    count = len(problem.plan.chunks) * problem.heads
    strong = torch.empty(count, dtype=torch.int32, device=q.device)
    options = dict(**problem.kind, GROUP=problem.group, C=CHUNK, **problem.precision, **problem.launch.prepare)
    run(
        _prepare, (count,),
        q, k, g, ready.scores, ready.rest, strong, ready.q, ready.k, ready.kept, problem.plan.chunks,
        scale, problem.tokens, CHANNEL=problem.channel, **options,
    )  # fmt: skip
    if problem.channel:
        del options["OPERAND"]
        grid, rounds = few_programs(count, q.device)
        run(
            _prepare_strong, grid,
            q, k, g, ready.scores, ready.rest, strong, ready.k, problem.plan.chunks, scale, problem.tokens, count, rounds,
            LEVELS=CHUNK.bit_length(), **options,
        )  # fmt: skip
    return ready


class _GatedLinearAttention(torch.autograd.Function):
    @staticmethod
    @forward_compiled_together
    def forward(ctx, q, k, v, g, initial, scale, borders, forward_only):
        problem = Recurrence(v, q.shape[2], q.shape[3], g.dim() == 4, scale, borders, forward_only)
        # The walk scales its results: scaled queries would be rounded once more where nothing has decayed. Decayed queries are
        # worth their memory where several programs would form them.
        ready = _prepared(problem, q, k, g, 1.0, queries=problem.dim_v > 2 * problem.launch.walk["BV"], rest=False)
        start = problem.starts(initial, ready.k, v, ready.kept, reverse=False)
        out, final = v.new_empty(*q.shape[:3], v.shape[3]), problem.new_final()
        reader, gates = (q, g) if ready.q is None else (ready.q, None)
        problem.walk(start, reader, ready.k, v, ready, gates=gates, out=out, final=final)
        ctx.save_for_backward(q, k, v, g, initial, None if start is initial else start)
        ctx.scale, ctx.borders = scale, borders
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @once_differentiable
    @backward_compiled_together
    def backward(ctx, saved, grad_out, grad_final):
        q, k, v, g, initial, start = saved
        start = initial if start is None else start
        grad_out = v.new_zeros(*q.shape[:3], v.shape[3]) if grad_out is None else grad_out.contiguous()
        grad_final = None if grad_final is None else grad_final.contiguous()
        problem = Recurrence(v, q.shape[2], q.shape[3], g.dim() == 4, ctx.scale, ctx.borders)
        ready = _prepared(problem, q, k, g, ctx.scale, queries=True, rest=problem.state_dtype == torch.bfloat16)
        # a chunk's decayed queries and keys are done with when its gradients are written
        grad_q, grad_k = (y if x.dtype == y.dtype else torch.empty_like(x) for x, y in ((q, ready.q), (k, ready.k)))
        # one gate per head sums over the slabs
        grad_g = torch.empty_like(g) if problem.channel else g.new_empty(problem.slabs, *g.shape, dtype=torch.float32)
        grad_v, grad_initial = problem.gradients(q, k, g, ready, start, grad_out, grad_final, grad_q, grad_k, grad_g)
        if not problem.channel:
            grad_g = grad_g.sum(0).to(g.dtype)
        return grad_q, grad_k, grad_v, grad_g, None if initial is None else grad_initial, None, None, None


@on_own_device
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
    out = v.new_empty(batch, time, heads, dim_v)
    final = v.new_empty(batch, kv_heads, dim_k, dim_v, dtype=torch.float32)
    columns = min(tile_width(dim_v), 32)
    _step[(batch * kv_heads * triton.cdiv(dim_v, columns),)](
        q, k, v, g, out, None if initial_state is None else initial_state.contiguous(), final, scale, time,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM_K=dim_k, DIM_V=dim_v, CHANNEL=g.dim() == 4,
        BK=tile_width(dim_k), BV=columns, num_warps=4,
    )  # fmt: skip
    return out, final


@torch.compiler.disable
@on_own_device
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
    borders = document_borders(*q.shape[:2], cu_seqlens)
    initial_state = None if initial_state is None else initial_state.float().contiguous()
    q, k, v, log_decay = (x.contiguous() for x in (q, k, v, log_decay))
    forward_only = not needs_gradient(q, k, v, log_decay, initial_state)
    return _GatedLinearAttention.apply(q, k, v, log_decay, initial_state, scale, borders, forward_only)
