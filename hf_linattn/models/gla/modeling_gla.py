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
"""GLA Transformer: gated linear attention and SwiGLU layers, without position embeddings."""

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ...cache import ensure_state_layers
from ...kernels.packing import packed_borders
from ...mixers.gla import GLAMixer, ShortConvolution
from ...mixers.latte import LatteRMSNorm
from ..common import StateGenerationMixin, keep_positions, padding_mask
from .configuration_gla import GLAConfig


class GLARMSNorm(LatteRMSNorm):
    """Root-mean-square norm with a gain, computed in float32, in the dtype of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).to(x.dtype)


class GLAMLP(nn.Module):
    def __init__(self, config: GLAConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class GLADecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: GLAConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = GLARMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = GLAMixer(config, layer_idx)
        self.post_attention_layernorm = GLARMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GLAMLP(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        mixed = self.mixer(self.input_layernorm(hidden_states), attention_mask, past_key_values, cu_seqlens)
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@auto_docstring
class GLAPreTrainedModel(PreTrainedModel):
    config: GLAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GLADecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _can_compile_fullgraph = True
    _is_stateful = True
    _can_record_outputs = {"hidden_states": GLADecoderLayer}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ShortConvolution):
            init.normal_(module.weight, std=self.config.initializer_range)


@auto_docstring
class GLAModel(GLAPreTrainedModel):
    def __init__(self, config: GLAConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([GLADecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = GLARMSNorm(config.hidden_size, eps=config.rms_norm_eps)
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
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if cu_seq_lens_q is None and attention_mask is None and past_key_values is None:
            cu_seq_lens_q = packed_borders(position_ids, inputs_embeds.shape[0])
        if use_cache and past_key_values is None and cu_seq_lens_q is None:
            past_key_values = DynamicCache(config=self.config)
        ensure_state_layers(past_key_values, range(self.config.num_hidden_layers), self.config.num_hidden_layers)
        mask = padding_mask(self.config, inputs_embeds, attention_mask)

        hidden_states = inputs_embeds
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=mask,
                past_key_values=past_key_values,
                cu_seqlens=cu_seq_lens_q,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


@auto_docstring
class GLAForCausalLM(GLAPreTrainedModel, StateGenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: GLAConfig):
        super().__init__(config)
        self.model = GLAModel(config)
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


class GLAForSequenceClassification(GenericForSequenceClassification, GLAPreTrainedModel):
    pass


__all__ = ["GLAForCausalLM", "GLAForSequenceClassification", "GLAModel", "GLAPreTrainedModel"]
