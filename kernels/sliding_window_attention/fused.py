# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Sliding-window attention with sinks in Triton, forward and backward (papers: Latte, section 10.2).

One program takes a block of queries of one head and walks over the tiles of keys that any of them sees, with an online
softmax in base 2; sinks outside the window are one more tile before. Backward, `_grad_queries` does the same walk, and
`_grad_keys` takes a block of keys and walks over the queries that see it, for all heads of its group: no atomics.

Positions count a row's keys. Those of an earlier call (`past` of them) stand before the row's own, and query i is at
position past + i. Where documents lie end to end in one row, tables say which document a position is of.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from ..compilation import backward_compiled_together, run
from ..dispatch import on_own_device
from ..packing import document_index
from ..tiles import CHUNK, HALF_WIDTH, INTERPRETED, LOG2E, dot, load_rows, load_state, store_rows, tile_width
from .reference import MASKED
from .state import WindowState

NEVER = tl.constexpr(1 << 30)  # a position that no query reaches
SINK_TILE = tl.constexpr(32)
NOTHING = tl.constexpr(MASKED)
VARYING = ["total_tokens", "time", "past", "before", "after"]


@triton.jit
def _sight(at, length, before, after, document, borders):
    """First and last position that each of the positions `at` (sorted, below `length`) sees."""
    if document is None:
        first, last = 0, length - 1
    else:
        number = tl.load(document + at)
        first, last = tl.load(borders + number), tl.load(borders + number + 1) - 1
    return tl.maximum(at - before, first), tl.minimum(at + after, last)


@triton.jit
def _sink_rows(row, first, rows, time, document):
    """First and last sequence, as the sinks are numbered, that a block of queries is of."""
    if document is None:
        low, high = row, row
    else:
        low, high = tl.load(document + first), tl.load(document + tl.minimum(first + rows, time) - 1)
    return low, high


@triton.jit
def _seen(visible, sink, stop):
    """From which to which position each sink is seen from outside the window."""
    inside = sink < stop
    since = tl.load(visible + 2 * sink, mask=inside, other=NEVER)
    return since, tl.load(visible + 2 * sink + 1, mask=inside, other=0)


