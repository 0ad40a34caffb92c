# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The rehearsal that has the kernels of a pass compiled together."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_linattn.kernels.tiles import INTERPRETED

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


class Kernel:
    def __init__(self, error=None):
        self.compiled, self.launched, self.loaded, self.error = [], [], 0, error

    def warmup(self, x, grid, **options):
        self.compiled.append((x.dtype, grid, options))
        return self

    @property
    def run(self):
        if self.error:
            raise self.error
        self.loaded += 1

    def __getitem__(self, grid):
        def launch(x, **options):
            self.launched.append((x.dtype, grid, options))
            x.add_(1)

        return launch


def doubled(kernel):
    from hf_linattn.kernels.compilation import backward_compiled_together, forward_compiled_together, run

    class Doubled(torch.autograd.Function):
        @staticmethod
        @forward_compiled_together
        def forward(ctx, x, known):
            out = x.clone()
            run(kernel, (3,), out, WIDTH=2)
            ctx.save_for_backward(x)
            return out

        @staticmethod
        @backward_compiled_together
        def backward(ctx, saved, grad):
            assert len(saved) == 1
            out = grad * 2
            run(kernel, (4,), out, WIDTH=2)
            return out, None

    return Doubled.apply


def test_each_kind_is_rehearsed_once_and_launched_every_time():
    kernel = Kernel()
    function = doubled(kernel)
    x = torch.zeros(2, 5, 3, requires_grad=True)
    for time in (5, 7):  # another length is no other kind
        y = torch.zeros(2, time, 3, requires_grad=True)
        out = function(y, True)
        assert torch.equal(out, torch.ones_like(y))
        assert torch.equal(torch.autograd.grad(out.sum(), y)[0], torch.full_like(y, 3))
    kind = torch.float32, dict(WIDTH=2)
    assert [(d, o) for d, _, o in kernel.compiled] == [kind] * 2 and [g for _, g, _ in kernel.compiled] == [(3,), (4,)]
    assert [g for _, g, _ in kernel.launched] == [(3,), (4,)] * 2
    for other in (x.double(), torch.zeros(2, 5, 4)):
        function(other, True)
    function(x, False)
    assert len(kernel.compiled) == kernel.loaded == 5 and len(kernel.launched) == 7


def test_hooks_on_saved_tensors_are_asked_once_per_backward():
    function, unpacked = doubled(Kernel()), []
    for count in (1, 2):
        x = torch.zeros(2, 5, 3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: unpacked.append(1) or x):
            out = function(x, True)
        out.sum().backward()
        assert len(unpacked) == count


@pytest.mark.parametrize("where", ["pass", "kernel", "interrupt"])
def test_an_error_leaves_no_rehearsal_behind(where):
    from triton.runtime._async_compile import active_mode

    from hf_linattn.kernels.compilation import forward_compiled_together, run

    kernel = Kernel(RuntimeError("out of memory") if where == "kernel" else None)
    errors = {"pass": RuntimeError("out of memory"), "interrupt": KeyboardInterrupt("out of memory")}

    @forward_compiled_together
    def step(ctx, x):
        run(kernel, (1,), x)
        if where in errors:
            raise errors[where]

    x = torch.zeros(3)
    for _ in range(2):
        with pytest.raises((RuntimeError, KeyboardInterrupt), match="out of memory"):
            step(None, x)
    assert active_mode.get() is None and not kernel.launched
    run(kernel, (2,), x)
    assert [g for _, g, _ in kernel.launched] == [(2,)] and x[0] == 1


class Driver:
    """As much of a GPU of capability 9.0 as Triton asks for when it compiles; launches do nothing."""

    class utils:  # noqa: N801
        @staticmethod
        def get_device_properties(device):
            return dict(max_shared_mem=232448)

        @staticmethod
        def load_binary(name, *binary):
            Driver.loaded.append((name, threading.current_thread()))
            return object(), name, 100, 0, 1024

    class launcher_cls:  # noqa: N801
        def __init__(self, source, metadata):
            self.name = metadata.name

        def __call__(self, *arguments):
            assert arguments[4] == self.name
            Driver.launched.append(self.name)

    loaded, launched = [], []
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="in Triton's caches, kernels of a stand-in would pass for real ones"
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_triton_compiles_all_kernels_of_a_pass_in_threads(tmp_path, monkeypatch, reentrant):
    """An operator's own kernels, for a GPU that need not be there, under a checkpoint as a trained layer has it."""
    from hf_linattn.kernels.sliding_window_attention.fused import sliding_window_attention_fused

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver)
    Driver.loaded.clear(), Driver.launched.clear()
    dim = 16 if reentrant else 32  # kernels that this process has not compiled
    q, k, v = (torch.zeros(1, 70, 2, dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def layer(q, k, v):
        return sliding_window_attention_fused(q, k, v, window=16)[0]

    for count in (1, 2):
        out = checkpoint(layer, q, k, v, use_reentrant=reentrant)
        out.sum().backward()
        assert Driver.launched == ["_forward", "_forward", "_grad_queries", "_grad_keys"] * count
    beside = {name for name, thread in Driver.loaded if thread is not threading.main_thread()}
    assert beside == {"_grad_queries", "_grad_keys"}  # the forward pass has a single kernel
