# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The whole conversion, stage by stage, and the two parts of it that also stand alone: training and evaluation."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from hf_linattn.models.retrofit.modeling_retrofit import build_teacher, native_attention

from .calibrate import calibrate
from .data import read_documents, token_stream
from .evaluate import evaluate as measure
from .plan import pick_device
from .recipe import Recipe, read_recipe
from .report import model_card, write_report
from .source import CheckpointError, open_source, scan_values
from .train import align, distil
from .write import (
    NEW_WEIGHTS,
    WorkDirectory,
    base_weights_identical,
    check_separate,
    converted_config,
    read_base,
    save_new_weights,
    write_converted,
)

RECIPE = "recipe.yaml"
FLOAT32_LIMIT = 4 << 30  # bytes of a checkpoint up to which "auto" computes in float32 on a GPU
TRAINED = ("align", "distil")
LONGEST = 2048  # trained length that default evaluation lengths start from
SPAN = 64  # room for a planted repeat and its surroundings


def convert(source: str | Path, output: str | Path, data: str | Path | None = None, **fields) -> dict:
    """Converts a checkpoint; `fields` are those of `Recipe`. Returns the report.

    The output appears complete or not at all, the source is never written to. Raises `ValueError` for bad input
    (`CheckpointError` for the source), `DiskFullError` when there is no room.
    """
    recipe = Recipe.from_dict(fields | {"source": str(source), "output": str(output), "data": data and str(data)})
    checkpoint = open_source(recipe.source, scan=False)
    config = converted_config(checkpoint, recipe)

    def write(folder: Path) -> None:
        scan_values(checkpoint)
        write_converted(checkpoint, config, folder)

    return _run(recipe, checkpoint.directory, write)


def train(directory: str | Path, output: str | Path, data: str | Path, **fields) -> dict:
    """Trains the new weights of a converted checkpoint further, into a new output. Returns the report.

    Settings that are not in `fields` are those the checkpoint was made with; its mixer cannot be changed.
    """
    directory = Path(directory)
    read_base(directory)
    config = AutoConfig.from_pretrained(directory)
    kept = ("to", "gate", "init", "assignment", "source_mixer", "window", "sinks", "latents", "layers", "mass_length")
    if changed := [name for name in fields if name in kept]:
        raise ValueError(f"{changed[0]} of {directory} cannot be changed by training; convert the source again.")
    values = read_recipe(directory / RECIPE) if (directory / RECIPE).is_file() else {}
    values |= {"layers": config.converted_layers, "overwrite": False, "resume": False, "eval_data": None}
    values |= {"stages": ["write", "align", "distil", "report"]} | fields
    values |= {"source": str(directory), "output": str(output), "data": str(data)}
    if "write" not in values["stages"]:
        values["stages"] = ["write", *values["stages"]]
    recipe = Recipe.from_dict(values)
    return _run(recipe, directory, lambda folder: shutil.copytree(directory, folder, dirs_exist_ok=True))


def evaluate(
    directory: str | Path,
    data: str | Path,
    teacher: str | Path | None = None,
    lengths: list[int] | None = None,
    report: str | Path | None = None,
    tokens: int = 32_768,
    distances: list[int] | None = None,
    seed: int = 0,
    device: str = "auto",
) -> dict:
    """Compares a converted checkpoint with its teacher (by default the base inside it) on a text.

    Returns the measurements; with `report` they are also written into that folder, with plots and the model card.
    """
    directory = Path(directory)
    record = read_base(directory)
    place = pick_device(device)
    texts = token_stream(read_documents(data), AutoTokenizer.from_pretrained(directory), tokens, progress=True)
    model = _load(directory, place)
    if teacher is None:
        other = build_teacher(model)
    else:
        found = open_source(teacher, scan=False)
        kind = native_attention(found.config)
        other = found.family.native_causal_lm.from_pretrained(
            found.directory, dtype=model.dtype, attn_implementation=kind
        )
        other = other.to(place).eval()
    values = measure(model, other, texts, *_spans(model.config, len(texts), lengths, distances), seed=seed)
    values["base_weights_identical"] = base_weights_identical(directory)
    values["base"] = record["base"]
    if report is not None:
        _write_report(values, Path(report), directory)
    return values


def _run(recipe: Recipe, origin: Path, write: Callable[[Path], object]) -> dict:
    """Runs the stages of a recipe; `write` fills an empty folder with the converted checkpoint of `origin`."""
    check_separate(origin, recipe.output)
    device = pick_device(recipe.device)
    try:
        with WorkDirectory(recipe.output, recipe.key(), recipe.overwrite, recipe.resume) as work:
            training, held_out = _streams(recipe, origin) if recipe.data else (None, None)
            if "write" not in work.finished:
                start = time.monotonic()
                transformers.set_seed(recipe.seed)
                write(work.fresh_checkpoint())
                recipe.to_file(work.checkpoint / RECIPE)
                work.finish("write", {"seconds": time.monotonic() - start})
            left = [stage for stage in recipe.stages if stage not in work.finished]
            report = {"stages": recipe.stages, "recipe": recipe.to_dict()}
            if left:
                model = _load(work.checkpoint, device, recipe.dtype)
                for stage in left:
                    start = time.monotonic()
                    if stage == "report":
                        report |= _report(work, recipe, model, held_out)
                        continue
                    notes = _fit(stage, recipe, model, training, work)
                    work.finish(stage, notes | {"seconds": time.monotonic() - start})
            report["output"] = str(work.output)
            work.publish()
            return report
    except KeyboardInterrupt as error:
        hint = "continue with --resume" if work.finished else "nothing is left behind, start it again"
        raise KeyboardInterrupt(f"interrupted; {recipe.output} was not written; {hint}.") from error


