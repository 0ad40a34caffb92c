# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Every command of the README does what it says."""

import re
import shlex
import shutil

import pytest
import torch

from hf_linattn.cli import _parser, main

SMALL = {
    "convert": ["--tokens", "2000", "--lengths", "64,128", "--latents", "8", "--window", "16"],
    "train": ["--tokens", "2000", "--lengths", "64,128"],
    "plan": [],
    "evaluate": [],
    "revert": [],
}


def blocks(repo_root, language):
    return re.findall(rf"```{language}\n(.*?)```", (repo_root / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def user_folder(tiny_checkpoint, tmp_path, monkeypatch, repo_root):
    """A folder with what the README assumes: a checkpoint and a text."""
    shutil.copytree(tiny_checkpoint(), tmp_path / "my-llama")
    prose = (repo_root / "LICENSE").read_text(encoding="utf-8")
    (tmp_path / "text.txt").write_text(prose * 8, encoding="utf-8")
    shutil.copytree(repo_root / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_shell_commands_run(repo_root, user_folder, capsys):
    lines = [line for block in blocks(repo_root, "sh") for line in block.splitlines() if line.startswith("hf-linattn")]
    run = 0
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        _parser().parse_args(words)
        if words[0] in SMALL:
            assert main(words + SMALL[words[0]]) == 0, (line, capsys.readouterr().err)
            run += 1
    assert run >= 5 and {line.split()[1] for line in lines} >= {*SMALL, "push", "demo"}


def test_python_blocks_run(repo_root, user_folder):
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


def test_make_targets_exist(repo_root):
    targets = re.findall(r"^(\w+):", (repo_root / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"^make (\w+)", "\n".join(blocks(repo_root, "sh")), re.MULTILINE)
    assert {"demo", "test"} <= set(named) <= set(targets)


def test_recipes_are_valid(repo_root):
    from hf_linattn.conversion.recipe import Recipe

    for path in sorted((repo_root / "examples" / "recipes").glob("*.yaml")):
        Recipe.from_file(path, source="s", output="o", data="d")
