# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The families that can be converted, one row each."""

from dataclasses import dataclass

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma2Model,
    GemmaConfig,
    GemmaForCausalLM,
    GemmaModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    MistralModel,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from .configuration_retrofit import make_config
from .modeling_retrofit import make_causal_lm, make_model


@dataclass(frozen=True)
class Family:
    """A base family and the classes generated from it."""

    native_config: type[PreTrainedConfig]
    native_causal_lm: type[PreTrainedModel]
    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]
    causal_lm_class: type[PreTrainedModel]


def _family(config: type, model: type, causal_lm: type) -> Family:
    ours = make_config(config)
    body = make_model(model, ours)
    return Family(config, causal_lm, ours, body, make_causal_lm(causal_lm, body, ours))


FAMILIES: dict[str, Family] = {
    "llama": _family(LlamaConfig, LlamaModel, LlamaForCausalLM),
    "gemma": _family(GemmaConfig, GemmaModel, GemmaForCausalLM),
    "gemma2": _family(Gemma2Config, Gemma2Model, Gemma2ForCausalLM),
    "mistral": _family(MistralConfig, MistralModel, MistralForCausalLM),
    "qwen2": _family(Qwen2Config, Qwen2Model, Qwen2ForCausalLM),
    "qwen3": _family(Qwen3Config, Qwen3Model, Qwen3ForCausalLM),
}


def register_families() -> None:
    """Make `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` know the converted classes."""
    for family in FAMILIES.values():
        AutoConfig.register(family.config_class.model_type, family.config_class, exist_ok=True)
        AutoModel.register(family.config_class, family.model_class, exist_ok=True)
        AutoModelForCausalLM.register(family.config_class, family.causal_lm_class, exist_ok=True)
