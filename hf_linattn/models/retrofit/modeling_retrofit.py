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
"""Converted models: the base family's own code, with our attention function in chosen layers.

No family's modelling file is copied. Each converted attention module projects, normalises and rotates as before; then it
calls the attention function named by its configuration, which is ours and gets the cache as an extra argument.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from ...cache import ensure_state_layers
from ...kernels.packing import packed_borders
from ...mixers.latte import LatteMixer, Variant

IMPLEMENTATION = "hf_linattn"


def linattn_attention(module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
    """Attention function of converted layers: heads second, `linattn_*` arguments from our model, no weights out."""
    call = kwargs["linattn_call"]
    cache, device = call["cache"], query.device.type
    if query.dtype == torch.float32 and device != "meta" and torch.is_autocast_enabled(device):
        # rotary embedding by cosines in float32 leaves queries and keys in it; softmax attention casts them too
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    layer = cache.layers[module.layer_idx] if cache is not None else None
    out, states = module.linattn(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        call["hidden"],
        call["rotary"],
        kwargs["linattn_offsets"],
        kwargs["linattn_variant"],
        scaling=module.scaling if scaling is None else scaling,
        softcap=softcap,
        states=layer.states if layer is not None and layer.is_initialized else None,
        attention_mask=kwargs.get("linattn_mask"),
        cu_seqlens=kwargs.get("linattn_cu_seqlens"),
    )
    if layer is not None:
        layer.store(states)
    return out, None


AttentionInterface.register(IMPLEMENTATION, linattn_attention)
AttentionMaskInterface.register(
    IMPLEMENTATION, sdpa_mask
)  # without one, mask building returns nothing for other layers


class LinAttnAttentionMixin:
    """First base of a converted layer's attention: hands the cache to our function instead of the family's update."""

    def forward(self, hidden_states, *args, past_key_values=None, **kwargs):
        if args:
            kwargs["position_embeddings"], args = args[0], args[1:]
        call = {"cache": past_key_values, "hidden": hidden_states, "rotary": kwargs["position_embeddings"]}
        return super().forward(hidden_states, *args, past_key_values=None, linattn_call=call, **kwargs)


def _converted_class(native: type) -> type:
    name = f"LinAttn{native.__name__}"
    if name not in globals():
        globals()[name] = type(name, (LinAttnAttentionMixin, native), {"__module__": __name__})
    return globals()[name]


class LinAttnPreTrainedMixin:
    """What our base and LM classes share."""

    _is_stateful = True
    _can_compile_fullgraph = True
    _keep_in_fp32_modules_strict = {"linattn"}  # log-masses and cluster variances need more than bfloat16

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Inert: the code lives in the package, it is never copied next to weights."""

    @torch.no_grad()
    def _init_weights(self, module) -> None:
        super()._init_weights(module)
        if isinstance(module, LatteMixer):
            module.init_weights()

    def _state_layers(self, cache) -> None:
        ensure_state_layers(cache, self.config.converted_layers, self.config.num_hidden_layers)


class LinAttnModelMixin(LinAttnPreTrainedMixin):
    """First base of `LinAttn<Family>Model`."""

    def __init__(self, config):
        super().__init__(config)
        for index in config.converted_layers:
            attention = self.layers[index].self_attn
            attention.__class__ = _converted_class(type(attention))
            attention.config = copy.copy(config)
            attention.config.__dict__["_attn_implementation_internal"] = IMPLEMENTATION
            attention.linattn = LatteMixer(config, index)
        self.variant = Variant(config.linattn_window, config.linattn_sinks, True, config.linattn_window)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        linattn_mask=None,
        **kwargs,
    ):
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is None:
            raise ValueError("pass either input_ids or inputs_embeds")
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if self.training and getattr(self.layers[0], "gradient_checkpointing", False):
            use_cache = False
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        self._state_layers(past_key_values)
        time = tokens.shape[1]
        if linattn_mask is None and isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            linattn_mask = attention_mask
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        one_row = tokens.shape[0] == 1 and not torch.compiler.is_compiling()
        if cu_seqlens is None and linattn_mask is None and past_key_values is None and one_row:
            cu_seqlens = packed_borders(position_ids, 1)
        # CODEPATH: true for families without local layers, and where those are converted too (`--layers all`).
        if len(self.config.converted_layers) == self.config.num_hidden_layers and not isinstance(attention_mask, dict):
            # No layer reads a mask over all pairs: a 4-D one is passed through and keeps it from being built.
            attention_mask = torch.zeros(1, 1, 1, 1, device=tokens.device)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            linattn_mask=None if linattn_mask is None else linattn_mask[:, -time:],
            linattn_cu_seqlens=cu_seqlens,
            **self.variant_arguments(),
            **kwargs,
        )

    def variant_arguments(self) -> dict:
        """The arguments that every converted layer needs beside its tokens: the variant and its rotations."""
        variant = self.variant
        positions = torch.tensor([[variant.window, variant.offset]], device=self.rotary_emb.inv_freq.device)
        probe = torch.zeros(1, dtype=torch.float32, device=positions.device)
        return {"linattn_variant": variant, "linattn_offsets": self.rotary_emb(probe, positions)}


