# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The command line: each command on a tiny checkpoint, bad input, and interruptions in each stage."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from hf_linattn.cli import main
from hf_linattn.conversion import convert
from hf_linattn.conversion.recipe import STAGES, Recipe
from hf_linattn.conversion.write import NEW_WEIGHTS

SETTINGS = {
    "device": "cpu",  # bit for bit
    "window": 8,
    "sinks": 2,
    "latents": 4,
    "lengths": [32, 64],
    "distances": [40],
    "eval_tokens": 512,
    "calibrate": {"tokens": 256, "length": 64},
    "align": {"steps": 2, "batch": 2, "length": 32},
    "distil": {"steps": 2, "batch": 2, "length": 32},
}


def write_text(folder: Path) -> Path:
    words = random.Random(0).choices("the cat sat on a mat and ran to see its old friend by the sea".split(), k=600)
    (folder / "text.txt").write_text(" ".join(words))
    return folder / "text.txt"


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path)


@pytest.fixture
def recipe(tmp_path, text):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(SETTINGS | {"data": str(text)}))
    return tmp_path / "recipe.yaml"


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def run(*arguments) -> int:
    return main([str(argument) for argument in arguments])


def test_whole_life_of_a_conversion(tiny_checkpoint, tmp_path, text, recipe, capsys):
    source, output = tiny_checkpoint(), tmp_path / "output"
    before = files_of(source)

    assert run("plan", source, "--recipe", recipe, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["layers"] == {"converted": [0, 1], "left": []} and not output.exists()
    assert plan["tokens"] == {"calibrate": 256, "align": 128, "distil": 128}
    assert set(plan["state_bytes"]) == {"1024", "8192", "65536"}

    assert run("convert", source, "--recipe", recipe, "--output", output, "--json") == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    for name in ("teacher", "converted", "window_only", "linear_only"):
        assert report[name]["perplexity"].keys() == {"32", "64"} and report[name]["recall"].keys() == {"40"}
    assert report["converted"]["kl_to_teacher"].keys() == {"32", "64"}
    assert report["base_weights_identical"] is True and report["trained_tokens"] == 256
    assert report["new_parameters"] == plan["new_parameters"] and report["seconds"] > 0
    assert report["state_bytes"].keys() >= plan["state_bytes"].keys()
    assert report["recipe"]["window"] == 8 and report["seed"] == 0 and report["versions"]["torch"]
    assert files_of(source) == before
    assert {"report.json", "perplexity.png", "README.md", "recipe.yaml", "tokenizer.json"} <= files_of(output).keys()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["output", "recipe.yaml", "text.txt"]
    assert Recipe.from_file(output / "recipe.yaml").to_dict() == report["recipe"]

    evaluated = tmp_path / "report"
    arguments = ("--teacher", source, "--data", text, "--lengths", "32,64", "--tokens", 512, "--distances", 40)
    assert run("evaluate", output, *arguments, "--report", evaluated, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    for name in ("teacher", "converted"):
        assert again[name]["perplexity"] == pytest.approx(report[name]["perplexity"], rel=1e-5)
    assert {"report.json", "README.md"} <= files_of(evaluated).keys()

    assert run("train", output, "--data", text, "--output", tmp_path / "trained") == 0
    assert "written to" in capsys.readouterr().out
    old, new = (AutoModelForCausalLM.from_pretrained(p).new_parameters() for p in (output, tmp_path / "trained"))
    assert old.keys() == new.keys() and any((old[name] != new[name]).any() for name in old)

    assert run("revert", tmp_path / "trained", "--output", tmp_path / "back") == 0
    assert files_of(tmp_path / "back") == before


def test_stages_can_be_picked_and_tokens_budgeted(tiny_checkpoint, tmp_path, recipe, capsys):
    output = tmp_path / "output"
    assert run("convert", tiny_checkpoint(), "--output", output, "--stages", "write", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["stages"] == ["write"] and "converted" not in report
    AutoModelForCausalLM.from_pretrained(output)

    arguments = ("--recipe", recipe, "--output", output, "--stages", "align,write", "--tokens", 320, "--overwrite")
    assert run("convert", tiny_checkpoint(), *arguments) == 0
    saved = Recipe.from_file(output / "recipe.yaml")
    assert saved.stages == ["write", "align"] and (saved.align.steps, saved.distil.steps) == (5, 2)


BAD = {
    "no source": (["plan"], "no source"),
    "absent source": (["plan", "{tmp}/absent"], "does not exist"),
    "absent recipe": (["plan", "{source}", "--recipe", "{tmp}/absent.yaml"], "absent.yaml does not exist"),
    "no output": (["convert", "{source}", "--data", "{text}"], "--output DIR"),
    "no data": (["convert", "{source}", "--output", "{tmp}/o"], "need text"),
    "absent data": (["convert", "{source}", "--output", "{tmp}/o", "--data", "{tmp}/absent.txt"], "does not exist"),
    "empty data": (["convert", "{source}", "--output", "{tmp}/o", "--data", "{tmp}/empty.txt"], "empty"),
    "short data": (["convert", "{source}", "--output", "{tmp}/o", "--data", "{tmp}/short.txt"], "too short"),
    "latin data": (["convert", "{source}", "--output", "{tmp}/o", "--data", "{tmp}/latin.txt"], "not UTF-8"),
    "long rows": (
        ["convert", "{source}", "--output", "{tmp}/o", "--data", "{text}", "--lengths", "99999"],
        "shorter lengths",
    ),
    "output is source": (
        ["convert", "{source}", "--output", "{source}", "--data", "{text}", "--overwrite"],
        "overlap",
    ),
    "output exists": (["convert", "{source}", "--output", "{tmp}", "--data", "{text}"], "exists"),
    "window": (["plan", "{source}", "--window", "0"], "window is 0; it must be at least 1"),
    "gate": (["plan", "{source}", "--gate", "max"], "gate is 'max'; choose one of lse, learned"),
    "layers": (["plan", "{source}", "--layers", "0,7"], "layers names layer 7"),
    "stage": (["plan", "{source}", "--stages", "write,fly"], "choose some of write, calibrate"),
    "device": (["plan", "{source}", "--device", "cuda:99"], "device 'cuda:99' cannot be used"),
    "not converted": (["revert", "{source}", "--output", "{tmp}/o"], "no linattn_base.json"),
    "evaluate source": (["evaluate", "{source}", "--data", "{text}"], "no linattn_base.json"),
    "push source": (["push", "{source}", "user/name"], "not converted"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_told_in_one_line(tiny_checkpoint, tmp_path, text, capsys, arguments, message):
    source = tiny_checkpoint()
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("too short a text")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9 ".encode("latin-1") * 100)
    before = files_of(source), files_of(tmp_path)
    places = {"source": source, "tmp": tmp_path, "text": text}
    assert run(*(argument.format(**places) for argument in arguments)) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.replace("\r", "\n").split("\n") if line.startswith("error: ")]
    assert len(lines) == 1 and message in lines[0] and captured.out == "" and "Traceback" not in captured.err
    assert (files_of(source), files_of(tmp_path)) == before
    assert not (tmp_path / "o").exists() and not (tmp_path / ".o.partial").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("windows: 3", "unknown recipe entry windows"),
        ("align: {step: 3}", "unknown recipe entry align.step"),
        ("window: many", "window is 'many'; it must be of type int"),
        ("window: true", "window is True; it must be of type int"),
        ("align: {learning_rate: fast}", "align.learning_rate is 'fast'; give a number"),
        ("align: {window_dropout: 2}", "align.window_dropout is 2.0; it must be between 0.0 and 1.0"),
        ("lengths: 512", "lengths is 512"),
        ("lengths: []", "name at least one length"),
        ("- window", "no `name: value` lines"),
        ("window: [", "not valid YAML"),
    ],
)
def test_bad_recipe_is_told(tiny_checkpoint, tmp_path, capsys, content, message):
    (tmp_path / "recipe.yaml").write_text(content)
    assert run("plan", tiny_checkpoint(), "--recipe", tmp_path / "recipe.yaml") == 2
    assert message in capsys.readouterr().err


def test_recipe_reads_numbers_as_people_write_them(tmp_path):
    (tmp_path / "recipe.yaml").write_text("source: a\noutput: b\ndata: c\nalign: {learning_rate: 1e-3}\n")
    recipe = Recipe.from_file(tmp_path / "recipe.yaml", output="d")
    assert recipe.align.learning_rate == 1e-3 and recipe.output == "d"
    recipe.to_file(tmp_path / "again.yaml")
    assert Recipe.from_file(tmp_path / "again.yaml") == recipe
    assert recipe.key() == Recipe.from_file(tmp_path / "again.yaml", output="e", resume=True).key()
    assert recipe.key() != Recipe.from_file(tmp_path / "again.yaml", seed=1).key()


def test_usage_errors_and_help(capsys):
    for arguments, code in ((["--help"], 0), (["fly"], 2), (["push", "here"], 2), (["evaluate", "d"], 2)):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == code
    assert "convert" in capsys.readouterr().out


def test_unexpected_errors_show_a_traceback_only_on_request(tiny_checkpoint, monkeypatch, capsys):
    def broken(*arguments, **options):
        raise RuntimeError("something\nbroke")

    monkeypatch.setattr("hf_linattn.conversion.plan", broken)
    source = tiny_checkpoint()
    capsys.readouterr()
    assert run("plan", source) == 1
    assert capsys.readouterr().err == "error: RuntimeError: something broke\n"
    assert run("plan", source, "--debug") == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.fixture(scope="module")
def uninterrupted(tiny_checkpoint, tmp_path_factory):
    """The new weights of a conversion that nothing stopped."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    convert(tiny_checkpoint(), folder / "output", write_text(folder), **SETTINGS)
    return (folder / "output" / NEW_WEIGHTS).read_bytes()


# Stops in the middle of a stage: after the second file in `write`, before the weights of a stage are saved, and
# inside training after a checkpoint was saved.
STOP = """
import os, signal, sys
stage, number, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
import hf_linattn.conversion
write, convert, train = (sys.modules[f"hf_linattn.conversion.{name}"] for name in ("write", "convert", "train"))

def stop_in(module, name, wanted, after=False):
    real, calls = getattr(module, name), []
    def stopping(*args, **kwargs):
        calls.append(0)
        if len(calls) == wanted and not after:
            os.kill(os.getpid(), number)
        result = real(*args, **kwargs)
        if len(calls) == wanted and after:
            os.kill(os.getpid(), number)
        return result
    setattr(module, name, stopping)

if stage == "write":
    stop_in(write, "_copy", 2)
elif stage == "report":
    stop_in(convert, "write_report", 1, after=True)
elif stage == "calibrate":
    stop_in(convert, "calibrate", 1, after=True)
else:
    trainer = train.AlignTrainer if stage == "align" else train.DistilTrainer
    stop_in(trainer, "compute_loss", 2)

from hf_linattn.cli import main
sys.exit(main(arguments))
"""


@pytest.mark.parametrize(
    ("stage", "number"),
    [(stage, signal.SIGKILL) for stage in STAGES] + [(stage, signal.SIGINT) for stage in ("write", "distil")],
)
def test_stopped_conversion_goes_on(tiny_checkpoint, tmp_path, recipe, uninterrupted, stage, number, capsys):
    source, output = tiny_checkpoint(), tmp_path / "output"
    before = files_of(source)
    arguments = ["convert", str(source), "--recipe", str(recipe), "--output", str(output)]
    command = [sys.executable, "-c", STOP, stage, str(int(number)), *arguments]
    root = str(Path(__file__).resolve().parent.parent)
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), done.stderr
    assert not output.exists() and files_of(source) == before
    if number == signal.SIGINT:
        assert "error: interrupted" in done.stderr and "Traceback" not in done.stderr
        assert ("--resume" in done.stderr) == (stage != "write")
    if number == signal.SIGKILL or stage != "write":
        assert run(*arguments) == 2
        assert "continue it with --resume, or start over with --overwrite" in capsys.readouterr().err
    assert run(*arguments, "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out)["base_weights_identical"] is True
    assert not (tmp_path / ".output.partial").exists()

    assert (output / NEW_WEIGHTS).read_bytes() == uninterrupted
