# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""What the benchmark programs of this folder share: options, timing, fresh processes, tables, JSON and plots."""

import argparse
import importlib.metadata
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

import torch

CACHE_BYTES = 1 << 28  # several times a GPU's second-level cache


def make_parser(
    description: str, sections: Iterable[str], layouts: Iterable[str], quick: str
) -> argparse.ArgumentParser:
    """The options of every program; `quick` names the reduced set of sizes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", required=True, help="folder of the results; rows already there are kept or replaced"
    )
    parser.add_argument("--only", nargs="+", choices=list(sections), help="sections to measure")
    parser.add_argument("--layouts", nargs="+", choices=list(layouts), default=list(layouts), help="shapes to measure")
    parser.add_argument("--quick", action="store_true", help=f"only lengths {quick}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="the CPU takes tiny shapes")
    parser.add_argument("--backend", choices=("triton", "torch"), help="ours; Triton on a GPU unless given")
    parser.add_argument(
        "--plot", nargs="+", type=Path, metavar="JSON", help="measure nothing; join and draw these files"
    )
    parser.add_argument("--first-call-of", help=argparse.SUPPRESS)
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: list[str] | None, *, whole_models: bool = False
) -> argparse.Namespace:
    """`whole_models`: refuse a backend, which their layers choose themselves, other than the one that they take."""
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not options.plot and not torch.cuda.is_available():
        parser.error("no CUDA GPU is visible; `--device cpu --quick` shows a reduced form of the program")
    usual = "triton" if options.device == "cuda" else "torch"
    if whole_models and not options.plot and options.backend not in (None, usual):
        parser.error(f"--backend {options.backend} is not for this program: a model's layers choose their own")
    options.backend = options.backend or usual
    return options


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(options: argparse.Namespace, bandwidth: float, others: dict[str, str | None], **more: object) -> dict:
    """What figures depend on besides the code; `others` are versions of further packages."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "cores": os.cpu_count(),  # on which first calls compile
        "backend": options.backend,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": version("triton"),
        **others,
        "copy_gb_per_s": plain(bandwidth / 1e9),
        **more,
    }


def draw(shape: tuple[int, ...], device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(call: Callable, device: str, repetitions: int = 20) -> tuple[float, float]:
    """Median milliseconds of a call on the device, and the milliseconds that the host needs to start one."""
    for _ in range(3):
        call()
    starts = []
    for _ in range(5):  # one by one: behind a full queue the host would wait for the device
        synchronize(device)
        start = time.perf_counter()
        call()
        starts.append(time.perf_counter() - start)
    host = statistics.median(starts)
    if device == "cpu":
        return 1e3 * host, 1e3 * host
    torch.cuda.synchronize()
    # before each call the device spins while the host fills its queue, so that no gap between launches is measured; once for
    # all calls would not do, as a queue of some thousand launches lets the host wait; 2e9 cycles a second
    spin = int(min(0.1, 1.5 * host) * 2e9)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    for before, after in events:
        torch.cuda._sleep(spin)
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events), 1e3 * host


