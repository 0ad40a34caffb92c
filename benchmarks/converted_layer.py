# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Measures an attention layer of a converted model on one GPU, projections and all, beside its teacher's.

    python benchmarks/converted_layer.py --output benchmarks/data

Prints tables and writes converted_layer.json and .png; README.md beside this file says what each figure means.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import common
import torch
from common import draw, measure
from transformers import DynamicCache, PreTrainedModel

from hf_linattn import FAMILIES
from hf_linattn.models.retrofit.modeling_retrofit import native_attention

LAYOUTS = {
    "llama-3.2-1b": ("llama", dict(hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, head_dim=64)),
    "gemma-2-2b": ("gemma2", dict(hidden_size=2304, num_attention_heads=8, num_key_value_heads=4, head_dim=256)),
}
TINY = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)  # on the CPU
LENGTHS = (2048, 4096, 8192, 16384, 32768)
QUICK_LENGTHS = (2048, 8192, 32768)
TOKENS = 16384  # in all, unless one sequence is longer
EAGER_TO = 8192  # longer ones exceed the memory of a GPU where all scores are kept
FIRST_LENGTH = 2048  # of first calls
CONTEXTS = (2048, 32768)  # of decoding
BATCHES = (1, 16)
MASS_LENGTH = 2048

FIGURES = {  # of the tables, by section
    "layer": {"forward_ms": "forward ms", "both_ms": "fwd+bwd ms", "both_mib": "fwd+bwd MiB"},
    "decode": {"step_us": "step us", "host_us": "host us"},
    "first-call": {"forward_s": "forward s", "both_s": "fwd+bwd s"},
}
COLOURS = {"converted": "#c0392b", "teacher": "#7f8c8d"}


def build(layout: str, converted: bool, device: str, **sizes: int) -> PreTrainedModel:
    """A random model of a layout, converted or as its teacher runs; the base's weights in bfloat16, the new ones in float32."""
    family, attention = LAYOUTS[layout]
    family = FAMILIES[family]
    native = family.native_config(**sizes | (TINY if device == "cpu" else attention))
    torch.manual_seed(0)
    if converted:
        fields = {k: v for k, v in native.to_dict().items() if k not in ("model_type", "architectures")}
        model = family.causal_lm_class(family.config_class(**fields, linattn_mass_length=MASS_LENGTH)).to(device)
    else:
        native._attn_implementation = native_attention(native)
        model = family.native_causal_lm(native).to(device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".linattn." in name)
        if ".linattn." not in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


class Layer:
    """Attention of one layer with full attention, in bfloat16, of a random model of these sizes."""

    def __init__(self, layout: str, converted: bool, device: str):
        # of two layers, because in Gemma 2 every second has full attention
        model = build(layout, converted, device, intermediate_size=64, num_hidden_layers=2, vocab_size=64)
        self.model, self.converted, self.device = model.model, converted, device
        self.attention = self.model.layers[1].self_attn
        self.trained = [p for p in self.attention.parameters() if p.requires_grad]
        self.width = model.config.hidden_size
        self.eager = not converted and model.config._attn_implementation == "eager"

    def prepare(self, length: int, first: int = 0) -> Callable:
        """A function of hidden states (B, length, D), and a cache, at positions from `first` on."""
        hidden = torch.empty(1, length, self.width, dtype=torch.bfloat16, device=self.device)
        positions = torch.arange(first, first + length, device=self.device)[None]
        arguments = dict(position_embeddings=self.model.rotary_emb(hidden, positions), attention_mask=None)
        if self.converted:
            arguments |= self.model.variant_arguments()
        elif self.eager and first == 0:
            future = torch.ones(length, length, dtype=torch.bool, device=self.device).triu(1)
            arguments["attention_mask"] = torch.zeros_like(future, dtype=hidden.dtype).masked_fill(future, -1e30)
        return lambda hidden, cache=None: self.attention(hidden, past_key_values=cache, **arguments)[0]


