# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""What a user reads: report.json, plots, the table on the terminal, the model card."""

import io
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# Order, label, colour (Okabe and Ito's palette), marker of each row.
STYLES = {
    "teacher": ("teacher (full attention)", "#000000", "o"),
    "converted": ("converted", "#0072B2", "s"),
    "window_equal_state": ("window + sinks, equal state", "#D55E00", "D"),
    "window_only": ("window + sinks only", "#E69F00", "^"),
    "linear_only": ("latents only", "#009E73", "v"),
}
OTHERS = (("#CC79A7", "P"), ("#56B4E9", "X"), ("#999999", "*"))
DATA = "evaluation text"


def write_report(report: dict, directory: str | Path) -> list[Path]:
    """Writes `report.json` and the plots `perplexity.png`, `recall.png`, `cost.png` for what the report holds.

    Each file appears complete or not at all; numbers that are not finite become null. Returns the paths.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    files = {"report.json": (json.dumps(_finite(report), indent=2, allow_nan=False) + "\n").encode()}
    names = _names(report)
    if any(report[name].get("perplexity") for name in names):
        files["perplexity.png"] = _perplexity_plot(report)
    if any(report[name].get("recall") for name in names):
        files["recall.png"] = _recall_plot(report)
    if any(report[name].get("decoding") for name in names) or report.get("state_bytes"):
        files["cost.png"] = _cost_plot(report)
    for name, content in files.items():
        partial = directory / f".{name}.partial"
        try:
            partial.write_bytes(content)
            os.replace(partial, directory / name)
        finally:
            partial.unlink(missing_ok=True)
    return [directory / name for name in files]


def format_table(report: dict) -> str:
    """The report as text for a terminal."""
    parts = []
    for title, header, lines in _tables(report):
        table = [["", *header], *lines]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        text = [
            "  ".join(
                cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in table
        ]
        parts.append("\n".join([title, *(line.rstrip() for line in text)]))
    return "\n\n".join(parts)


def model_card(
    report: dict,
    name: str,
    *,
    base_model: str | None = None,
    license: str | None = None,
    datasets: list[str] | None = None,
    data: str = DATA,
) -> str:
    """The model card (README.md) of a converted checkpoint, with metadata for the Hub.

    Args:
        report: as from `evaluate`, with the entries that a conversion adds (`trained_tokens`, `seconds`,
            `base_weights_identical`), each left out where it is absent.
        name: of the checkpoint: a Hub id, or a folder, of which only the last part is shown.
        base_model: id of the base on the Hub; that in the report if `None`. A local path is left out of the metadata.
        license: Hub licence id of the base; the licence of the base holds for its weights.
        datasets: ids on the Hub that it was trained on.
        data: what the evaluation text is called.
    """
    model = report.get("model", {})
    base = base_model or model.get("linattn_base")
    shown, title = _public(base) or "its base model", _public(name)
    mixer = model.get("linattn_mixer", "latte")
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="text",
            dataset_name=data,
            metric_type="perplexity",
            metric_name=f"perplexity at {length} tokens",
            metric_value=round(value, 4),
        )
        for length, value in report["converted"]["perplexity"].items()
        if math.isfinite(value)
    ]
    metadata = ModelCardData(
        model_name=title.rsplit("/", 1)[-1],
        library_name="transformers",
        pipeline_tag="text-generation",
        license=license,
        base_model=base if base and _public(base) == base else None,
        base_model_relation="finetune" if base and _public(base) == base else None,
        tags=["linear-attention", "hf_linattn", mixer],
        datasets=datasets,
        eval_results=results or None,
    )
    sections = {
        f"# {title.rsplit('/', 1)[-1]}": _summary(report, shown),
        "## How to load": _loading(title),
        "## What was replaced": _replaced(report, shown),
        "## Training": _training(report),
        "## Evaluation": _evaluation(report, data),
        "## Limits": LIMITS,
        "## Citation": CITATION,
    }
    body = "\n\n".join(f"{heading}\n\n{text}" for heading, text in sections.items())
    return f"---\n{metadata.to_yaml().strip()}\n---\n\n{body}\n"


def _public(name: str | None) -> str | None:
    """A Hub id as it is; of a local path only its last part."""
    if name is None or re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", name) and not Path(name).exists():
        return name
    return Path(name).resolve().name


def _names(report: dict) -> list[str]:
    found = [name for name, value in report.items() if isinstance(value, dict) and "perplexity" in value]
    return [name for name in STYLES if name in found] + [name for name in found if name not in STYLES]


def _style(report: dict, name: str) -> tuple[str, str, str]:
    if name in STYLES:
        label, colour, marker = STYLES[name]
        if name == "window_equal_state" and "equal_window" in report:
            label = f"window {report['equal_window']} + sinks, equal state"
        return label, colour, marker
    others = [other for other in _names(report) if other not in STYLES]
    return name.replace("_", " "), *OTHERS[others.index(name) % len(OTHERS)]


def _finite(value):
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"


def _bytes(value: float, _position: int | None = None) -> str:
    power = min(3, int(math.log2(value)) // 10) if value >= 1 else 0
    value, unit = value / 1024**power, ("B", "KiB", "MiB", "GiB")[power]
    return f"{value:.0f} {unit}" if value >= 100 or value == int(value) else f"{value:.1f} {unit}"


def _tables(report: dict) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and lines (label first) of each table that the report has numbers for."""
    kinds: list[tuple[str, str, Callable]] = [
        ("Perplexity by length in tokens", "perplexity", _number),
        ("KL(teacher || model) in nats per token, by length", "kl_to_teacher", _number),
        (
            "Planted repeats by distance in tokens: nats per token on the second one (accuracy; nats on the first)",
            "recall",
            lambda found: f"{_number(found['nats'])} ({found['accuracy']:.0%}; {_number(found['first'])})",
        ),
        (
            "Decoding after a context of so many tokens: tokens per second",
            "decoding",
            lambda found: f"{found['tokens_per_second']:.1f}",
        ),
    ]
    tables = []
    for title, key, show in kinds:
        lines = [(name, report[name][key]) for name in _names(report) if report[name].get(key)]
        if lines:
            header = list(lines[0][1])
            body = [[_style(report, name)[0], *(show(values[k]) for k in header)] for name, values in lines]
            tables.append((title, header, body))
    if states := report.get("state_bytes"):
        body = [
            [STYLES[name][0], *(_bytes(state[name]) for state in states.values())] for name in ("teacher", "converted")
        ]
        tables.append(("State of one sequence, by context in tokens", list(states), body))
    return tables


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _axes(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(6.8 * count, 4.6), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _draw(axes: Axes, report: dict, name: str, points: dict[str, float]) -> None:
    label, colour, marker = _style(report, name)
    line = "-" if name in ("teacher", "converted") else "--"
    axes.plot([int(x) for x in points], list(points.values()), line, color=colour, marker=marker, label=label)


def _finish(axes: Axes, title: str, x: str, y: str, ticks: set[str]) -> None:
    positions = sorted(map(int, ticks))
    axes.set_xscale("log", base=2)
    axes.set_xticks(positions, [f"{p:,}" for p in positions])
    axes.minorticks_off()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)


