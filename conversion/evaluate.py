# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""What a conversion kept and lost: perplexity, divergence from the teacher, recall of planted repeats, speed."""

import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import transformers
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel

import hf_linattn
from hf_linattn.cache import state_bytes

from .data import rows

Run = partial[torch.Tensor]  # token ids (B, T) -> logits (B, T, vocabulary); the model is its first argument
Progress = bool | Callable[[int, int], None]  # a bar, or a function of tokens done and tokens in all

TOKENS = 8192  # of a batch
LOGITS = 1 << 26  # numbers in the logits of a batch of more than one row
PIECE = 1 << 24  # numbers in one float32 working copy of logits
LEAD = 16  # tokens before the first planted span
SKIP = 4  # first tokens of a span, which tell that a repeat has begun
WARM = 2  # decoding steps before the clock starts
CONTEXTS = (1024, 8192, 65536)  # for which state bytes are always given


@torch.no_grad()
def perplexity(
    model: PreTrainedModel,
    stream: torch.Tensor,
    length: int,
    *,
    dtype: torch.dtype | None = torch.float32,
    progress: Progress = False,
) -> float:
    """exp(mean NLL) over non-overlapping rows of `stream` (N,); the first token of each row is not scored.

    Computed in `dtype`, as loaded if `None`.

    Raises:
        ValueError: if the stream has less than one row.
    """
    data = _rows(stream, length)
    with _prepared([model], dtype), _ticker(progress, data.numel()) as tick:
        return _exp(_score(data, {"": _run(model)}, None, tick)[""]["nll"].mean())


@torch.no_grad()
def kl_to_teacher(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    stream: torch.Tensor,
    length: int,
    *,
    dtype: torch.dtype | None = torch.float32,
    progress: Progress = False,
) -> dict:
    """KL(teacher || model) in nats per token over non-overlapping rows of `stream` (N,).

    Returns:
        `mean`, and `by_position`: the mean in each range of positions, such as "64-127".

    Raises:
        ValueError: if the stream has less than one row.
    """
    data = _rows(stream, length)
    with _prepared([model, teacher], dtype), _ticker(progress, 2 * data.numel()) as tick:
        kl = _score(data, {"teacher": _run(teacher), "": _run(model)}, "teacher", tick)[""]["kl"]
    return {"mean": kl.mean().item(), "by_position": _buckets(kl, 0)}


def planted_rows(stream: torch.Tensor, distance: int, span: int, count: int, seed: int) -> torch.Tensor:
    """Rows of text in which a span from elsewhere stands twice, its two beginnings `distance` tokens apart.

    Returns:
        (count, LEAD + distance + span): LEAD tokens of the host, the span, more of the host, the span again.

    Raises:
        ValueError: if the spans would overlap or the stream (N,) is too short.
    """
    if distance < span:
        raise ValueError(f"a repeat {distance} tokens back overlaps with its span of {span}: ask for {span} or more.")
    host = LEAD + distance - span  # tokens of the row that are not planted
    free = len(stream) - host - span
    if free < 0:
        raise ValueError(
            f"the text is too short: it has {len(stream)} tokens and repeats {distance} tokens back need "
            f"{host + span}; give more text or ask for shorter distances."
        )
    generator = torch.Generator().manual_seed(seed)
    start, place = torch.randint(free + 1, (2, count, 1), generator=generator)
    # Two blocks that do not overlap: whichever was drawn first comes first, the other moves behind it.
    start, place = torch.where(place < start, start + span, start), torch.where(place < start, place, place + host)
    text, planted = stream[start + torch.arange(host)], stream[place + torch.arange(span)]
    return torch.cat([text[:, :LEAD], planted, text[:, LEAD:], planted], dim=1)


