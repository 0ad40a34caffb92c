# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""RG-LRU in Triton, forward and backward (papers: Latte, sections 2.8 and 10.1).

A program of one warp walks through one segment of one document, token by token, for a block of channels; everything
elementwise is formed on the way. Where documents are cut into several segments, a first walk gives what each segment makes of
its start (`_walk` without `out`; backward `_totals`), `_join` the starts, and a second walk the results. Backward goes from
the last token to the first, with the outputs of the forward pass as the states before each token.

The tokens of all rows lie end to end; tables say where segments begin and, with padding, which real token stands before each.
"""

import functools
import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from ..compilation import backward_compiled_together, forward_compiled_together, run
from ..dispatch import on_own_device
from ..packing import document_borders, document_index
from ..tiles import LOG2E
from .chunked import MAX_SQRT_DERIVATIVE

CHANNELS = 128
SHORTEST = 8 if triton.knobs.runtime.interpret else 64  # tokens of a segment; short tests are to have several
STAGES = 4  # tokens whose loads are under way
PADDING, FIRST = tl.constexpr(-2), tl.constexpr(-1)  # in place of a previous token
BOUND = tl.constexpr(60.0)  # of exponents in log2: the product of two such powers is a finite float32
MAX_INVERSE = tl.constexpr(2 * MAX_SQRT_DERIVATIVE)


@triton.jit
def _gates(r, i, rate):
    """Both sigmoids and their derivatives, the decay a, 1 / sqrt(1 - a^2) and that root itself; `rate` is log a at r = inf."""
    r_closing, i_closing = tl.exp2(tl.minimum(r * -LOG2E, BOUND)), tl.exp2(tl.minimum(i * -LOG2E, BOUND))
    # one reciprocal for both, by its root: the special function unit is as busy as the memory here
    both = tl.rsqrt((1 + r_closing) * (1 + i_closing))
    both *= both
    r_open, i_open = both * (1 + i_closing), both * (1 + r_closing)
    log = rate * r_open
    decay = tl.exp2(log * LOG2E)
    z = 2 * log
    series = 1 + z * (1 / 2 + z * (1 / 6 + z * (1 / 24 + z * (1 / 120 + z * (1 / 720)))))  # (e^z - 1) / z
    rest = tl.where(z > -0.25, -z * series, 1 - decay * decay)
    inverse = tl.rsqrt(tl.maximum(rest, 1e-37))
    return r_open, i_open, r_open * r_open * r_closing, i_open * i_open * i_closing, decay, inverse, rest * inverse


@triton.jit
def _segment(segments, n):
    """First token of segment n and the one after its last, its document, the document's first token, and how many segments of
    the document come before and after."""
    place = segments + 6 * n
    first, end, document = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    return first, end, document, tl.load(place + 3), tl.load(place + 4), tl.load(place + 5)


@triton.jit
def _starts_fresh(begins, document):
    """Whether a document's state begins with its first real token here."""
    fresh = document >= 0
    if begins is not None:
        fresh = tl.load(begins + document) != 0
    return fresh


@triton.jit
def _previous(before, t, origin):
    """The real token before token t of the document that begins at token `origin`, or FIRST or PADDING."""
    if before is None:
        previous = tl.where(t > origin, t - 1, FIRST)
    else:
        previous = tl.load(before + t)
    return previous


@triton.jit
def _load(pointer, at, columns, D: tl.constexpr):
    return tl.load(pointer + tl.cast(at, tl.int64) * D + columns, mask=columns < D, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, x, at, columns, D: tl.constexpr):
    tl.store(pointer + tl.cast(at, tl.int64) * D + columns, x.to(pointer.dtype.element_ty), mask=columns < D)