def copy_bandwidth(device: str) -> float:
    """Bytes read plus bytes written per second by a copy."""
    source = torch.ones((1 << 31) if device == "cuda" else (1 << 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (measure(lambda: target.copy_(source), device)[0] / 1e3)


def peak_mib(call: Callable, device: str) -> float | None:
    """Peak of what a call allocates beyond what is held already, outputs and gradients included; `None` on a CPU."""
    call()
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def passes(operator: Callable, inputs: list[torch.Tensor], grad_out: torch.Tensor) -> tuple[Callable, Callable]:
    """The forward pass without gradients, and forward and backward pass, of an operator that returns its output first."""
    leaves = [x.detach().requires_grad_() for x in inputs]

    def forward():
        with torch.no_grad():
            return operator(*inputs)

    def both():
        out = operator(*leaves)[0]
        return torch.autograd.grad(out, leaves, grad_out, allow_unused=True)  # softmax attention has no gate

    return forward, both


def step_timing(device: str) -> str:
    """How `time_step` takes its times."""
    return "CUDA graph of as many steps as states_per_graph says" if device == "cuda" else "host clock"


def time_step(step: Callable, states: list, size: int, device: str, bandwidth: float) -> dict:
    """Figures of a decoding step that reads and writes `size` bytes of state, over distinct states in one CUDA graph."""
    with torch.no_grad():
        host_ms = measure(lambda: step(states[0]), device)[1]

        def steps():
            return [step(state) for state in states]

        if device == "cuda":
            steps()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept = steps()  # holds the results' memory for as long as the graph runs
            ms = measure(graph.replay, device)[0] / len(states)
            del graph, kept
        else:
            ms = measure(steps, device)[0] / len(states)
    rate = 2 * size / (ms / 1e3)
    return {
        "step_us": 1e3 * ms,
        "gb_per_s": rate / 1e9,
        "of_copy": rate / bandwidth,
        "host_us": 1e3 * host_ms,
        "states_per_graph": len(states) if device == "cuda" else None,
    }


def count_states(size: int, device: str) -> int:
    """So many states of `size` bytes as exceed every cache, as the layers of a model would."""
    return min(64, max(4, CACHE_BYTES // size)) if device == "cuda" else 2


def first_call(operator: Callable, inputs: list[torch.Tensor], device: str) -> dict:
    """Seconds from the first call to its output, and to its gradients."""
    leaves = [x.requires_grad_() for x in inputs]
    warm = torch.ones(64, 64, device=device, requires_grad=True)
    (warm @ warm).sum().backward()
    synchronize(device)
    start = time.perf_counter()
    out = operator(*leaves)[0]
    synchronize(device)
    middle = time.perf_counter()
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    synchronize(device)
    return {"forward_s": middle - start, "both_s": time.perf_counter() - start}


def start_child(
    file: str, name: str, layout: str, options: argparse.Namespace, cache: str | None, *more: str
) -> subprocess.Popen:
    """A fresh process of a program that prints figures of `first_call`, with an empty cache of kernels if one is named."""
    command = [sys.executable, file, "--output", options.output, "--device", options.device, "--quick"]
    command += ["--backend", options.backend, "--layouts", layout, "--first-call-of", name, *more]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # whatever this process imports
    environment |= {"TRITON_CACHE_DIR": cache} if cache else {}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def finish_child(child: subprocess.Popen) -> dict:
    """Send the line that a child may wait for, and read what it printed last."""
    printed, _ = child.communicate("\n")
    if child.returncode:
        raise RuntimeError(f"the fresh process ended with code {child.returncode}")
    return json.loads(printed.splitlines()[-1])


def plain(value: object) -> object:
    """A figure for JSON: four digits, and a word for what is no number."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


class Record:
    """Rows by what they measure, written after each, so that a run that is cut off keeps what it has.

    `figures` gives the columns of every section's table, `colours` the operators in the order of tables and plots.
    """

    def __init__(
        self,
        path: Path,
        figures: dict[str, dict[str, str]],
        colours: dict[str, str],
        files: list[Path],
        environment: dict | None = None,
    ):
        self.path, self.figures, self.colours = path, figures, colours
        self.rows, self.environments = {}, {}
        for file in files:
            content = json.loads(file.read_text())
            self.environments |= content["environments"]
            for row in content["rows"]:
                if row["date"] >= self.rows.get(self.key(row), row)["date"]:  # of several files, the newest
                    self.rows[self.key(row)] = row
        self.date = environment and environment["date"]
        if environment:
            self.environments[self.date] = environment
        path.parent.mkdir(parents=True, exist_ok=True)

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

    def show(self, draw: Callable) -> None:
        """Write the rows, print their tables and have them drawn."""
        self.write()
        self.print_tables()
        draw(self)

    def failed(self, operators: Iterable[str]) -> bool:
        """Whether a figure of these could not be had in this run."""
        rows = self.rows.values()
        return any("error" in r for r in rows if r["operator"] in operators and r["date"] == self.date)

    def select(self, section: str, **wanted: str) -> list[dict]:
        rows = [r for r in self.rows.values() if r["section"] == section and wanted.items() <= r.items()]
        named = any(isinstance(r["case"], str) for r in rows)
        return rows if named else sorted(rows, key=lambda r: (r["layout"], r["case"]))

    def print_tables(self) -> None:
        for section, figures in self.figures.items():
            rows = self.select(section)
            if not rows:
                continue
            names = [o for o in self.colours if any(r["operator"] == o for r in rows)]
            columns = [(figure, name) for figure in figures for name in names]
            titles = [f"{name} {figures[figure]}" for figure, name in columns]
            print(f"\n{section}\n| layout | case |", " | ".join(titles), "|")
            print("|---" * (len(columns) + 2) + "|")
            for layout, case in dict.fromkeys((r["layout"], r["case"]) for r in rows):
                cells = []
                for figure, name in columns:
                    row = self.rows.get((section, layout, case, name), {})
                    cell = "failed" if "error" in row else row.get(figure)
                    cells.append("" if cell is None else str(cell))
                print(f"| {layout} | {case} |", " | ".join(cells), "|")

    def plot(
        self, layouts: Iterable[str], panels: Iterable[tuple], floor_of: tuple[str, str], size: tuple[float, float]
    ) -> None:
        """One row of axes per layout. A panel is (section, figure, title, title of the horizontal axis, ratio to a floor);
        the floor is drawn from the rows of operator `floor_of[0]` and labelled `floor_of[1]`."""
        try:
            import matplotlib
        except ImportError:
            print(f"No plot: matplotlib is missing. Later: --plot {self.path}", file=sys.stderr)
            return
        matplotlib.use("Agg")
        from matplotlib import pyplot

        layouts, panels = list(layouts), list(panels)
        figure, axes = pyplot.subplots(len(layouts), len(panels), figsize=size, squeeze=False, layout="constrained")
        for row_of_axes, layout in zip(axes, layouts, strict=True):
            for axis, (section, name, title, across, ratio) in zip(row_of_axes, panels, strict=True):
                rows = [r for r in self.select(section, layout=layout) if isinstance(r.get(name), float)]
                for operator, colour in self.colours.items():
                    points = [(r["case"], r[name]) for r in rows if r["operator"] == operator]
                    if points:
                        axis.plot(*zip(*points, strict=True), "o-", color=colour, label=operator)
                floor = [(r["case"], r[name] / r[ratio]) for r in rows if ratio and r["operator"] == floor_of[0]]
                if floor:
                    axis.plot(*zip(*floor, strict=True), "k:", label=floor_of[1])
                axis.set(title=f"{layout}: {title}", xlabel=across)
                if rows:
                    axis.set_xscale("log", base=2)
                    axis.set_yscale("log")
                    axis.legend()
                axis.grid(alpha=0.3)
        devices = sorted({e["device"] for e in self.environments.values()})
        figure.suptitle(f"{self.path.stem}, bfloat16, {', '.join(devices)}")
        figure.savefig(self.path.with_suffix(".png"), dpi=120)
        print(f"\n{self.path}\n{self.path.with_suffix('.png')}", file=sys.stderr)
