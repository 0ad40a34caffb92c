# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Linear-time attention for Transformers: architectures, conversion of softmax checkpoints, kernels."""

from pathlib import Path

_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file():  # in a checkout, kernels/ and conversion/ stand beside this folder
    __path__.append(str(_checkout))

from .models.gla import GLAConfig, GLAForCausalLM, GLAForSequenceClassification, GLAModel  # noqa: E402
from .models.latte import (  # noqa: E402
    LatteConfig,
    LatteForCausalLM,
    LatteForMaskedLM,
    LatteForSequenceClassification,
    LatteModel,
)
from .models.retrofit.families import FAMILIES, register_families  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "FAMILIES",
    "GLAConfig",
    "GLAForCausalLM",
    "GLAForSequenceClassification",
    "GLAModel",
    "LatteConfig",
    "LatteForCausalLM",
    "LatteForMaskedLM",
    "LatteForSequenceClassification",
    "LatteModel",
]

register_families()
