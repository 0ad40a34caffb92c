# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Conversion of softmax checkpoints: what the command line does, as functions of the same names."""

from .convert import convert, evaluate, train
from .demo import demo
from .plan import plan
from .publish import push
from .recipe import Recipe
from .source import CheckpointError, open_source
from .write import load_delta, revert, save_delta

__all__ = [
    "CheckpointError",
    "Recipe",
    "convert",
    "demo",
    "evaluate",
    "load_delta",
    "open_source",
    "plan",
    "push",
    "revert",
    "save_delta",
    "train",
]
