# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The example that trains GLA or Latte from scratch: it learns, and what it saves loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linattn import GLAForCausalLM, LatteForCausalLM


def run(repo_root: Path, *arguments: str) -> subprocess.CompletedProcess:
    paths = os.pathsep.join(filter(None, [str(repo_root), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(repo_root / "examples" / "train_from_scratch.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})


@pytest.mark.parametrize(
    ("options", "head"),
    [
        (["--architecture", "gla"], GLAForCausalLM),
        (["--architecture", "latte"], LatteForCausalLM),
        (["--architecture", "latte", "--variant", "Latte"], LatteForCausalLM),
    ],
    ids=["gla", "latte macchiato", "latte"],
)
def test_training_from_scratch(options: list[str], head: type, repo_root: Path, tmp_path: Path):
    for i in range(2):
        lines = [f"{a} plus {b} is {a + b}, said the master of sums.\n" for a in range(30) for b in range(i, 30, 2)]
        (tmp_path / f"{i}.txt").write_text("".join(lines), encoding="utf-8")
    shape = "--vocab 300 --hidden 32 --layers 1 --heads 2 --length 32 --steps 30 --lr 1e-2".split()
    data = [*options, "--data", *(str(tmp_path / f"{i}.txt") for i in range(2))]
    result = run(repo_root, *data, "--output", str(tmp_path / "out"), *shape)
    assert result.returncode == 0, result.stderr
    report = next(json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"perplexity_before'))
    assert 200 < report["perplexity_before"] < 400  # near uniform over 300 tokens
    assert report["perplexity"] < 50
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model) is head
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("1 plus 2").input_ids[0] == tokenizer.bos_token_id == model.config.bos_token_id

    again = run(repo_root, *data, "--output", str(tmp_path / "out"), *shape)
    assert again.returncode == 2
    assert "exists: name a new folder" in again.stderr