def _log_if_wide(axes: Axes, show: Callable, ratio: float = 5.0) -> None:
    values = [v for line in axes.get_lines() for v in line.get_ydata() if isinstance(v, float | int) and v > 0]
    if values and max(values) / min(values) > ratio:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(show))


def _perplexity_plot(report: dict) -> bytes:
    names = _names(report)
    close = [name for name in names if name != "linear_only"]  # far from the others, it would press them together
    figure, panels = _axes(1 if close == names else 2)
    trained = report.get("model", {}).get("trained_length")
    for axes, shown in zip(panels, (names, close), strict=False):
        for name in shown:
            _draw(axes, report, name, report[name]["perplexity"])
        _log_if_wide(axes, lambda value, _: f"{value:g}")
        if trained:
            axes.axvline(trained, color="#555555", linestyle=":", label=f"trained length of the teacher, {trained:,}")
        title = "Perplexity by length" if shown is names else "Perplexity by length, without `latents only`"
        ticks = {length for name in shown for length in report[name]["perplexity"]}
        _finish(axes, title, "tokens per row", "perplexity (lower is better)", ticks)
    panels[0].legend(fontsize="small")
    return _png(figure)


def _recall_plot(report: dict) -> bytes:
    figure, (left, right) = _axes(2)
    ticks: set[str] = set()
    for name in _names(report):
        found = report[name].get("recall", {})
        _draw(left, report, name, {k: v["nats"] for k, v in found.items()})
        _draw(right, report, name, {k: v["accuracy"] for k, v in found.items()})
        ticks |= found.keys()
    first = {k: v["first"] for k, v in report.get("teacher", {}).get("recall", {}).items()}
    if first:
        label = "teacher, first occurrence"
        left.plot([int(x) for x in first], list(first.values()), ":", color="#555555", marker="x", label=label)
    window = report.get("model", {}).get("linattn_window")
    for axes in (left, right):
        if window:
            axes.axvline(window, color="#555555", linestyle="-.", linewidth=1, label=f"window, {window}")
    x = "tokens between the two occurrences"
    _finish(left, "Planted repeats: nats", x, "nats per token (lower is better)", ticks)
    _finish(right, "Planted repeats: accuracy", x, "accuracy (higher is better)", ticks)
    right.set_ylim(-0.02, 1.02)
    left.legend(fontsize="small")
    return _png(figure)


def _cost_plot(report: dict) -> bytes:
    speeds = {name: report[name]["decoding"] for name in _names(report) if report[name].get("decoding")}
    states = report.get("state_bytes")
    figure, panels = _axes(bool(speeds) + bool(states))
    context = "tokens of context"
    if speeds:
        axes = panels[0]
        for name, found in speeds.items():
            _draw(axes, report, name, {k: v["tokens_per_second"] for k, v in found.items()})
        _log_if_wide(axes, lambda value, _: f"{value:g}")
        ticks = {k for found in speeds.values() for k in found}
        _finish(axes, "Decoding speed", context, "tokens per second (higher is better)", ticks)
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
    if states:
        axes = panels[-1]
        for name in ("teacher", "converted"):
            _draw(axes, report, name, {k: v[name] for k, v in states.items()})
        _finish(axes, "State of one sequence", context, "bytes (lower is better)", set(states))
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(_bytes))
        axes.legend(fontsize="small")
    return _png(figure)


