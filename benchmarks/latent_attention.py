# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Measures Latte's operators (latents, window, both, scans) on one GPU, beside softmax attention on the same inputs.

    python benchmarks/latent_attention.py --output benchmarks/data

Prints tables and writes latent_attention.json and .png; README.md beside this file says what each figure means.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
import torch
import torch.nn.functional as F
from common import draw, measure, passes

from hf_linattn.kernels.latent_attention import latent_attention
from hf_linattn.kernels.macchiato_attention import macchiato_attention
from hf_linattn.kernels.rg_lru import rg_lru
from hf_linattn.kernels.short_convolution import short_convolution
from hf_linattn.kernels.sliding_window_attention import sliding_window_attention

LATENTS = 16
WINDOW = 128
LAYOUTS = {
    "16x128": (16, 16, 128),
    "gemma-2-2b": (8, 4, 256),
    "llama-3.2-1b": (32, 8, 64),
}  # heads, kv heads, channels
TINY = {"16x128": (2, 2, 16), "gemma-2-2b": (2, 1, 32), "llama-3.2-1b": (4, 1, 16)}  # on the CPU
LENGTHS = tuple(1024 << n for n in range(8))
QUICK_LENGTHS = (2048, 8192, 32768)
TOKENS = 16384  # in all, unless one sequence is longer
FIRST_LENGTH = 2048  # of first calls
FLEX_LENGTH = 8192
FEW_FROM = 65536  # tokens from which few repetitions are enough
SDPA_BACKWARD_TO = 32768
SCAN_WIDTHS = (768, 2304)
LAGS = 3
DECODE_LAYOUT = (32, 32, 128)
CHUNK = 64  # of the three-phase floor
BACKWARD_TRAFFIC = 2.5  # that of the forward pass, by the same estimate

PASSES = {
    "forward_ms": "forward ms",
    "both_ms": "fwd+bwd ms",
    "both_us_per_token": "fwd+bwd us/token",
    "forward_over_three_phase": "forward / three-phase floor",
    "both_over_three_phase": "fwd+bwd / three-phase floor",
}
FIGURES = {  # of the tables, by section
    "operators": PASSES,
    "flex": PASSES | {"first_forward_s": "first forward s", "first_both_s": "first fwd+bwd s"},
    "scans": {
        "forward_ms": "forward ms",
        "both_ms": "fwd+bwd ms",
        "forward_of_copy": "forward of copy",
        "both_of_copy": "fwd+bwd of copy",
    },
    "decode": {"step_us": "step us", "gb_per_s": "state GB/s", "of_copy": "of copy", "host_us": "host us"},
    "first-call": {"forward_s": "forward s", "both_s": "fwd+bwd s"},
}
SECTIONS = tuple(FIGURES)
DEFAULT_SECTIONS = tuple(section for section in SECTIONS if section != "flex")  # which compiles for long
INPUTS = {  # of each operator, in the order of its arguments
    "latent": ("q", "theta", "v"),
    "macchiato": ("q", "theta", "gate", "window_q", "window_k", "v"),
    "two calls": ("q", "theta", "gate", "window_q", "window_k", "v"),
    "window": ("window_q", "window_k", "v"),
    "flex": ("window_q", "window_k", "v"),
    "sdpa": ("window_q", "window_k", "v"),
}
COLOURS = {
    "latent": "#e08e2b",
    "macchiato": "#c0392b",
    "two calls": "#9b59b6",
    "window": "#27865a",
    "flex": "#2c6fbb",
    "sdpa": "#7f8c8d",
    "rg_lru": "#34495e",
    "short_convolution": "#16a085",
}
OURS = COLOURS.keys() - {"flex", "sdpa"}


def make_inputs(batch: int, length: int, layout: tuple[int, int, int], device: str) -> dict[str, torch.Tensor]:
    """Latent logits q and theta, the gate, and the window's queries, keys and values, in bfloat16."""
    heads, kv_heads, dim = layout
    torch.manual_seed(0)
    sizes = {"q": (heads, LATENTS), "theta": (kv_heads, LATENTS), "gate": (heads,)}
    sizes |= {"window_q": (heads, dim), "window_k": (kv_heads, dim), "v": (kv_heads, dim)}
    return {name: draw((batch, length, *size), device) for name, size in sizes.items()}


