# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Which implementation of an operator runs, and one clear warning when it is the slower one."""

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable

import torch

BACKENDS = ("auto", "triton", "torch")
MIN_CAPABILITY = (8, 0)  # bfloat16 in hardware

MAX_TRACED = 16  # tokens

_warned: set[str] = set()


def _interpreted() -> bool:
    """Whether Triton kernels run on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


def _obstacle(
    device: torch.device, available: tuple[str, ...], limit: str | None, explicit: bool
) -> tuple[str, str] | None:
    """Why Triton cannot run and what helps, or `None` if it can."""
    if "triton" not in available:
        return "it has no Triton kernel in this release", "use backend='torch'"
    if limit is not None:
        return limit, "choose sizes within these limits, or pass backend='torch' where you call it"
    if explicit and _interpreted():
        return None
    if device.type != "cuda":
        return f"Triton does not run on device {device}", "move the tensors to a CUDA GPU or use backend='torch'"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed", "`pip install triton` or use backend='torch'"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        found, needed = (".".join(map(str, c)) for c in (capability, MIN_CAPABILITY))
        return f"the GPU's compute capability {found} is below {needed}", "use a newer GPU or backend='torch'"
    return None


def on_own_device(launching: Callable) -> Callable:
    """Decorator of what launches kernels. Triton does so on the current device, where a model's layers are on several: this
    makes it the first argument's."""

    @functools.wraps(launching)
    def guarded(first: torch.Tensor, *arguments, **options):
        if torch.compiler.is_compiling():  # compiled code sets it
            return launching(first, *arguments, **options)
        with torch.cuda.device_of(first):
            return launching(first, *arguments, **options)

    return guarded


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd will want something of a call on these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def traces_few(tokens: int) -> bool:
    """Whether torch.compile traces a call on few tokens, as in decoding. The PyTorch path is to serve it: that becomes one
    graph, which a kernel's launch would break."""
    return torch.compiler.is_compiling() and tokens <= MAX_TRACED


@torch.compiler.assume_constant_result  # runs while torch.compile traces: the warning breaks no graph
def resolve_backend(
    operator: str, backend: str, device: torch.device, available: tuple[str, ...], limit: str | None = None
) -> str:
    """Choose the implementation of `operator` for tensors on `device`.

    Args:
        operator: name for messages.
        backend: "auto" (Triton where it can run, else PyTorch; on a CUDA device the latter warns once per operator),
            "triton" or "torch".
        device: where the inputs are.
        available: implementations that the operator has, out of "triton" and "torch".
        limit: why its Triton kernels cannot take these inputs, if they cannot.

    Returns:
        "triton" or "torch".

    Raises:
        ValueError: for an unknown backend, or for "triton" where it cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r} for {operator}: use one of {', '.join(map(repr, BACKENDS))}")
    if backend == "torch":
        return "torch"
    obstacle = _obstacle(device, available, limit, explicit=backend == "triton")
    if obstacle is None:
        return "triton"
    reason, remedy = obstacle
    if backend == "triton":
        raise ValueError(f"backend='triton' is not possible for {operator}: {reason}. Remedy: {remedy}, or 'auto'.")
    if device.type == "cuda" and operator not in _warned:
        _warned.add(operator)
        warnings.warn(
            f"{operator} takes the slower PyTorch path on {device}: {reason}. Remedy: {remedy} (which also ends this "
            "warning; results are the same).",
            stacklevel=3,
        )
    return "torch"
