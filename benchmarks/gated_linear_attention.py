# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Measures `gated_linear_attention` on one GPU, beside flash-linear-attention and softmax attention on the same inputs.

    python benchmarks/gated_linear_attention.py --output benchmarks/data

Prints tables and writes gated_linear_attention.json and .png; README.md beside this file says what each figure means.
"""

import argparse
import importlib.metadata
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F

from hf_linattn.kernels.gated_linear_attention import gated_linear_attention

SECTIONS = ("speed", "memory", "accuracy", "decode", "first-call")
LAYOUTS = {"16x128": (16, 128, 128), "4x256x512": (4, 256, 512)}  # heads, dk, dv
DECODE_LAYOUTS = {"16x128": (32, 128, 128), "4x256x512": (4, 256, 512)}
TINY = {"16x128": (2, 16, 16), "4x256x512": (1, 16, 32)}  # on the CPU
LENGTHS = tuple(1024 << n for n in range(8))
QUICK_LENGTHS = (2048, 8192, 32768)
TOKENS = 16384  # in all, unless one sequence is longer
CHUNK = 64  # of the two-pass floor
CACHE_BYTES = 1 << 28  # several times a GPU's second-level cache
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


def draw(shape: tuple[int, ...], device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


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


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(call: Callable, device: str, repetitions: int = 20) -> tuple[float, float]:
    """Median milliseconds of a call on the device, and the milliseconds that the host needs to start one."""
    for _ in range(3):
        call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(3):
        call()
    host = (time.perf_counter() - start) / 3
    if device == "cpu":
        return 1e3 * host, 1e3 * host
    torch.cuda.synchronize()
    # the device spins while the host fills its queue, so that no gap between launches is measured; 2e9 cycles a second
    torch.cuda._sleep(int(min(0.5, 1.5 * repetitions * host) * 2e9))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    start = time.perf_counter()
    for before, after in events:
        before.record()
        call()
        after.record()
    host = (time.perf_counter() - start) / repetitions
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events), 1e3 * host


def copy_bandwidth(device: str) -> float:
    """Bytes read plus bytes written per second by a copy."""
    source = torch.ones((1 << 31) if device == "cuda" else (1 << 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (measure(lambda: target.copy_(source), device)[0] / 1e3)


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


def passes(operator: Callable, inputs: list[torch.Tensor]) -> tuple[Callable, Callable]:
    """The forward pass without gradients, and forward and backward pass."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    grad_out = torch.randn_like(inputs[2])

    def forward():
        with torch.no_grad():
            return operator(*inputs)

    def both():
        out, _ = operator(*leaves)
        return torch.autograd.grad(out, leaves, grad_out, allow_unused=True)  # softmax attention has no gate

    return forward, both