@torch.no_grad()
def recall(
    model: PreTrainedModel,
    stream: torch.Tensor,
    distances: list[int],
    *,
    span: int = 32,
    count: int = 32,
    seed: int = 0,
    dtype: torch.dtype | None = torch.float32,
    progress: Progress = False,
) -> dict[str, dict[str, float]]:
    """How well a model predicts a span that it has met `distance` tokens before; the same rows for every model.

    Returns:
        For each distance `nats` and `accuracy` per token of the second occurrence and `first`, the nats of the first
        one (4 tokens at the beginning of each are left out).

    Raises:
        ValueError: as `planted_rows`.
    """
    planted = _planted(stream, distances, span, count, seed)
    total = sum(data.numel() for data in planted.values())
    with _prepared([model], dtype), _ticker(progress, total) as tick:
        return {distance: _recall(data, _run(model), span, tick) for distance, data in planted.items()}


@torch.no_grad()
def tokens_per_second(
    model: PreTrainedModel,
    contexts: list[int],
    *,
    new_tokens: int = 16,
    batch: int = 1,
    seed: int = 0,
    tick: Callable[[int], object] = lambda tokens: None,
) -> dict[str, dict[str, float | int | None]]:
    """Speed of cached decoding after each context length, in the model's own dtype, on random tokens.

    Returns:
        For each context `tokens_per_second`, `prefill_seconds` and `peak_bytes` of the accelerator (None on a CPU).
    """
    found, device, cuda = {}, model.device, model.device.type == "cuda"
    generator = torch.Generator().manual_seed(seed)

    def now() -> float:
        if cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    with _prepared([model], None):
        for context in contexts:
            ids = torch.randint(model.config.vocab_size, (batch, context), generator=generator).to(device)
            if cuda:
                torch.cuda.reset_peak_memory_stats(device)
            begin = now()
            out = model(ids, use_cache=True, logits_to_keep=1)
            prefill = now() - begin
            for step in range(WARM + new_tokens):
                if step == WARM:
                    begin = now()
                token = out.logits[:, -1:].argmax(-1)
                out = model(token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
            found[str(context)] = {
                "tokens_per_second": batch * new_tokens / (now() - begin),
                "prefill_seconds": prefill,
                "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
            }
            tick(batch * context)
    return found


@torch.no_grad()
def evaluate(
    converted: PreTrainedModel,
    teacher: PreTrainedModel,
    stream: torch.Tensor,
    lengths: list[int],
    distances: list[int],
    *,
    equal_window: int | None = None,
    others: dict[str, PreTrainedModel] | None = None,
    span: int = 32,
    recall_rows: int = 32,
    seed: int = 0,
    dtype: torch.dtype | None = torch.float32,
    progress: Progress = True,
) -> dict:
    """The measured part of a report: the teacher, the converted model, and what each of its components does alone.

    Args:
        converted: a converted causal language model, on the same device as `teacher`; both are left as they were.
        teacher: the model it was converted from.
        stream: token ids, (N,).
        lengths: tokens per row, each 2 or more.
        distances: of planted repeats; [] leaves recall out.
        equal_window: the window whose state is as large as that of the converted model; computed if `None`.
        others: more models for the report, each a row under its name.
        span, recall_rows, seed: of the planted repeats.
        dtype: to compute in, as loaded if `None`; speed is always measured as loaded.
        progress: a bar, or a function of tokens done and tokens in all.

    Returns:
        Rows `teacher`, `converted`, `window_only`, `linear_only`, `window_equal_state` and the others, each with
        `perplexity` and (not the teacher) `kl_to_teacher` by length, `perplexity_by_position` and `kl_by_position` by
        length and position, `recall` by distance; `decoding` of the teacher and the converted model by context;
        `state_bytes` by context; `new_parameters`, `model`, `evaluation`, `versions`. Lengths are string keys.

    Raises:
        ValueError: if the stream is too short for a length or a distance, before anything is computed.
    """
    begin = time.perf_counter()
    if not lengths:
        raise ValueError("lengths is empty: name at least one.")
    data = {str(length): _rows(stream, length) for length in lengths}
    planted = _planted(stream, distances, span, recall_rows, seed)
    equal_window = equal_window or state_bytes(converted.config, max(lengths))["equal_window"]
    runs = {
        "teacher": _run(teacher),
        "converted": _run(converted),
        "window_only": _run(converted, latents=False),
        "linear_only": _run(converted, window=1, sinks=0),
        "window_equal_state": _run(converted, window=equal_window, latents=False),
    } | {name: _run(model) for name, model in (others or {}).items()}
    report = {name: {"perplexity": {}, "perplexity_by_position": {}, "recall": {}} for name in runs}
    for name in report.keys() - {"teacher"}:
        report[name] |= {"kl_to_teacher": {}, "kl_by_position": {}}

    scored = sum(part.numel() for part in [*data.values(), *planted.values()])
    with _ticker(progress, len(runs) * scored + 2 * sum(lengths)) as tick:
        with _prepared([teacher, converted, *(others or {}).values()], dtype):
            for length, part in data.items():
                for name, found in _score(part, runs, "teacher", tick).items():
                    report[name]["perplexity"][length] = _exp(found["nll"].mean())
                    nats = _buckets(found["nll"], 1)
                    report[name]["perplexity_by_position"][length] = {k: _exp(v) for k, v in nats.items()}
                    if name != "teacher":
                        report[name]["kl_to_teacher"][length] = found["kl"].mean().item()
                        report[name]["kl_by_position"][length] = _buckets(found["kl"], 0)
            for distance, part in planted.items():
                for name, run in runs.items():
                    report[name]["recall"][distance] = _recall(part, run, span, tick)
        for name, model in (("teacher", teacher), ("converted", converted)):
            report[name]["decoding"] = tokens_per_second(model, lengths, seed=seed, tick=tick)

    config = converted.config
    report["state_bytes"] = {
        str(context): {k: v for k, v in state_bytes(config, context).items() if k != "equal_window"}
        for context in sorted({*lengths, *CONTEXTS})
    }
    report["equal_window"] = equal_window
    report["new_parameters"] = sum(p.numel() for n, p in converted.named_parameters() if ".linattn." in n)
    report["model"] = {
        "model_type": config.model_type,
        "parameters": converted.num_parameters(),
        "trained_length": config.max_position_embeddings,
        "layers": config.num_hidden_layers,
        "converted_layers": list(config.converted_layers),
    } | {k: v for k, v in config.to_dict().items() if k.startswith("linattn_")}
    report["evaluation"] = {
        "tokens": len(stream),
        "span": span,
        "recall_rows": recall_rows,
        "seed": seed,
        "dtype": str(dtype or converted.dtype).removeprefix("torch."),
        "device": str(converted.device),
        "seconds": time.perf_counter() - begin,
    }
    report["versions"] = {
        "hf_linattn": hf_linattn.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return report


def _rows(stream: torch.Tensor, length: int) -> torch.Tensor:
    if length < 2:
        raise ValueError(f"a row of {length} tokens has none to score: ask for a length of 2 or more.")
    return rows(stream, length)


def _planted(stream: torch.Tensor, distances: list[int], span: int, count: int, seed: int) -> dict[str, torch.Tensor]:
    if distances and span <= SKIP:
        raise ValueError(f"a planted span of {span} tokens is too short: ask for more than {SKIP}.")
    return {str(distance): planted_rows(stream, distance, span, count, seed + distance) for distance in distances}


def _run(model: PreTrainedModel, **variant) -> Run:
    return partial(_logits, model, variant)


def _logits(model: PreTrainedModel, variant: dict, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    with model.linattn_variant(**variant) if variant else nullcontext():
        return model(ids.to(model.device), use_cache=False, **kwargs).logits


@contextmanager
def _prepared(models: list[PreTrainedModel], dtype: torch.dtype | None) -> Iterator[None]:
    """Evaluation mode, weights in `dtype`; afterwards everything is as it was, bit for bit."""
    parameters = {id(p): p for model in models for p in model.parameters()}.values()
    kept = [(p, p.data) for p in parameters if dtype and p.is_floating_point() and p.dtype != dtype]
    training = [(module, module.training) for model in models for module in model.modules()]
    try:
        for parameter, value in kept:
            parameter.data = value.to(dtype)
        for model in models:
            model.eval()
        yield
    finally:
        for parameter, value in kept:
            parameter.data = value
        for module, mode in training:
            module.training = mode


@contextmanager
def _ticker(progress: Progress, total: int) -> Iterator[Callable[[int], object]]:
    if not callable(progress):
        with tqdm(
            total=total, unit="tok", unit_scale=True, desc="evaluating", disable=not progress, leave=False
        ) as bar:
            yield bar.update
        return
    done = 0

    def tick(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(done, total)

    yield tick


def _batches(data: torch.Tensor, run: Run) -> tuple[torch.Tensor, ...]:
    vocabulary = run.args[0].config.get_text_config().vocab_size
    return data.split(max(1, min(TOKENS, LOGITS // vocabulary) // data.shape[1]))


def _score(data: torch.Tensor, runs: dict[str, Run], reference: str | None, tick: Callable) -> dict[str, dict]:
    """Mean NLL (T - 1,) and KL to the reference (T,) by position, float64, for each run on rows (N, T).

    The reference comes first in `runs`: its logits serve all others of the same batch.
    """
    count, length = data.shape
    sums = {
        name: {
            "nll": torch.zeros(length - 1, dtype=torch.float64),
            "kl": torch.zeros(length, dtype=torch.float64),
        }
        for name in runs
    }
    for ids in _batches(data, next(iter(runs.values()))):
        expected = None
        for name, run in runs.items():
            logits = run(ids)
            step = max(1, PIECE // logits[:, 0].numel())
            for begin in range(0, length, step):
                piece = slice(begin, begin + step)
                found = logits[:, piece].float().log_softmax(-1)
                targets = ids[:, begin + 1 : begin + step + 1].to(found.device)
                nll = -found[:, : targets.shape[1]].gather(-1, targets[..., None])[..., 0]
                sums[name]["nll"][piece] += nll.cpu().double().sum(0)
                if expected is not None:
                    wanted = expected[:, piece].float().log_softmax(-1)
                    kl = F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
                    sums[name]["kl"][piece] += kl.cpu().double().sum(0)
            if name == reference:
                expected = logits
            del logits
            tick(ids.numel())
    return {name: {key: value / count for key, value in found.items()} for name, found in sums.items()}


def _recall(data: torch.Tensor, run: Run, span: int, tick: Callable) -> dict[str, float]:
    """Nats and accuracy on the second planted span of rows (N, T), and the nats on the first one."""
    places = torch.cat([torch.arange(begin + SKIP, begin + span) for begin in (LEAD, data.shape[1] - span)])
    nats, hits = [], []
    for ids in _batches(data, run):
        logits = run(ids, logits_to_keep=(places - 1).to(run.args[0].device)).float()
        targets = ids[:, places].to(logits.device)
        nats.append(F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").cpu().double())
        hits.append((logits.argmax(-1) == targets).cpu().double())
        tick(ids.numel())
    first, second = torch.cat(nats).mean(0).chunk(2)
    accuracy = torch.cat(hits).mean(0).chunk(2)[1]
    return {"nats": second.mean().item(), "accuracy": accuracy.mean().item(), "first": first.mean().item()}


def _buckets(values: torch.Tensor, first: int) -> dict[str, float]:
    """Means of values (n,), which belong to positions first, first + 1, ..., in ranges that double: 0-63, 64-127."""
    edges, end = [first], first + len(values)
    edge = 64
    while edge < end:
        edges.append(edge)
        edge *= 2
    parts = zip(edges, [*edges[1:], end], strict=True)
    return {f"{low}-{high - 1}": values[low - first : high - first].mean().item() for low, high in parts}


def _exp(nats: torch.Tensor | float) -> float:
    return math.exp(min(float(nats), 700.0))  # beyond this, float64 overflows
