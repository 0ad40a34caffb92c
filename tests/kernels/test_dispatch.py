# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
import contextlib
import importlib.util
import warnings

import pytest
import torch

from hf_linattn.kernels import dispatch
from hf_linattn.kernels.dispatch import on_own_device, resolve_backend
from hf_linattn.kernels.rg_lru import rg_lru
from hf_linattn.kernels.short_convolution import short_convolution

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BOTH = ("triton", "torch")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with Triton and a GPU of capability 9.0, as far as dispatch asks; tests change what it returns."""
    found = {"triton": object(), "capability": (9, 0)}
    monkeypatch.setattr(dispatch, "_warned", set())
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: found[name] if name in found else find_spec(name, *a)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found["capability"])
    return found


@pytest.fixture
def silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("available", [("torch",), BOTH])
def test_cpu_is_silent(available, silence):
    assert resolve_backend("op", "auto", CPU, available) == "torch"


def test_auto_takes_triton_where_it_can_run(silence):
    assert resolve_backend("op", "auto", GPU, BOTH) == "triton"
    assert resolve_backend("op", "triton", GPU, BOTH) == "triton"


def test_torch_on_request_is_silent(silence):
    assert resolve_backend("op", "torch", GPU, BOTH) == "torch"
    assert resolve_backend("op", "torch", GPU, ("torch",)) == "torch"


@pytest.mark.parametrize(
    ("available", "change", "reason", "remedy"),
    [
        (("torch",), {}, "no Triton kernel", "backend='torch'"),
        (BOTH, {"triton": None}, "not installed", "pip install triton"),
        (BOTH, {"capability": (7, 5)}, "7.5 is below 8.0", "newer GPU"),
    ],
)
def test_slow_path_warns_once_per_operator(machine, available, change, reason, remedy):
    machine.update(change)
    for operator in ("first_op", "second_op"):
        with pytest.warns(UserWarning) as caught:
            assert all(resolve_backend(operator, "auto", GPU, available) == "torch" for _ in range(3))
        assert len(caught) == 1
        message = str(caught[0].message)
        assert operator in message and reason in message and remedy in message
    with pytest.raises(ValueError, match=f"first_op.*{reason}.*{remedy}"):
        resolve_backend("first_op", "triton", GPU, available)


def test_triton_on_cpu_is_refused():
    with pytest.raises(ValueError, match="not possible for op: .*cpu"):
        resolve_backend("op", "triton", CPU, BOTH)


def test_unknown_backend_lists_the_known():
    with pytest.raises(ValueError, match="'cuda' for op.*'auto', 'triton', 'torch'"):
        resolve_backend("op", "cuda", CPU, BOTH)


def test_warns_inside_a_compiled_graph():
    def call(x):
        resolve_backend("op", "auto", GPU, ("torch",))
        return x + 1

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with pytest.warns(UserWarning, match="op takes the slower PyTorch path"):
        compiled(torch.zeros(2))


def test_operators_ask():
    x = torch.zeros(1, 2, 3)
    for call in (
        lambda backend: rg_lru(x, x, x, x[0, 0], backend=backend),
        lambda backend: short_convolution(x, x[0].T, backend=backend),
    ):
        assert call("auto")[0].shape == call("torch")[0].shape == x.shape
        with pytest.raises(ValueError, match="does not run on device cpu"):
            call("triton")


def test_kernels_launch_on_the_device_of_their_tensors(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def device_of(tensor):
        entered.append(tensor)
        yield
        entered.append(None)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)

    @on_own_device
    def launch(x, y, *, scale):
        assert entered[-1] is x
        return scale * (x + y)

    x = torch.ones(2)
    assert torch.equal(launch(x, x, scale=3), torch.full((2,), 6.0)) and entered == [x, None]
    # tracing has no use for it
    compiled = torch.compile(on_own_device(lambda x: x + 1), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x + 1) and len(entered) == 2
