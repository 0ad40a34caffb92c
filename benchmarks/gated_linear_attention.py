# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Measures `gated_linear_attention` on one GPU, beside flash-linear-attention and softmax attention on the same inputs.

    python benchmarks/gated_linear_attention.py --output benchmarks/data

Prints tables and writes gated_linear_attention.json and .png; README.md beside this file says what each figure means.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import common
import torch
import torch.nn.functional as F
from common import draw, measure, passes

from hf_linattn.kernels.gated_linear_attention import gated_linear_attention

SECTIONS = ("speed", "memory", "accuracy", "decode", "first-call")
LAYOUTS = {"16x128": (16, 128, 128), "4x256x512": (4, 256, 512)}  # heads, dk, dv
DECODE_LAYOUTS = {"16x128": (32, 128, 128), "4x256x512": (4, 256, 512)}
TINY = {"16x128": (2, 16, 16), "4x256x512": (1, 16, 32)}  # on the CPU
LENGTHS = tuple(1024 << n for n in range(8))
QUICK_LENGTHS = (2048, 8192, 32768)
TOKENS = 16384  # in all, unless one sequence is longer
CHUNK = 64  # of the two-pass floor
GATES = {
    "logsigmoid/16": lambda x: F.logsigmoid(x) / 16,
    "logsigmoid": F.logsigmoid,
    "logsigmoid(10x)": lambda x: F.logsigmoid(10 * x),
    "0 or -1000": lambda x: -1000.0 * (x > 1.3),  # one in ten
    "logsigmoid(10x) >= -5": lambda x: F.logsigmoid(10 * x).clamp(min=-5),
}
FIGURES = {  # of the tables
    "speed": {
        "forward_ms": "forward ms",
        "both_ms": "fwd+bwd ms",
        "forward_over_two_pass": "forward / two-pass floor",
        "both_over_two_pass": "fwd+bwd / two-pass floor",
    },
    "memory": {"forward_mib": "forward MiB", "both_mib": "fwd+bwd MiB"},
    "accuracy": {
        name: name for name in ("out", "final_state", "grad_q", "grad_k", "grad_v", "grad_g", "grad_initial_state")
    },
    "decode": {"step_us": "step us", "gb_per_s": "state GB/s", "of_copy": "of copy", "host_us": "host us"},
    "first-call": {"forward_s": "forward s", "both_s": "fwd+bwd s"},
}
COLOURS = {"ours": "#c0392b", "fla": "#2c6fbb", "sdpa": "#7f8c8d"}


def make_inputs(batch: int, length: int, layout: tuple[int, int, int], device: str, gate: str) -> list[torch.Tensor]:
    """q, k, v and the gate in bfloat16."""
    heads, dim_k, dim_v = layout
    torch.manual_seed(0)
    q, k, v = (draw((batch, length, heads, dim), device) for dim in (dim_k, dim_k, dim_v))
    return [q, k, v, GATES[gate](draw((batch, length, heads, dim_k), device, torch.float32)).to(q.dtype)]


def find_operators(backend: str, fla: bool) -> dict[str, Callable]:
    """Functions of (q, k, v, gate, initial state) that return output and final state."""

    def ours(q, k, v, g, state=None):
        return gated_linear_attention(q, k, v, g, initial_state=state, backend=backend)

    def chunk(q, k, v, g, state=None):
        return chunk_gla(q, k, v, g, initial_state=state, output_final_state=True)

    def sdpa(q, k, v, g, state=None):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), None

    if fla:
        try:
            from fla.ops.gla import chunk_gla
        except Exception as error:  # anything may go wrong inside an optional package
            print(f"No column for flash-linear-attention: {type(error).__name__}: {error}", file=sys.stderr)
            fla = False
    return {"ours": ours} | ({"fla": chunk} if fla else {}) | {"sdpa": sdpa}


def find_decoders(operators: dict[str, Callable]) -> dict[str, Callable]:
    decoders = {"ours": operators["ours"]}
    if "fla" in operators:
        from fla.ops.gla import fused_recurrent_gla

        def recurrent(q, k, v, g, state=None):
            return fused_recurrent_gla(q, k, v, gk=g, initial_state=state, output_final_state=True)

        decoders["fla"] = recurrent
    return decoders