def _streams(recipe: Recipe, origin: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids to train on and to report on, apart from each other."""
    tokenizer = AutoTokenizer.from_pretrained(origin)
    stages = [getattr(recipe, name) for name in TRAINED if name in recipe.stages]
    needed = max(recipe.calibrate.tokens, sum(stage.steps * stage.batch * stage.length for stage in stages))
    held = 0 if recipe.eval_data or "report" not in recipe.stages else recipe.eval_tokens
    stream = token_stream(read_documents(recipe.data), tokenizer, needed + held, progress=True)
    if len(stream) < needed + held:
        held = min(held, len(stream) // 2)  # of a short text, half is for training
    training, held_out = stream[held:], stream[:held]
    if recipe.eval_data and "report" in recipe.stages:
        held_out = token_stream(read_documents(recipe.eval_data), tokenizer, recipe.eval_tokens, progress=True)
    least = 2 * recipe.window + recipe.latents
    if len(training) < least:
        raise ValueError(f"{recipe.data} is too short: {len(training)} tokens are for training, {least} are needed.")
    if "report" in recipe.stages:  # now, and not after the training
        _spans(AutoConfig.from_pretrained(origin), len(held_out), recipe.lengths, recipe.distances, recipe.window)
    return training, held_out


def _load(directory: Path, device: torch.device, dtype: str = "auto") -> PreTrainedModel:
    if dtype == "auto":  # bfloat16 swallows small updates; larger models have to live with that
        small = sum(path.stat().st_size for path in directory.glob("*.safetensors")) < FLOAT32_LIMIT
        dtype = "float32" if small or device.type == "cpu" else "auto"
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(info[kind]):
            raise CheckpointError(f"{directory} has {kind.replace('_', ' ')}: {names[:3]}; convert again.")
    return model.to(device).eval()


def _fit(stage: str, recipe: Recipe, model: PreTrainedModel, stream: torch.Tensor, work: WorkDirectory) -> dict:
    """One stage that changes the new weights; they are saved, and the model goes on with what was stored."""
    notes = {}
    transformers.set_seed(recipe.seed)
    if stage == "calibrate" and recipe.init == "data":
        length = min(recipe.calibrate.length, model.config.max_position_embeddings)
        calibrate(model, stream[: recipe.calibrate.tokens], length=length, seed=recipe.seed)
    elif stage in TRAINED:
        run = align if stage == "align" else distil
        notes = run(model, stream, getattr(recipe, stage), work.scratch(stage), seed=recipe.seed, resume=recipe.resume)
    save_new_weights(work.checkpoint, model.new_parameters())
    model.load_state_dict(load_file(work.checkpoint / NEW_WEIGHTS), strict=False)
    return notes


def _report(work: WorkDirectory, recipe: Recipe, model: PreTrainedModel, stream: torch.Tensor) -> dict:
    spans = _spans(model.config, len(stream), recipe.lengths, recipe.distances)
    values = measure(model, build_teacher(model), stream, *spans, seed=recipe.seed)
    values |= {
        "base": read_base(work.checkpoint)["base"],
        "base_weights_identical": base_weights_identical(work.checkpoint),
        "trained_tokens": sum(notes.get("tokens", 0) for notes in work.finished.values()),
        "training": work.finished,
        "seconds": sum(notes["seconds"] for notes in work.finished.values()),
        "seed": recipe.seed,
        "recipe": recipe.to_dict(),
    }
    _write_report(values, work.checkpoint, work.output)
    return values


def _write_report(values: dict, folder: Path, checkpoint: Path) -> None:
    write_report(values, folder)
    (folder / "README.md").write_text(model_card(values, str(checkpoint)), encoding="utf-8")


def _spans(
    config: PreTrainedConfig, tokens: int, lengths: list[int] | None, distances: list[int] | None, window: int = 0
) -> tuple[list[int], list[int]]:
    """Lengths and distances to evaluate at on a text of so many tokens: those asked for, or what fits."""
    trained = min(config.max_position_embeddings, LONGEST)
    if lengths is None:
        every = [trained // 2, trained, 2 * trained, 4 * trained, 8 * trained]
        lengths = [length for length in every if length <= tokens] or every[:1]
    longest = max([*lengths, *(distance + SPAN for distance in distances or [])])
    if longest > tokens:
        raise ValueError(
            f"the text is too short: the report has {tokens} tokens and needs {longest}; give more text, or ask for "
            "shorter lengths and distances."
        )
    if distances is None:
        distance, distances = 2 * (window or config.linattn_window), []
        while distance <= min(trained, tokens) - SPAN:
            distances.append(distance)
            distance *= 2
    return lengths, distances
