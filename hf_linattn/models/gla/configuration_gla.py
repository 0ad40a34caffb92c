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
"""Configuration of the GLA Transformer."""

import math
import sys

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import auto_docstring

FEATURE_MAPS = (None, "relu")

# Of a model outside of it, the library would print errors that it cannot find the configuration.
_documented = getattr(sys.modules[auto_docstring.__module__], "HARDCODED_CONFIG_FOR_MODELS", {})
_documented.setdefault("gla", "GLAConfig")


@auto_docstring(
    checkpoint="hf-linattn/gla-340M", custom_intro="The defaults are the paper's model of 340M parameters."
)
@strict
class GLAConfig(PreTrainedConfig):
    r"""
    num_key_value_heads (`int`, *optional*):
        Heads of keys, values, decays and states; as many as query heads if not given.
    intermediate_size (`int`, *optional*):
        Width of the feed-forward layer; `8 / 3 * hidden_size`, rounded up to a multiple of 256, if not given.
    hidden_act (`str`, *optional*, defaults to `"silu"`):
        Activation of the feed-forward layer and of the output gate.
    expand_k (`float`, *optional*, defaults to 0.5):
        Width of all query heads together, as a share of `hidden_size`.
    expand_v (`float`, *optional*, defaults to 1.0):
        Width of the outputs of all heads together, as a share of `hidden_size`.
    gate_low_rank_dim (`int`, *optional*, defaults to 16):
        Rank of the projection to the decays.
    gate_logit_normalizer (`float`, *optional*, defaults to 16):
        A decay is the sigmoid of its logit to the power of one over this; larger forgets slower.
    clamp_min (`float`, *optional*):
        Smallest logarithm of a decay, below zero; no limit if not given.
    use_output_gate (`bool`, *optional*, defaults to `True`):
        Whether the output of each head is multiplied by a gate that depends on the token.
    use_short_conv (`bool`, *optional*, defaults to `False`):
        Whether queries, keys and values go through a causal convolution.
    conv_size (`int`, *optional*, defaults to 4):
        Tokens that the convolution sees.
    feature_map (`str`, *optional*):
        `"relu"` keeps queries and keys positive; none if not given.

    ```python
    >>> from hf_linattn import GLAConfig, GLAForCausalLM

    >>> model = GLAForCausalLM(GLAConfig())  # 340M
    >>> model = GLAForCausalLM(GLAConfig(hidden_size=2048, tie_word_embeddings=False))  # the paper's 1.3B
    ```"""

    model_type = "linattn_gla"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int | None = None
    num_hidden_layers: int = 24
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    expand_k: float | int = 0.5
    expand_v: float | int = 1.0
    gate_low_rank_dim: int = 16
    gate_logit_normalizer: float | int = 16
    clamp_min: float | int | None = None
    use_output_gate: bool = True
    use_short_conv: bool = False
    conv_size: int = 4
    feature_map: str | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = 256 * math.ceil(8 * self.hidden_size // 3 / 256)
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Part of `@strict`-powered validation. Validates the architecture of the config."""
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "gate_low_rank_dim",
            "conv_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}")
        for name in ("expand_k", "expand_v"):
            size = self.hidden_size * getattr(self, name) / heads
            if size < 1 or not size.is_integer():
                raise ValueError(
                    f"{name} {getattr(self, name)} of hidden_size {self.hidden_size} gives each of {heads} heads {size} "
                    f"channels: choose {name} or num_attention_heads so that it is a whole number"
                )
        if self.gate_logit_normalizer <= 0:
            raise ValueError(f"gate_logit_normalizer must be above 0, got {self.gate_logit_normalizer}")
        if self.clamp_min is not None and self.clamp_min >= 0:
            raise ValueError(
                f"clamp_min is a logarithm below 0, got {self.clamp_min}: use e.g. -5, or None for no limit"
            )
        if self.feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map must be one of {FEATURE_MAPS}, got {self.feature_map!r}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(
                f"hidden_act must be an activation of Transformers such as 'silu', got {self.hidden_act!r}"
            )

    @property
    def key_head_dim(self) -> int:
        """Channels of a query and of a key."""
        return int(self.hidden_size * self.expand_k / self.num_attention_heads)

    @property
    def value_head_dim(self) -> int:
        """Channels of a value."""
        return int(self.hidden_size * self.expand_v / self.num_attention_heads)

    @property
    def layer_types(self) -> list[str]:
        """For the caches and masks of Transformers."""
        return ["linear_attention"] * self.num_hidden_layers


__all__ = ["GLAConfig"]
