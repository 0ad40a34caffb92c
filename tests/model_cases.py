# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The architectures from scratch, as tiny models, and what differs between them.

A new architecture is a new row of `ARCHITECTURES`; tests/test_models.py then holds it to every promise.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from hf_linattn import (
    GLAConfig,
    GLAForCausalLM,
    GLAForSequenceClassification,
    GLAModel,
    LatteConfig,
    LatteForCausalLM,
    LatteForMaskedLM,
    LatteForSequenceClassification,
    LatteModel,
)
from hf_linattn.models.latte.configuration_latte import VARIANTS

PAD, WINDOW = 2, 5
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
SIZES |= dict(pad_token_id=PAD, bos_token_id=0, eos_token_id=1)
SIZES |= dict(initializer_range=0.2)  # ten times the usual, so that layers have something to say and decays differ


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One row: the classes, the variants, and what differs from other architectures."""

    config: type
    model: type
    causal_lm: type
    masked_lm: type | None = None  # of bidirectional models, where there are any
    classifier: type
    sizes: dict = field(default_factory=dict)  # of a tiny model, beside SIZES
    variants: dict[str, dict]  # fields of each
    default: str  # the variant for promises that do not depend on it
    compiled: tuple[str, ...]  # variants whose decoding step is compiled, which takes seconds each
    state_sizes: dict[str, int]  # numbers that a variant keeps per layer and sequence, its length aside
    float32_states: Callable[[PreTrainedConfig], set[str]]  # names of those that are float32 in a model of any dtype
    float32_weights: tuple[str, ...] = ()  # the same of weights, by the ends of their names
    idle_weights: dict[str, tuple[str, ...]] = field(default_factory=dict)  # without gradient, by variant
    pads_inside: tuple[str, ...]  # variants where padding may also stand between the tokens of a row
    pads_packed: bool  # whether packed documents may come with an attention mask
    pooled: Callable[[torch.Tensor], torch.Tensor]  # what a sequence classifier reads of (B, T, D)
    reload_tolerance: float = 0.0  # of what a saved and loaded model computes
    bad_configurations: list[tuple[dict, str]]  # and what the error says
    fresh: list[tuple[dict, dict[str, float]]]  # fields, and the spread of weights by part of name where it is special
    fresh_elsewhere: tuple[str, ...] = ()  # ends of names of weights that the architecture's own file tests


BAD_HEADS = [
    (dict(num_attention_heads=4, num_key_value_heads=3), "4 must be a multiple of num_key_value_heads 3"),
    (dict(num_attention_heads=0), "num_attention_heads must be at least 1, got 0"),
]

LATTE_VARIANTS = {
    name: fields | ({"window_size": WINDOW} if fields["window_size"] else {}) for name, fields in VARIANTS.items()
}
LATTE_VARIANTS |= {
    "rotated values in a window": dict(source="none", window_size=WINDOW, num_key_value_heads=2),
    "own sizes": dict(num_key_value_heads=1, head_dim=6, rglru_blocks=2, window_size=8, num_latents_per_head=1),
    "convolved window": dict(source="conv", window_size=1, conv_kernel_size=4, num_latents_per_head=0),
}
LATENTS = 4 * 3 * (8 + 1)  # a mean and its mass each
IN_WINDOW = WINDOW * (2 * 4 * 8 + 1)  # keys, values and a flag for each slot
CONV, RGLRU = 2 * 32 + 1, 32 + 1  # the source's state and a flag
LATTE_SPREADS = {"latent": 64**-0.5, "o_proj": 0.01, "down_proj": 0.01}


def latte_float32_states(config):
    latents = {"mass", "mean"} if config.num_latents_per_head else set()
    return latents | ({"source"} if config.source == "rglru" else set())


ARCHITECTURES = {
    "gla": Architecture(
        config=GLAConfig,
        model=GLAModel,
        causal_lm=GLAForCausalLM,
        classifier=GLAForSequenceClassification,
        variants={
            "paper": {},
            "grouped": dict(num_key_value_heads=2),
            "convolution": dict(num_key_value_heads=2, use_short_conv=True),
            "retrofit": dict(
                num_key_value_heads=1, expand_k=1, feature_map="relu", use_output_gate=False, clamp_min=-0.05
            ),
        },
        default="grouped",
        compiled=("paper", "convolution"),
        state_sizes={  # key/value heads x key channels x value channels, and inputs that the convolution still reaches
            "paper": 4 * 4 * 8,
            "grouped": 2 * 4 * 8,
            "convolution": 2 * 4 * 8 + 3 * (16 + 8 + 16),
            "retrofit": 1 * 8 * 8,
        },
        float32_states=lambda config: {"state"},
        pads_inside=("paper", "grouped", "retrofit"),  # a convolution sees zeros there
        pads_packed=True,
        pooled=lambda hidden_states: hidden_states[:, -1],
        bad_configurations=[
            *BAD_HEADS,
            (dict(conv_size=0), "conv_size must be at least 1, got 0"),
            (dict(hidden_size=36), "expand_k 0.5 of hidden_size 36 gives each of 4 heads 4.5 channels: choose"),
            (dict(expand_v=0.3), "expand_v 0.3 of hidden_size 32 .* choose"),
            (dict(gate_logit_normalizer=0), "gate_logit_normalizer must be above 0, got 0"),
            (dict(clamp_min=5.0), "clamp_min is a logarithm below 0, got 5.0"),
            (dict(feature_map="elu"), "feature_map must be one of .* got 'elu'"),
            (dict(hidden_act="swoosh"), "hidden_act must be .* got 'swoosh'"),
        ],
        fresh=[(dict(use_short_conv=True), {})],
    ),
    "latte": Architecture(
        config=LatteConfig,
        model=LatteModel,
        causal_lm=LatteForCausalLM,
        masked_lm=LatteForMaskedLM,
        classifier=LatteForSequenceClassification,
        sizes=dict(num_latents_per_head=3),
        variants=LATTE_VARIANTS,
        default="Latte-RGLRU-SWA++",
        compiled=("Latte++", "Latte-RGLRU-SWA++"),
        state_sizes={
            "Latte": LATENTS,
            "Latte++": LATENTS,
            "Latte-Conv++": LATENTS + CONV,
            "Latte-RGLRU++": LATENTS + RGLRU,
            "Latte-Conv-SWA++": LATENTS + IN_WINDOW + CONV,
            "Latte-RGLRU-SWA++": LATENTS + IN_WINDOW + RGLRU,
            "RGLRU-SWA++": IN_WINDOW + RGLRU,
            "rotated values in a window": 2 * 3 * (8 + 1) + WINDOW * (2 * 2 * 8 + 1),
            "own sizes": 1 * 1 * (6 + 1) + 8 * (2 * 1 * 6 + 1) + RGLRU,
            "convolved window": 1 * (2 * 4 * 8 + 1) + 3 * 32 + 1,
        },
        float32_states=latte_float32_states,
        float32_weights=("vapor_angles",),
        idle_weights={"convolved window": ("q_proj", "k_proj", "sources")},  # its one key has all the weight
        pads_inside=("Latte-RGLRU++",),  # windows and rotations count it, a convolution sees zeros there
        pads_packed=False,  # a window takes borders of documents or a mask, not both
        pooled=lambda hidden_states: hidden_states.mean(1),
        reload_tolerance=1e-4,  # equal to the bit only where tensors happen to lie alike in memory
        bad_configurations=[
            *BAD_HEADS,
            (dict(conv_kernel_size=0), "conv_kernel_size must be at least 1, got 0"),
            (dict(source="lstm"), "source must be one of 'none', 'conv', 'rglru', got 'lstm'"),
            (
                dict(num_latents_per_head=0, window_size=None),
                "num_latents_per_head 0 and window_size None leave nothing",
            ),
            (dict(num_latents_per_head=-1), "num_latents_per_head must be at least 0, got -1"),
            (dict(window_size=0), "window_size must be at least 1, or None for no window, got 0"),
            (dict(head_dim=5), "head_dim 5 must be even"),
            (dict(head_dim=5, window_size=None, vapor=True), "head_dim 5 must be even"),
            (dict(rglru_blocks=5), "hidden_size 32 must be a multiple of rglru_blocks 5"),
            (dict(dropout=1.0), "dropout must be at least 0 and below 1, got 1.0"),
            (dict(is_causal=False, use_cache=True), "use_cache True needs is_causal True"),
        ],
        fresh=[
            (dict(vapor=True, is_causal=False), LATTE_SPREADS | {"sources": 0.25}),
            (
                dict(source="conv", window_size=None, gated_mlp=False, is_causal=False),
                LATTE_SPREADS | {"sources": 3**-0.5},
            ),
        ],
        fresh_elsewhere=("decay", "vapor_angles"),
    ),
}


class Case(NamedTuple):
    architecture: str
    variant: str
    is_causal: bool = True

    def __str__(self):
        return f"{self.architecture}: {self.variant}{'' if self.is_causal else ', bidirectional'}"

    @property
    def row(self):
        return ARCHITECTURES[self.architecture]

    @property
    def language_model(self):
        return self.row.causal_lm if self.is_causal else self.row.masked_lm


CASES = [
    Case(name, variant, is_causal)
    for name, row in ARCHITECTURES.items()
    for variant in row.variants
    for is_causal in ((True, False) if row.masked_lm else (True,))
]


def make_config(architecture, **fields):
    row = ARCHITECTURES[architecture]
    return row.config(**SIZES | row.sizes | fields)


def case_config(case, **fields):
    direction = {} if case.is_causal else dict(is_causal=False)
    return make_config(case.architecture, **case.row.variants[case.variant] | direction | fields)


def perturbed(model_class, config):
    """A fresh model whose norms and biases differ from the neutral ones that they start as."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = model_class(config).eval()
        for name, p in model.named_parameters():
            if "norm.weight" in name:
                p.uniform_(0.5, 2)
            elif p.dim() == 1 or name.endswith("bias"):
                p.add_(torch.randn_like(p) * 0.3)
    return model


@functools.cache
def build(case):
    """The case's language model, the same to all tests: one that changes it takes a copy."""
    return perturbed(case.language_model, case_config(case))


def tokens(*shape, seed=0):
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(seed))


def close(actual, expected, tolerance=1e-4):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
