# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Compilation of all kernels of one pass side by side; one after the other, the first call would take several times as long."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context

import torch
import triton

from .tiles import INTERPRETED

_rehearsal: ContextVar[list | None] = ContextVar("hf_linattn_rehearsal", default=None)


def run(kernel, grid: tuple[int, ...], *arguments, **options) -> None:
    """Launch a kernel, or have it compiled and go on where the pass is rehearsed."""
    compiling = _rehearsal.get()
    if compiling is None:
        kernel[grid](*arguments, **options)
    else:
        compiling.append(kernel.warmup(*arguments, grid=grid, **options))


def _kind(x):
    if isinstance(x, torch.Tensor):
        return x.dtype, x.shape[2:]
    return x if x is None or isinstance(x, bool) else type(x)


def _load(kernel, device: int) -> None:
    """Have Triton make the launcher of a compiled kernel, for which some versions start a C compiler."""
    with torch.cuda.device(device):  # threads start on the first
        (kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel).run  # noqa: B018


def _rehearse(step: Callable, arguments: tuple) -> None:
    kernels = []
    _rehearsal.set(kernels)
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    with ThreadPoolExecutor() as pool:
        with triton.AsyncCompileMode(pool):
            step(*arguments)
        for loaded in [pool.submit(_load, kernel, device) for kernel in set(kernels)]:
            loaded.result()


def _compiled_together(step: Callable) -> Callable:
    known = set()

    def start(values: tuple, *arguments):
        kind = tuple(map(_kind, values))
        if kind not in known and not INTERPRETED:
            copy_context().run(_rehearse, step, arguments)  # whatever ends it, no rehearsal goes on outside the copy
            known.add(kind)
        return step(*arguments)

    return start


def forward_compiled_together(forward: Callable) -> Callable:
    """Decorator of an autograd function's `forward`, all of whose kernels start by `run`.

    The first call of a kind (types, sizes of heads, absent tensors) is rehearsed without its launches, whose kernels compile in
    threads. What a later call of that kind needs beside them, of longer sequences for instance, compiles when it starts.
    """
    start = _compiled_together(forward)
    return functools.wraps(forward)(lambda ctx, *arguments: start(arguments, ctx, *arguments))


def backward_compiled_together(backward: Callable) -> Callable:
    """The same for `backward`, which takes the saved tensors as its second argument: checkpoints and other hooks on them allow,
    or pay for, each reading."""
    start = _compiled_together(backward)

    @functools.wraps(backward)
    def compiled(ctx, *grads):
        saved = ctx.saved_tensors
        return start((*saved, *grads), ctx, saved, *grads)

    return compiled
