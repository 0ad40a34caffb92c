# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The GLA Transformer, trained from scratch."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from .configuration_gla import GLAConfig
from .import_fla import from_fla, map_fla_config, map_fla_state_dict
from .modeling_gla import GLAForCausalLM, GLAForSequenceClassification, GLAModel, GLAPreTrainedModel

__all__ = [
    "GLAConfig",
    "GLAForCausalLM",
    "GLAForSequenceClassification",
    "GLAModel",
    "GLAPreTrainedModel",
    "from_fla",
    "map_fla_config",
    "map_fla_state_dict",
]

AutoConfig.register(GLAConfig.model_type, GLAConfig, exist_ok=True)
AutoModel.register(GLAConfig, GLAModel, exist_ok=True)
AutoModelForCausalLM.register(GLAConfig, GLAForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(GLAConfig, GLAForSequenceClassification, exist_ok=True)
