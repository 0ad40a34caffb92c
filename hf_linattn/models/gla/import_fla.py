# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Loads GLA checkpoints of flash-linear-attention (`model_type: gla`)."""

import json
import re
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file

from .configuration_gla import GLAConfig
from .modeling_gla import GLAForCausalLM

RENAMED = {  # their field: ours
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
}
KEPT = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "expand_k",
    "expand_v",
    "feature_map",
    "clamp_min",
    "use_output_gate",
    "use_short_conv",
    "conv_size",
    "initializer_range",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
)
DEFAULTS = {"hidden_size": 2048, "tie_word_embeddings": False}  # theirs, where they are not ours
SUPPORTED = {  # fields that change the function, and the values that we can compute; theirs by default comes first
    "hidden_act": ("swish", "silu"),
    "elementwise_affine": (True,),
    "use_gk": (True,),
    "use_gv": (False,),
    "attn": (None,),
    "attnres_block_size": (None,),
}
OUTER = {
    "model.embeddings.weight": "model.embed_tokens.weight",
    "model.norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
INNER = {
    "attn_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "attn.gk_proj.0.weight": "mixer.decay_down_proj.weight",
    "attn.gk_proj.1.weight": "mixer.decay_up_proj.weight",
    "attn.gk_proj.1.bias": "mixer.decay_up_proj.bias",
    "attn.g_proj.weight": "mixer.gate_proj.weight",
    "attn.g_norm_swish_gate.weight": "mixer.norm.weight",  # with its norm and gate fused
    "attn.g_norm.weight": "mixer.norm.weight",  # or apart
}
INNER |= {f"attn.{name}_proj.weight": f"mixer.{name}_proj.weight" for name in "qkvo"}
INNER |= {f"mlp.{name}_proj.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
CONVOLUTIONS = tuple(f"attn.{name}_conv1d.weight" for name in "qkv")  # one after the other in ours


def from_fla(
    source: str | Path, *, dtype: torch.dtype | None = None, revision: str | None = None, token: str | None = None
) -> GLAForCausalLM:
    """Loads a GLA language model that flash-linear-attention saved; that package is not needed.

    Save the result with `save_pretrained` to have an ordinary checkpoint for `AutoModelForCausalLM`; the tokenizer is
    loaded from `source` by `AutoTokenizer` as always.

    Args:
        source: a folder with `config.json` and safetensors files, or an id on the Hub.
        dtype: of the weights; as stored if not given.
        revision, token: for the Hub.

    Returns:
        The model in evaluation mode, on the CPU.

    Raises:
        ValueError: if there are no safetensors, a configuration asks for what this package does not compute, or weights
            do not fit it.
    """
    folder = Path(source)
    if not folder.is_dir():
        patterns = ["config.json", "*.safetensors"]
        folder = Path(snapshot_download(str(source), revision=revision, token=token, allow_patterns=patterns))
    shards = sorted(folder.glob("*.safetensors"))
    if not shards or not (folder / "config.json").is_file():
        raise ValueError(
            f"{source} needs config.json and *.safetensors; pickled weights are refused: load them in their own package and "
            "call save_pretrained there"
        )
    config = map_fla_config(json.loads((folder / "config.json").read_text("utf-8")))
    state_dict = map_fla_state_dict({name: t for shard in shards for name, t in load_file(shard).items()})
    with torch.device("meta"):
        model = GLAForCausalLM(config)
    if config.tie_word_embeddings:
        state_dict["lm_head.weight"] = state_dict.get("model.embed_tokens.weight")
    expected = model.state_dict()
    wrong = {name: "missing" for name in expected if state_dict.get(name) is None}
    wrong |= {name: "not in a model of this configuration" for name in state_dict.keys() - expected.keys()}
    for name in expected.keys() - wrong.keys():
        found, wanted = tuple(state_dict[name].shape), tuple(expected[name].shape)
        if found != wanted:
            wrong[name] = f"{found}, expected {wanted}"
    if wrong:
        listed = "; ".join(f"{name}: {what}" for name, what in sorted(wrong.items())[:5])
        raise ValueError(f"{len(wrong)} weights of {source} do not fit its config.json ({listed}): is it complete?")
    model.load_state_dict(state_dict, assign=True)
    model.tie_weights()
    dtype = model.lm_head.weight.dtype if dtype is None else dtype
    model.config.dtype = dtype
    return model.to(dtype).eval()


def map_fla_config(fields: dict) -> GLAConfig:
    """Our configuration of the content of their `config.json`; missing fields have their package's defaults (0.6.0).

    Fields that choose among implementations of one function (`attn_mode`, `fuse_norm`...) are left out.

    Raises:
        ValueError: for another architecture, or a field whose value this package does not compute.
    """
    if fields.get("model_type") != "gla":
        raise ValueError(
            f"expected a checkpoint of flash-linear-attention's GLA (model_type 'gla'), got {fields.get('model_type')!r}"
        )
    for name, accepted in SUPPORTED.items():
        if fields.get(name, accepted[0]) not in accepted:
            raise ValueError(f"{name} {fields[name]!r} is not supported: only {' and '.join(map(repr, accepted))}")
    fields = DEFAULTS | fields
    ours = {name: fields[name] for name in KEPT if name in fields}
    ours |= {new: fields[old] for old, new in RENAMED.items() if old in fields}
    if ours.get("intermediate_size") is None:
        ratio = 4 if fields.get("hidden_ratio") is None else fields["hidden_ratio"]
        ours["intermediate_size"] = -(-int(ours["hidden_size"] * ratio * 2 / 3) // 256) * 256
    return GLAConfig(**ours)


def map_fla_state_dict(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Their weights under our names; the three convolutions become one, with the current token's column first.

    Raises:
        ValueError: naming the weights that have no place in our model.
    """
    ours, unknown = {}, []
    for name, tensor in state_dict.items():
        layer, inner = re.fullmatch(r"(model\.layers\.\d+\.)?(.*)", name).groups()
        if layer is None and inner in OUTER:
            ours[OUTER[inner]] = tensor
        elif layer and inner in INNER:
            ours[layer + INNER[inner]] = tensor
        elif layer and inner in CONVOLUTIONS:
            parts = [state_dict.get(layer + part) for part in CONVOLUTIONS]
            if inner == CONVOLUTIONS[0] and all(part is not None for part in parts):
                ours[layer + "mixer.conv.weight"] = torch.cat(parts).squeeze(1).flip(-1).contiguous()
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(
            f"{len(unknown)} weights have no place in GLA as this package computes it: {', '.join(sorted(unknown)[:5])}"
        )
    return ours


__all__ = ["from_fla", "map_fla_config", "map_fla_state_dict"]
