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
"""Configuration of Latte and Latte Macchiato."""

import sys

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils import auto_docstring

SOURCES = ("none", "conv", "rglru")
VARIANTS = {  # the systems of the paper, causal; bidirectional with is_causal=False
    "Latte": dict(source="none", window_size=None, gated_mlp=False),
    "Latte++": dict(source="none", window_size=None),
    "Latte-Conv++": dict(source="conv", window_size=None),
    "Latte-RGLRU++": dict(source="rglru", window_size=None),
    "Latte-Conv-SWA++": dict(source="conv", window_size=128),
    "Latte-RGLRU-SWA++": dict(source="rglru", window_size=128),
    "RGLRU-SWA++": dict(source="rglru", window_size=128, num_latents_per_head=0),
}

# Of a model outside of it, the library would print errors that it cannot find the configuration.
_documented = getattr(sys.modules[auto_docstring.__module__], "HARDCODED_CONFIG_FOR_MODELS", {})
_documented.setdefault("latte", "LatteConfig")


@auto_docstring(
    checkpoint="hf-linattn/latte-156M",
    custom_intro="The defaults are the paper's best model (Latte-RGLRU-SWA++, Latte Macchiato) at its size of 156M parameters.",
)
@strict
class LatteConfig(PreTrainedConfig):
    r"""
    num_key_value_heads (`int`, *optional*):
        Heads of keys, values and states; as many as query heads if not given.
    head_dim (`int`, *optional*):
        Channels of a head; `hidden_size / num_attention_heads` if not given.
    num_latents_per_head (`int`, *optional*, defaults to 16):
        Latents of each head. 0 leaves the window alone, whose queries and keys then come from the source.
    source (`str`, *optional*, defaults to `"rglru"`):
        What the latents' logits are linear in: `"none"` for the layer's input itself, `"conv"` for a short convolution of
        it, `"rglru"` for the norm of an RG-LRU over it.
    window_size (`int`, *optional*, defaults to 128):
        Keys that a token sees exactly, itself included; no window if `None`. Of a bidirectional model, it sees half as
        many on each side.
    is_causal (`bool`, *optional*, defaults to `True`):
        Whether tokens see the past only. `LatteForCausalLM` needs it, `LatteForMaskedLM` needs its opposite.
    vapor (`bool`, *optional*):
        Whether values are rotated by relative position, at learned angles. By default exactly when `source` is `"none"`,
        as nothing else tells latents of positions then.
    conv_kernel_size (`int`, *optional*, defaults to 3):
        Tokens that the convolution sees.
    rglru_blocks (`int`, *optional*):
        Blocks of the RG-LRU's gates; as many as query heads if not given.
    gated_mlp (`bool`, *optional*, defaults to `True`):
        `True` for the blocks of "++": RMSNorm and a feed-forward layer with a SiLU gate and no biases; `False` for those
        of plain Latte: LayerNorm and a GELU feed-forward layer.
    rope_theta (`float`, *optional*, defaults to 10000.0):
        Base of the window's rotary embedding, and of VAPOR's angles at the start.
    dropout (`float`, *optional*, defaults to 0.0):
        Dropout of the mixture's weights over window and latents, and of each branch into the residual stream.
    use_cache (`bool`, *optional*):
        Whether states are returned; as `is_causal` if not given, and never in bidirectional models.

    The systems of the paper are one line each:

    | `LatteConfig.variant(...)` | the same as `LatteConfig(...)` with |
    |---|---|
    | `"Latte"` | `source="none", window_size=None, gated_mlp=False` |
    | `"Latte++"` | `source="none", window_size=None` |
    | `"Latte-Conv++"` | `source="conv", window_size=None` |
    | `"Latte-RGLRU++"` | `source="rglru", window_size=None` |
    | `"Latte-Conv-SWA++"` | `source="conv", window_size=128` |
    | `"Latte-RGLRU-SWA++"` (Latte Macchiato) | `source="rglru", window_size=128` |
    | `"RGLRU-SWA++"` (control without latents) | `source="rglru", window_size=128, num_latents_per_head=0` |
    | bidirectional ones | `is_causal=False` beside any of these |

    ```python
    >>> from hf_linattn import LatteConfig, LatteForCausalLM, LatteForMaskedLM

    >>> model = LatteForCausalLM(LatteConfig())  # Latte Macchiato, 156M
    >>> model = LatteForCausalLM(LatteConfig.variant("Latte-Conv++", hidden_size=512))
    >>> model = LatteForMaskedLM(LatteConfig.variant("Latte-RGLRU-SWA++", is_causal=False))
    ```"""

    model_type = "linattn_latte"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 50257
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_latents_per_head: int = 16
    source: str = "rglru"
    window_size: int | None = 128
    is_causal: bool = True
    vapor: bool | None = None
    conv_kernel_size: int = 3
    rglru_blocks: int | None = None
    gated_mlp: bool = True
    rope_theta: float | int = 10000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    dropout: float | int = 0.0
    use_cache: bool | None = None
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // max(1, self.num_attention_heads)
        if self.rglru_blocks is None:
            self.rglru_blocks = self.num_attention_heads
        if self.vapor is None:
            self.vapor = self.source == "none"
        if self.use_cache is None:
            self.use_cache = self.is_causal
        super().__post_init__(**kwargs)

    @classmethod
    def variant(cls, name: str, **fields) -> "LatteConfig":
        """The configuration of a system of the paper by its name, see `VARIANTS`; `fields` take precedence.

        Raises:
            ValueError: for an unknown name.
        """
        if name not in VARIANTS:
            raise ValueError(f"unknown variant {name!r}: choose one of {', '.join(VARIANTS)}")
        return cls(**VARIANTS[name] | fields)

    def validate_architecture(self):
        """Part of `@strict`-powered validation. Validates the architecture of the config."""
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "conv_kernel_size",
            "rglru_blocks",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.source not in SOURCES:
            raise ValueError(f"source must be one of {', '.join(map(repr, SOURCES))}, got {self.source!r}")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}")
        if self.window_size is not None and self.window_size < 1:
            raise ValueError(f"window_size must be at least 1, or None for no window, got {self.window_size}")
        if self.num_latents_per_head < 0:
            raise ValueError(f"num_latents_per_head must be at least 0, got {self.num_latents_per_head}")
        if not self.num_latents_per_head and self.window_size is None:
            raise ValueError(
                "num_latents_per_head 0 and window_size None leave nothing to attend to: give one of them"
            )
        if self.head_dim % 2 and (self.vapor or self.window_size is not None):
            raise ValueError(
                f"head_dim {self.head_dim} must be even, as channels are rotated in pairs: choose it, or hidden_size and "
                "num_attention_heads, so"
            )
        if self.source == "rglru" and self.hidden_size % self.rglru_blocks:
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of rglru_blocks {self.rglru_blocks}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if self.use_cache and not self.is_causal:
            raise ValueError(
                "use_cache True needs is_causal True, as a bidirectional model has no state to carry on: leave it out"
            )

    @property
    def branch_initializer_range(self) -> float:
        """Spread of the fresh weights that end a branch into the residual stream, to which all layers add."""
        return self.initializer_range / (2 * self.num_hidden_layers) ** 0.5

    @property
    def layer_types(self) -> list[str]:
        """For the caches and masks of Transformers."""
        return ["linear_attention"] * self.num_hidden_layers


__all__ = ["LatteConfig"]
