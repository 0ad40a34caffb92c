# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Causal latent attention in Triton: forward, backward and the decode step (papers: Latte, sections 2.3, 2.5, 2.6 and 10).

Latents are the state of gated linear attention with queries a, keys exp(theta - z) and log decays z_{t-1} - z_t (section 2.3).
So this file forms the masses z and the probabilities a, hands weights inside chunks, decayed queries and decayed keys to the
walks of `gated_linear_attention`, and brings their gradients back to logits.

Masses: `_sum_chunks`, `_carry` along the chunks, `_accumulate` inside each. `_prepare` forms what walks take: the weight of a
pair is a_t exp(c - z_t) times exp(theta_s - c) with the chunk's first z as anchor c, for rows whose z rose by SPREAD at most;
other rows have the anchors of a dyadic decomposition, where no factor exceeds 1. What becomes of a row depends on no later one.
Backward: `_gather` gives the gradients of query logits and gate and what each row sends to the masses of its latents,
`_carry_back` and `_spread` sum that over later rows for the key logits. Logarithms are to base 2.
"""

import math

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from ..compilation import backward_compiled_together, forward_compiled_together, run
from ..dispatch import on_own_device
from ..gated_linear_attention.fused import Prepared, Recurrence, store_scores
from ..packing import document_borders
from ..tiles import (
    CHUNK,
    LOG2E,
    few_programs,
    load_rows,
    load_state,
    marked_number,
    marked_rounds,
    place_in_grid,
    rounded_dot,
    store_rows,
    store_state,
    tile_width,
)
from .reference import EMPTY

TO_BASE_2 = 1 / math.log(2)
LEVELS = tl.constexpr(CHUNK.bit_length())
SPREAD = tl.constexpr(43.0)  # in log2, 30 nats
NOTHING = tl.constexpr(EMPTY)
OCCUPIED = tl.constexpr(EMPTY / 2)
COLUMNS = 64  # latents of all heads, side by side, that one program takes
STAGES = 8  # rows or chunks whose loads are under way
EXACT_ROWS = 32  # of the exact branch, that one program takes


@triton.jit
def _add_logs(a, b):
    return tl.maximum(a, b) + tl.log2(1.0 + tl.exp2(-tl.abs(a - b)))


@triton.jit
def _load_logits(pointer, start, left, head, latents, C: tl.constexpr, HEADS: tl.constexpr, LATENTS: tl.constexpr):
    """Key logits to base 2, `NOTHING` where nothing is absorbed."""
    rows = tl.arange(0, C)
    at = (start * HEADS + head) * LATENTS + rows[:, None] * (HEADS * LATENTS) + latents[None, :]
    x = tl.load(pointer + at, mask=(rows < left)[:, None] & (latents < LATENTS)[None, :], other=NOTHING).to(tl.float32)
    return tl.where(x > OCCUPIED, x * LOG2E, NOTHING)


@triton.jit
def _share(theta, reference):
    """exp(theta - reference) where theta is a logit."""
    return tl.where(theta > OCCUPIED, tl.exp2(tl.minimum(theta - reference, 0.0)), 0.0)


@triton.jit
def _absorbed(z):
    """log2 of all mass in the latents of each head, the last dimension, which is kept as one."""
    axis: tl.constexpr = len(z.shape) - 1
    top = tl.max(z, axis, keep_dims=True)
    return top + tl.log2(tl.sum(tl.exp2(z - top), axis, keep_dims=True))


@triton.jit
def _columns(heads, latents, HEADS: tl.constexpr, LATENTS: tl.constexpr, P: tl.constexpr):
    """Where in a row the latents of heads are that stand side by side in a tile; beyond its end where there are none."""
    width: tl.constexpr = HEADS * LATENTS
    columns = tl.where((latents < LATENTS) & (heads < HEADS), heads * LATENTS + latents, width)
    if LATENTS * P == columns.shape[0]:
        columns = tl.max_contiguous(tl.multiple_of(columns, LATENTS), LATENTS)
    return columns


@triton.jit
def _allowance(z, log_length, MASS: tl.constexpr, P: tl.constexpr):
    """What is added to the query logits of P heads, whose z, (C, columns), stand side by side."""
    allowance = tl.where(z > OCCUPIED, 0.0, NOTHING)
    if MASS:
        allowance = tl.where(z > OCCUPIED, z, NOTHING)
        if log_length is not None:
            by_head: tl.constexpr = (z.shape[0], P, z.shape[1] // P)
            excess = tl.maximum(_absorbed(tl.reshape(z, by_head)) - log_length, 0.0)
            allowance = tl.reshape(tl.reshape(allowance, by_head) - excess, z.shape)
    return allowance


@triton.jit
def _weights(
    q, gate, allowance, start, left, columns, heads,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Of P heads, whose logits stand side by side in `columns`, probability of each latent, (C, columns), and of the exact
    branch, (C, P)."""
    logits = load_rows(q, start, left, 0, columns, C, 1, WIDTH).to(tl.float32) * LOG2E + allowance
    by_head: tl.constexpr = (C, P, allowance.shape[1] // P)
    logits = tl.reshape(logits, by_head)
    top = tl.maximum(tl.max(logits, 2), OCCUPIED)
    if gate is not None:
        exact = load_rows(gate, start, left, 0, heads, C, 1, HEADS).to(tl.float32) * LOG2E
        top = tl.maximum(top, exact)
    parts = tl.exp2(logits - top[:, :, None])
    total = tl.sum(parts, 2)
    own = total * 0.0
    if gate is not None:
        own = tl.exp2(exact - top)
        total += own
    share = 1 / tl.maximum(total, 1e-30)
    return tl.reshape(parts * share[:, :, None], allowance.shape), own * share


@triton.jit
def _load_row(pointer, row, columns, WIDTH: tl.constexpr):
    return tl.load(pointer + tl.cast(row, tl.int64) * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _load_logit_row(theta, row, columns, WIDTH: tl.constexpr):
    x = _load_row(theta, row, columns, WIDTH)
    return tl.where((columns < WIDTH) & (x > OCCUPIED), x * LOG2E, NOTHING)


@triton.jit
def _sum_chunks(theta, sums, chunks, WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Log-sum-exp of each chunk's logits, latents of all heads side by side."""
    n, block, _ = place_in_grid(tl.program_id(0), (WIDTH + BLOCK - 1) // BLOCK, 1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    start, end = tl.load(chunks + 2 * n).to(tl.int64), tl.load(chunks + 2 * n + 1)
    logits = _load_logits(theta, start, (end - start).to(tl.int32), 0, columns, C, 1, WIDTH)
    top = tl.max(logits, 0)
    total = tl.sum(_share(logits, top[None, :]), 0)
    tl.store(sums + n * WIDTH + columns, top + tl.log2(tl.maximum(total, 1.0)), mask=columns < WIDTH)


@triton.jit
def _chunks_of(document, documents, segments, C: tl.constexpr):
    """First chunk of a document and how many it has."""
    first, count = tl.load(documents + 2 * document), tl.load(documents + 2 * document + 1)
    begin = tl.load(segments + 6 * first + 2)
    last = segments + 6 * (first + count - 1)
    return begin, tl.load(last + 2) - begin + tl.cdiv(tl.load(last + 1) - tl.load(last), C)


@triton.jit
def _carry(
    sums, initial, befores, final, documents, segments,
    WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Masses before each chunk of a document, and after its last."""
    document, block, _ = place_in_grid(tl.program_id(0), (WIDTH + BLOCK - 1) // BLOCK, 1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    first, count = _chunks_of(document, documents, segments, C)
    z = tl.full((BLOCK,), NOTHING, tl.float32)
    if initial is not None:
        z = _load_row(initial, document, columns, WIDTH)
    for n in tl.range(first, first + count, num_stages=STAGES):
        total = _load_row(sums, n, columns, WIDTH)
        tl.store(befores + n * WIDTH + columns, z, mask=columns < WIDTH)
        z = _add_logs(z, total)
    tl.store(final + document * WIDTH + columns, z, mask=columns < WIDTH)


@triton.jit
def _accumulate(theta, befores, masses, chunks, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """z of each row of a chunk: log-sum-exp of the logits up to it and of what came before the chunk."""
    n, block, _ = place_in_grid(tl.program_id(0), (WIDTH + BLOCK - 1) // BLOCK, 1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    start, end = tl.load(chunks + 2 * n), tl.load(chunks + 2 * n + 1)
    before = _load_row(befores, n, columns, WIDTH)
    # the chunk's sum by itself: equal steps of a large one would all be rounded the same way
    inside = tl.full((BLOCK,), NOTHING, tl.float32)
    z = before
    for t in tl.range(start, end, num_stages=STAGES):
        inside = _add_logs(inside, _load_logit_row(theta, t, columns, WIDTH))
        z = tl.maximum(z, _add_logs(before, inside))  # never less, whatever rounding does
        tl.store(masses + tl.cast(t, tl.int64) * WIDTH + columns, z, mask=columns < WIDTH)


@triton.jit
def _load_masses(pointer, start, rows, head, latents, HEADS: tl.constexpr, LATENTS: tl.constexpr):
    at = (start * HEADS + head) * LATENTS + rows[:, None] * (HEADS * LATENTS) + latents[None, :]
    return tl.load(pointer + at, mask=(latents < LATENTS)[None, :], other=NOTHING)


@triton.jit
def _load_chunk_masses(masses, start, left, columns, C: tl.constexpr, WIDTH: tl.constexpr):
    """z of a chunk's rows, where rows behind the end repeat the last; its anchor, that of the first row where the latent is not
    empty; and its last."""
    z = _load_masses(masses, start, tl.minimum(tl.arange(0, C), left - 1), 0, columns, 1, WIDTH)
    last = tl.max(z, 0)  # it never falls
    anchor = tl.min(tl.where(z > OCCUPIED, z, last[None, :]), 0)
    return z, anchor, last


@triton.jit
def _fading(z, anchor):
    """exp(anchor - z), of whatever size where the latent is still empty."""
    return tl.exp2(tl.minimum(anchor[None, :] - z, 0.0))


@triton.jit
def _near_key(logits, anchor):
    """What each token puts into the latents, beside `anchor`."""
    return tl.exp2(tl.minimum(logits - anchor[None, :], SPREAD))


@triton.jit
def _near_pairs(faded, key, C: tl.constexpr, PRECISION: tl.constexpr):
    """Weight of each token of a chunk in the output of each row, sum_l a_t exp(theta_s - z_t), right for near rows; `faded` is
    a exp(anchor - z)."""
    rows = tl.arange(0, C)
    pairs = rounded_dot(faded, tl.trans(key), PRECISION)
    return tl.where(rows[:, None] >= rows[None, :], pairs, 0.0)


@triton.jit
def _far_pairs(
    pairs, a, z, anchor, logits, masses, start, left, columns,
    C: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same, given that, for all rows."""
    rows = tl.arange(0, C)
    near = tl.max(z - anchor[None, :], 1) <= SPREAD
    own = tl.sum(a * _share(logits, z), 1)
    pairs = tl.where(near[:, None], pairs, tl.where(rows[:, None] == rows[None, :], own[:, None], 0.0))
    for level in tl.range(1, LEVELS, num_stages=1):  # pairs across the middle of blocks of 2^level rows
        half = 1 << (level - 1)
        late, middle = rows // half % 2 == 1, rows // (2 * half) * (2 * half) + half - 1
        across = (middle[:, None] == middle[None, :]) & (late & (near == 0))[:, None] & (late == 0)[None, :]
        anchors = _load_masses(masses, start, tl.minimum(middle, left - 1), 0, columns, 1, WIDTH)
        read = a * tl.exp2(tl.minimum(anchors - z, 0.0))
        part = rounded_dot(read, tl.trans(_share(logits, anchors)), PRECISION)
        pairs += tl.where(across, part, 0.0)
    return pairs


@triton.jit
def _prepare(
    q, theta, gate, masses, befores, scores, rest, far, reader, writer, kept, shares, own_shares, keys, gates,
    chunks, log_length, total_tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LATENTS: tl.constexpr, MASS: tl.constexpr, C: tl.constexpr, BL: tl.constexpr,
    P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk and P key/value heads, side by side, with all their query heads: what walks take, see `Prepared`, and the share
    of the exact branch. For the backward pass `shares` takes the probabilities a, `keys` exp(theta_t - z_t) and `gates`
    z_{t-1} - z_t (natural logarithm).

    Where rows are not near, `far` is set, and `_prepare_far` forms these weights again.
    """
    kv_heads: tl.constexpr = HEADS // GROUP
    width: tl.constexpr = HEADS * LATENTS
    kv_width: tl.constexpr = kv_heads * LATENTS
    n, block, _ = place_in_grid(tl.program_id(0), (kv_heads + P - 1) // P, 1)
    start, end = tl.load(chunks + 2 * n).to(tl.int64), tl.load(chunks + 2 * n + 1)
    left = (end - start).to(tl.int32)
    rows, part, latents = tl.arange(0, C), tl.arange(0, BL) // (BL // P), tl.arange(0, BL) % (BL // P)
    kv_columns = _columns(block * P + part, latents, kv_heads, LATENTS, P)
    before = tl.load(befores + n * kv_width + kv_columns, mask=kv_columns < kv_width, other=NOTHING)
    logits = _load_logits(theta, start, left, 0, kv_columns, C, 1, kv_width)
    z, anchor, last = _load_chunk_masses(masses, start, left, kv_columns, C, kv_width)
    tl.store(far + tl.program_id(0), (tl.max(last - anchor, 0) > SPREAD).to(tl.int32))
    store_rows(writer, _share(logits, last[None, :]), start, left, 0, kv_columns, C, 1, kv_width)
    tl.store(kept + n * kv_width + kv_columns, before - last, mask=kv_columns < kv_width)
    if keys is not None:
        store_rows(keys, _share(logits, z), start, left, 0, kv_columns, C, 1, kv_width)
        above = tl.minimum(tl.maximum(rows, 1), left) - 1
        earlier = _load_masses(masses, start, above, 0, kv_columns, 1, kv_width)
        earlier = tl.where((rows == 0)[:, None], before[None, :], earlier)
        log = tl.where(earlier > OCCUPIED, (earlier - z) / LOG2E, 0.0)  # nothing decays in an empty latent
        store_rows(gates, log, start, left, 0, kv_columns, C, 1, kv_width)
    allowance = _allowance(z, log_length, MASS, P)
    fading, key = _fading(z, anchor), _near_key(logits, anchor)
    from_start = tl.exp2(before - anchor)[None, :]
    for j in range(GROUP):
        columns = _columns((block * P + part) * GROUP + j, latents, HEADS, LATENTS, P)
        heads = (block * P + tl.arange(0, P)) * GROUP + j
        a, own = _weights(q, gate, allowance, start, left, columns, heads, HEADS, width, C, P)
        faded = a * fading
        for i in tl.static_range(P):
            pairs = _near_pairs(tl.where((part == i)[None, :], faded, 0.0), key, C, PRECISION)
            count = tl.where(block * P + i < kv_heads, left, 0)
            store_scores(scores, rest, pairs, start, count, (block * P + i) * GROUP + j, total_tokens, C)
        store_rows(reader, faded * from_start, start, left, 0, columns, C, 1, width)
        if gate is not None:
            store_rows(own_shares, own, start, left, 0, heads, C, 1, HEADS)
        if shares is not None:
            store_rows(shares, a, start, left, 0, columns, C, 1, width)


@triton.jit(do_not_specialize=["count", "rounds"])
def _prepare_far(
    q, theta, gate, masses, scores, rest, far, chunks, log_length, total_tokens, count, rounds,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LATENTS: tl.constexpr, MASS: tl.constexpr, C: tl.constexpr, BL: tl.constexpr,
    P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights of `_prepare` where some rows are not near."""
    kv_heads: tl.constexpr = HEADS // GROUP
    kv_width: tl.constexpr = kv_heads * LATENTS
    part, latents = tl.arange(0, BL) // (BL // P), tl.arange(0, BL) % (BL // P)
    for i in range(marked_rounds(far, count, rounds, P * GROUP)):
        number, marked = marked_number(far, count, i, P * GROUP)
        if marked:
            n, block, head = place_in_grid(number, (kv_heads + P - 1) // P, P * GROUP)
            start, end = tl.load(chunks + 2 * n).to(tl.int64), tl.load(chunks + 2 * n + 1)
            left = (end - start).to(tl.int32)
            kv_columns = _columns(block * P + part, latents, kv_heads, LATENTS, P)
            columns = _columns((block * P + part) * GROUP + head % GROUP, latents, HEADS, LATENTS, P)
            heads = (block * P + tl.arange(0, P)) * GROUP + head % GROUP
            logits = _load_logits(theta, start, left, 0, kv_columns, C, 1, kv_width)
            z, anchor, last = _load_chunk_masses(masses, start, left, kv_columns, C, kv_width)
            allowance = _allowance(z, log_length, MASS, P)
            a, own = _weights(q, gate, allowance, start, left, columns, heads, HEADS, HEADS * LATENTS, C, P)
            a = tl.where((part == head // GROUP)[None, :], a, 0.0)
            pairs = _near_pairs(a * _fading(z, anchor), _near_key(logits, anchor), C, PRECISION)
            pairs = _far_pairs(pairs, a, z, anchor, logits, masses, start, left, kv_columns, C, kv_width, PRECISION)
            head += block * P * GROUP
            store_scores(scores, rest, pairs, start, tl.where(head < HEADS, left, 0), head, total_tokens, C)


@triton.jit(do_not_specialize=["tokens"])
def _grad_exact(
    exact, grad_out, own_shares, grad_exact, exact_delta, tokens,
    HEADS: tl.constexpr, DIM: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """C tokens of one head: the exact branch's gradient, and that of its probability."""
    n, head, _ = place_in_grid(tl.program_id(0), HEADS, 1)
    start, left = n.to(tl.int64) * C, tokens - n * C
    rows, values = tl.arange(0, C), tl.arange(0, BV)
    grads = load_rows(grad_out, start, left, head, values, C, HEADS, DIM).to(tl.float32)
    result = load_rows(exact, start, left, head, values, C, HEADS, DIM).to(tl.float32)
    at = (start + rows) * HEADS + head
    own = tl.load(own_shares + at, mask=rows < left, other=0.0)
    tl.store(exact_delta + at, tl.sum(result * grads, 1), mask=rows < left)
    store_rows(grad_exact, own[:, None] * grads, start, left, head, values, C, HEADS, DIM)


@triton.jit
def _gather(
    shares, own_shares, deltas, masses, befores, exact_delta, grad_q, grad_gate, sent, sums, chunks, log_length,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LATENTS: tl.constexpr, MASS: tl.constexpr, C: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """One chunk and key/value head, with delta the gradients of the probabilities a, `exact_delta` that of the exact branch's:
    gradients of query logits and gate; what each row sends to the masses of its latents, a delta minus the gradient that
    reaches z through the query logits (papers: Latte, section 2.6, where W sums it), and its sum at the chunk's start.
    """
    kv_heads: tl.constexpr = HEADS // GROUP
    n, kv_head, _ = place_in_grid(tl.program_id(0), kv_heads, 1)
    start, end = tl.load(chunks + 2 * n).to(tl.int64), tl.load(chunks + 2 * n + 1)
    left = (end - start).to(tl.int32)
    rows, latents = tl.arange(0, C), tl.arange(0, BL)
    place = (n * kv_heads + kv_head) * LATENTS + latents
    before = tl.load(befores + place, mask=latents < LATENTS, other=NOTHING)
    z = _load_masses(masses, start, tl.minimum(rows, left - 1), kv_head, latents, kv_heads, LATENTS)
    total = tl.zeros((C, BL), tl.float32)
    held = tl.zeros((C, 1), tl.float32)
    for j in range(GROUP):
        head = kv_head * GROUP + j
        a = load_rows(shares, start, left, head, latents, C, HEADS, LATENTS)
        delta = load_rows(deltas, start, left, head, latents, C, HEADS, LATENTS)
        by_row = a * delta
        expected = tl.sum(by_row, 1)
        if own_shares is not None:
            at = (start + rows) * HEADS + head
            own = tl.load(own_shares + at, mask=rows < left, other=0.0)
            product = tl.load(exact_delta + at, mask=rows < left, other=0.0)
            expected += own * product
            # product - expected, without its cancellation where own is near 1
            change = product * tl.sum(a, 1) - tl.sum(by_row, 1)
            tl.store(grad_gate + at, own * change, mask=rows < left)
        d_logits = a * (delta - expected[:, None])
        store_rows(grad_q, d_logits, start, left, head, latents, C, HEADS, LATENTS)
        if MASS:
            by_row -= d_logits
            if log_length is not None:
                held += tl.sum(d_logits, 1, keep_dims=True)
        total += by_row
    if log_length is not None:  # the same share of each head's, so added once
        absorbed = _absorbed(z)
        total += tl.where(absorbed > log_length, held, 0.0) * tl.exp2(z - absorbed)
    store_rows(sent, total, start, left, kv_head, latents, C, kv_heads, LATENTS)
    tl.store(sums + place, tl.sum(tl.exp2(before[None, :] - z) * total, 0), mask=latents < LATENTS)


@triton.jit
def _carry_back(
    sums, kept, initial, ends, final, documents, segments,
    WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """In reverse along a document, what all later rows send to the masses at each chunk's end, and at the document's start."""
    document, block, _ = place_in_grid(tl.program_id(0), (WIDTH + BLOCK - 1) // BLOCK, 1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    first, count = _chunks_of(document, documents, segments, C)
    later = tl.zeros((BLOCK,), tl.float32)
    if initial is not None:
        later = _load_row(initial, document, columns, WIDTH)
    for i in tl.range(0, count, num_stages=STAGES):
        n = first + count - 1 - i
        total, decay = _load_row(sums, n, columns, WIDTH), _load_row(kept, n, columns, WIDTH)
        tl.store(ends + n * WIDTH + columns, later, mask=columns < WIDTH)
        later = later * tl.exp2(decay) + total
    tl.store(final + document * WIDTH + columns, later, mask=columns < WIDTH)


@triton.jit
def _spread(
    theta,
    masses,
    grad_k,
    sent,
    ends,
    grad_theta,
    chunks,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of a chunk's key logits, from those of the keys and what the rows send to masses."""
    n, block, _ = place_in_grid(tl.program_id(0), (WIDTH + BLOCK - 1) // BLOCK, 1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    start, end = tl.load(chunks + 2 * n), tl.load(chunks + 2 * n + 1)
    later = _load_row(ends, n, columns, WIDTH)
    z_later = _load_row(masses, end - 1, columns, WIDTH)
    for i in tl.range(0, end - start, num_stages=STAGES):
        t = end - 1 - i
        z = _load_row(masses, t, columns, WIDTH)
        later = later * tl.exp2(z - z_later) + _load_row(sent, t, columns, WIDTH)
        z_later = z
        change = _load_row(grad_k, t, columns, WIDTH) - later
        change *= _share(_load_logit_row(theta, t, columns, WIDTH), z)
        into = grad_theta + tl.cast(t, tl.int64) * WIDTH + columns
        tl.store(into, change.to(grad_theta.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def _step(
    q, theta, v, gate, gate_value, out, initial_mass, initial_mean, final_mass, final_mean, log_length, time,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LATENTS: tl.constexpr, DIM: tl.constexpr, MASS: tl.constexpr,
    BL: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A few tokens through the recurrence, the state read and written once."""
    kv_heads: tl.constexpr = HEADS // GROUP
    tiles: tl.constexpr = (DIM + BV - 1) // BV
    tile, place = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row, kv_head = place // kv_heads, place % kv_heads
    latents, values = tl.arange(0, BL), tile * BV + tl.arange(0, BV)
    z = tl.full((BL,), NOTHING, tl.float32)
    mean = tl.zeros((BL, BV), tl.float32)
    if initial_mass is not None:
        z = tl.load(initial_mass + place * LATENTS + latents, mask=latents < LATENTS, other=NOTHING)
        mean = load_state(initial_mean, place, latents, values, LATENTS, DIM)
    for t in range(time):
        token = row.to(tl.int64) * time + t
        at = token * kv_heads + kv_head
        logits = tl.load(theta + at * LATENTS + latents, mask=latents < LATENTS, other=NOTHING).to(tl.float32)
        logits = tl.where(logits > OCCUPIED, logits * LOG2E, NOTHING)
        v_row = tl.load(v + at * DIM + values, mask=values < DIM, other=0.0).to(tl.float32)
        later = _add_logs(z, logits)
        # a step towards the value: shares of old and new, rounded by themselves, would not add up to one
        mean += _share(logits, later)[:, None] * (v_row[None, :] - mean)
        z = later
        allowance = _allowance(z[None, :], log_length, MASS, 1)
        for j in range(GROUP):
            head = kv_head * GROUP + j
            columns = _columns(head, latents, HEADS, LATENTS, 1)
            a, own = _weights(
                q, gate, allowance, token, 1, columns, head + tl.arange(0, 1), HEADS, HEADS * LATENTS, 1, 1
            )
            result = tl.sum(tl.trans(a) * mean, 0)
            into = (token * HEADS + head) * DIM + values
            if gate is not None:
                exact = tl.load(gate_value + into, mask=values < DIM, other=0.0).to(tl.float32)
                result += tl.sum(tl.sum(own, 1), 0) * exact
            tl.store(out + into, result.to(out.dtype.element_ty), mask=values < DIM)
    store_state(final_mean, mean, place, latents, values, LATENTS, DIM)
    if tile == 0:
        tl.store(final_mass + place * LATENTS + latents, z, mask=latents < LATENTS)


class Latents(Recurrence):
    """One call's recurrence over latents, and what leads to it and back."""

    def __init__(self, q, v, borders, use_mass=False, mass_length=None):
        super().__init__(v, *q.shape[2:], channel=True, scale=1.0, borders=borders)
        # queries and keys in float32, loaded two steps ahead, would take the shared memory of a second program
        if self.dim_k > 32:
            gradients = dict(self.launch.gradients, num_stages=min(self.launch.gradients["num_stages"], 2))
            self.launch = self.launch._replace(gradients=gradients)
        self.width = self.kv_heads * self.dim_k
        self.options = dict(HEADS=self.heads, GROUP=self.group, LATENTS=self.dim_k, MASS=use_mass, C=CHUNK)
        self.log_length = None if mass_length is None else math.log2(mass_length)

    def new(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=self.v.device)

    def columns(self, kernel, rows: int, *arguments, num_warps: int = 1, **options) -> None:
        """Launch a kernel over `rows` chunks or documents and the latents of all heads, side by side."""
        block = min(COLUMNS, triton.next_power_of_2(self.width))
        grid = (rows * triton.cdiv(self.width, block),)
        run(kernel, grid, *arguments, WIDTH=self.width, BLOCK=block, num_warps=num_warps, **options)

    def masses(self, theta, initial) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """z of every token, before every chunk and at the end of every document."""
        plan, held = self.plan, (self.kv_heads, self.dim_k)
        sums, befores = (self.new(len(plan.chunks), *held) for _ in range(2))
        masses, final = self.new(*theta.shape), self.new(len(plan.documents), *held)
        self.columns(_sum_chunks, len(plan.chunks), theta, sums, plan.chunks, C=CHUNK, num_warps=4)
        self.columns(
            _carry,
            len(plan.documents),
            sums,
            initial,
            befores,
            final,
            plan.documents,
            plan.segments,
            C=CHUNK,
            STAGES=STAGES,
        )
        self.columns(_accumulate, len(plan.chunks), theta, befores, masses, plan.chunks, STAGES=STAGES)
        return masses, befores, final

    def prepare(
        self, q, theta, gate, masses, befores, backward: bool
    ) -> tuple[Prepared, tuple[torch.Tensor | None, ...]]:
        """What walks take; shares of the exact branch, and for `backward` probabilities, keys and gates."""
        ready = self.new_prepared(queries=True, rest=backward and self.state_dtype == torch.bfloat16)
        own = None if gate is None else self.new(*gate.shape)
        shares, keys, gates = (self.new(*x.shape) if backward else None for x in (q, theta, theta))
        # heads with few latents stand side by side in a tile
        tile = tile_width(self.dim_k)
        together = min(tile // triton.next_power_of_2(self.dim_k), triton.next_power_of_2(self.kv_heads))
        half = self.state_dtype == torch.bfloat16
        count = len(self.plan.chunks) * triton.cdiv(self.kv_heads, together)
        far = torch.empty(count, dtype=torch.int32, device=q.device)
        options = dict(
            **self.options,
            BL=tile,
            P=together,
            PRECISION=self.precision["PRECISION"],
            num_warps=4 if tile <= 64 else 8 if half else 16,
            num_stages=3 if half else 1,  # of the loads of query logits
        )
        run(
            _prepare, (count,),
            q, theta, gate, masses, befores, ready.scores, ready.rest, far, ready.q, ready.k, ready.kept, shares, own, keys,
            gates, self.plan.chunks, self.log_length, self.tokens, **options,
        )  # fmt: skip
        count *= together * self.group
        grid, rounds = few_programs(count, q.device)
        run(
            _prepare_far, grid,
            q, theta, gate, masses, ready.scores, ready.rest, far, self.plan.chunks, self.log_length, self.tokens, count,
            rounds, **options,
        )  # fmt: skip
        return ready, (own, shares, keys, gates)

    def backward(
        self, q, theta, gate, masses, befores, start, grad_out, by_mean, by_mass, exact=None, exact_delta=None
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of q, theta, v, gate, the exact branch, the initial means and, these fixed, minus that of the initial
        masses. Of the exact branch, which one pass does not keep, `exact_delta` is its product with grad_out.

        `by_mean` and `by_mass` are the same of the final state, `start` the means that segments start from.
        """
        plan = self.plan
        ready, (own, shares, keys, gates) = self.prepare(q, theta, gate, masses, befores, backward=True)
        deltas, grad_k = torch.empty_like(shares), torch.empty_like(keys)
        grad_v, grad_mean = self.gradients(shares, keys, gates, ready, start, grad_out, by_mean, deltas, grad_k, None)
        grad_q, grad_theta = torch.empty_like(q), torch.empty_like(theta)
        grad_gate, grad_exact = (None if x is None else torch.empty_like(x) for x in (gate, exact))
        sent, sums, ends = (torch.empty_like(x) for x in (masses, befores, befores))
        grad_mass = self.new(len(plan.documents), self.kv_heads, self.dim_k)
        tile = triton.next_power_of_2(self.dim_k)
        if exact is not None:
            exact_delta = torch.empty_like(own)
            run(
                _grad_exact, (triton.cdiv(self.tokens, EXACT_ROWS) * self.heads,),
                exact, grad_out, own, grad_exact, exact_delta, self.tokens, HEADS=self.heads, DIM=self.dim_v, C=EXACT_ROWS,
                BV=triton.next_power_of_2(self.dim_v), num_warps=4,
            )  # fmt: skip
        run(
            _gather, (len(plan.chunks) * self.kv_heads,),
            shares, own, deltas, masses, befores, exact_delta, grad_q, grad_gate, sent, sums, plan.chunks, self.log_length,
            BL=tile, **self.options, num_warps=4 if tile <= 64 else 8,
        )  # fmt: skip
        self.columns(
            _carry_back, len(plan.documents), sums, ready.kept, by_mass, ends, grad_mass, plan.documents, plan.segments,
            C=CHUNK, STAGES=STAGES,
        )  # fmt: skip
        self.columns(
            _spread, len(plan.chunks), theta, masses, grad_k, sent, ends, grad_theta, plan.chunks, STAGES=STAGES
        )
        return grad_q, grad_theta, grad_v, grad_gate, grad_exact, grad_mean, grad_mass


def by_final_state(grad_mass, grad_mean, mean) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What `Latents.backward` takes of the final state, whose gradients may be `None`; masses are in base 2 here."""
    if grad_mean is None and grad_mass is None:
        return None, None
    by_mean = torch.zeros_like(mean) if grad_mean is None else grad_mean.contiguous()
    by_mass = (by_mean * mean).sum(-1)
    return by_mean, by_mass if grad_mass is None else by_mass - grad_mass * TO_BASE_2


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    @forward_compiled_together
    def forward(ctx, q, theta, v, gate, value, z0, mean0, borders, use_mass, mass_length):
        latents = Latents(q, v, borders, use_mass, mass_length)
        masses, befores, final_mass = latents.masses(theta, z0)
        ready, (own, *_) = latents.prepare(q, theta, gate, masses, befores, backward=False)
        start = latents.starts(mean0, ready.k, v, ready.kept, reverse=False)
        out, final_mean = v.new_empty(*q.shape[:3], v.shape[3]), latents.new_final()
        latents.walk(start, ready.q, ready.k, v, ready, other=value, shares=own, out=out, final=final_mean)
        start = None if start is mean0 else start
        ctx.save_for_backward(q, theta, v, gate, value, mean0, masses, befores, start, final_mean)
        ctx.arguments = borders, use_mass, mass_length
        ctx.set_materialize_grads(False)
        return out, final_mass, final_mean

    @staticmethod
    @once_differentiable
    @backward_compiled_together
    def backward(ctx, saved, grad_out, grad_mass, grad_mean):
        q, theta, v, gate, value, mean0, masses, befores, start, mean = saved
        latents = Latents(q, v, *ctx.arguments)
        grad_out = v.new_zeros(*q.shape[:3], v.shape[3]) if grad_out is None else grad_out.contiguous()
        start = mean0 if start is None else start
        by_mean, by_mass = by_final_state(grad_mass, grad_mean, mean)
        *grads, grad_mean0, grad_mass0 = latents.backward(
            q, theta, gate, masses, befores, start, grad_out, by_mean, by_mass, exact=value
        )
        if mean0 is None:
            return *grads, *(None,) * 5
        return *grads, ((grad_mean0 * mean0).sum(-1) - grad_mass0) / TO_BASE_2, grad_mean0, *(None,) * 3


def _to_base_2(state):
    """The state as kernels hold it: float32, masses to base 2, contiguous."""
    return (
        (None, None) if state is None else ((state[0].float() * TO_BASE_2).contiguous(), state[1].float().contiguous())
    )


@on_own_device
def latent_attention_step(
    q: torch.Tensor,
    theta: torch.Tensor,
    v: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    gate_value: torch.Tensor | None = None,
    use_mass: bool = False,
    mass_length: int | None = None,
    initial_state: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """A few tokens without gradients; arguments as in `latent_attention_fused`."""
    q, theta, v = q.contiguous(), theta.contiguous(), v.contiguous()
    gate, gate_value = (None if x is None else x.contiguous() for x in (gate, gate_value))
    (batch, time, heads, latents), (kv_heads, dim) = q.shape, v.shape[2:]
    out = v.new_empty(batch, time, heads, dim)
    z, mean = (torch.empty(batch, kv_heads, latents, *w, dtype=torch.float32, device=v.device) for w in ((), (dim,)))
    tile, columns = tile_width(latents), min(tile_width(dim), 64)
    _step[(batch * kv_heads * triton.cdiv(dim, columns),)](
        q, theta, v, gate, gate_value, out, *_to_base_2(initial_state), z, mean,
        None if mass_length is None else math.log2(mass_length), time,
        HEADS=heads, GROUP=heads // kv_heads, LATENTS=latents, DIM=dim, MASS=use_mass,
        BL=tile, BV=columns, num_warps=2 if tile <= 64 else 4,
    )  # fmt: skip
    return out, (z / TO_BASE_2, mean)


@torch.compiler.disable
@on_own_device
def latent_attention_fused(
    q: torch.Tensor,
    theta: torch.Tensor,
    v: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    gate_value: torch.Tensor | None = None,
    use_mass: bool = False,
    mass_length: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """See `hf_linattn.kernels.latent_attention.latent_attention`."""
    borders = document_borders(*q.shape[:2], cu_seqlens)
    inputs = (q, theta, v, gate, gate_value, *_to_base_2(initial_state))
    inputs = tuple(None if x is None else x.contiguous() for x in inputs)
    out, z, mean = _LatentAttention.apply(*inputs, borders, use_mass, mass_length)
    return out, (z / TO_BASE_2, mean)
