# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Compilation of all kernels of one pass side by side; one after the other, the first call would take several times as long."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import torch
import triton

from .tiles import INTERPRETED

_rehearsal: ContextVar[list | None] = ContextVar("hf_linattn_rehearsal", default=None)


def run(kernel, grid: tuple[int, ...], *arguments, **options) -> None:
    """Launch a kernel, or have it compiled and go on where `compiled_together` rehearses the pass."""
    compiling = _rehearsal.get()
    if compiling is None:
        kernel[grid](*arguments, **options)
    else:
        compiling.append(kernel.warmup(*arguments, grid=grid, **options))


def _kind(x):
    if isinstance(x, torch.Tensor):
        return x.dtype, x.shape[2:]
    return x if x is None or isinstance(x, bool) else type(x)


def _load(kernel, tensor: torch.Tensor) -> None:
    """Have Triton make the launcher of a compiled kernel, for which some versions start a C compiler."""
    with torch.cuda.device_of(tensor):  # threads start on the first device
        (kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel).run  # noqa: B018


def _rehearse(step: Callable, ctx, arguments: tuple, tensor: torch.Tensor) -> None:
    kernels = []
    token = _rehearsal.set(kernels)
    try:
        with ThreadPoolExecutor() as pool:
            # raising there, the mode would stay active for good; `_load` raises instead
            with triton.AsyncCompileMode(pool, ignore_errors=True):
                step(ctx, *arguments)
            for loaded in [pool.submit(_load, kernel, tensor) for kernel in kernels]:
                loaded.result()
    finally:
        _rehearsal.reset(token)


def compiled_together(step: Callable) -> Callable:
    """Decorator of an autograd function's `forward` or `backward`, all of whose kernels start by `run`.

    The first call of a kind (types, sizes of heads, absent tensors) is rehearsed without its launches, whose kernels compile in
    threads. What a later call of that kind needs beside them, of longer sequences for instance, compiles when it starts.
    """
    known = set()

    @functools.wraps(step)
    def compiled(ctx, *arguments):
        values = (*arguments, *ctx.saved_tensors)
        kind = tuple(map(_kind, values))
        if kind not in known and not INTERPRETED:
            known.add(kind)
            _rehearse(step, ctx, arguments, next(x for x in values if isinstance(x, torch.Tensor)))
        return step(ctx, *arguments)

    return compiled