def byte_floors(dim_k: int, dim_v: int) -> dict[str, float]:
    """Bytes per token and head in bfloat16: every tensor once, and twice with a state stored per chunk between the passes."""
    state = dim_k * dim_v / CHUNK
    forward, backward = 6 * dim_k + 4 * dim_v, 12 * dim_k + 6 * dim_v
    forward_twice = forward + 4 * state + 4 * dim_k + 2 * dim_v
    return {
        "forward_over_compulsory": forward,
        "forward_over_two_pass": forward_twice,
        "both_over_compulsory": forward + backward,
        "both_over_two_pass": forward_twice + backward + 8 * state + 8 * dim_k + 4 * dim_v,
    }


def speed(operator: Callable, inputs: list[torch.Tensor], device: str, bandwidth: float) -> dict:
    batch, length, heads, dim_k = inputs[0].shape
    forward, both = passes(operator, inputs, torch.randn_like(inputs[2]))
    figures = {"batch": batch}
    for name, call in (("forward", forward), ("both", both)):
        figures[f"{name}_ms"], figures[f"{name}_host_ms"] = measure(call, device)
    for name, size in byte_floors(dim_k, inputs[2].shape[-1]).items():
        floor_ms = 1e3 * size * batch * length * heads / bandwidth
        figures[name] = figures[name.split("_")[0] + "_ms"] / floor_ms
    return figures


def memory(operator: Callable, inputs: list[torch.Tensor], device: str) -> dict:
    """Peak of what a call allocates beyond its inputs, outputs and gradients included."""
    figures = {"batch": inputs[0].shape[0]}
    calls = passes(operator, inputs, torch.randn_like(inputs[2]))
    for name, call in zip(("forward", "both"), calls, strict=True):
        size = common.peak_mib(call, device)
        figures |= {} if size is None else {f"{name}_mib": size}
    return figures


def all_results(operator: Callable, inputs: list[torch.Tensor], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output, final state and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = operator(*leaves)
    return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, grads)]


def accuracy(operator: Callable, inputs: list[torch.Tensor], grads: list[torch.Tensor]) -> dict:
    """Norm of the error over the norm of the PyTorch path's result for the same inputs in float64."""

    def exact_operator(q, k, v, g, state):
        return gated_linear_attention(q, k, v, g, initial_state=state, backend="torch")

    exact = all_results(exact_operator, [x.double() for x in inputs], [x.double() for x in grads])
    found = all_results(operator, inputs, grads)
    errors = ((a.double() - b).norm() / b.norm() for a, b in zip(found, exact, strict=True))
    return dict(zip(FIGURES["accuracy"], (e.item() for e in errors), strict=True))


def decode(operator: Callable, batch: int, layout: tuple[int, int, int], device: str, bandwidth: float) -> dict:
    """One token through as many distinct states as exceed every cache, as the layers of a model would."""
    heads, dim_k, dim_v = layout
    token = make_inputs(batch, 1, layout, device, "logsigmoid/16")
    size = 4 * batch * heads * dim_k * dim_v
    states = [
        draw((batch, heads, dim_k, dim_v), device, torch.float32) for _ in range(common.count_states(size, device))
    ]
    return common.time_step(lambda state: operator(*token, state), states, size, device, bandwidth)


def start_child(name: str, layout: str, options: argparse.Namespace, cache: str | None) -> Popen:
    more = [] if name == "fla" else ["--no-fla"]
    return common.start_child(__file__, name, layout, options, cache, *more)


def fresh_first_call(name: str, layout: str, options: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as cache:
        return common.finish_child(start_child(name, layout, options, cache))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, SECTIONS, LAYOUTS, str(QUICK_LENGTHS))
    parser.set_defaults(only=SECTIONS)
    parser.add_argument("--no-fla", action="store_true", help="leave flash-linear-attention out")
    parser.add_argument("--first-call-fla", action="store_true", help="its first call too, which takes minutes")
    return common.parse(parser, arguments)


