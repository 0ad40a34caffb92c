# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Borders of packed documents."""

import gc
import weakref

import pytest
import torch

from hf_linattn.kernels import packing


def test_borders_are_read_once_until_they_change(monkeypatch):
    read = []

    class Counted(torch.Tensor):
        def tolist(self):
            read.append(self)
            return super().tolist()

    borders = torch.tensor([0, 2, 5]).as_subclass(Counted)
    assert [packing.borders_on_host(borders) for _ in range(3)] == [(0, 2, 5)] * 3
    assert len(read) == 1
    borders[1] = 3
    assert packing.borders_on_host(borders) == (0, 3, 5)
    assert len(read) == 2


def test_borders_do_not_keep_their_tensor():
    borders = torch.tensor([0, 7])
    packing.borders_on_host(borders)
    kept = weakref.ref(borders)
    del borders
    gc.collect()
    assert kept() is None


def test_borders_in_inference_mode():
    with torch.inference_mode():
        borders = torch.tensor([0, 2, 5])
        packing.check_packed(borders, 1, 5)
        borders[1] = 1
        assert packing.borders_on_host(borders) == (0, 1, 5)


@pytest.mark.parametrize(
    ("borders", "message"),
    [([[0, 5]], r"shape of \(1, 2\)"), ([0], "got"), ([1, 5], "got"), ([0, 4], "length 5"), ([0, 4, 3, 5], "rise")],
)
def test_borders_that_describe_no_row(borders, message):
    with pytest.raises(ValueError, match=message):
        packing.check_packed(torch.tensor(borders), 1, 5)


def test_packed_rows_are_one_row():
    with pytest.raises(ValueError, match="batch of 2"):
        packing.check_packed(torch.tensor([0, 5]), 2, 5)