def speed(layout: str, converted: bool, length: int, tokens: int, device: str) -> dict:
    """Times of the forward pass without gradients, and of both passes with gradients of the input and the new weights."""
    layer = Layer(layout, converted, device)
    call, hidden = layer.prepare(length), draw((max(1, tokens // length), length, layer.width), device)
    leaf, grad_out = hidden.clone().requires_grad_(), torch.randn_like(hidden)

    def forward():
        with torch.no_grad():
            return call(hidden)

    def both():
        return torch.autograd.grad(call(leaf), [leaf, *layer.trained], grad_out, allow_unused=True)

    figures = {"batch": len(hidden)}
    for name, function in {"forward": forward, "both": both}.items():
        figures[f"{name}_ms"], figures[f"{name}_host_ms"] = measure(function, device)
    if (size := common.peak_mib(both, device)) is not None:
        figures["both_mib"] = size
    return figures


@torch.no_grad()
def decode(layout: str, converted: bool, batch: int, context: int, device: str) -> dict:
    """One token after `context` others."""
    layer = Layer(layout, converted, device)
    cache = DynamicCache(config=layer.model.config)
    if converted:
        layer.model._state_layers(cache)
    if layer.eager:  # keys and values alone: all scores would not fit into memory
        shape = batch, layer.model.config.num_key_value_heads, context, layer.attention.head_dim
        cache.layers[1].update(draw(shape, device), draw(shape, device))
    else:
        layer.prepare(context)(draw((batch, context, layer.width), device), cache)
    call, token, kept = layer.prepare(1, first=context), draw((batch, 1, layer.width), device), cache.layers[1]

    def step():
        call(token, cache)
        if not converted:  # PyTorch plans softmax attention anew for each length of the cache
            kept.keys, kept.values = (x[:, :, :context] for x in (kept.keys, kept.values))

    ms, host_ms = measure(step, device)
    return {"step_us": 1e3 * ms, "host_us": 1e3 * host_ms}


def first_length(device: str) -> int:
    return 64 if device == "cpu" else FIRST_LENGTH


def run_child(options: argparse.Namespace, layout: str) -> None:
    """What a fresh process does once its line comes."""
    length = first_length(options.device)
    layer = Layer(layout, options.first_call_of == "converted", options.device)
    call, hidden = layer.prepare(length), draw((1, length, layer.width), options.device)
    sys.stdin.readline()
    print(json.dumps(common.first_call(lambda x: (call(x),), [hidden], options.device)))


def draw_plot(record: common.Record) -> None:
    panels = (
        ("layer", "forward_ms", "forward, ms", "tokens per sequence", None),
        ("layer", "both_ms", "forward + backward, ms", "tokens per sequence", None),
    )
    record.plot(LAYOUTS, panels, ("converted", ""), (11, 8))


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; 1 if a figure could not be had."""
    parser = common.make_parser(__doc__, FIGURES, LAYOUTS, str(QUICK_LENGTHS))
    parser.set_defaults(only=tuple(FIGURES))
    options = common.parse(parser, arguments, whole_models=True)
    path, device = Path(options.output) / "converted_layer.json", options.device
    if options.plot:
        common.Record(path, FIGURES, COLOURS, options.plot).show(draw_plot)
        return 0
    if options.first_call_of:
        run_child(options, *options.layouts)
        return 0

    tiny = device == "cpu"
    lengths = (64, 128) if tiny else QUICK_LENGTHS if options.quick else LENGTHS
    tokens, contexts, batches = (128, (64, 100), (1, 2)) if tiny else (TOKENS, CONTEXTS, BATCHES)
    environment = common.describe(
        options, common.copy_bandwidth(device), {}, dtype="bfloat16, new weights float32",
        shapes={name: TINY if tiny else LAYOUTS[name][1] for name in options.layouts},
    )  # fmt: skip
    print(json.dumps(environment), file=sys.stderr)
    record = common.Record(path, FIGURES, COLOURS, [path] if path.is_file() else [], environment)
    for layout in options.layouts:
        if "first-call" in options.only:
            with tempfile.TemporaryDirectory() as cache:
                child = common.start_child(__file__, "converted", layout, options, cache)
                record.add("first-call", layout, first_length(device), "converted", common.finish_child, child)
        for operator in COLOURS:
            converted, eager = operator == "converted", LAYOUTS[layout][0] == "gemma2"
            for length in lengths if "layer" in options.only else ():
                if converted or not eager or length <= EAGER_TO:
                    record.add("layer", layout, length, operator, speed, layout, converted, length, tokens, device)
            for batch in batches if "decode" in options.only else ():
                for context in contexts:
                    case = f"batch {batch}, {context} tokens"
                    record.add("decode", layout, case, operator, decode, layout, converted, batch, context, device)
    record.show(draw_plot)
    return int(record.failed(COLOURS))


if __name__ == "__main__":
    sys.exit(main())
