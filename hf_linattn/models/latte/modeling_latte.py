# Copyright 2026 The hf-linattn authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Latte: mixtures of an exact window and latents, with feed-forward layers in between; causal or bidirectional."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutputWithPast,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ...cache import ensure_state_layers
from ...kernels.packing import document_index, packed_borders
from ...mixers.latte_attention import RGLRU, Convolution, LatteAttention, rope_frequencies, rotation
from ..common import StateGenerationMixin, keep_positions, padding_mask
from .configuration_latte import LatteConfig


def make_norm(config: LatteConfig) -> nn.Module:
    # CODEPATH: the paper's plain "Latte" has LayerNorm, all others ("++") RMSNorm.
    kind = nn.RMSNorm if config.gated_mlp else nn.LayerNorm
    return kind(config.hidden_size, eps=config.rms_norm_eps)


class LatteMLP(nn.Module):
    def __init__(self, config: LatteConfig):
        super().__init__()
        # CODEPATH: the paper's plain "Latte" has a GELU layer with biases, all others ("++") a gated one without.
        gated, width, inner = config.gated_mlp, config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False) if gated else None
        self.up_proj = nn.Linear(width, inner, bias=not gated)
        self.down_proj = nn.Linear(inner, width, bias=not gated)
        self.down_proj.init_std = config.branch_initializer_range

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up_proj(x)
        return self.down_proj(F.gelu(up) if self.gate_proj is None else F.silu(self.gate_proj(x)) * up)


class LatteDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: LatteConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.mixer = LatteAttention(config, layer_idx)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = LatteMLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        mixed = self.mixer(normed, positions, rotary, attention_mask, past_key_values, cu_seqlens)
        hidden_states = hidden_states + self.dropout(mixed)
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


@auto_docstring
class LattePreTrainedModel(PreTrainedModel):
    config: LatteConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LatteDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _keep_in_fp32_modules_strict = {"vapor_angles"}  # times a position, what bfloat16 rounds off is whole turns
    _can_compile_fullgraph = True
    _is_stateful = True
    _can_record_outputs = {"hidden_states": LatteDecoderLayer}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (Convolution, LatteAttention, RGLRU)):
            module.init_weights()
        elif getattr(module, "init_std", None) is not None:
            init.normal_(module.weight, std=module.init_std)


@auto_docstring
class LatteModel(LattePreTrainedModel):
    def __init__(self, config: LatteConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([LatteDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        r"""
        position_ids (`torch.LongTensor`, *optional*):
            Only read for the borders of packed documents, where positions start again.
        cu_seq_lens_q (`torch.Tensor`, *optional*):
            Borders of packed documents, as `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` gives them.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        if not self.config.is_causal and (use_cache or past_key_values is not None):
            raise ValueError(
                "a bidirectional model (is_causal=False) has no state to carry on: pass neither use_cache=True nor a cache"
            )
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if cu_seq_lens_q is None and attention_mask is None and past_key_values is None:
            cu_seq_lens_q = packed_borders(position_ids, inputs_embeds.shape[0])
        if use_cache and past_key_values is None and cu_seq_lens_q is None:
            past_key_values = DynamicCache(config=self.config)
        ensure_state_layers(past_key_values, range(self.config.num_hidden_layers), self.config.num_hidden_layers)
        mask = padding_mask(self.config, inputs_embeds, attention_mask)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        positions, rotary = self._positions(inputs_embeds, past, cu_seq_lens_q)

        hidden_states = inputs_embeds
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                positions,
                rotary,
                attention_mask=mask,
                past_key_values=past_key_values,
                cu_seqlens=cu_seq_lens_q,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)

    def _positions(
        self, inputs_embeds: torch.Tensor, past: int | torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """Positions of the tokens, padding included as only differences matter, and their rotation for the window."""
        batch, time, _ = inputs_embeds.shape
        if cu_seqlens is None:
            positions = torch.arange(time, device=inputs_embeds.device) + past
        else:
            positions = torch.arange(batch * time, device=inputs_embeds.device)
            positions = positions - cu_seqlens[document_index(cu_seqlens, batch * time)]
        # CODEPATH: variants without "SWA" in their name have no window.
        if self.config.window_size is None:
            return positions, None
        frequencies = rope_frequencies(self.config.head_dim, self.config.rope_theta, inputs_embeds.device)
        return positions, rotation(positions, frequencies)


@auto_docstring
class LatteForCausalLM(LattePreTrainedModel, StateGenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LatteConfig):
        super().__init__(config)
        if not config.is_causal:
            raise ValueError(
                "LatteForCausalLM needs is_causal=True in the configuration; LatteForMaskedLM sees both sides"
            )
        self.model = LatteModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(keep_positions(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )


@auto_docstring
class LatteForMaskedLM(LattePreTrainedModel):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LatteConfig):
        super().__init__(config)
        if config.is_causal:
            raise ValueError(
                "LatteForMaskedLM needs is_causal=False in the configuration: it predicts from both sides"
            )
        self.model = LatteModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    @auto_docstring(checkpoint="hf-linattn/latte-156M")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        r"""
        labels (`torch.LongTensor`, *optional*):
            (B, T), -100 where nothing is predicted.
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


@auto_docstring(custom_intro="Latte with a linear head on the mean of the tokens that `attention_mask` does not mask.")
class LatteForSequenceClassification(GenericForSequenceClassification, LattePreTrainedModel):
    @can_return_tuple
    @auto_docstring(checkpoint="hf-linattn/latte-156M")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutputWithPast:
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if attention_mask is None:
            pooled = hidden_states.mean(1)
        else:
            share = attention_mask / attention_mask.sum(1, keepdim=True)
            pooled = (share[..., None].to(hidden_states.dtype) * hidden_states).sum(1)
        pooled_logits = self.score(pooled)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=pooled_logits, labels=labels, pooled_logits=pooled_logits, config=self.config
            )
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=pooled_logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )


__all__ = [
    "LatteForCausalLM",
    "LatteForMaskedLM",
    "LatteForSequenceClassification",
    "LatteModel",
    "LattePreTrainedModel",
]