@triton.jit
def _walk(
    x, r, i, rate, before, begins, starts, out, final, decays, ends, segments,
    D: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk through a segment from its start (zero if not given) to its outputs and the document's final state; without `out`
    to the decay over the segment and the state at its end."""
    blocks: tl.constexpr = (D + C - 1) // C
    n = tl.program_id(0) // blocks
    columns = tl.program_id(0) % blocks * C + tl.arange(0, C)
    first, end, document, origin, earlier, after = _segment(segments, n)
    fresh = _starts_fresh(begins, document)
    slope = tl.load(rate + columns, mask=columns < D, other=0.0)
    state = tl.zeros((C,), tl.float32)
    if starts is not None:
        state = _load(starts, n, columns, D)
    decay = tl.full((C,), 1.0, tl.float32)
    for t in tl.range(first, end, num_stages=STAGES):
        previous = _previous(before, t, origin)
        x_row, r_row, i_row = _load(x, t, columns, D), _load(r, t, columns, D), _load(i, t, columns, D)
        r_open, i_open, r_slope, i_slope, kept, inverse, root = _gates(r_row, i_row, slope)
        start, real = fresh & (previous == FIRST), previous != PADDING
        kept = tl.where(real, tl.where(start, 0.0, kept), 1.0)
        added = tl.where(real, tl.where(start, 1.0, root) * i_open * x_row, 0.0)
        state = kept * state + added
        if out is None:
            decay *= kept
        else:
            _store(out, tl.where(real, state, 0.0), t, columns, D)
    if out is None:
        _store(decays, decay, n, columns, D)
        _store(ends, state, n, columns, D)
    elif final is not None:
        if after == 0:
            _store(final, state, document, columns, D)


@triton.jit
def _join(
    decays, ends, initial, starts, documents,
    D: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """From what each segment makes of its start, the starts of a document's segments; in reverse from the last one on."""
    blocks: tl.constexpr = (D + C - 1) // C
    document = tl.program_id(0) // blocks
    columns = tl.program_id(0) % blocks * C + tl.arange(0, C)
    first, count = tl.load(documents + 2 * document), tl.load(documents + 2 * document + 1)
    state = tl.zeros((C,), tl.float32)
    if initial is not None:
        state = _load(initial, document, columns, D)
    for j in tl.range(0, count, num_stages=STAGES):
        n = first + (count - 1 - j if REVERSE else j)
        _store(starts, state, n, columns, D)
        state = _load(decays, n, columns, D) * state + _load(ends, n, columns, D)


@triton.jit
def _totals(
    r, rate, grad_out, before, begins, decays, ends, segments,
    D: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a segment makes of the gradient of the state after it: the decay, and the gradient from its own outputs."""
    blocks: tl.constexpr = (D + C - 1) // C
    n = tl.program_id(0) // blocks
    columns = tl.program_id(0) % blocks * C + tl.arange(0, C)
    first, end, document, origin, earlier, after = _segment(segments, n)
    fresh = _starts_fresh(begins, document)
    slope = tl.load(rate + columns, mask=columns < D, other=0.0) * LOG2E
    grad = tl.zeros((C,), tl.float32)
    decay = tl.full((C,), 1.0, tl.float32)
    for j in tl.range(0, end - first, num_stages=STAGES):
        t = end - 1 - j
        previous = _previous(before, t, origin)
        r_row, grad_row = _load(r, t, columns, D), _load(grad_out, t, columns, D)
        root = tl.rsqrt(1 + tl.exp2(tl.minimum(r_row * -LOG2E, BOUND)))
        kept = tl.exp2(slope * root * root)
        start, real = fresh & (previous == FIRST), previous != PADDING
        kept = tl.where(real, tl.where(start, 0.0, kept), 1.0)
        grad = kept * (grad + tl.where(real, grad_row, 0.0))
        decay *= kept
    _store(decays, decay, n, columns, D)
    _store(ends, grad, n, columns, D)


@triton.jit
def _gradients(
    x, r, i, rate, out, initial, grad_out, later, before, begins, grad_x, grad_r, grad_i, grad_rate, grad_initial, segments,
    D: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a segment's inputs and its share of those of the rates, and of the document's initial state; `later` is the
    gradient of the state after each segment."""
    blocks: tl.constexpr = (D + C - 1) // C
    n = tl.program_id(0) // blocks
    columns = tl.program_id(0) % blocks * C + tl.arange(0, C)
    first, end, document, origin, earlier, after = _segment(segments, n)
    fresh = _starts_fresh(begins, document)
    slope = tl.load(rate + columns, mask=columns < D, other=0.0)
    grad = tl.zeros((C,), tl.float32)
    if later is not None:
        grad = _load(later, n, columns, D)
    state = tl.zeros((C,), tl.float32)
    if initial is not None:
        state = _load(initial, document, columns, D)
    due = tl.zeros((C,), tl.float32)
    for j in tl.range(0, end - first, num_stages=STAGES):
        t = end - 1 - j
        previous = _previous(before, t, origin)
        x_row, r_row, i_row = _load(x, t, columns, D), _load(r, t, columns, D), _load(i, t, columns, D)
        old = _load(out, tl.maximum(previous, 0), columns, D)
        old = tl.where(previous >= 0, old, state)
        start, real = fresh & (previous == FIRST), previous != PADDING
        r_open, i_open, r_slope, i_slope, kept, inverse, root = _gates(r_row, i_row, slope)
        total = grad + tl.where(real, _load(grad_out, t, columns, D), 0.0)
        added = total * tl.where(start, 1.0, root)
        change = total * kept * (old - kept * i_open * x_row * tl.minimum(inverse, MAX_INVERSE))  # of log a
        change = tl.where(real & (start == 0), change, 0.0)
        _store(grad_x, tl.where(real, added * i_open, 0.0), t, columns, D)
        _store(grad_i, tl.where(real, added * x_row * i_slope, 0.0), t, columns, D)
        _store(grad_r, tl.where(real, change * slope * r_slope, 0.0), t, columns, D)
        due += tl.where(real, change * r_open, 0.0)
        grad = tl.where(real, tl.where(start, 0.0, kept), 1.0) * total
    _store(grad_rate, due, n, columns, D)
    if grad_initial is not None:
        if earlier == 0:
            _store(grad_initial, grad, document, columns, D)


class _Plan(NamedTuple):
    """Tables, int32: segments (first token, the one after the last, document, first token of the document, segments of the
    document before and after it); documents (first segment, number of segments). `joined`: some document has several."""

    segments: torch.Tensor
    documents: torch.Tensor
    joined: bool


@functools.lru_cache(maxsize=64)
def _plan(borders: tuple[int, ...], blocks: int, device: torch.device) -> _Plan:
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    longest = max(end - start for start, end in itertools.pairwise(borders))
    # a single walk moves about half the bytes of two: worth it where 8 programs per unit are left, of up to 32
    segment = borders[-1] * blocks // (8 * units)
    if segment < longest:
        segment = max(SHORTEST, segment // 4)
    segments, documents = [], []
    for number, (start, end) in enumerate(itertools.pairwise(borders)):
        pieces = max(triton.cdiv(end - start, segment), 1)
        length = max(triton.cdiv(end - start, pieces), 1)
        pieces = max(triton.cdiv(end - start, length), 1)
        documents.append((len(segments), pieces))
        for piece in range(pieces):
            at = start + piece * length
            segments.append((at, min(at + length, end), number, start, piece, pieces - 1 - piece))
    tables = (torch.tensor(t, dtype=torch.int32).to(device) for t in (segments, documents))
    return _Plan(*tables, len(segments) > len(documents))


class _Problem:
    """What the kernels of one call share."""

    def __init__(self, x, borders):
        self.width = x.shape[2]
        self.blocks = triton.cdiv(self.width, CHANNELS)
        self.plan = _plan(borders, self.blocks, x.device)
        self.grid = (len(self.plan.segments) * self.blocks,)
        self.options = dict(D=self.width, C=CHANNELS, STAGES=STAGES, num_warps=1)
        self.x = x

    def new(self, rows: torch.Tensor) -> torch.Tensor:
        return self.x.new_empty(len(rows), self.width, dtype=torch.float32)

    def starts(self, initial, kernel, *arguments, reverse: bool):
        """States at the start of all segments (in reverse, gradients at their ends); `kernel` goes through each by itself."""
        if not self.plan.joined:
            return initial
        decays, ends, starts = (self.new(self.plan.segments) for _ in range(3))
        run(kernel, self.grid, *arguments, decays, ends, self.plan.segments, **self.options)
        columns = 32  # few programs, so small ones
        run(
            _join, (len(self.plan.documents) * triton.cdiv(self.width, columns),),
            decays, ends, initial, starts, self.plan.documents, REVERSE=reverse,
            **self.options | dict(C=columns, STAGES=2 * STAGES),
        )  # fmt: skip
        return starts


class _RGLRU(torch.autograd.Function):
    @staticmethod
    @forward_compiled_together
    def forward(ctx, x, r, i, rate, initial, before, begins, borders):
        problem = _Problem(x, borders)
        inputs = x, r, i, rate, before, begins
        starts = problem.starts(initial, _walk, *inputs, None, None, None, reverse=False)
        out, final = torch.empty_like(x), problem.new(problem.plan.documents)
        run(_walk, problem.grid, *inputs, starts, out, final, None, None, problem.plan.segments, **problem.options)
        ctx.save_for_backward(x, r, i, rate, initial, before, begins, out)
        ctx.borders = borders
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @once_differentiable
    @backward_compiled_together
    def backward(ctx, saved, grad_out, grad_final):
        x, r, i, rate, initial, before, begins, out = saved
        problem = _Problem(x, ctx.borders)
        grad_out = torch.zeros_like(x) if grad_out is None else grad_out.contiguous()
        grad_final = None if grad_final is None else grad_final.contiguous()
        later = problem.starts(grad_final, _totals, r, rate, grad_out, before, begins, reverse=True)
        grads = [torch.empty_like(t) for t in (x, r, i)]
        grad_rate = problem.new(problem.plan.segments)
        grad_initial = None if initial is None else torch.empty_like(initial)
        run(
            _gradients, problem.grid,
            x, r, i, rate, out, initial, grad_out, later, before, begins, *grads, grad_rate, grad_initial,
            problem.plan.segments, **problem.options,
        )  # fmt: skip
        return *grads, grad_rate.sum(0), grad_initial, None, None, None


def _real_before(real: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """What `_previous` says of each token of (B, T), (B * T,) int32."""
    tokens = torch.arange(real.numel(), device=real.device).view_as(real)
    before = F.pad(torch.where(real, tokens, FIRST.value).cummax(1).values[:, :-1], (1, 0), value=FIRST.value)
    if cu_seqlens is not None:
        origin = cu_seqlens.long()[document_index(cu_seqlens, real.shape[1])]
        before = before.masked_fill(before < origin, FIRST.value)
    return before.masked_fill(~real, PADDING.value).int().flatten()


@torch.compiler.disable
@on_own_device
def rg_lru_fused(
    x: torch.Tensor,
    r: torch.Tensor,
    i: torch.Tensor,
    lam: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    is_start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_linattn.kernels.rg_lru.rg_lru`."""
    batch, time = x.shape[:2]
    borders = document_borders(batch, time, cu_seqlens)
    before = begins = None
    if attention_mask is not None:
        before = _real_before(attention_mask.bool(), cu_seqlens)
    if initial_state is not None:
        initial_state = initial_state.float()
        begins = torch.zeros(batch, dtype=torch.int32, device=x.device)
        if is_start is not None:
            begins = is_start.int()
            initial_state = initial_state.masked_fill(is_start.bool()[:, None], 0)
        initial_state = initial_state.contiguous()
    rate = 8 * F.logsigmoid(-lam.float())  # logsigmoid(-lam) = -softplus(lam)
    return _RGLRU.apply(*(t.contiguous() for t in (x, r, i)), rate, initial_state, before, begins, borders)
