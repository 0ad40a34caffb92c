# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""What the Triton kernels of several operators share: tiles of tensors, their products, and tables of chunks.

The tokens of all rows lie end to end; tables say where chunks, segments (runs of chunks that one program walks through) and
documents begin.
"""

import functools
import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

CHUNK = 64
# Least columns of a product's second operand of 16 bits that is not transposed. With 32, the ptxas that Triton 3.6 brings takes
# such an operand from where a uniform register points that nobody has written: compute-sanitizer stopped there, and the machine
# code shows it. Transposed ones, TF32 and wider ones were right in all kernels looked through.
HALF_WIDTH = tl.constexpr(64)
MOST_ROUNDS = tl.constexpr(32)
INTERPRETED = triton.knobs.runtime.interpret
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def place_in_grid(number, HEADS: tl.constexpr, TILES: tl.constexpr):
    """What chunk or segment, head and tile of it program `number` takes. Tiles and heads of a chunk come one after the other:
    they run at the same time, so what several of them read comes from memory once."""
    return number // (HEADS * TILES), number // TILES % HEADS, number % TILES


@triton.jit
def marked_rounds(marks, count, rounds, SHARE: tl.constexpr):
    """How often this program has to look for work: `rounds` times, each time a grid's width further, or never if none of the
    marks that it would meet is set. SHARE of `count` numbers have a mark in common."""
    numbers = tl.program_id(0) + tl.num_programs(0) * tl.arange(0, MOST_ROUNDS)
    found = tl.max(tl.load(marks + numbers // SHARE, mask=numbers < count, other=0), 0)
    return tl.where(found != 0, rounds, 0)


@triton.jit
def marked_number(marks, count, i, SHARE: tl.constexpr):
    """The number that this program takes in round i, and whether its mark is set."""
    number = tl.program_id(0) + tl.num_programs(0) * i
    return number, tl.load(marks + number // SHARE, mask=number < count, other=0) != 0


@triton.jit
def load_rows(pointer, start, left, head, columns, C: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """C rows of one head of a (tokens, HEADS, WIDTH) tensor from token `start` (int64) on, zero beyond `left` rows."""
    rows = tl.arange(0, C)
    mask = (rows < left)[:, None] & (columns < WIDTH)[None, :]
    tile = rows[:, None] * (HEADS * WIDTH) + columns[None, :]
    return tl.load(pointer + (start * HEADS + head) * WIDTH + tile, mask=mask, other=0.0)


@triton.jit
def store_rows(pointer, x, start, left, head, columns, C: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    rows = tl.arange(0, C)
    mask = (rows < left)[:, None] & (columns < WIDTH)[None, :]
    tile = rows[:, None] * (HEADS * WIDTH) + columns[None, :]
    tl.store(pointer + (start * HEADS + head) * WIDTH + tile, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_state(pointer, place, columns, values, DIM_K: tl.constexpr, DIM_V: tl.constexpr):
    """A tile of the state number `place`, (columns, values)."""
    tile = columns[:, None] * DIM_V + values[None, :]
    inside = (columns < DIM_K)[:, None] & (values < DIM_V)[None, :]
    return tl.load(pointer + place.to(tl.int64) * (DIM_K * DIM_V) + tile, mask=inside, other=0.0)


@triton.jit
def store_state(pointer, x, place, columns, values, DIM_K: tl.constexpr, DIM_V: tl.constexpr):
    tile = columns[:, None] * DIM_V + values[None, :]
    inside = (columns < DIM_K)[:, None] & (values < DIM_V)[None, :]
    tl.store(pointer + place.to(tl.int64) * (DIM_K * DIM_V) + tile, x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def dot(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a.to(OPERAND), b.to(OPERAND), input_precision=PRECISION)


@triton.jit
def _half_a_step_up(x):
    """float32 from which dropping the low 13 bits rounds x; a NaN stays one."""
    return (tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFFEFFF) + 0x1000).to(tl.float32, bitcast=True)


@triton.jit
def _truncated(x):
    """The high bits of float32, which a TF32 product sees."""
    return (x.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def rounded_dot(a, b, PRECISION: tl.constexpr):
    """Product of float32 operands, rounded: the hardware itself drops the low bits."""
    if PRECISION == "tf32":
        a, b = _half_a_step_up(a), _half_a_step_up(b)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _halves(x):
    """x as two parts of bfloat16, which together hold 16 bits of it."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def precise_dot(a, b, PRECISION: tl.constexpr):
    """Product of float32 operands to about 2^-16. It takes three products of parts, one and a half as long as one of TF32,
    which holds 2^-12 and is left where there are fewer columns than HALF_WIDTH."""
    HALF: tl.constexpr = b.shape[1] >= HALF_WIDTH
    if PRECISION == "ieee":
        product = tl.dot(a, b, input_precision="ieee")
    elif HALF:
        a_high, a_low = _halves(a)
        b_high, b_low = _halves(b)
        product = tl.dot(a_low, b_high)
        product = tl.dot(a_high, b_low, product)
        product = tl.dot(a_high, b_high, product)
    else:
        product = rounded_dot(a, b, PRECISION)
    return product


@triton.jit
def _high_part(x, HALF: tl.constexpr):
    """What an operand of a product holds of x: bfloat16, or the bits that TF32 sees."""
    return x.to(tl.bfloat16) if HALF else _truncated(x.to(tl.float32))


