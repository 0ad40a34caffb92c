# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The demo, with few steps and short texts."""

import importlib
import json

from hf_linattn.cli import main

demo = importlib.import_module("hf_linattn.conversion.demo")
SHORT = {
    "calibrate": {"tokens": 1024},
    "align": {"steps": 2, "batch": 1, "length": 128},
    "distil": {"steps": 1, "batch": 1, "length": 128},
    "eval_tokens": 1024,
    "lengths": [256, 512],
    "distances": [256],
}


def test_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "RECIPE", SHORT)
    output = tmp_path / "demo"
    assert main(["demo", "--output", str(output), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "class Stack" in shown and str(output) in shown
    report = json.loads((output / "report.json").read_text())
    assert report["base_weights_identical"] is True
    for row in ("teacher", "converted", "window_only", "linear_only"):
        assert set(report[row]["perplexity"]) == {"256", "512"}
        assert "256" in report[row]["recall"]
    assert report["teacher"]["perplexity"]["512"] < 20 and list(output.glob("*.png"))
    assert main(["demo", "--output", str(output)]) == 2  # nothing is overwritten silently
    assert main(["demo", "--output", str(output), "--overwrite", "--json"]) == 0
    assert "converted" in json.loads(capsys.readouterr().out)["continuation"]


def test_held_out_files_are_not_trained_on():
    training, evaluation = demo._library_text({"csv.py", "cmd.py"})
    assert len(evaluation) == 2 and not set(training) & set(evaluation)