def speed(operator: Callable, inputs: list[torch.Tensor], device: str, bandwidth: float) -> dict:
    batch, length, heads, dim_k = inputs[0].shape
    forward, both = passes(operator, inputs)
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
    for name, call in zip(("forward", "both"), passes(operator, inputs), strict=True):
        call()
        if device == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call()
            figures[f"{name}_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
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
    copies = min(64, max(4, CACHE_BYTES // size)) if device == "cuda" else 2
    states = [draw((batch, heads, dim_k, dim_v), device, torch.float32) for _ in range(copies)]
    with torch.no_grad():
        host_ms = measure(lambda: operator(*token, states[0]), device)[1]

        def steps():
            return [operator(*token, state) for state in states]

        if device == "cuda":
            steps()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept = steps()  # holds the results' memory for as long as the graph runs
            ms = measure(graph.replay, device)[0] / copies
            del graph, kept
        else:
            ms = measure(steps, device)[0] / copies
    rate = 2 * size / (ms / 1e3)
    return {
        "step_us": 1e3 * ms,
        "gb_per_s": rate / 1e9,
        "of_copy": rate / bandwidth,
        "host_us": 1e3 * host_ms,
        "states_per_graph": copies if device == "cuda" else None,
    }


def first_call(operator: Callable, inputs: list[torch.Tensor], device: str) -> dict:
    """Seconds from the first call to its output, and to its gradients."""
    leaves = [x.requires_grad_() for x in inputs]
    warm = torch.ones(64, 64, device=device, requires_grad=True)
    (warm @ warm).sum().backward()
    synchronize(device)
    start = time.perf_counter()
    out, _ = operator(*leaves)
    synchronize(device)
    middle = time.perf_counter()
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    synchronize(device)
    return {"forward_s": middle - start, "both_s": time.perf_counter() - start}


def start_child(name: str, layout: str, options: argparse.Namespace, cache: str | None) -> subprocess.Popen:
    """A fresh process that prints the figures of `first_call`, with an empty cache of kernels if one is named."""
    command = [sys.executable, __file__, "--output", options.output, "--device", options.device, "--quick"]
    command += ["--backend", options.backend, "--layouts", layout, "--first-call-of", name]
    command += [] if name == "fla" else ["--no-fla"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # whatever this process imports
    environment |= {"TRITON_CACHE_DIR": cache} if cache else {}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def fresh_first_call(name: str, layout: str, options: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as cache:
        child = start_child(name, layout, options, cache)
        printed, _ = child.communicate()
    if child.returncode:
        raise RuntimeError(f"the fresh process ended with code {child.returncode}")
    return json.loads(printed.splitlines()[-1])


def plain(value: object) -> object:
    """A figure for JSON: four digits, and a word for what is no number."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


class Record:
    """Rows by what they measure, written after each, so that a run that is cut off keeps what it has."""

    def __init__(self, folder: Path, files: list[Path], environment: dict | None = None):
        self.path, self.rows, self.environments = folder / "gated_linear_attention.json", {}, {}
        for file in files:
            content = json.loads(file.read_text())
            self.environments |= content["environments"]
            self.rows |= {self.key(row): row for row in content["rows"]}
        self.date = environment and environment["date"]
        if environment:
            self.environments[self.date] = environment
        folder.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def key(row: dict) -> tuple:
        return row["section"], row["layout"], row["case"], row["operator"]

    def add(self, section: str, layout: str, case: int | str, operator: str, function: Callable, *arguments) -> None:
        try:
            figures = {name: plain(value) for name, value in function(*arguments).items()}
        except Exception as error:  # one failure must not cost the other figures
            figures = {"error": f"{type(error).__name__}: {error}"[:500]}
        row = dict(section=section, layout=layout, case=case, operator=operator, date=self.date, **figures)
        self.rows[self.key(row)] = row
        print(*self.key(row), *(f"{name}={value}" for name, value in figures.items()), file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        used = {row["date"] for row in self.rows.values()}
        content = {
            "environments": {date: e for date, e in self.environments.items() if date in used},
            "rows": list(self.rows.values()),
        }
        self.path.write_text(json.dumps(content, indent=1) + "\n")

    def select(self, section: str, **wanted: str) -> list[dict]:
        rows = [r for r in self.rows.values() if r["section"] == section and wanted.items() <= r.items()]
        return rows if section == "accuracy" else sorted(rows, key=lambda r: (r["layout"], r["case"]))

    def print_tables(self) -> None:
        for section in SECTIONS:
            rows = self.select(section)
            if not rows:
                continue
            names = [o for o in COLOURS if any(r["operator"] == o for r in rows)]
            columns = [(figure, name) for figure in FIGURES[section] for name in names]
            titles = [f"{name} {FIGURES[section][figure]}" for figure, name in columns]
            print(f"\n{section}\n| layout | case |", " | ".join(titles), "|")
            print("|---" * (len(columns) + 2) + "|")
            for layout, case in dict.fromkeys((r["layout"], r["case"]) for r in rows):
                cells = []
                for figure, name in columns:
                    row = self.rows.get((section, layout, case, name), {})
                    cell = "failed" if "error" in row else row.get(figure)
                    cells.append("" if cell is None else str(cell))
                print(f"| {layout} | {case} |", " | ".join(cells), "|")

    def plot(self) -> None:
        try:
            import matplotlib
        except ImportError:
            print(f"No plot: matplotlib is missing. Later: --plot {self.path}", file=sys.stderr)
            return
        matplotlib.use("Agg")
        from matplotlib import pyplot

        panels = (
            ("speed", "forward_ms", "forward, ms", "tokens per sequence"),
            ("speed", "both_ms", "forward + backward, ms", "tokens per sequence"),
            ("memory", "both_mib", "forward + backward, extra MiB", "tokens per sequence"),
            ("decode", "step_us", "decode step, µs", "batch"),
        )
        figure, axes = pyplot.subplots(len(LAYOUTS), len(panels), figsize=(16, 7), squeeze=False, layout="constrained")
        for row_of_axes, layout in zip(axes, LAYOUTS, strict=True):
            for axis, (section, name, title, across) in zip(row_of_axes, panels, strict=True):
                rows = [r for r in self.select(section, layout=layout) if isinstance(r.get(name), float)]
                for operator, colour in COLOURS.items():
                    points = [(r["case"], r[name]) for r in rows if r["operator"] == operator]
                    if points:
                        axis.plot(*zip(*points, strict=True), "o-", color=colour, label=operator)
                floor = [
                    (r["case"], r[name] / r[name.replace("_ms", "_over_two_pass")])
                    for r in rows
                    if section == "speed" and r["operator"] == "ours"
                ]
                if floor:
                    axis.plot(*zip(*floor, strict=True), "k:", label="two-pass byte floor")
                axis.set(title=f"{layout}: {title}", xlabel=across)
                if rows:
                    axis.set_xscale("log", base=2)
                    axis.set_yscale("log")
                    axis.legend()
                axis.grid(alpha=0.3)
        devices = sorted({e["device"] for e in self.environments.values()})
        figure.suptitle(f"gated_linear_attention, bfloat16, {', '.join(devices)}")
        figure.savefig(self.path.with_suffix(".png"), dpi=120)
        print(f"\n{self.path}\n{self.path.with_suffix('.png')}", file=sys.stderr)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", required=True, help="folder of the results; rows already there are kept or replaced"
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections to measure")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="heads x dk x dv")
    parser.add_argument("--quick", action="store_true", help=f"only lengths {QUICK_LENGTHS}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="the CPU takes tiny shapes")
    parser.add_argument("--backend", choices=("triton", "torch"), help="ours; Triton on a GPU unless given")
    parser.add_argument("--no-fla", action="store_true", help="leave flash-linear-attention out")
    parser.add_argument("--first-call-fla", action="store_true", help="its first call too, which takes minutes")
    parser.add_argument(
        "--plot", nargs="+", type=Path, metavar="JSON", help="measure nothing; join and draw these files"
    )
    parser.add_argument("--first-call-of", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not options.plot and not torch.cuda.is_available():
        parser.error("no CUDA GPU is visible; `--device cpu --quick` shows a reduced form of the program")
    options.backend = options.backend or ("triton" if options.device == "cuda" else "torch")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; 1 if a figure of ours could not be had."""
    options = parse(arguments)
    folder, device = Path(options.output), options.device
    if options.plot:
        record = Record(folder, options.plot)
        record.write()
        record.print_tables()
        record.plot()
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
        print(json.dumps(first_call(operators[options.first_call_of], inputs, device)))
        return 0

    searching = {"speed", "memory", "accuracy"} & set(options.only)
    if "fla" in operators and searching and len(layouts) > 1:
        # its search compiles for minutes; side by side into the common cache of kernels it takes half as long
        for child in [start_child("fla", layout, options, None) for layout in layouts]:
            child.communicate()

    bandwidth = copy_bandwidth(device)
    environment = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "backend": options.backend,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": version("triton"),
        "flash-linear-attention": version("flash-linear-attention") if "fla" in operators else None,
        "copy_gb_per_s": plain(bandwidth / 1e9),
        "dtype": "bfloat16, states float32",
        "gate": "logsigmoid(randn) / 16 except for accuracy",
        "shapes": {name: "heads {}, dk {}, dv {}".format(*shape) for name, shape in layouts.items()},
        "decode_shapes": {name: "heads {}, dk {}, dv {}".format(*shape) for name, shape in decode_layouts.items()},
        "decode_timing": "CUDA graph of as many steps as states_per_graph says" if device == "cuda" else "host clock",
    }
    print(json.dumps(environment), file=sys.stderr)
    path = folder / "gated_linear_attention.json"
    record = Record(folder, [path] if path.is_file() else [], environment)

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
    record.print_tables()
    record.plot()
    return int(any("error" in r for r in record.rows.values() if r["operator"] == "ours" and r["date"] == record.date))


if __name__ == "__main__":
    sys.exit(main())