class LinAttnForCausalLMMixin(LinAttnPreTrainedMixin):
    """First base of `LinAttn<Family>ForCausalLM`."""

    native_class: type[PreTrainedModel]
    body_class: type[PreTrainedModel]

    def __init__(self, config):
        super().__init__(config)
        self.model = self.body_class(config)
        self.post_init()

    @contextmanager
    def linattn_variant(
        self, window: int | None = None, sinks: int | None = None, latents: bool = True
    ) -> Iterator[None]:
        """Run an ablation: another window, other sinks, the latents off. Caches do not carry over."""
        body, before = self.model, self.model.variant
        window = before.window if window is None else window
        body.variant = Variant(
            window, before.sinks if sinks is None else sinks, latents, max(window, self.config.linattn_window)
        )
        try:
            yield
        finally:
            body.variant = before

    def new_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that the conversion added, by name."""
        return {name: p for name, p in self.named_parameters() if ".linattn." in name}

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        out = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        self._state_layers(model_kwargs.get("past_key_values"))
        return out

    def prepare_inputs_for_generation(self, input_ids, *args, attention_mask=None, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, *args, attention_mask=attention_mask, **kwargs)
        if attention_mask is not None and attention_mask.dim() == 2:
            tokens = inputs.get("input_ids")
            time = (tokens if tokens is not None else inputs["inputs_embeds"]).shape[1]
            inputs["linattn_mask"] = attention_mask[:, -time:]
        return inputs


def make_model(native: type[PreTrainedModel], config_class: type) -> type[PreTrainedModel]:
    """Our base model of a family, `LinAttn<Family>Model`."""
    return _publish(
        "LinAttn" + native.__name__, (LinAttnModelMixin, native), {"config_class": config_class}, config_class
    )


def make_causal_lm(native: type, body: type[PreTrainedModel], config_class: type) -> type[PreTrainedModel]:
    """Our language model of a family, `LinAttn<Family>ForCausalLM`."""
    fields = {"config_class": config_class, "native_class": native, "body_class": body}
    return _publish(
        "LinAttn" + native.__name__, (LinAttnForCausalLMMixin, native, GenerationMixin), fields, config_class
    )


def _publish(name: str, bases: tuple[type, ...], body: dict, config_class: type) -> type:
    if hasattr(config_class, "attn_logit_softcapping"):
        body["_supports_sdpa"] = False  # native layers of these families then run eagerly, see `native_attention`
    made = type(name, bases, {**body, "__module__": __name__, "__annotations__": {"config": config_class}})
    globals()[name] = made  # importable by name, for pickling and remote loading
    return made


def native_attention(config) -> str:
    """The attention implementation that computes a family as defined: SDPA leaves out a soft-cap, or refuses it."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"


def build_teacher(model: PreTrainedModel) -> PreTrainedModel:
    """The unconverted model of a converted one: native classes around the same tensors, so no memory is added."""
    native_class = type(model).native_class
    fields = {k: v for k, v in model.config.to_dict().items() if not k.startswith("linattn_")}
    for key in ("model_type", "architectures", "auto_map"):
        fields.pop(key, None)
    config = native_class.config_class.from_dict(fields)
    config._attn_implementation = native_attention(config)
    with torch.device("meta"):
        teacher = native_class(config)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, module in teacher.named_modules():
        prefix = f"{name}." if name else ""
        for store in (module._parameters, module._buffers):
            for key in list(store):
                if store[key] is not None:
                    # A tied head is listed once, under its embedding's name.
                    source = tensors.get(prefix + key)
                    store[key] = model.get_parameter(prefix + key) if source is None else source
    teacher.generation_config = model.generation_config
    return teacher.eval()