def _length(report: dict) -> str:
    """The evaluated length nearest to what the teacher was trained for."""
    lengths = list(report["converted"]["perplexity"])
    trained = report.get("model", {}).get("trained_length") or int(lengths[0])
    return min(lengths, key=lambda length: abs(int(length) - trained))


def _summary(report: dict, base: str) -> str:
    model = report.get("model", {})
    text = [
        f"This is {base} with its softmax attention replaced by an exact sliding window, a few sinks and a "
        "linear-time long-range path (Latte Macchiato). In converted layers memory does not grow with the context."
    ]
    if report.get("base_weights_identical"):
        text.append("Every pretrained weight is kept, bit for bit; only new weights were set or trained.")
    length = _length(report)
    found = {
        name: report[name]["perplexity"][length] for name in _names(report) if length in report[name]["perplexity"]
    }
    said = [
        f"{_style(report, k)[0]} {_number(found[k])}"
        for k in ("converted", "teacher", "window_equal_state")
        if k in found
    ]
    trained = " (the teacher's trained length)" if int(length) == model.get("trained_length") else ""
    text.append(f"Perplexity at {length} tokens{trained}: {', '.join(said)}.")
    if "window_equal_state" in found and not found["converted"] < found["window_equal_state"]:
        text.append("At this length the long-range path does **not** beat a plain window of the same size.")
    return " ".join(text)


def _loading(name: str) -> str:
    return f"""With the package `hf-linattn` installed:

```python
import hf_linattn  # registers the converted classes
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
```

Without the import, with a loader file that comes with the checkpoint (the package must still be installed):

```python
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
```"""


def _replaced(report: dict, base: str) -> str:
    model, lines = report.get("model", {}), [f"- Base: {base}"]
    if "converted_layers" in model:
        kept = model["layers"] - len(model["converted_layers"])
        rest = f"; {kept} keep their own attention" if kept else ""
        lines.append(f"- Layers: {len(model['converted_layers'])} of {model['layers']} converted{rest}")
    if "linattn_window" in model:
        lines.append(
            f"- Mixer: {model['linattn_mixer']}, window {model['linattn_window']}, {model['linattn_sinks']} sinks, "
            f"{model['linattn_latents']} latents per key/value head, gate `{model['linattn_gate']}`, initialised "
            f"{'from data' if model['linattn_init'] == 'data' else 'at random'}"
        )
    if "new_parameters" in report:
        total = f" of {model['parameters']:,}" if "parameters" in model else ""
        lines.append(f"- New parameters: {report['new_parameters']:,}{total}")
    for context, state in report.get("state_bytes", {}).items():
        size, before = _bytes(state["converted"]), _bytes(state["teacher"])
        lines.append(f"- State of a sequence of {int(context):,} tokens: {size} (base: {before})")
    return "\n".join(lines)


def _training(report: dict) -> str:
    lines = []
    if "trained_tokens" in report:
        lines.append(f"- Tokens trained on: {report['trained_tokens']:,}")
    if "seconds" in report and isinstance(report["seconds"], int | float):
        lines.append(f"- Time: {report['seconds']:.0f} seconds")
    lines += [f"- {name}: {version}" for name, version in report.get("versions", {}).items()]
    return "\n".join([*lines, "- Everything else: the recipe saved with the checkpoint and `report.json`."])


def _evaluation(report: dict, data: str) -> str:
    parts = [
        f"On {data}: documents joined by BOS, cut into rows that do not overlap, the first token of a row not scored. "
        "The rows below the teacher and the converted model switch single components off, or give the window as many "
        "bytes as the whole state. A planted repeat is a span that stood in the text so many tokens before."
    ]
    for title, header, lines in _tables(report):
        table = [["", *header], ["---", *["---:"] * len(header)], *lines]
        parts.append("\n".join([f"**{title}**", "", *("| " + " | ".join(line) + " |" for line in table)]))
    return "\n\n".join(parts)


LIMITS = """- The state is of fixed size: what left the window is kept only in compressed form. Exact recall of details
  far back is weaker than with full attention; the tables show by how much.
- A state cannot be rewound: assisted decoding and cropping the cache are not supported.
- Limits and biases of the base model remain."""

CITATION = """```bibtex
@misc{hf_linattn,
  title = {hf-linattn: linear-time attention for Transformers},
  author = {{The hf-linattn authors}},
  year = {2026}
}
@misc{latte,
  title = {Latte: Latent Attention for Linear Time Transformers},
  author = {Rares Dolga and Lucas Maystre and Marius Cobzarenco and David Barber},
  year = {2024},
  eprint = {2402.17512},
  archivePrefix = {arXiv}
}
```"""
