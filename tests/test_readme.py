# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Every command of the README does what it says."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from hf_linattn import GLAConfig, GLAForCausalLM
from hf_linattn.cli import _parser, main
from hf_linattn.models.gla import import_fla

SMALL = {
    "convert": ["--tokens", "2000", "--lengths", "64,128", "--latents", "8", "--window", "16"],
    "train": ["--tokens", "2000", "--lengths", "64,128"],
    "plan": [],
    "evaluate": [],
    "revert": [],
}
PROGRAMS = ("gated_linear_attention", "latent_attention", "converted_layer", "generation", "latte_language_modelling")
SMALL_PROGRAMS = {
    "examples/train_from_scratch.py": "--vocab 300 --hidden 32 --layers 1 --heads 2 --length 32 --steps 2".split(),
    "benchmarks/gated_linear_attention.py": "--device cpu --quick --layouts 16x128 --only speed".split(),
    "benchmarks/latent_attention.py": "--device cpu --quick --layouts 16x128 --only operators".split(),
    "benchmarks/converted_layer.py": "--device cpu --quick --layouts llama-3.2-1b --only layer".split(),
    "benchmarks/generation.py": "--device cpu --quick --layouts llama-3.2-1b".split(),
    "benchmarks/latte_language_modelling.py": (
        "--models Latte Transformer++ --seeds 0 --hidden 32 --layers 1 --heads 2 --length 32 --batch 2 --steps 2"
    ).split(),
}


def blocks(repo_root, language):
    return re.findall(rf"```{language}\n(.*?)```", (repo_root / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def save_fla(folder):
    """A tiny checkpoint as flash-linear-attention would write it."""
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, intermediate_size=64)
    model = GLAForCausalLM(GLAConfig(**sizes, tie_word_embeddings=False))
    theirs = {ours: name for name, ours in import_fla.OUTER.items()}
    theirs |= {f"model.layers.0.{ours}": f"model.layers.0.{name}" for name, ours in import_fla.INNER.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(model_type="gla", num_heads=4) | sizes))
    save_file({theirs[name]: tensor for name, tensor in model.state_dict().items()}, folder / "model.safetensors")


@pytest.fixture
def user_folder(tiny_checkpoint, tmp_path, monkeypatch, repo_root):
    """A folder with what the README assumes: checkpoints, a text, and the repository's programs."""
    shutil.copytree(tiny_checkpoint(), tmp_path / "my-llama")
    save_fla(tmp_path / "their-gla")
    prose = (repo_root / "LICENSE").read_text(encoding="utf-8")
    (tmp_path / "text.txt").write_text(prose * 8, encoding="utf-8")
    for name in ("examples", "benchmarks"):
        shutil.copytree(repo_root / name, tmp_path / name, ignore=shutil.ignore_patterns("data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines_with(repo_root, program):
    lines = [line for block in blocks(repo_root, "sh") for line in block.splitlines()]
    assert all(line.startswith(("hf-linattn ", "python ", "make ")) for line in lines)
    return [line for line in lines if line.startswith(program)]


def run_programs(repo_root):
    """The lines that start a program of the repository, with smaller numbers."""
    path = os.pathsep.join(filter(None, [str(repo_root), os.environ.get("PYTHONPATH")]))
    programs = [shlex.split(line, comments=True)[1:] for line in lines_with(repo_root, "python")]
    assert {words[0] for words in programs} == SMALL_PROGRAMS.keys()
    for words in programs:
        command = [sys.executable, *words, *SMALL_PROGRAMS[words[0]]]
        result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
        assert result.returncode == 0, (words, result.stderr)


def test_shell_commands_run(repo_root, user_folder, capsys):
    lines = lines_with(repo_root, "hf-linattn")
    run = 0
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        _parser().parse_args(words)
        if words[0] in SMALL:
            assert main(words + SMALL[words[0]]) == 0, (line, capsys.readouterr().err)
            run += 1
    assert run >= 5 and {line.split()[1] for line in lines} >= {*SMALL, "push", "demo"}


def test_programs_and_python_blocks_run(repo_root, user_folder):
    run_programs(repo_root)
    torch.manual_seed(0)
    scope = {}
    code = blocks(repo_root, "python")
    assert code
    for block in code:
        # The same calls on fewer tokens.
        exec(
            block.replace('output="converted"', 'output="converted", tokens=2000, lengths=[64, 128], latents=8'), scope
        )
    assert (user_folder / "converted" / "report.json").is_file()
    assert (user_folder / "imported-gla" / "model.safetensors").is_file()
    for name in PROGRAMS:
        assert (user_folder / "benchmarks" / "data" / f"{name}.json").is_file()


def test_make_targets_exist(repo_root):
    targets = re.findall(r"^(\w+):", (repo_root / "Makefile").read_text(), re.MULTILINE)
    named = [line.split()[1] for line in lines_with(repo_root, "make")]
    assert {"demo", "test"} <= set(named) <= set(targets)


def test_recipes_are_valid(repo_root):
    from hf_linattn.conversion.recipe import Recipe

    for path in sorted((repo_root / "examples" / "recipes").glob("*.yaml")):
        Recipe.from_file(path, source="s", output="o", data="d")