def draw_plot(record: common.Record) -> None:
    panels = (
        ("speed", "forward_ms", "forward, ms", "tokens per sequence", "forward_over_two_pass"),
        ("speed", "both_ms", "forward + backward, ms", "tokens per sequence", "both_over_two_pass"),
        ("memory", "both_mib", "forward + backward, extra MiB", "tokens per sequence", None),
        ("decode", "step_us", "decode step, µs", "batch", None),
    )
    record.plot(LAYOUTS, panels, ("ours", "two-pass byte floor"), (16, 7))


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; 1 if a figure of ours could not be had."""
    options = parse(arguments)
    path, device = Path(options.output) / "gated_linear_attention.json", options.device
    if options.plot:
        common.Record(path, FIGURES, COLOURS, options.plot).show(draw_plot)
        return 0

    tiny = device == "cpu"
    layouts = {name: (TINY if tiny else LAYOUTS)[name] for name in options.layouts}
    decode_layouts = {name: (TINY if tiny else DECODE_LAYOUTS)[name] for name in options.layouts}
    lengths = (64, 128) if tiny else QUICK_LENGTHS if options.quick else LENGTHS
    tokens, accuracy_length, batches = (128, 128, (1, 2)) if tiny else (TOKENS, 2048, (1, 4, 16, 64, 256))
    operators = find_operators(options.backend, fla=device == "cuda" and not options.no_fla)

    if options.first_call_of:
        (layout,) = layouts.values()
        inputs = make_inputs(max(1, tokens // accuracy_length), accuracy_length, layout, device, "logsigmoid/16")
        print(json.dumps(common.first_call(operators[options.first_call_of], inputs, device)))
        return 0

    searching = {"speed", "memory", "accuracy"} & set(options.only)
    if "fla" in operators and searching and len(layouts) > 1:
        # its search compiles for minutes; side by side into the common cache of kernels it takes half as long
        for child in [start_child("fla", layout, options, None) for layout in layouts]:
            child.communicate()

    bandwidth = common.copy_bandwidth(device)
    environment = common.describe(
        options,
        bandwidth,
        {"flash-linear-attention": common.version("flash-linear-attention") if "fla" in operators else None},
        dtype="bfloat16, states float32",
        gate="logsigmoid(randn) / 16 except for accuracy",
        shapes={name: "heads {}, dk {}, dv {}".format(*shape) for name, shape in layouts.items()},
        decode_shapes={name: "heads {}, dk {}, dv {}".format(*shape) for name, shape in decode_layouts.items()},
        decode_timing=common.step_timing(device),
    )
    print(json.dumps(environment), file=sys.stderr)
    record = common.Record(path, FIGURES, COLOURS, [path] if path.is_file() else [], environment)

    for name, layout in layouts.items():
        for length in lengths if {"speed", "memory"} & set(options.only) else ():
            inputs = make_inputs(max(1, tokens // length), length, layout, device, "logsigmoid/16")
            for operator, call in operators.items():
                if operator == "sdpa" and layout[1] != layout[2]:
                    continue
                if "speed" in options.only:
                    record.add("speed", name, length, operator, speed, call, inputs, device, bandwidth)
                if "memory" in options.only:
                    record.add("memory", name, length, operator, memory, call, inputs, device)
        if "accuracy" in options.only:
            heads, dim_k, dim_v = layout
            for gate in GATES:
                inputs = make_inputs(1, accuracy_length, layout, device, gate)
                inputs.append(draw((1, heads, dim_k, dim_v), device, torch.float32))
                grads = [torch.randn_like(inputs[2]), torch.randn_like(inputs[4])]
                for operator, call in operators.items():
                    if operator != "sdpa":
                        record.add("accuracy", name, gate, operator, accuracy, call, inputs, grads)
        if "decode" in options.only:
            for batch in batches:
                for operator, call in find_decoders(operators).items():
                    record.add(
                        "decode", name, batch, operator, decode, call, batch, decode_layouts[name], device, bandwidth
                    )
        if "first-call" in options.only:
            for operator in ("ours", "fla") if options.first_call_fla and "fla" in operators else ("ours",):
                record.add("first-call", name, accuracy_length, operator, fresh_first_call, operator, name, options)
    record.show(draw_plot)
    return int(record.failed({"ours"}))


if __name__ == "__main__":
    sys.exit(main())
