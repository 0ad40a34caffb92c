# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Measures `generate` of whole converted models on one GPU, token by token and compiled, beside their teachers.

    python benchmarks/generation.py --output benchmarks/data

Prints tables and writes generation.json and .png; README.md beside this file says what each figure means.
"""

import functools
import json
import statistics
import sys
import time
from pathlib import Path

import common
import torch
from converted_layer import COLOURS as PLAIN
from converted_layer import LAYOUTS, TINY, build
from transformers import PreTrainedModel, StoppingCriteria

SIZES = {  # beside those of attention
    "llama-3.2-1b": dict(intermediate_size=8192, num_hidden_layers=16, vocab_size=128256),
    "gemma-2-2b": dict(intermediate_size=9216, num_hidden_layers=26, vocab_size=256000),
}
SMALL = dict(intermediate_size=64, num_hidden_layers=2, vocab_size=64)  # on the CPU
CONTEXTS = (2048, 32768)
NEW_TOKENS = 64
SKIPPED = 8  # first ones, while clocks and allocators settle
FIGURES = {
    "generation": {
        "token_ms": "ms a token",
        "prefill_ms": "prefill ms",
        "first_s": "first call s",
        "state_mib": "kept MiB",
    }
}
COLOURS = PLAIN | {f"{name}, compiled": colour + "80" for name, colour in PLAIN.items()}


class Clock(StoppingCriteria):
    """Notes when each token is there; stops nothing."""

    def __init__(self, device: str):
        self.device, self.times = device, []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        common.synchronize(self.device)
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def held_mib(cache: object) -> float:
    """What a cache keeps between tokens."""
    tensors = (t for layer in cache.layers for t in getattr(layer, "states", {}).values())
    pairs = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    held = [*tensors, *(t for t in pairs if isinstance(t, torch.Tensor))]
    return sum(t.numel() * t.element_size() for t in held) / 2**20


@functools.lru_cache(maxsize=1)
def model_of(layout: str, converted: bool, device: str) -> PreTrainedModel:
    model = build(layout, converted, device, **SMALL if device == "cpu" else SIZES[layout]).eval()
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def generation(layout: str, converted: bool, context: int, compiled: bool, new_tokens: int, device: str) -> dict:
    """Greedy tokens behind a random prompt, one row. Of two equal calls the first compiles, the second gives the times."""
    model = model_of(layout, converted, device)
    prompt = torch.randint(model.config.vocab_size, (1, context), device=device)
    options = dict(max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True)
    if compiled:
        options["cache_implementation"] = "static"
    seconds = []
    for _ in range(2):
        clock = Clock(device)
        common.synchronize(device)
        start = time.perf_counter()
        done = model.generate(prompt, stopping_criteria=[clock], **options)
        seconds.append(time.perf_counter() - start)
    steps = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    return {
        "token_ms": 1e3 * statistics.median(steps[SKIPPED:]),
        "prefill_ms": 1e3 * (clock.times[0] - start),
        "first_s": seconds[0],
        "state_mib": held_mib(done.past_key_values),
    }


def draw_plot(record: common.Record) -> None:
    panels = (("generation", "token_ms", "ms a token", "tokens before it", None),)
    layouts = [name for name in LAYOUTS if record.select("generation", layout=name)]
    record.plot(layouts, panels, ("converted", ""), (6, 4 * len(layouts)))


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; 1 if a figure could not be had."""
    parser = common.make_parser(__doc__, FIGURES, LAYOUTS, str(CONTEXTS[:1]))
    options = common.parse(parser, arguments, whole_models=True)
    path, device = Path(options.output) / "generation.json", options.device
    if options.plot:
        common.Record(path, FIGURES, COLOURS, options.plot).show(draw_plot)
        return 0

    tiny = device == "cpu"
    contexts = (64, 100) if tiny else CONTEXTS[:1] if options.quick else CONTEXTS
    new_tokens = SKIPPED + 4 if tiny else NEW_TOKENS
    environment = common.describe(
        options, common.copy_bandwidth(device), {}, dtype="bfloat16, new weights float32",
        shapes={n: TINY | SMALL if tiny else LAYOUTS[n][1] | SIZES[n] for n in options.layouts},
    )  # fmt: skip
    print(json.dumps(environment), file=sys.stderr)
    record = common.Record(path, FIGURES, COLOURS, [path] if path.is_file() else [], environment)
    for operator in COLOURS:  # compiled ones last: they take minutes
        name, *compiled = operator.split(", ")
        for layout in options.layouts:
            for context in contexts:
                record.add(
                    "generation", layout, context, operator,
                    generation, layout, name == "converted", context, bool(compiled), new_tokens, device,
                )  # fmt: skip
    record.show(draw_plot)
    return int(record.failed(COLOURS))


if __name__ == "__main__":
    sys.exit(main())
