# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""What a conversion will do, before it does anything."""

import math
import time
from pathlib import Path

import torch

from hf_linattn.cache import state_bytes

from .recipe import Recipe
from .source import open_source
from .write import MARGIN, converted_config

CONTEXTS = (1024, 8192, 65536)
EFFICIENCY = 0.15  # share of the speed of large matrix products that training of small models reached


def pick_device(name: str) -> torch.device:
    """The device of a recipe; "auto" is the GPU if there is one. Raises `ValueError` if it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used ({reason}); use cpu, cuda or auto.") from error
    return device


def plan(source: str | Path, **fields) -> dict:
    """Describes a conversion without writing anything; `fields` are those of `Recipe`.

    Returns layers converted and left, new parameters, state bytes per sequence by context length, steps and tokens of
    each stage, disk space, and a rough estimate of the seconds. Raises as `open_source` and `Recipe` do.
    """
    recipe = Recipe.from_dict({"data": "", "output": ""} | fields | {"source": str(source)})
    return make_plan(recipe)


def make_plan(recipe: Recipe) -> dict:
    """`plan` for a recipe that is already there."""
    checkpoint = open_source(recipe.source)
    config = converted_config(checkpoint, recipe)
    device = pick_device(recipe.device)
    with torch.device("meta"):
        model = checkpoint.family.causal_lm_class(config)
    new = sum(parameter.numel() for parameter in model.new_parameters().values())
    steps = {name: getattr(recipe, name).steps for name in ("align", "distil") if name in recipe.stages}
    tokens = {name: steps[name] * getattr(recipe, name).batch * getattr(recipe, name).length for name in steps}
    if "calibrate" in recipe.stages and recipe.init == "data":
        tokens = {"calibrate": recipe.calibrate.tokens} | tokens
    return {
        "source": checkpoint.name,
        "family": checkpoint.config.model_type,
        "parameters": checkpoint.parameters,
        "new_parameters": new,
        "layers": {
            "converted": config.converted_layers,
            "left": [i for i in range(config.num_hidden_layers) if i not in config.converted_layers],
        },
        "state_bytes": {str(length): state_bytes(config, length, checkpoint.dtype) for length in CONTEXTS},
        "stages": recipe.stages,
        "steps": steps,
        "tokens": tokens,
        "disk_bytes": checkpoint.bytes + new * checkpoint.dtype.itemsize + MARGIN,
        "device": str(device),
        "seconds": _seconds(checkpoint, config, tokens, device),
    }


def _seconds(checkpoint, config, tokens: dict[str, int], device: torch.device) -> dict[str, float]:
    """Rough times by stage: floating point operations over the measured speed of a matrix product."""
    passes = {"calibrate": 1, "align": 4, "distil": 4}  # teacher, converted model, and its backward pass of two
    heads, dim = config.num_attention_heads, getattr(config, "head_dim", None) or config.hidden_size
    mixing = 8 * heads * dim * (config.linattn_window + config.linattn_latents) * len(config.converted_layers)
    speed = _speed(device, checkpoint.dtype) * EFFICIENCY
    return {
        name: round(n * passes[name] * (2 * checkpoint.parameters + mixing) / speed, 1) for name, n in tokens.items()
    }


def _speed(device: torch.device, dtype: torch.dtype) -> float:
    """Floating point operations per second of a matrix product on the device."""
    size = 512 if device.type == "cpu" else 4096
    x = torch.ones(size, size, device=device, dtype=torch.float32 if device.type == "cpu" else dtype)
    _ = (x @ x).sum().item()
    start, runs = time.perf_counter(), 0
    while time.perf_counter() - start < 0.1:
        _ = (x @ x).sum().item()
        runs += 1
    return runs * 2 * size**3 / (time.perf_counter() - start)


def format_plan(values: dict) -> str:
    """The plan as text for people."""
    layers = values["layers"]
    count = len(layers["converted"]) + len(layers["left"])
    share = values["new_parameters"] / values["parameters"]
    lines = [
        f"source          {values['source']} ({values['family']}, {values['parameters']:,} parameters)",
        f"layers          {len(layers['converted'])} of {count} converted: {_numbers(layers['converted'])}; "
        f"left as they are: {_numbers(layers['left'])}",
        f"new parameters  {values['new_parameters']:,} ({share:.1%} of the source)",
        "state bytes per sequence, converted against the teacher's KV cache:",
    ]
    for length, row in values["state_bytes"].items():
        ratio = row["teacher"] / row["converted"]
        lines.append(
            f"  {int(length):>6,} tokens  {row['converted']:>14,}  {row['teacher']:>16,}  ({ratio:.1f} times less)"
        )
    lines.append(f"stages          {', '.join(values['stages'])}")
    for name, tokens in values["tokens"].items():
        steps = f"{values['steps'][name]:,} steps, " if name in values["steps"] else ""
        lines.append(f"  {name:<13} {steps}{tokens:,} tokens, about {_duration(values['seconds'][name])}")
    lines.append(
        f"time            about {_duration(sum(values['seconds'].values()))} on {values['device']}, report aside"
    )
    lines.append(f"disk            {values['disk_bytes'] / 1e6:,.0f} MB")
    return "\n".join(lines)


def _numbers(layers: list[int]) -> str:
    """0, 1, 2, 5 as 0-2, 5."""
    parts, rest = [], list(layers)
    while rest:
        end = next((i for i in range(1, len(rest)) if rest[i] != rest[0] + i), len(rest))
        parts.append(f"{rest[0]}-{rest[end - 1]}" if end > 1 else str(rest[0]))
        rest = rest[end:]
    return ", ".join(parts) or "none"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