@triton.jit
def selected_sums(mask, x, EXACT: tl.constexpr):
    """mask (rows, tokens) of zeros and ones times x (tokens, channels), to float32 precision."""
    HALF: tl.constexpr = x.shape[1] >= HALF_WIDTH
    if EXACT == "ieee":
        sums = tl.dot(mask.to(tl.float32), x.to(tl.float32), input_precision="ieee")
    else:  # float32 is the sum of three parts, whose products with one are exact; one part holds all of bfloat16
        ones = mask.to(tl.bfloat16 if HALF else tl.float32)
        high = _high_part(x, HALF)
        sums = tl.dot(ones, high, input_precision="tf32")
        if x.dtype == tl.float32 or (HALF and x.dtype == tl.float16):
            rest = x.to(tl.float32) - high.to(tl.float32)
            middle = _high_part(rest, HALF)
            sums = tl.dot(ones, middle, sums, input_precision="tf32")
            sums = tl.dot(ones, _high_part(rest - middle.to(tl.float32), HALF), sums, input_precision="tf32")
    return sums


@triton.jit
def join_segments(
    totals, decays, initial, starts, documents,
    KV_HEADS: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr,
    REVERSE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The state that each segment of a document starts from (in reverse, at its end), from what the segments before it add
    (`totals`) and log2 of what they keep (`decays`)."""
    n, kv_head = tl.program_id(0), tl.program_id(1)
    tiles: tl.constexpr = (DIM_V + BV - 1) // BV
    columns = tl.program_id(2) // tiles * BK + tl.arange(0, BK)
    values = tl.program_id(2) % tiles * BV + tl.arange(0, BV)
    first, count = tl.load(documents + 2 * n), tl.load(documents + 2 * n + 1)
    place = n * KV_HEADS + kv_head
    if initial is None:
        state = tl.zeros((BK, BV), tl.float32)
    else:
        state = load_state(initial, place, columns, values, DIM_K, DIM_V)
    # one segment ahead, so that loads do not wait for stores
    at = (first + (count - 1 if REVERSE else 0)) * KV_HEADS + kv_head
    step = -KV_HEADS if REVERSE else KV_HEADS
    total = load_state(totals, at, columns, values, DIM_K, DIM_V)
    for _ in range(count - 1):
        keep = tl.exp2(tl.load(decays + at * DIM_K + columns, mask=columns < DIM_K, other=0.0))[:, None]
        ahead = load_state(totals, at + step, columns, values, DIM_K, DIM_V)
        store_state(starts, state, at, columns, values, DIM_K, DIM_V)
        state = state * keep + total
        total = ahead
        at += step
    store_state(starts, state, at, columns, values, DIM_K, DIM_V)


class Plan(NamedTuple):
    """Tables of token positions, int32: chunks (start, end); segments (start, end, first chunk, segments of the document
    before it and after it, document); documents (first segment, number of segments). `cuts`: (first segment, first chunk) of
    the parts that the backward pass takes one after the other, and the ends. `joined`: some document has several segments."""

    chunks: torch.Tensor
    segments: torch.Tensor
    documents: torch.Tensor
    cuts: tuple[tuple[int, int], ...]
    joined: bool


@functools.lru_cache(maxsize=64)
def make_plan(borders: tuple[int, ...], segment: int, device: torch.device) -> Plan:
    chunks, segments, documents = [], [], []
    for number, (start, end) in enumerate(itertools.pairwise(borders)):
        pieces = max(-(-(end - start) // segment), 1)
        length = max(-(-(end - start) // pieces // CHUNK) * CHUNK, CHUNK)
        pieces = max(-(-(end - start) // length), 1)
        documents.append((len(segments), pieces))
        for piece, at in enumerate(range(start, start + pieces * length, length)):
            stop = min(at + length, end)
            segments.append((at, stop, len(chunks), piece, pieces - 1 - piece, number))
            chunks += [(x, min(x + CHUNK, stop)) for x in range(at, stop, CHUNK)]
    half = len(segments) // 2
    cuts = ((0, 0), (half, segments[half][2]), (len(segments), len(chunks)))
    tables = (torch.tensor(t, dtype=torch.int32).to(device) for t in (chunks, segments, documents))
    return Plan(*tables, cuts[half == 0 :], len(segments) > len(documents))


def tile_width(n: int) -> int:
    """Width of a tile: Triton 3.6 reads beyond shared memory in products of 16 columns."""
    return max(32, triton.next_power_of_2(n))


def product_precision(dtype: torch.dtype) -> dict:
    """Type of the matrix products' operands, and how products of float32 operands are formed. float16 is multiplied as
    bfloat16: sums over the whole sequence would overflow."""
    exact = INTERPRETED or dtype == torch.float32  # the interpreter's products of bfloat16 are wrong
    return dict(
        OPERAND=tl.float32 if exact else tl.bfloat16,
        PRECISION="ieee" if exact else "tf32",
        EXACT="ieee" if INTERPRETED else "split",
    )


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def few_programs(count: int, device: torch.device) -> tuple[tuple[int], int]:
    """Grid whose programs look through `count` numbers for marked ones, and in how many rounds: mostly there is none, and
    thousands of programs would take as long to come and go as a kernel that works."""
    rounds = min(max(count // (4 * processors(device)), 1), MOST_ROUNDS.value)
    return (triton.cdiv(count, rounds),), rounds


@functools.lru_cache(maxsize=64)
def has_ample_memory(device: torch.device) -> bool:
    """Whether a program has as much shared memory as on an A100 (163 KiB); consumers' GPUs have 99 KiB."""
    if device.type != "cuda":
        return True
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"] >= 160 * 1024