@triton.jit
def _scores(a, b, scale, softcap, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Scores in base 2, and their derivative by the product a b^T."""
    scores = dot(a, tl.trans(b), OPERAND, PRECISION)
    slope = scale
    if softcap is None:
        scores *= scale * LOG2E
    else:
        capped = 1 - 2 / (tl.exp2(scores * (2 * LOG2E * scale / softcap)) + 1)  # tanh
        scores = capped * (softcap * LOG2E)
        slope = scale * (1 - capped * capped)
    return scores, slope


@triton.jit
def _attend(
    queries, keys, values, allowed, most, total, acc, scale, softcap, OPERAND: tl.constexpr, PRECISION: tl.constexpr
):
    """Take one tile of keys into the softmax: largest score, sum of weights and weighted sum of values so far."""
    scores, _ = _scores(queries, keys, scale, softcap, OPERAND, PRECISION)
    scores = tl.where(allowed, scores, float("-inf"))
    larger = tl.maximum(most, tl.max(scores, 1))
    weights = tl.exp2(scores - larger[:, None])
    fade = tl.exp2(most - larger)
    acc = acc * fade[:, None] + dot(weights, values, OPERAND, PRECISION)
    return larger, total * fade + tl.sum(weights, 1), acc


@triton.jit
def _load_column(pointer, start, left, head, C: tl.constexpr, HEADS: tl.constexpr):
    """C numbers of one head of a (tokens, HEADS) tensor."""
    rows = tl.arange(0, C)
    return tl.load(pointer + (start + rows) * HEADS + head, mask=rows < left, other=0.0)


@triton.jit(do_not_specialize=VARYING)
def _forward(
    q, k, v, q_sink, sink_k, sink_v, visible, valid, document, borders, out, lse,
    chunks, reader, weights, states, shares, total_tokens,
    scale, softcap, time, past, before, after,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SINKS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    LATENTS: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Outputs and log-sum-exp of M queries of one head.

    Given `chunks`, their start and end, a block of queries lies inside one chunk, and what its latents give is added in the
    same pass: out = share * window + weights @ v + reader @ state, see `Joined`; the log-sum-exp becomes that of the scores
    less log share, which makes exp(score - it) the weight of a key in the output.
    """
    block, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    length = time + past
    if chunks is None:
        blocks = tl.cdiv(time, M)
        row, first, stop = block // blocks, block % blocks * M, time
    else:
        n = block // (C // M)
        chunk, stop = tl.load(chunks + 2 * n), tl.load(chunks + 2 * n + 1)
        row = chunk // time
        first, stop = chunk - row * time + block % (C // M) * M, stop - row * time
    left = stop - first
    queries_at, keys_at = row.to(tl.int64) * time + first, row.to(tl.int64) * length
    columns = tl.arange(0, D)
    at = past + tl.minimum(first + tl.arange(0, M), stop - 1)
    low, high = _sight(at, length, before, after, document, borders)
    queries = load_rows(q, queries_at, left, head, columns, M, HEADS, DIM)
    most = tl.full((M,), NOTHING, tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    if SINKS > 0:
        far = queries if q_sink is None else load_rows(q_sink, queries_at, left, head, columns, M, HEADS, DIM)
        begin, end = _sink_rows(row, first, M, time, document)
        sinks_end = (end + 1) * SINKS
        for s in tl.range(begin * SINKS, sinks_end, SINK_TILE, num_stages=1):
            since, until = _seen(visible, s + tl.arange(0, SINK_TILE), sinks_end)
            keys = load_rows(
                sink_k, tl.cast(s, tl.int64), sinks_end - s, head // GROUP, columns, SINK_TILE, HEADS // GROUP, DIM
            )
            values = load_rows(
                sink_v, tl.cast(s, tl.int64), sinks_end - s, head // GROUP, columns, SINK_TILE, HEADS // GROUP, DIM
            )
            allowed = (at[:, None] >= since[None, :]) & (at[:, None] <= until[None, :])
            most, total, acc = _attend(
                far, keys, values, allowed, most, total, acc, scale, softcap, OPERAND, PRECISION
            )
    for s in range(tl.min(low, 0) // N * N, tl.max(high, 0) + 1, N):
        keys = load_rows(k, keys_at + s, length - s, head // GROUP, columns, N, HEADS // GROUP, DIM)
        values = load_rows(v, keys_at + s, length - s, head // GROUP, columns, N, HEADS // GROUP, DIM)
        of_key = s + tl.arange(0, N)
        allowed = (of_key[None, :] >= low[:, None]) & (of_key[None, :] <= high[:, None])
        if valid is not None:
            allowed = allowed & (tl.load(valid + keys_at + of_key, mask=of_key < length, other=0) != 0)[None, :]
        most, total, acc = _attend(
            queries, keys, values, allowed, most, total, acc, scale, softcap, OPERAND, PRECISION
        )
    some = total > 0
    total = tl.where(some, total, 1.0)
    acc /= total[:, None]
    log = tl.where(some, (most + tl.log2(total)) / LOG2E, NOTHING)
    if chunks is not None:
        share = _load_column(shares, queries_at, left, head, M, HEADS)
        log -= tl.log2(share) / LOG2E
        acc *= share[:, None]
        latents = tl.arange(0, L)
        pairs = load_rows(
            weights + head.to(tl.int64) * total_tokens * C, queries_at, left, 0, tl.arange(0, C), M, 1, C
        )
        values = load_rows(
            v, chunk.to(tl.int64), stop - (chunk - row * time), head // GROUP, columns, C, HEADS // GROUP, DIM
        )
        acc += dot(pairs, values, OPERAND, PRECISION)
        state = load_state(states, n * (HEADS // GROUP) + head // GROUP, latents, columns, LATENTS, DIM)
        read = load_rows(reader, queries_at, left, head, latents, M, HEADS, LATENTS)
        acc += dot(read, state, OPERAND, PRECISION)
    store_rows(out, acc, queries_at, left, head, columns, M, HEADS, DIM)
    rows = tl.arange(0, M)
    tl.store(lse + (queries_at + rows) * HEADS + head, log, mask=rows < left)


@triton.jit(do_not_specialize=VARYING)
def _grad_queries(
    q, k, v, q_sink, sink_k, sink_v, visible, valid, document, borders, out, lse, grad_out, grad_lse,
    delta, grad_q, grad_q_sink, parts_k, parts_v,
    scale, softcap, time, past, before, after,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SINKS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SLAB: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of M queries of one head, what they add to that of the sinks, and `delta`, sum(out * grad_out) - grad_lse.

    Without `out`, where latents were added to the window's output, that output is formed again.
    """
    block, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    blocks, length = tl.cdiv(time, M), time + past
    row, first = block // blocks, block % blocks * M
    queries_at, keys_at = row.to(tl.int64) * time + first, row.to(tl.int64) * length
    columns, rows = tl.arange(0, D), tl.arange(0, M)
    at = past + tl.minimum(first + rows, time - 1)
    low, high = _sight(at, length, before, after, document, borders)
    queries = load_rows(q, queries_at, time - first, head, columns, M, HEADS, DIM)
    grads = load_rows(grad_out, queries_at, time - first, head, columns, M, HEADS, DIM)
    log = _load_column(lse, queries_at, time - first, head, M, HEADS) * LOG2E
    if out is None:
        mean = tl.zeros((M,), tl.float32)
        total = tl.zeros((M,), tl.float32)
        for s in range(tl.min(low, 0) // N * N, tl.max(high, 0) + 1, N):
            keys = load_rows(k, keys_at + s, length - s, head // GROUP, columns, N, HEADS // GROUP, DIM)
            values = load_rows(v, keys_at + s, length - s, head // GROUP, columns, N, HEADS // GROUP, DIM)
            of_key = s + tl.arange(0, N)
            allowed = (of_key[None, :] >= low[:, None]) & (of_key[None, :] <= high[:, None])
            scores, _ = _scores(queries, keys, scale, softcap, OPERAND, PRECISION)
            weights = tl.exp2(tl.where(allowed, scores - log[:, None], float("-inf")))
            mean += tl.sum(weights * dot(grads, tl.trans(values), OPERAND, PRECISION), 1)
            total += tl.sum(weights, 1)
        mean /= tl.maximum(total, 1e-30)
    else:
        results = load_rows(out, queries_at, time - first, head, columns, M, HEADS, DIM)
        mean = tl.sum(results.to(tl.float32) * grads.to(tl.float32), 1)
        if grad_lse is not None:
            mean -= _load_column(grad_lse, queries_at, time - first, head, M, HEADS)
    tl.store(delta + (queries_at + rows) * HEADS + head, mean, mask=rows < time - first)
    acc = tl.zeros((M, D), tl.float32)
    if SINKS > 0:
        far = queries if q_sink is None else load_rows(q_sink, queries_at, time - first, head, columns, M, HEADS, DIM)
        begin, end = _sink_rows(row, first, M, time, document)
        stop = (end + 1) * SINKS
        for s in tl.range(begin * SINKS, stop, SINK_TILE, num_stages=1):
            sink = s + tl.arange(0, SINK_TILE)
            since, until = _seen(visible, sink, stop)
            keys = load_rows(
                sink_k, tl.cast(s, tl.int64), stop - s, head // GROUP, columns, SINK_TILE, HEADS // GROUP, DIM
            )
            values = load_rows(
                sink_v, tl.cast(s, tl.int64), stop - s, head // GROUP, columns, SINK_TILE, HEADS // GROUP, DIM
            )
            allowed = (at[:, None] >= since[None, :]) & (at[:, None] <= until[None, :])
            scores, slope = _scores(far, keys, scale, softcap, OPERAND, PRECISION)
            weights = tl.exp2(tl.where(allowed, scores - log[:, None], float("-inf")))
            change = weights * (dot(grads, tl.trans(values), OPERAND, PRECISION) - mean[:, None]) * slope
            acc += dot(change, keys, OPERAND, PRECISION)
            # block and sequence never rise without their sum: each pair of them has a slot of its own
            slot = (block + sink // SINKS).to(tl.int64) * HEADS + head
            tile = (slot * SINKS + sink % SINKS)[:, None] * DIM
            change, weights = tl.trans(change), tl.trans(weights)
            for c in tl.range(0, D, SLAB, num_stages=1):  # all columns at once would not fit into the registers
                part = c + tl.arange(0, SLAB)
                inside = (sink < stop)[:, None] & (part < DIM)[None, :]
                far_part = load_rows(
                    q if q_sink is None else q_sink, queries_at, time - first, head, part, M, HEADS, DIM
                )
                grads_part = load_rows(grad_out, queries_at, time - first, head, part, M, HEADS, DIM)
                tl.store(parts_k + tile + part[None, :], dot(change, far_part, OPERAND, PRECISION), mask=inside)
                tl.store(parts_v + tile + part[None, :], dot(weights, grads_part, OPERAND, PRECISION), mask=inside)
        if q_sink is not None:
            store_rows(grad_q_sink, acc, queries_at, time - first, head, columns, M, HEADS, DIM)
            acc = tl.zeros((M, D), tl.float32)
    for s in range(tl.min(low, 0) // N * N, tl.max(high, 0) + 1, N):
        keys = load_rows(k, keys_at + s, length - s, head // GROUP, columns, N, HEADS // GROUP, DIM)
        values = load_rows(v, keys_at + s, length - s, head // GROUP, columns, N, HEADS // GROUP, DIM)
        of_key = s + tl.arange(0, N)
        allowed = (of_key[None, :] >= low[:, None]) & (of_key[None, :] <= high[:, None])
        if valid is not None:
            allowed = allowed & (tl.load(valid + keys_at + of_key, mask=of_key < length, other=0) != 0)[None, :]
        scores, slope = _scores(queries, keys, scale, softcap, OPERAND, PRECISION)
        weights = tl.exp2(tl.where(allowed, scores - log[:, None], float("-inf")))
        change = weights * (dot(grads, tl.trans(values), OPERAND, PRECISION) - mean[:, None]) * slope
        acc += dot(change, keys, OPERAND, PRECISION)
    store_rows(grad_q, acc, queries_at, time - first, head, columns, M, HEADS, DIM)


@triton.jit(do_not_specialize=VARYING)
def _grad_keys(
    q, k, v, valid, document, borders, lse, delta, grad_out, added, grad_k, grad_v,
    scale, softcap, time, past, before, after,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SLAB: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of N keys and values of one key/value head, sinks aside; SLAB of the columns. `added`, if given, is a part of
    the values' gradient."""
    kv_heads: tl.constexpr = HEADS // GROUP
    block, kv_head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    length = time + past
    blocks = tl.cdiv(length, N)
    row, first = block // blocks, block % blocks * N
    queries_at, keys_at = row.to(tl.int64) * time, row.to(tl.int64) * length + first
    columns, part = tl.arange(0, D), tl.program_id(1) * SLAB + tl.arange(0, SLAB)
    at = tl.minimum(first + tl.arange(0, N), length - 1)
    low, high = _sight(at, length, after, before, document, borders)  # the queries that see a key
    if valid is not None:
        high = tl.where(tl.load(valid + row.to(tl.int64) * length + at) != 0, high, -1)
    keys = load_rows(k, keys_at, length - first, kv_head, columns, N, kv_heads, DIM)
    values = load_rows(v, keys_at, length - first, kv_head, columns, N, kv_heads, DIM)
    acc_k = tl.zeros((N, SLAB), tl.float32)
    acc_v = tl.zeros((N, SLAB), tl.float32)
    start, stop = tl.maximum(tl.min(low, 0) - past, 0) // M * M, tl.max(high, 0) + 1 - past
    tiles = tl.cdiv(tl.maximum(stop - start, 0), M)
    for i in range(GROUP * tiles):  # one loop over heads and tiles, which needs fewer registers than two
        head, t = kv_head * GROUP + i // tiles, start + i % tiles * M
        queries = load_rows(q, queries_at + t, time - t, head, columns, M, HEADS, DIM)
        grads = load_rows(grad_out, queries_at + t, time - t, head, columns, M, HEADS, DIM)
        log = _load_column(lse, queries_at + t, time - t, head, M, HEADS) * LOG2E
        mean = _load_column(delta, queries_at + t, time - t, head, M, HEADS)
        of_query = past + t + tl.arange(0, M)
        allowed = (of_query[None, :] >= low[:, None]) & (of_query[None, :] <= high[:, None])
        scores, slope = _scores(keys, queries, scale, softcap, OPERAND, PRECISION)
        weights = tl.exp2(tl.where(allowed, scores - log[None, :], float("-inf")))
        change = weights * (dot(values, tl.trans(grads), OPERAND, PRECISION) - mean[None, :]) * slope
        if SLAB < D:
            queries = load_rows(q, queries_at + t, time - t, head, part, M, HEADS, DIM)
            grads = load_rows(grad_out, queries_at + t, time - t, head, part, M, HEADS, DIM)
        acc_v += dot(weights, grads, OPERAND, PRECISION)
        acc_k += dot(change, queries, OPERAND, PRECISION)
    if added is not None:
        acc_v += load_rows(added, keys_at, length - first, kv_head, part, N, kv_heads, DIM).to(tl.float32)
    store_rows(grad_k, acc_k, keys_at, length - first, kv_head, part, N, kv_heads, DIM)
    store_rows(grad_v, acc_v, keys_at, length - first, kv_head, part, N, kv_heads, DIM)


@triton.jit(do_not_specialize=["time"])
def _sum_sinks(
    parts_k, parts_v, borders, grad_k, grad_v, time,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SINKS: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Gradient of one sink of one key/value head: the sum of what `_grad_queries` left for it."""
    kv_heads: tl.constexpr = HEADS // GROUP
    place = tl.program_id(0)
    kv_head, sink, row = place % kv_heads, place // kv_heads % SINKS, place // (kv_heads * SINKS)
    if borders is None:
        first, count = row * tl.cdiv(time, M), tl.cdiv(time, M)
    else:
        start, end = tl.load(borders + row), tl.load(borders + row + 1)
        first = start // M
        count = tl.where(end > start, (end - 1) // M - first + 1, 0)
    columns = tl.arange(0, D)
    sum_k = tl.zeros((D,), tl.float32)
    sum_v = tl.zeros((D,), tl.float32)
    for i in range(0, count * GROUP, 32):
        at = i + tl.arange(0, 32)
        slot = (first + row + at // GROUP).to(tl.int64) * HEADS + kv_head * GROUP + at % GROUP
        tile = (slot * SINKS + sink)[:, None] * DIM + columns[None, :]
        inside = (at < count * GROUP)[:, None] & (columns < DIM)[None, :]
        sum_k += tl.sum(tl.load(parts_k + tile, mask=inside, other=0.0), 0)
        sum_v += tl.sum(tl.load(parts_v + tile, mask=inside, other=0.0), 0)
    tile = ((row * SINKS + sink).to(tl.int64) * kv_heads + kv_head) * DIM + columns
    tl.store(grad_k + tile, sum_k.to(grad_k.dtype.element_ty), mask=columns < DIM)
    tl.store(grad_v + tile, sum_v.to(grad_v.dtype.element_ty), mask=columns < DIM)


class _Launch(NamedTuple):
    """Tile sizes (M queries, N keys, D columns, SLAB of them at a time where sums would not fit), warps and stages of the
    kernels; chosen on an H200 with 64, 128 and 256 channels in bfloat16, in float32 by registers alone."""

    forward: dict
    grad_queries: dict
    grad_keys: dict


@functools.lru_cache(maxsize=64)
def _launch(dim: int, itemsize: int) -> _Launch:
    wide = tile_width(dim)
    if itemsize == 4:
        tiles = dict(M=32, N=32, D=wide, num_warps=8, num_stages=1)
        return _Launch(tiles, tiles | dict(SLAB=min(wide, 64)), tiles | dict(SLAB=min(wide, 64)))
    wide = max(wide, HALF_WIDTH.value)
    tiles = dict(M=64, N=64, D=wide, num_warps=4, num_stages=2 if wide > 128 else 3)
    few = 64 if wide <= 64 else 32  # sums fill the registers
    if wide > 128:
        return _Launch(
            tiles | dict(N=few),
            tiles | dict(N=few, SLAB=few, num_stages=1),
            tiles | dict(M=few, SLAB=128, num_stages=1),
        )
    return _Launch(tiles, tiles | dict(N=few, SLAB=few), tiles | dict(M=few, SLAB=min(wide, 128)))


class Joined(NamedTuple):
    """What latents give to the same outputs: by chunks of tokens, queries that read the state which the chunk starts with,
    weights of the chunk's own tokens, (heads, tokens, CHUNK), and the share of the window per token and head."""

    chunks: torch.Tensor
    reader: torch.Tensor
    weights: torch.Tensor
    states: torch.Tensor
    shares: torch.Tensor


class Band(NamedTuple):
    """What the kernels share beside the differentiable tensors."""

    visible: torch.Tensor | None  # (sequences * sinks, 2) first and last position that sees a sink outside the window
    valid: torch.Tensor | None  # (B, past + T) int8, zero at padding
    document: torch.Tensor | None  # (T,) of each token of a packed row
    borders: torch.Tensor | None  # (documents + 1,)
    scale: float
    softcap: float | None
    past: int
    before: int  # how far a query sees to the left
    after: int  # and to the right

    def scalars(self, q: torch.Tensor) -> tuple:
        return self.scale, self.softcap, q.shape[1], self.past, self.before, self.after

    def options(self, q: torch.Tensor, k: torch.Tensor) -> dict:
        exact = INTERPRETED or q.dtype == torch.float32  # the interpreter's products of bfloat16 are wrong
        operand = tl.float32 if exact else tl.float16 if q.dtype == torch.float16 else tl.bfloat16
        kind = dict(HEADS=q.shape[2], GROUP=q.shape[2] // k.shape[2], DIM=q.shape[3])
        return dict(**kind, OPERAND=operand, PRECISION="ieee" if INTERPRETED else "tf32x3" if exact else "tf32")

    def forward(
        self, q, k, v, sinks=(None, None, None), joined: Joined | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and log-sum-exp; `sinks`: queries, keys and values."""
        batch, time, heads, dim = q.shape
        out = torch.empty_like(q, dtype=v.dtype)
        lse = q.new_empty(batch, time, heads, dtype=torch.float32)
        config = _launch(dim, q.element_size()).forward
        blocks, latents = batch * triton.cdiv(time, config["M"]), 1
        if joined is not None:
            blocks, latents = len(joined.chunks) * (CHUNK // config["M"]), joined.reader.shape[3]
        run(
            _forward, (blocks * heads,),
            q, k, v, *sinks, *self[:4], out, lse, *(joined or (None,) * 5), batch * time, *self.scalars(q),
            SINKS=0 if sinks[1] is None else sinks[1].shape[1], LATENTS=latents, L=tile_width(latents), C=CHUNK,
            **self.options(q, k), **config,
        )  # fmt: skip
        return out, lse

    def grad_queries(self, q, k, v, sinks, out, lse, grad_out, grad_lse=None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of q and the sinks (queries, keys, values), and out * grad_out less `grad_lse` per query and head; without
        `out`, where latents were joined to it, of the window alone."""
        batch, time, heads, dim = q.shape
        grad_q, delta = torch.empty_like(q), torch.empty_like(lse)
        by_sink = grad_q_sink, grad_sink_k, grad_sink_v = [None if x is None else torch.empty_like(x) for x in sinks]
        config, options = _launch(dim, q.element_size()).grad_queries, self.options(q, k)
        blocks = batch * triton.cdiv(time, config["M"])
        count, parts = 0, (None, None)
        if sinks[1] is not None:
            rows, count = sinks[1].shape[:2]
            parts = lse.new_empty(2, blocks + rows, heads, count, dim)
        run(
            _grad_queries, (blocks * heads,),
            q, k, v, *sinks, *self[:4], out, lse, grad_out, grad_lse,
            delta, grad_q, grad_q_sink, *parts, *self.scalars(q), SINKS=count, **options, **config,
        )  # fmt: skip
        if count:
            kind = {n: options[n] for n in ("HEADS", "GROUP", "DIM")} | {n: config[n] for n in "MD"}
            run(
                _sum_sinks, (rows * count * k.shape[2],),
                *parts, self.borders, grad_sink_k, grad_sink_v, time, SINKS=count, **kind, num_warps=4,
            )  # fmt: skip
        return grad_q, *by_sink, delta

    def grad_keys(self, q, k, v, lse, delta, grad_out, added=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of k and v, sinks aside; `added` is a part of v's."""
        grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
        config = _launch(q.shape[3], q.element_size()).grad_keys
        grid = k.shape[0] * triton.cdiv(k.shape[1], config["N"]) * k.shape[2], triton.cdiv(k.shape[3], config["SLAB"])
        run(
            _grad_keys, grid,
            q, k, v, *self[1:4], lse, delta, grad_out, added, grad_k, grad_v, *self.scalars(q), **self.options(q, k), **config,
        )  # fmt: skip
        return grad_k, grad_v


class _SlidingWindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, q_sink, sink_k, sink_v, band):
        tensors = [None if x is None else x.contiguous() for x in (q, k, v, q_sink, sink_k, sink_v)]
        out, lse = band.forward(*tensors[:3], tensors[3:])
        ctx.save_for_backward(*tensors, out, lse)
        ctx.band = band
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    @backward_compiled_together
    def backward(ctx, saved, grad_out, grad_lse):
        q, k, v, *sinks, out, lse = saved
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.contiguous()
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        grad_q, *by_sink, delta = ctx.band.grad_queries(q, k, v, sinks, out, lse, grad_out, grad_lse)
        grad_k, grad_v = ctx.band.grad_keys(q, k, v, lse, delta, grad_out)
        return grad_q, grad_k, grad_v, *by_sink, None


@torch.compiler.disable
@on_own_device
def sliding_window_attention_fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int,
    sinks: int = 0,
    q_sink: torch.Tensor | None = None,
    k_sink: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: WindowState | None = None,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, WindowState | None]:
    """See `hf_linattn.kernels.sliding_window_attention.sliding_window_attention`."""
    (batch, time), dim = q.shape[:2], q.shape[3]
    valid = None if attention_mask is None else attention_mask.bool()
    after = visible = document = borders = sink_k = sink_v = None
    k_sink = k if k_sink is None else k_sink
    past = 0 if initial_state is None else window
    if causal and cu_seqlens is None:
        if initial_state is None and valid is None:
            after = WindowState.of_whole_rows(k, v, k_sink, window, sinks)
        else:
            state = WindowState.empty(k, window, sinks) if initial_state is None else initial_state
            new = torch.ones(batch, time, dtype=torch.bool, device=q.device) if valid is None else valid
            if sinks:
                state = state.with_sinks(k_sink, v, new)
            after = state.advance(k, v, new)
    if cu_seqlens is not None:
        borders = cu_seqlens.to(q.device, torch.int32)
        document = document_index(borders, time).int()
    if sinks:
        if after is not None:
            sink_k, sink_v = after.sink_key, after.sink_value
            among_keys = after.sink_index - after.length + past + time
            since = torch.where(after.sink_index < 0, NEVER.value, among_keys + window)
            until = torch.full_like(since, past + time)
        else:
            since = borders[:-1, None].long() + torch.arange(sinks, device=q.device)
            until = borders[1:, None].long() - 1
            at = since.clamp(max=time - 1)  # of a short document, some sinks lie behind its end, where none sees them
            sink_k, sink_v = k_sink[0, at], v[0, at]
            since = since + window
            until = until.expand_as(since)
        visible = torch.stack([since.clamp(-NEVER.value, NEVER.value), until], -1).int()
    else:
        q_sink = None
    if past:
        k, v = torch.cat([state.key, k], 1), torch.cat([state.value, v], 1)
        valid = torch.cat([state.valid, new], 1)
    if valid is not None:
        valid = valid.contiguous().view(torch.int8)

    before, ahead = (window - 1, 0) if causal else (window // 2, window // 2)
    limit = past + time
    band = Band(
        visible, valid, document, borders, dim**-0.5 if scale is None else scale, softcap,
        past, min(before, limit), min(ahead, limit),
    )  # fmt: skip
    pad = -dim % 8  # aligned rows; Triton 3.6 reads beyond shared memory where a tensor has one number per token
    tensors = (None if x is None else F.pad(x, (0, pad)) if pad else x for x in (q, k, v, q_sink, sink_k, sink_v))
    out, lse = _SlidingWindowAttention.apply(*tensors, band)
    return out[..., :dim], lse, after
