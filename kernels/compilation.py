# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Compilation of all kernels of one pass side by side; one after the other, the first call would take several times as long."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import torch
import triton

from .tiles import INTERPRETED

_compiling = ContextVar("hf_linattn_compiling", default=False)


def run(kernel, grid: tuple[int, ...], *arguments, **options) -> None:
    """Launch a kernel, or have it compiled and go on where `compiled_together` rehearses the pass."""
    if _compiling.get():
        kernel.warmup(*arguments, grid=grid, **options)
    else:
        kernel[grid](*arguments, **options)


def _kind(x):
    if isinstance(x, torch.Tensor):
        return x.dtype, x.shape[2:]
    return x if x is None or isinstance(x, bool) else type(x)


def compiled_together(step: Callable) -> Callable:
    """Decorator of an autograd function's `forward` or `backward`, all of whose kernels start by `run`.

    The first call of a kind (types, sizes of heads, absent tensors) is rehearsed without its launches, whose kernels compile in
    threads. What a later call of that kind needs beside them, of longer sequences for instance, compiles when it starts.
    """
    known = set()

    @functools.wraps(step)
    def compiled(ctx, *arguments):
        kind = tuple(map(_kind, (*arguments, *ctx.saved_tensors)))
        if kind not in known and not INTERPRETED:
            known.add(kind)
            token = _compiling.set(True)
            try:
                # an error comes again, where it belongs, when the kernel starts
                with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
                    step(ctx, *arguments)
            finally:
                _compiling.reset(token)
        return step(ctx, *arguments)

    return compiled
