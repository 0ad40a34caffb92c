# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""What the from-scratch models share beside their layers."""

import torch
from transformers import GenerationMixin, PreTrainedConfig
from transformers.masking_utils import create_recurrent_attention_mask

from ..cache import ensure_state_layers


def padding_mask(
    config: PreTrainedConfig, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | dict | None
) -> torch.Tensor | None:
    """(B, T), zero at padding, or `None` where there is none.

    Raises:
        ValueError: for a mask over pairs of tokens, or one that is shorter than the input.
    """
    if isinstance(attention_mask, dict):  # made by `generate`
        return attention_mask["linear_attention"]
    time = inputs_embeds.shape[1]
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] < time:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} must be (batch, {time} or more), zero at padding: linear "
            "attention has no mask over pairs of tokens"
        )
    if time == 1:  # which the library takes for a generated token, never padding
        return attention_mask[:, -1:]
    return create_recurrent_attention_mask(config, inputs_embeds, attention_mask)


class StateGenerationMixin(GenerationMixin):
    """`generate` asks a cache for its length before the first forward: every layer of these models keeps a `StateLayer`."""

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        out = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        layers = self.config.num_hidden_layers
        ensure_state_layers(model_kwargs.get("past_key_values"), range(layers), layers)
        return out


def keep_positions(hidden_states: torch.Tensor, kept: int | torch.Tensor) -> torch.Tensor:
    """The last `kept` positions (0 for all), or those of an index (N,) or (B, N), or of a boolean mask (B, T), flattened."""
    if isinstance(kept, int):
        return hidden_states[:, -kept:]
    if kept.dtype == torch.bool:
        return hidden_states[kept]
    return hidden_states[:, kept] if kept.dim() == 1 else hidden_states.take_along_dim(kept[..., None], dim=1)
