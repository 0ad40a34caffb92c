# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Latte and Latte Macchiato, trained from scratch."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from .configuration_latte import LatteConfig
from .modeling_latte import (
    LatteForCausalLM,
    LatteForMaskedLM,
    LatteForSequenceClassification,
    LatteModel,
    LattePreTrainedModel,
)

__all__ = [
    "LatteConfig",
    "LatteForCausalLM",
    "LatteForMaskedLM",
    "LatteForSequenceClassification",
    "LatteModel",
    "LattePreTrainedModel",
]

AutoConfig.register(LatteConfig.model_type, LatteConfig, exist_ok=True)
AutoModel.register(LatteConfig, LatteModel, exist_ok=True)
AutoModelForCausalLM.register(LatteConfig, LatteForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(LatteConfig, LatteForMaskedLM, exist_ok=True)
AutoModelForSequenceClassification.register(LatteConfig, LatteForSequenceClassification, exist_ok=True)
