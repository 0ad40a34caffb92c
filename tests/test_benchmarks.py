# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The benchmark program in its reduced form, which needs no GPU."""

import importlib.util
import json

import pytest
import torch


@pytest.fixture
def program(repo_root):
    spec = importlib.util.spec_from_file_location("benchmark", repo_root / "benchmarks/gated_linear_attention.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reduced_form(program, tmp_path, capsys):
    folder = tmp_path / "first"
    arguments = ["--device", "cpu", "--quick", "--layouts", "16x128"]
    assert program.main([*arguments, "--output", str(folder)]) == 0
    content = json.loads((folder / "gated_linear_attention.json").read_text())
    rows = [row for row in content["rows"] if row["operator"] == "ours"]
    assert {row["section"] for row in rows} == set(program.SECTIONS)
    for row in rows:
        figures = [row[name] for name in program.FIGURES[row["section"]] if row["section"] != "memory"]
        assert all(figure > 0 for figure in figures)
        assert row["section"] != "accuracy" or max(figures) < 1e-2
    assert content["environments"].keys() == {row["date"] for row in rows}
    assert "| 16x128 | logsigmoid/16 |" in capsys.readouterr().out

    again = tmp_path / "again"
    assert program.main(["--plot", str(folder / "gated_linear_attention.json"), "--output", str(again)]) == 0
    assert json.loads((again / "gated_linear_attention.json").read_text()) == content
    for path in (folder, again):
        assert (path / "gated_linear_attention.png").read_bytes().startswith(b"\x89PNG")


def test_failure_of_ours_is_kept_and_reported(program, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(program, "gated_linear_attention", fail)
    arguments = ["--device", "cpu", "--quick", "--layouts", "16x128", "--only", "memory", "--output", str(tmp_path)]
    assert program.main(arguments) == 1
    rows = json.loads((tmp_path / "gated_linear_attention.json").read_text())["rows"]
    assert [row["error"] for row in rows if row["operator"] == "ours"] == ["RuntimeError: no such kernel"] * 2
    assert not any("error" in row for row in rows if row["operator"] == "sdpa")


def test_without_a_gpu_the_remedy_is_named(program, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        program.main(["--output", str(tmp_path)])
    assert "--device cpu" in capsys.readouterr().err


def test_byte_floors(program):
    """papers: GLA, section 9.2: 2 x 16384 tokens, 16 heads of 128, at 4.8 TB/s."""
    floors = program.byte_floors(128, 128)
    milliseconds = {name: 1e3 * size * 2 * 16384 * 16 / 4.8e12 for name, size in floors.items()}
    expected = dict(forward_over_compulsory=0.14, forward_over_two_pass=0.34)
    expected |= dict(both_over_compulsory=0.39, both_over_two_pass=0.98)
    assert milliseconds == pytest.approx(expected, abs=5e-3)
