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
"""Configurations of converted checkpoints: the base family's configuration and our fields."""

from pathlib import Path

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

LOADER = "hf_linattn_loader"
GATES = ("lse", "learned")
INITS = ("data", "random")
ASSIGNMENTS = ("soft", "hard")
SOURCES = ("none", "conv", "rglru")

FIELDS = {
    "linattn_mixer": (str, "latte"),
    "linattn_gate": (str, "lse"),
    "linattn_init": (str, "data"),
    "linattn_assignment": (str, "soft"),
    "linattn_source": (str, "none"),
    "linattn_window": (int, 64),
    "linattn_sinks": (int, 4),
    "linattn_latents": (int, 128),
    "linattn_layers": (list[int] | None, None),
    "linattn_mass_length": (int | None, None),
    "linattn_base": (str | None, None),
}


def convertible_layers(config: PreTrainedConfig) -> list[int]:
    """The layers that a conversion replaces by default: all with full attention, native local layers stay."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [i for i, kind in enumerate(types) if kind == "full_attention"]


class HubConfigMixin:
    """First base of our configurations: a checkpoint refers to the installed package and never carries its code."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Inert: the code lives in the package, it is never copied next to weights."""

    def save_pretrained(self, save_directory: str, **kwargs) -> None:
        super().save_pretrained(save_directory, **kwargs)
        names = sorted(
            {v.split(".")[1] for v in (getattr(self, "auto_map", None) or {}).values() if v.startswith(LOADER)}
        )
        if names:
            Path(save_directory, f"{LOADER}.py").write_text(
                f"from hf_linattn.models.retrofit import {', '.join(names)}\n"
            )


class LinAttnConfigMixin(HubConfigMixin):
    """Checks of the fields that a conversion adds (see `FIELDS`).

    - linattn_mixer: the long-range operator beside the window; "latte" (latent attention).
    - linattn_gate: "lse" puts window, sinks and latents under one softmax; "learned" is the paper's softmax over the window
      and the latents with a gate logit linear in the token.
    - linattn_init: "data" places the latents by k-means on the teacher's keys; "random" is the paper's.
    - linattn_assignment: "soft" spreads a key over latents, "hard" gives it to the nearest.
    - linattn_source: what the token-dependent latent logits are computed from: "none" (with "random": the layer's input
      itself; with "data": the teacher's own queries and keys only), "conv" or "rglru" of the layer's input.
    - linattn_window, linattn_sinks: exact keys, the last and the first ones.
    - linattn_latents: latents per key/value head.
    - linattn_layers: converted layers; `None` means all with full attention.
    - linattn_mass_length: tokens outside the window up to which their mass counts in full ("lse").
    - linattn_base: the checkpoint that was converted.
    """

    def validate_linattn(self) -> None:
        for name, accepted in (
            ("linattn_mixer", ("latte",)),
            ("linattn_gate", GATES),
            ("linattn_init", INITS),
            ("linattn_assignment", ASSIGNMENTS),
            ("linattn_source", SOURCES),
        ):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be one of {accepted}, got {getattr(self, name)!r}")
        for name, least in (("linattn_window", 1), ("linattn_sinks", 0), ("linattn_latents", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.linattn_mass_length is not None and self.linattn_mass_length < 1:
            raise ValueError(f"linattn_mass_length must be at least 1, got {self.linattn_mass_length}")
        outside = [i for i in self.linattn_layers or [] if not 0 <= i < self.num_hidden_layers]
        if outside:
            raise ValueError(
                f"linattn_layers names layers {outside}, the model has layers 0..{self.num_hidden_layers - 1}"
            )

    @property
    def converted_layers(self) -> list[int]:
        """Indices of the converted layers, ascending."""
        return convertible_layers(self) if self.linattn_layers is None else sorted(self.linattn_layers)


def make_config(native: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Our configuration class for a family, `LinAttn<Family>Config`."""
    body = {name: default for name, (_, default) in FIELDS.items()}
    body |= {
        "model_type": f"linattn_{native.model_type}",
        "__annotations__": {name: kind for name, (kind, _) in FIELDS.items()},
        "__doc__": f"{native.__name__} of a converted checkpoint. Added fields: see `LinAttnConfigMixin`.",
        "__module__": __name__,
        "keys_to_ignore_at_inference": ["past_key_values"],
    }
    made = strict(type("LinAttn" + native.__name__, (LinAttnConfigMixin, native), body))
    globals()[made.__name__] = made  # importable by name, for pickling and remote loading
    return made