def find_operators(backend: str, window: int = WINDOW) -> dict[str, Callable]:
    """Functions of the tensors that INPUTS names; the output comes first."""

    def latent(q, theta, v):
        return latent_attention(q, theta, v, backend=backend)

    def local(q, k, v):
        return sliding_window_attention(q, k, v, window=window, backend=backend)

    def macchiato(*inputs):
        return macchiato_attention(*inputs, window=window, backend=backend)

    def two_calls(q, theta, gate, window_q, window_k, v):
        exact = local(window_q, window_k, v)[0]
        return latent_attention(q, theta, v, gate=gate, gate_value=exact, backend=backend)

    def sdpa(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return (out.transpose(1, 2),)

    return {"latent": latent, "macchiato": macchiato, "two calls": two_calls, "window": local, "sdpa": sdpa}


def find_flex(length: int, device: str, window: int = WINDOW) -> Callable:
    """FlexAttention over the same window, compiled on a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def band(batch, head, at, key):
        return (at >= key) & (at - key < window)

    blocks = create_block_mask(band, None, None, length, length, device=device)
    run = torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention

    def flex(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = run(q, k, v, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])
        return (out.transpose(1, 2),)

    return flex


def three_phase_bytes(operator: str, layout: tuple[int, int, int]) -> float | None:
    """Bytes per token that a forward pass in three phases moves in bfloat16 (papers: Latte, section 10.3)."""
    heads, kv_heads, dim = layout
    queries, values, logits = 2 * heads * dim, 2 * kv_heads * dim, 2 * heads * LATENTS
    window = 2 * queries + 2 * values  # q and output, k and v
    # q, theta, v, output and z once, v and theta again, four passes over the chunks' states
    latent = 2 * logits + values + queries + 4 * heads * LATENTS
    latent += values + logits + 16 * heads * LATENTS * (dim + 1) / CHUNK
    gated = latent + 2 * heads + queries  # the gate and what it weighs
    # in one pass, the window's output is neither written nor read again
    sums = {"latent": latent, "window": window, "macchiato": gated + window - 2 * queries, "two calls": gated + window}
    return sums.get(operator)


def compulsory_bytes(inputs: list[torch.Tensor], out: torch.Tensor) -> dict[str, int]:
    """Every input and output once: of the forward pass, and of forward and backward pass."""
    size = sum(x.nbytes for x in inputs)
    return {"forward": size + out.nbytes, "both": 3 * size + 2 * out.nbytes}


def speed(
    operator: Callable,
    inputs: list[torch.Tensor],
    device: str,
    bandwidth: float,
    repetitions: int = 20,
    backward: bool = True,
) -> dict:
    """Times of the passes, and the rate of their compulsory bytes as a share of the copy bandwidth."""
    with torch.no_grad():
        out = operator(*inputs)[0]
    sizes = compulsory_bytes(inputs, out)
    calls = dict(zip(sizes, passes(operator, inputs, torch.randn_like(out)), strict=True))
    figures = {"batch": inputs[0].shape[0]}
    for name, call in calls.items() if backward else [("forward", calls["forward"])]:
        ms, figures[f"{name}_host_ms"] = measure(call, device, repetitions)
        figures |= {f"{name}_ms": ms, f"{name}_of_copy": 1e3 * sizes[name] / ms / bandwidth}
    if backward and (size := common.peak_mib(calls["both"], device)) is not None:
        figures["both_mib"] = size
    return figures


def attend(
    name: str,
    operator: Callable,
    layout: tuple[int, int, int],
    inputs: dict[str, torch.Tensor],
    device: str,
    bandwidth: float,
) -> dict:
    """`speed` of an operator, per token and against the floor."""
    batch, length = inputs["v"].shape[:2]
    repetitions = 5 if length >= FEW_FROM else 20
    backward = name != "sdpa" or length <= SDPA_BACKWARD_TO
    tensors = [inputs[x] for x in INPUTS[name]]
    figures = speed(operator, tensors, device, bandwidth, repetitions, backward)
    size = three_phase_bytes(name, layout)
    for part, factor in (("forward", 1), ("both", 1 + BACKWARD_TRAFFIC)):
        if f"{part}_ms" in figures:
            per_token = figures[f"{part}_ms"] / 1e3 / (batch * length)
            figures[f"{part}_us_per_token"] = 1e6 * per_token
            if size is not None:
                figures[f"{part}_over_three_phase"] = per_token * bandwidth / (size * factor)
    return figures


def attend_flex(
    layout: tuple[int, int, int],
    inputs: dict[str, torch.Tensor],
    device: str,
    bandwidth: float,
) -> dict:
    operator = find_flex(inputs["v"].shape[1], device)
    first = common.first_call(operator, [inputs[name] for name in INPUTS["flex"]], device)
    figures = attend("flex", operator, layout, inputs, device, bandwidth)
    return figures | {f"first_{name}": value for name, value in first.items()}


def find_scans(length: int, width: int, backend: str, device: str) -> dict[str, tuple[Callable, list[torch.Tensor]]]:
    """The recurrence and the convolution with their inputs."""
    torch.manual_seed(0)
    x, r, i = (draw((1, length, width), device) for _ in range(3))
    lam, weight = draw((width,), device), draw((width, LAGS), device)
    return {
        "rg_lru": (lambda *args: rg_lru(*args, backend=backend), [x, r, i, lam]),
        "short_convolution": (lambda *args: short_convolution(*args, backend=backend), [x, weight]),
    }


def decode(batch: int, layout: tuple[int, int, int], backend: str, device: str, bandwidth: float) -> dict:
    """One token through distinct states; the state's size does not depend on how many tokens went into it."""
    token = make_inputs(batch, 1, layout, device)
    inputs = [token[name] for name in INPUTS["latent"]]
    _, kv_heads, dim = layout
    size = 4 * batch * kv_heads * LATENTS * (dim + 1)
    states = [
        tuple(draw((batch, kv_heads, LATENTS, *rest), device, torch.float32) for rest in ((), (dim,)))
        for _ in range(common.count_states(size, device))
    ]

    def step(state):
        return latent_attention(*inputs, initial_state=state, backend=backend)

    return common.time_step(step, states, size, device, bandwidth)


def first_shape(device: str) -> tuple[int, int]:
    return (1, 128) if device == "cpu" else (TOKENS // FIRST_LENGTH, FIRST_LENGTH)


def run_child(options: argparse.Namespace, layout: tuple[int, int, int]) -> None:
    """What a fresh process does once its line comes: first calls, then the kernels of a call without gradients."""
    name, device = options.first_call_of, options.device
    inputs = make_inputs(*first_shape(device), layout, device)
    operator, tensors = find_operators(options.backend)[name], [inputs[x] for x in INPUTS[name]]
    sys.stdin.readline()
    figures = common.first_call(operator, tensors, device)
    with torch.no_grad():
        operator(*tensors)
    print(json.dumps(figures))


def fill_cache(options: argparse.Namespace) -> None:
    """Compile all kernels side by side into the common cache, untimed, so that the sections need not wait for each."""
    names = [(name, layout) for layout in options.layouts for name in ("latent", "macchiato")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda pair: common.start_child(__file__, *pair, options, None).communicate("\n"), names))


def draw_plot(record: common.Record) -> None:
    panels = tuple(
        (
            "operators",
            f"{part}_us_per_token",
            f"{title}, µs per token",
            "tokens per sequence",
            f"{part}_over_three_phase",
        )
        for part, title in (("forward", "forward"), ("both", "forward + backward"))
    )
    record.plot(LAYOUTS, panels, ("macchiato", "three-phase byte floor of macchiato"), (11, 12))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, SECTIONS, LAYOUTS, str(QUICK_LENGTHS))
    parser.set_defaults(only=DEFAULT_SECTIONS)
    return common.parse(parser, arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; 1 if a figure of ours could not be had."""
    options = parse(arguments)
    path, device = Path(options.output) / "latent_attention.json", options.device
    if options.plot:
        common.Record(path, FIGURES, COLOURS, options.plot).show(draw_plot)
        return 0

    tiny = device == "cpu"
    layouts = {name: (TINY if tiny else LAYOUTS)[name] for name in options.layouts}
    if options.first_call_of:
        run_child(options, *layouts.values())
        return 0

    lengths = (32, 64) if tiny else QUICK_LENGTHS if options.quick else LENGTHS
    tokens, flex_length, batches = (64, 64, (1, 2)) if tiny else (TOKENS, FLEX_LENGTH, (1, 4, 16, 64, 256))
    scan_length, scan_widths = (64, (8, 24)) if tiny else (TOKENS, SCAN_WIDTHS)
    decode_layout = TINY["16x128"] if tiny else DECODE_LAYOUT
    bandwidth = common.copy_bandwidth(device)
    environment = common.describe(
        options,
        bandwidth,
        {},
        dtype="bfloat16, states float32",
        latents=LATENTS,
        window=WINDOW,
        shapes={name: "heads {}, kv heads {}, channels {}".format(*shape) for name, shape in layouts.items()},
        decode_shape="heads {}, kv heads {}, channels {}".format(*decode_layout),
        decode_timing=common.step_timing(device),
    )
    print(json.dumps(environment), file=sys.stderr)
    record = common.Record(path, FIGURES, COLOURS, [path] if path.is_file() else [], environment)

    with tempfile.TemporaryDirectory() as folder:
        # they import while the caches fill, and are then measured one by one
        names, layout = ("latent", "macchiato") if "first-call" in options.only else (), options.layouts[0]
        children = {n: common.start_child(__file__, n, layout, options, str(Path(folder, n))) for n in names}
        if "operators" in options.only and device == "cuda":
            fill_cache(options)
        for name, child in children.items():
            record.add("first-call", layout, first_shape(device)[1], name, common.finish_child, child)
    operators = find_operators(options.backend)
    for name, layout in layouts.items():
        for length in lengths if "operators" in options.only else ():
            inputs = make_inputs(max(1, tokens // length), length, layout, device)
            for operator, call in operators.items():
                record.add(
                    "operators", name, length, operator, attend, operator, call, layout, inputs, device, bandwidth
                )
        if "flex" in options.only:
            inputs = make_inputs(max(1, tokens // flex_length), flex_length, layout, device)
            record.add("flex", name, flex_length, "flex", attend_flex, layout, inputs, device, bandwidth)
    for width in scan_widths if "scans" in options.only else ():
        for operator, (call, inputs) in find_scans(scan_length, width, options.backend, device).items():
            record.add("scans", f"{width} channels", scan_length, operator, speed, call, inputs, device, bandwidth)
    if "decode" in options.only:
        name = f"{decode_layout[0]}x{decode_layout[2]}"
        for batch in batches:
            record.add(
                "decode", name, batch, "latent", decode, batch, decode_layout, options.backend, device, bandwidth
            )
    record.show(draw_plot)
    return int(record.failed(OURS))


if __name__ == "__main__":
    sys.exit(main())
