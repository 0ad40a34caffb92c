# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Causal latent attention in Triton: forward, backward and the decode step (papers: Latte, sections 2.5, 2.6 and 10).

Forward: `_walk` without outputs sums up each segment (log-sum-exp z and mean M per latent), `_join` gives the state that each
segment starts from, `_walk` the outputs. Backward: `_read_gradients` walks forward again for what queries and gates get;
`_write_gradients` walks in reverse for values and key logits, after a walk without outputs and a join of its own.

Inside a chunk, pairs share an anchor c: their weight is a_t exp(c - z_t) times exp(theta_s - c). Where z rises by less than
SPREAD in the chunk, one anchor (its last z) serves all pairs; else each level of a dyadic decomposition has the anchors between
its early and its late rows, and no factor exceeds 1. Logarithms are to base 2.
"""

import math

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from ..dispatch import needs_gradient
from ..packing import document_borders
from ..tiles import (
    CHUNK,
    LOG2E,
    dot,
    join_segments,
    load_rows,
    load_state,
    make_plan,
    processors,
    product_precision,
    selected_sums,
    store_rows,
    store_state,
    tile_width,
)
from .reference import EMPTY

TO_BASE_2 = 1 / math.log(2)
LEVELS = tl.constexpr(CHUNK.bit_length())
SPREAD = tl.constexpr(43.0)  # in log2, 30 nats
NARROW = tl.constexpr(100.0)  # leaves room above float32's 2^-126 for three bfloat16
NOTHING = tl.constexpr(EMPTY)
OCCUPIED = tl.constexpr(EMPTY / 2)


@triton.jit
def _add_logs(a, b):
    return tl.maximum(a, b) + tl.log2(1.0 + tl.exp2(-tl.abs(a - b)))


@triton.jit
def _load_logits(pointer, start, left, head, latents, C: tl.constexpr, HEADS: tl.constexpr, LATENTS: tl.constexpr):
    """Key logits to base 2, `NOTHING` where nothing is absorbed."""
    x = load_rows(pointer, start, left, head, latents, C, HEADS, LATENTS).to(tl.float32)
    inside = (tl.arange(0, C) < left)[:, None] & (latents < LATENTS)[None, :] & (x > OCCUPIED)
    return tl.where(inside, x * LOG2E, NOTHING)


@triton.jit
def _load_masses(pointer, place, latents, LATENTS: tl.constexpr):
    return tl.load(pointer + place.to(tl.int64) * LATENTS + latents, mask=latents < LATENTS, other=NOTHING)


@triton.jit
def _share(theta, reference):
    """exp(theta - reference) where theta is a logit."""
    return tl.where(theta > OCCUPIED, tl.exp2(tl.minimum(theta - reference, 0.0)), 0.0)


@triton.jit
def _absorbed(z):
    """log2 of all mass in the latents, per row."""
    top = tl.max(z, 1)
    return top + tl.log2(tl.sum(tl.exp2(z - top[:, None]), 1))


@triton.jit
def _weights(
    q, gate, z, start, left, head, latents, log_length,
    HEADS: tl.constexpr, LATENTS: tl.constexpr, MASS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Probability of each latent, (C, latents), and of the exact branch, (C,)."""
    logits = load_rows(q, start, left, head, latents, C, HEADS, LATENTS).to(tl.float32) * LOG2E
    if MASS:
        logits += z
        if log_length is not None:
            logits -= tl.maximum(_absorbed(z) - log_length, 0.0)[:, None]
    occupied = z > OCCUPIED
    logits = tl.where(occupied, logits, NOTHING)
    top = tl.max(logits, 1)
    if gate is not None:
        rows = tl.arange(0, C)
        exact = tl.load(gate + (start + rows) * HEADS + head, mask=rows < left, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(top, exact)
    parts = tl.where(occupied, tl.exp2(logits - top[:, None]), 0.0)
    total = tl.sum(parts, 1)
    own = total * 0.0
    if gate is not None:
        own = tl.exp2(exact - top)
        total += own
        own /= total
    return parts / tl.maximum(total, 1e-30)[:, None], own


@triton.jit
def _split(level, C: tl.constexpr):
    """Blocks of 2^level rows: which rows are in the late half of theirs, and the last row before that half."""
    rows = tl.arange(0, C)
    half = 1 << (level - 1)
    return rows // half % 2 == 1, rows // (2 * half) * (2 * half) + half - 1


@triton.jit
def _running_masses(theta, before, C: tl.constexpr, EXACT: tl.constexpr):
    """z of each row: log-sum-exp of the chunk's logits up to it and of what came before."""
    rows = tl.arange(0, C)
    top = tl.max(theta, 0)
    lowest = tl.min(tl.where(theta > OCCUPIED, theta, top[None, :]), 0)
    narrow = tl.max(top - lowest, 0) <= NARROW
    sums = selected_sums(rows[:, None] >= rows[None, :], _share(theta, top[None, :]), EXACT)
    z = tl.where(sums > 0.0, top[None, :] + tl.log2(tl.maximum(sums, 1e-37)), NOTHING)
    z = tl.where(narrow, z, theta)
    for level in range(1, tl.where(narrow, 1, LEVELS)):  # where the sum would underflow
        late, middle = _split(level, C)
        other = selected_sums(middle[:, None] == rows[None, :], z, EXACT)
        z = tl.where(late[:, None], _add_logs(z, other), z)
    return _add_logs(z, before[None, :])


@triton.jit
def _levels(z):
    """How many levels of anchors a chunk needs: one if its masses rise by little."""
    last = tl.max(z, 0)
    first = tl.min(tl.where(z > OCCUPIED, z, last[None, :]), 0)
    return tl.where(tl.max(last - first, 0) <= SPREAD, 1, LEVELS)


@triton.jit
def _anchored(z, theta, level, levels, C: tl.constexpr, EXACT: tl.constexpr):
    """Of one level: factors of queries and of keys, (C, latents) each, and the pairs (query, key) that it is for.

    Level 0 of several is each row by itself, level n the pairs across the middle of blocks of 2^n rows.
    """
    rows = tl.arange(0, C)
    late, anchor = _split(tl.maximum(level, 1), C)
    across = (anchor[:, None] == anchor[None, :]) & late[:, None] & (late == 0)[None, :]
    own = level == 0
    anchor = tl.where(levels == 1, C - 1, tl.where(own, rows, anchor))
    pairs = tl.where(own, rows[:, None] == rows[None, :], across)
    pairs = tl.where(levels == 1, rows[:, None] >= rows[None, :], pairs)
    middle = selected_sums(anchor[:, None] == rows[None, :], z, EXACT)
    return tl.exp2(tl.minimum(middle - z, 2 * SPREAD)), _share(theta, middle), pairs


@triton.jit
def _walk(
    q, theta, v, gate, gate_value, out, masses, shares, own_shares, befores,
    start_mass, start_mean, end_mass, end_mean, segments, log_length,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LATENTS: tl.constexpr, DIM: tl.constexpr, MASS: tl.constexpr,
    C: tl.constexpr, BL: tl.constexpr, BV: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One segment and query head, a tile of value channels; without `out`, what the segment alone would hold at its end.

    For the backward pass, `masses` takes z, `shares` and `own_shares` the probabilities and `befores` z before each chunk.
    """
    n, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = head // GROUP
    kv_heads: tl.constexpr = HEADS // GROUP
    latents, values = tl.arange(0, BL), tile * BV + tl.arange(0, BV)
    rows = tl.arange(0, C)
    start, end = tl.load(segments + 6 * n).to(tl.int64), tl.load(segments + 6 * n + 1)
    chunk, after = tl.load(segments + 6 * n + 2), tl.load(segments + 6 * n + 4)
    document = tl.load(segments + 6 * n + 5)
    place = n * kv_heads + kv_head
    before = tl.full((BL,), NOTHING, tl.float32)
    mean = tl.zeros((BL, BV), tl.float32)
    if start_mass is not None:
        before = _load_masses(start_mass, place, latents, LATENTS)
        mean = load_state(start_mean, place, latents, values, LATENTS, DIM)
    for i in range(tl.cdiv((end - start).to(tl.int32), C)):
        first = start + i * C
        left = (end - first).to(tl.int32)
        logits = _load_logits(theta, first, left, kv_head, latents, C, kv_heads, LATENTS)
        v_rows = load_rows(v, first, left, kv_head, values, C, kv_heads, DIM)
        if out is None:
            last = tl.max(logits, 0)
            last += tl.log2(tl.maximum(tl.sum(_share(logits, last[None, :]), 0), 1e-30))
            last = _add_logs(before, last)
        else:
            z = _running_masses(logits, before, C, EXACT)
            last = tl.max(z, 0)
            a, own = _weights(q, gate, z, first, left, head, latents, log_length, HEADS, LATENTS, MASS, C)
            result = dot(a * tl.exp2(before[None, :] - z), mean, OPERAND, PRECISION)
            pairs = tl.zeros((C, C), tl.float32)
            levels = _levels(z)
            for level in range(levels):
                to_query, to_key, inside = _anchored(z, logits, level, levels, C, EXACT)
                pairs += tl.where(inside, tl.dot(a * to_query, tl.trans(to_key), input_precision=PRECISION), 0.0)
            result += dot(pairs, v_rows, OPERAND, PRECISION)
            if gate is not None:
                result += own[:, None] * load_rows(gate_value, first, left, head, values, C, HEADS, DIM).to(tl.float32)
            store_rows(out, result, first, left, head, values, C, HEADS, DIM)
            if masses is not None and tile == 0:
                store_rows(shares, a, first, left, head, latents, C, HEADS, LATENTS)
                if gate is not None:
                    tl.store(own_shares + (first + rows) * HEADS + head, own, mask=rows < left)
                if head % GROUP == 0:
                    store_rows(masses, z, first, left, kv_head, latents, C, kv_heads, LATENTS)
                    into = befores + (chunk + i).to(tl.int64) * (kv_heads * LATENTS) + kv_head * LATENTS + latents
                    tl.store(into, before, mask=latents < LATENTS)
        mean = mean * tl.exp2(before - last)[:, None]
        mean += dot(tl.trans(_share(logits, last[None, :])), v_rows, OPERAND, PRECISION)
        before = last
    if out is not None:
        place = document * kv_heads + kv_head
    if (out is None or after == 0) and head % GROUP == 0:
        store_state(end_mean, mean, place, latents, values, LATENTS, DIM)
        if tile == 0:
            tl.store(end_mass + place * LATENTS + latents, before, mask=latents < LATENTS)


@triton.jit
def _join(
    masses, means, initial_mass, initial_mean, start_mass, start_mean, documents,
    KV_HEADS: tl.constexpr, LATENTS: tl.constexpr, DIM: tl.constexpr, BL: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The state that each segment of a document starts from."""
    n, kv_head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    latents, values = tl.arange(0, BL), tile * BV + tl.arange(0, BV)
    at, count = tl.load(documents + 2 * n) * KV_HEADS + kv_head, tl.load(documents + 2 * n + 1)
    z = tl.full((BL,), NOTHING, tl.float32)
    mean = tl.zeros((BL, BV), tl.float32)
    if initial_mass is not None:
        z = _load_masses(initial_mass, n * KV_HEADS + kv_head, latents, LATENTS)
        mean = load_state(initial_mean, n * KV_HEADS + kv_head, latents, values, LATENTS, DIM)
    # one segment ahead, so that loads do not wait for stores
    mass, total = _load_masses(masses, at, latents, LATENTS), load_state(means, at, latents, values, LATENTS, DIM)
    for i in range(count):
        following = at + tl.where(i + 1 < count, KV_HEADS, 0)
        next_mass = _load_masses(masses, following, latents, LATENTS)
        next_total = load_state(means, following, latents, values, LATENTS, DIM)
        store_state(start_mean, mean, at, latents, values, LATENTS, DIM)
        if tile == 0:
            tl.store(start_mass + at * LATENTS + latents, z, mask=latents < LATENTS)
        later = _add_logs(z, mass)
        mean = mean * tl.exp2(z - later)[:, None] + total * tl.exp2(mass - later)[:, None]
        z, mass, total = later, next_mass, next_total
        at = following


@triton.jit
def _read_gradients(
    theta, v, gate_value, grad_out, masses, shares, own_shares, befores, start_mean,
    grad_q, grad_gate, grad_value, grad_masses, segments, log_length,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LATENTS: tl.constexpr, DIM: tl.constexpr, MASS: tl.constexpr,
    C: tl.constexpr, BL: tl.constexpr, BV: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of query logits, gate and exact branch, and what each row sends to the masses of its latents: with M the means
    and w = a (g . M), minus the gradient that reaches z through the query logits (papers: Latte, section 2.6, where r sums w).
    """
    n, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // GROUP
    kv_heads: tl.constexpr = HEADS // GROUP
    latents, values, rows = tl.arange(0, BL), tl.arange(0, BV), tl.arange(0, C)
    start, end = tl.load(segments + 6 * n).to(tl.int64), tl.load(segments + 6 * n + 1)
    chunk = tl.load(segments + 6 * n + 2)
    mean = tl.zeros((BV, BL), tl.float32)
    if start_mean is not None:
        mean = tl.trans(load_state(start_mean, n * kv_heads + kv_head, latents, values, LATENTS, DIM))
    for i in range(tl.cdiv((end - start).to(tl.int32), C)):
        first = start + i * C
        left = (end - first).to(tl.int32)
        before = _load_masses(befores, (chunk + i) * kv_heads + kv_head, latents, LATENTS)
        logits = _load_logits(theta, first, left, kv_head, latents, C, kv_heads, LATENTS)
        known = (rows < left)[:, None] & (latents < LATENTS)[None, :]
        z = tl.where(known, load_rows(masses, first, left, kv_head, latents, C, kv_heads, LATENTS), NOTHING)
        last = tl.maximum(tl.max(z, 0), before)
        z = tl.where((rows < left)[:, None], z, last[None, :])
        a = load_rows(shares, first, left, head, latents, C, HEADS, LATENTS)
        v_rows = load_rows(v, first, left, kv_head, values, C, kv_heads, DIM)
        g_rows = load_rows(grad_out, first, left, head, values, C, HEADS, DIM)
        delta = tl.exp2(before[None, :] - z) * dot(g_rows, mean, OPERAND, PRECISION)
        products = dot(g_rows, tl.trans(v_rows), OPERAND, PRECISION)
        levels = _levels(z)
        for level in range(levels):
            to_query, to_key, inside = _anchored(z, logits, level, levels, C, EXACT)
            delta += to_query * tl.dot(tl.where(inside, products, 0.0), to_key, input_precision=PRECISION)
        delta = tl.where(a > 0, delta, 0.0)
        expected = tl.sum(a * delta, 1)
        if gate_value is not None:
            at = (first + rows) * HEADS + head
            own = tl.load(own_shares + at, mask=rows < left, other=0.0)
            exact = load_rows(gate_value, first, left, head, values, C, HEADS, DIM).to(tl.float32)
            own_delta = tl.sum(exact * g_rows.to(tl.float32), 1)
            expected += own * own_delta
            tl.store(grad_gate + at, own * (own_delta - expected), mask=rows < left)
            if grad_value is not None:
                store_rows(grad_value, own[:, None] * g_rows.to(tl.float32), first, left, head, values, C, HEADS, DIM)
        d_logits = a * (delta - expected[:, None])
        store_rows(grad_q, d_logits, first, left, head, latents, C, HEADS, LATENTS)
        sent = a * delta
        if MASS:
            sent -= d_logits
            if log_length is not None:
                absorbed = _absorbed(z)
                held = tl.where(absorbed > log_length, tl.sum(d_logits, 1), 0.0)
                sent += held[:, None] * tl.exp2(z - absorbed[:, None])
        store_rows(grad_masses, sent, first, left, head, latents, C, HEADS, LATENTS)
        mean = mean * tl.exp2(before - last)[None, :]
        mean += dot(tl.trans(v_rows), _share(logits, last[None, :]), OPERAND, PRECISION)


@triton.jit
def _write_gradients(
    theta, v, grad_out, masses, shares, befores, grad_masses, end_mean, end_mass, grad_v, grad_theta,
    start_mean, start_mass, decays, segments, total_tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LATENTS: tl.constexpr, DIM: tl.constexpr,
    C: tl.constexpr, BL: tl.constexpr, BV: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """In reverse through one segment, carrying the gradients R of the means and r of the masses: gradients of values and, a
    part per tile of value channels, of key logits. Without `grad_v`, what the segment alone sends to its start, and log2 of
    what it passes on (`decays`).
    """
    n, kv_head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads: tl.constexpr = HEADS // GROUP
    latents, values, rows = tl.arange(0, BL), tile * BV + tl.arange(0, BV), tl.arange(0, C)
    start, end = tl.load(segments + 6 * n).to(tl.int64), tl.load(segments + 6 * n + 1)
    chunk, earlier = tl.load(segments + 6 * n + 2), tl.load(segments + 6 * n + 3)
    document = tl.load(segments + 6 * n + 5)
    place = n * kv_heads + kv_head
    by_mean = tl.zeros((BV, BL), tl.float32)
    by_mass = tl.zeros((BL,), tl.float32)
    if end_mean is not None:
        by_mean = tl.trans(load_state(end_mean, place, latents, values, LATENTS, DIM))
        by_mass = tl.load(end_mass + place * LATENTS + latents, mask=latents < LATENTS, other=0.0)
    passed = tl.zeros((BL,), tl.float32)
    count = tl.cdiv((end - start).to(tl.int32), C)
    for i in range(count):
        at = count - 1 - i
        first = start + at * C
        left = (end - first).to(tl.int32)
        before = _load_masses(befores, (chunk + at) * kv_heads + kv_head, latents, LATENTS)
        known = (rows < left)[:, None] & (latents < LATENTS)[None, :]
        z = tl.where(known, load_rows(masses, first, left, kv_head, latents, C, kv_heads, LATENTS), NOTHING)
        last = tl.maximum(tl.max(z, 0), before)
        z = tl.where((rows < left)[:, None], z, last[None, :])
        keep = tl.exp2(before - last)
        passed += before - last
        if grad_v is not None:
            logits = _load_logits(theta, first, left, kv_head, latents, C, kv_heads, LATENTS)
            v_rows = load_rows(v, first, left, kv_head, values, C, kv_heads, DIM)
            key = _share(logits, last[None, :])
            d_values = dot(key, tl.trans(by_mean), OPERAND, PRECISION)
            d_theta = key * (dot(v_rows, by_mean, OPERAND, PRECISION) - tl.where(tile == 0, by_mass, 0.0)[None, :])
            levels = _levels(z)
        by_mean *= keep[None, :]
        by_mass *= keep
        for j in range(GROUP):
            head = kv_head * GROUP + j
            a = load_rows(shares, first, left, head, latents, C, HEADS, LATENTS)
            sent = load_rows(grad_masses, first, left, head, latents, C, HEADS, LATENTS)
            g_rows = load_rows(grad_out, first, left, head, values, C, HEADS, DIM)
            if grad_v is not None:
                products = dot(g_rows, tl.trans(v_rows), OPERAND, PRECISION)
                pairs = tl.zeros((C, C), tl.float32)
                for level in range(levels):
                    to_query, to_key, inside = _anchored(z, logits, level, levels, C, EXACT)
                    read = a * to_query
                    pairs += tl.where(inside, tl.dot(read, tl.trans(to_key), input_precision=PRECISION), 0.0)
                    got = tl.dot(tl.trans(tl.where(inside, products, 0.0)), read, input_precision=PRECISION)
                    if tile == 0:
                        got -= selected_sums(tl.trans(inside.to(tl.float32)), sent * to_query, EXACT)
                    d_theta += to_key * got
                d_values += dot(tl.trans(pairs), g_rows, OPERAND, PRECISION)
            fade = tl.exp2(before[None, :] - z)
            by_mean += dot(tl.trans(g_rows), a * fade, OPERAND, PRECISION)
            by_mass += tl.sum(sent * fade, 0)
        if grad_v is not None:
            store_rows(grad_v, d_values, first, left, kv_head, values, C, kv_heads, DIM)
            part = grad_theta + tile.to(tl.int64) * total_tokens * (kv_heads * LATENTS)
            store_rows(part, d_theta, first, left, kv_head, latents, C, kv_heads, LATENTS)
    if grad_v is not None:
        place = document * kv_heads + kv_head
    if grad_v is None or earlier == 0:
        store_state(start_mean, tl.trans(by_mean), place, latents, values, LATENTS, DIM)
        if tile == 0:
            tl.store(start_mass + place * LATENTS + latents, by_mass, mask=latents < LATENTS)
            if grad_v is None:
                tl.store(decays + place * LATENTS + latents, passed, mask=latents < LATENTS)


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
        z = _load_masses(initial_mass, place, latents, LATENTS)
        mean = load_state(initial_mean, place, latents, values, LATENTS, DIM)
    for t in range(time):
        token = row.to(tl.int64) * time + t
        at = token * kv_heads + kv_head
        logits = tl.load(theta + at * LATENTS + latents, mask=latents < LATENTS, other=NOTHING).to(tl.float32)
        logits = tl.where(logits > OCCUPIED, logits * LOG2E, NOTHING)
        v_row = tl.load(v + at * DIM + values, mask=values < DIM, other=0.0).to(tl.float32)
        later = _add_logs(z, logits)
        mean = mean * tl.exp2(z - later)[:, None] + _share(logits, later)[:, None] * v_row[None, :]
        z = later
        for j in range(GROUP):
            a, own = _weights(
                q, gate, z[None, :], token, 1, kv_head * GROUP + j, latents, log_length, HEADS, LATENTS, MASS, 1
            )
            result = tl.sum(tl.trans(a) * mean, 0)
            into = (token * HEADS + kv_head * GROUP + j) * DIM + values
            if gate is not None:
                exact = tl.load(gate_value + into, mask=values < DIM, other=0.0).to(tl.float32)
                result += tl.sum(own, 0) * exact
            tl.store(out + into, result.to(out.dtype.element_ty), mask=values < DIM)
    store_state(final_mean, mean, place, latents, values, LATENTS, DIM)
    if tile == 0:
        tl.store(final_mass + place * LATENTS + latents, z, mask=latents < LATENTS)


class _Problem:
    """One call's tensors, laid end to end, and everything that its kernels share."""

    def __init__(self, q, theta, v, borders, use_mass, mass_length):
        self.heads, self.latents = q.shape[2:]
        self.kv_heads, self.dim = v.shape[2:]
        self.group = self.heads // self.kv_heads
        self.tokens, self.device = q.shape[0] * q.shape[1], q.device
        self.precision = product_precision(v.dtype)
        self.log_length = None if mass_length is None else math.log2(mass_length)
        segment = triton.cdiv(self.tokens * self.heads, 4 * processors(q.device))
        segment = min(max(triton.cdiv(segment, CHUNK) * CHUNK, 2 * CHUNK), 16 * CHUNK)
        self.plan = make_plan(borders, segment, q.device)
        self.shape = dict(LATENTS=self.latents, DIM=self.dim)
        self.options = dict(C=CHUNK, **self.precision)
        self.mass = dict(MASS=use_mass)
        self.value_tile = min(tile_width(self.dim), 128)
        self.tiles = triton.cdiv(self.dim, self.value_tile)

    def new(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=self.device)

    def states(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.new(count, self.kv_heads, self.latents), self.new(count, self.kv_heads, self.latents, self.dim)

    def walk(self, heads, q, theta, v, gate, value, out, saved, start, end):
        """`saved`: (masses, shares, own shares, befores) for the backward pass, or nothing."""
        _walk[(len(self.plan.segments), heads, self.tiles)](
            q, theta, v, gate, value, out, *(saved or (None,) * 4), *start, *end, self.plan.segments, self.log_length,
            HEADS=heads, GROUP=heads // self.kv_heads, BV=self.value_tile, BL=tile_width(self.latents),
            **self.shape, **self.mass, **self.options, num_warps=4, num_stages=2,
        )  # fmt: skip

    def starts(self, theta, v, initial) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not self.plan.joined:
            return initial
        totals, starts = (self.states(len(self.plan.segments)) for _ in range(2))
        self.walk(self.kv_heads, None, theta, v, None, None, None, None, (None, None), totals)
        columns = min(self.value_tile, 32)
        _join[(len(self.plan.documents), self.kv_heads, triton.cdiv(self.dim, columns))](
            *totals, *initial, *starts, self.plan.documents, KV_HEADS=self.kv_heads, BL=tile_width(self.latents), BV=columns,
            **self.shape, num_warps=1,
        )  # fmt: skip
        return starts


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, theta, v, gate, value, z0, mean0, borders, use_mass, mass_length, train):
        problem = _Problem(q, theta, v, borders, use_mass, mass_length)
        start = problem.starts(theta, v, (z0, mean0))
        out = v.new_empty(*q.shape[:3], v.shape[3])
        saved = None
        if train:
            saved = (
                problem.new(problem.tokens, problem.kv_heads, problem.latents),
                problem.new(problem.tokens, problem.heads, problem.latents),
                None if gate is None else problem.new(problem.tokens, problem.heads),
                problem.new(len(problem.plan.chunks), problem.kv_heads, problem.latents),
            )
        final = problem.states(len(problem.plan.documents))
        problem.walk(problem.heads, q, theta, v, gate, value, out, saved, start, final)
        if train:
            ctx.save_for_backward(q, theta, v, gate, value, mean0, start[1], final[1], *saved)
            ctx.arguments = borders, use_mass, mass_length
            ctx.set_materialize_grads(False)
        return out, *final

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_final_mass, grad_final_mean):
        q, theta, v, gate, value, mean0, start_mean, end_mean, masses, shares, own, befores = ctx.saved_tensors
        problem = _Problem(q, theta, v, *ctx.arguments)
        plan, heads, kv_heads = problem.plan, problem.heads, problem.kv_heads
        grad_out = v.new_zeros(*q.shape[:3], v.shape[3]) if grad_out is None else grad_out.contiguous()
        # in half precision, these kernels' products of 32 columns read beyond shared memory in Triton 3.6
        width = max(64 if problem.precision["OPERAND"] == tl.bfloat16 else 32, tile_width(problem.latents))
        options = dict(HEADS=heads, GROUP=problem.group, BL=width, **problem.shape, **problem.options, num_stages=1)

        grad_q, grad_masses = torch.empty_like(q), torch.empty_like(shares)
        grad_gate, grad_value = (None if x is None else torch.empty_like(x) for x in (gate, value))
        _read_gradients[(len(plan.segments), heads)](
            theta, v, value, grad_out, masses, shares, own, befores, start_mean, grad_q, grad_gate, grad_value,
            grad_masses, plan.segments, problem.log_length, BV=tile_width(problem.dim), num_warps=4, **problem.mass,
            **options,
        )  # fmt: skip

        last = None, None
        if grad_final_mean is not None or grad_final_mass is not None:
            by_mean = torch.zeros_like(end_mean) if grad_final_mean is None else grad_final_mean
            by_mass = (by_mean * end_mean).sum(-1)
            # masses are in base 2 here
            last = (
                by_mean.contiguous(),
                by_mass if grad_final_mass is None else by_mass - grad_final_mass * TO_BASE_2,
            )
        grad_v = torch.empty_like(v)
        grad_theta = problem.new(problem.tiles, *theta.shape)

        def write(ends, grads, starts, decays=None):
            _write_gradients[(len(plan.segments), kv_heads, problem.tiles)](
                theta, v, grad_out, masses, shares, befores, grad_masses, *ends, *grads, *starts, decays, plan.segments,
                problem.tokens, BV=problem.value_tile, num_warps=4, **options,
            )  # fmt: skip

        if plan.joined:
            total_mass, total_mean = problem.states(len(plan.segments))
            decays = torch.empty_like(total_mass)
            write((None, None), (None, None), (total_mean, total_mass), decays)
            ends = torch.empty_like(total_mean), torch.empty_like(total_mass)
            by_tensor = (total_mean, last[0], ends[0], problem.dim), (total_mass, last[1], ends[1], 1)
            for totals, initial, into, columns in by_tensor:
                tile = dict(BK=tile_width(problem.latents), BV=min(triton.next_power_of_2(columns), 32))
                join_segments[(len(plan.documents), kv_heads, triton.cdiv(columns, tile["BV"]))](
                    totals, decays, initial, into, plan.documents, KV_HEADS=kv_heads, DIM_K=problem.latents,
                    DIM_V=columns, REVERSE=True, num_warps=1, **tile,
                )  # fmt: skip
        else:
            ends = last
        first_mass, first_mean = problem.states(len(plan.documents))
        write(ends, (grad_v, grad_theta), (first_mean, first_mass))
        grad_theta = grad_theta.sum(0) if problem.tiles > 1 else grad_theta[0]

        grad_z0 = grad_mean0 = None
        if mean0 is not None:
            grad_mean0, grad_z0 = first_mean, ((first_mean * mean0).sum(-1) - first_mass) / TO_BASE_2
        return grad_q, grad_theta.to(theta.dtype), grad_v, grad_gate, grad_value, grad_z0, grad_mean0, *(None,) * 4


def _to_base_2(state):
    """The state as kernels hold it: float32, masses to base 2, contiguous."""
    return (
        (None, None) if state is None else ((state[0].float() * TO_BASE_2).contiguous(), state[1].float().contiguous())
    )


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
    columns = min(tile_width(dim), 64)
    _step[(batch * kv_heads * triton.cdiv(dim, columns),)](
        q, theta, v, gate, gate_value, out, *_to_base_2(initial_state), z, mean,
        None if mass_length is None else math.log2(mass_length), time,
        HEADS=heads, GROUP=heads // kv_heads, LATENTS=latents, DIM=dim, MASS=use_mass,
        BL=tile_width(latents), BV=columns, num_warps=2,
    )  # fmt: skip
    return out, (z / TO_BASE_2, mean)


@torch.compiler.disable
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
    out, z, mean = _LatentAttention.apply(*inputs, borders, use_mass, mass_length, needs_gradient(*inputs))
    return out, (z / TO_BASE_2, mean)
