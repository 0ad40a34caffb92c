# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The main job on what every machine has: the small teacher inside the package, and Python's own source code."""

import json
import sysconfig
import tempfile
from importlib.resources import as_file, files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linattn.models.retrofit.modeling_retrofit import build_teacher

from .convert import convert

NOT_LIBRARY = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
TRAINING_BYTES = 2_000_000
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
RECIPE = {
    "calibrate": {"tokens": 16_384},
    "align": {"steps": 20, "batch": 4, "length": 512, "learning_rate": 3e-2},
    "distil": {"steps": 60, "batch": 4, "length": 512, "learning_rate": 3e-2},
    "eval_tokens": 8192,
    "distances": [128, 256, 512, 900],
}


def demo(output: str | Path = "demo-output", overwrite: bool = False, seed: int = 0, device: str = "auto") -> dict:
    """Convert the teacher inside the package, train the new weights, report, and continue a text with both models.

    Needs no network, no GPU and no data beyond Python's standard library.

    Args:
        output: the folder to make; it holds the converted checkpoint, `report.json`, plots and a card.
        overwrite: replace an earlier output.
        seed: of everything random.
        device: "cpu", "cuda", or "auto".

    Returns:
        The report, with `continuation` of both models.
    """
    with as_file(files("hf_linattn") / "assets" / "code_teacher") as teacher, tempfile.TemporaryDirectory() as scratch:
        held_out = set(json.loads((teacher / "training_report.json").read_text())["held_out_files"])
        training, evaluation = _library_text(held_out)
        texts = {}
        for name, documents in (("training", training), ("evaluation", evaluation)):
            texts[name] = Path(scratch, f"{name}.jsonl")
            texts[name].write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
        report = convert(
            teacher,
            output,
            texts["training"],
            eval_data=str(texts["evaluation"]),
            overwrite=overwrite,
            seed=seed,
            device=device,
            **RECIPE,
        )
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(output)
    prompt = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)
    report["continuation"] = {"prompt": PROMPT}
    for name, which in (("teacher", build_teacher(model)), ("converted", model)):
        out = which.generate(**prompt, max_new_tokens=48, do_sample=False)
        report["continuation"][name] = tokenizer.decode(
            out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return report


def _library_text(held_out: set[str]) -> tuple[list[str], list[str]]:
    """Source files of the standard library to train on, and those that the teacher never saw."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in sorted(root.rglob("*.py")) if not NOT_LIBRARY & set(p.relative_to(root).parts)]
    training, evaluation, size = [], [], 0
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.relative_to(root).as_posix() in held_out:
            evaluation.append(text)
        elif size < TRAINING_BYTES:
            training.append(text)
            size += len(text)
    return training, evaluation
