# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The benchmark programs in their reduced form, which needs no GPU."""

import importlib.util
import itertools
import json

import pytest
import torch


def load(folder, name):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder_of_programs(repo_root, monkeypatch):
    monkeypatch.syspath_prepend(repo_root / "benchmarks")  # where a program that is run finds what all share
    return repo_root / "benchmarks"


@pytest.fixture
def program(folder_of_programs):
    return load(folder_of_programs, "gated_linear_attention")


@pytest.fixture
def latent_program(folder_of_programs):
    return load(folder_of_programs, "latent_attention")


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


def test_joined_results_keep_the_newest_rows(program, tmp_path):
    def result(name, date, cases):
        rows = [
            dict(section="decode", layout="16x128", case=case, operator="ours", date=date, step_us=us)
            for case, us in cases
        ]
        path = tmp_path / name
        path.write_text(json.dumps({"environments": {date: {"date": date}}, "rows": rows}))
        return path

    new = result("new.json", "2026-02-01T00:00:00+00:00", [(1, 2.0)])
    old = result("old.json", "2026-01-01T00:00:00+00:00", [(1, 9.0), (4, 3.0)])
    for files in ((new, old), (old, new)):
        record = program.common.Record(tmp_path / "out" / "x.json", program.FIGURES, program.COLOURS, files)
        assert {row["case"]: row["step_us"] for row in record.rows.values()} == {1: 2.0, 4: 3.0}


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


def test_reduced_form_of_latent_attention(latent_program, tmp_path, capsys):
    program, folder = latent_program, tmp_path / "first"
    arguments = ["--device", "cpu", "--quick", "--layouts", "gemma-2-2b"]
    assert program.main([*arguments, "--output", str(folder)]) == 0
    content = json.loads((folder / "latent_attention.json").read_text())
    rows = content["rows"]
    assert {row["section"] for row in rows} == set(program.SECTIONS) - {"flex"}
    attention = {"latent", "macchiato", "two calls", "window", "sdpa"}
    assert {row["operator"] for row in rows if row["section"] == "operators"} == attention
    for row in rows:
        without_floor = row["operator"] == "sdpa"
        names = [x for x in program.FIGURES[row["section"]] if not (without_floor and x.endswith("three_phase"))]
        assert all(row[name] > 0 for name in names if name != "both_mib")  # of a GPU's memory
    assert "| gemma-2-2b | 32 |" in capsys.readouterr().out

    again = tmp_path / "again"
    assert program.main(["--plot", str(folder / "latent_attention.json"), "--output", str(again)]) == 0
    assert json.loads((again / "latent_attention.json").read_text()) == content
    for path in (folder, again):
        assert (path / "latent_attention.png").read_bytes().startswith(b"\x89PNG")


def test_only_failures_of_ours_count(latent_program, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no such kernel")

    arguments = ["--device", "cpu", "--quick", "--layouts", "16x128", "--output", str(tmp_path)]
    monkeypatch.setattr(latent_program, "find_flex", fail)
    assert latent_program.main([*arguments, "--only", "flex"]) == 0
    monkeypatch.setattr(latent_program, "rg_lru", fail)
    assert latent_program.main([*arguments, "--only", "scans"]) == 1
    rows = json.loads((tmp_path / "latent_attention.json").read_text())["rows"]
    assert {row["operator"] for row in rows if "error" in row} == {"flex", "rg_lru"}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("layout", ["16x128", "gemma-2-2b"])
def test_compared_operators_do_the_same(latent_program, layout):
    inputs = latent_program.make_inputs(2, 48, latent_program.TINY[layout], "cpu")
    inputs = {name: x.float() for name, x in inputs.items()}

    def run(name, operator):
        return operator(*(inputs[x] for x in latent_program.INPUTS[name]))[0]

    short, long = (latent_program.find_operators("torch", window=window) for window in (20, 48))
    window = run("window", short["window"])
    torch.testing.assert_close(run("flex", latent_program.find_flex(48, "cpu", window=20)), window)
    shares = torch.cat([inputs["gate"][..., None], inputs["q"]], -1).softmax(-1)[..., :1]
    latents = (run("macchiato", short["macchiato"]) - shares * window) / (1 - shares)
    torch.testing.assert_close(latents, run("latent", short["latent"]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run("sdpa", long["sdpa"]), run("window", long["window"]))
    assert not torch.allclose(window, run("window", long["window"]))


@pytest.mark.parametrize(
    ("layout", "inputs_and_outputs", "states", "window"),
    [("gemma-2-2b", 185, 172, 201), ("llama-3.2-1b", 219, 170, 168)],
)
def test_three_phase_floor(latent_program, layout, inputs_and_outputs, states, window):
    """papers: Latte, section 10.3: megabytes of 16384 tokens."""
    heads, kv_heads, dim = latent_program.LAYOUTS[layout]
    found = {
        name: latent_program.three_phase_bytes(name, (heads, kv_heads, dim)) * 16384 / 1e6
        for name in ("latent", "window", "macchiato", "two calls")
    }
    assert found["window"] == pytest.approx(window, abs=0.5)
    gated = found["two calls"] - found["window"]
    assert gated == pytest.approx(inputs_and_outputs + states, abs=1)
    assert found["latent"] == pytest.approx(gated - 2 * heads * (dim + 1) * 16384 / 1e6)
    assert found["macchiato"] == pytest.approx(found["two calls"] - 2 * 2 * heads * dim * 16384 / 1e6)


@pytest.mark.parametrize("layout", ["llama-3.2-1b", "gemma-2-2b"])
def test_reduced_form_of_converted_layers(layout, folder_of_programs, tmp_path, capsys):
    program = load(folder_of_programs, "converted_layer")
    assert program.main(["--device", "cpu", "--quick", "--layouts", layout, "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "converted_layer.json").read_text())["rows"]
    assert {(row["section"], row["operator"]) for row in rows} == {
        (section, operator)
        for section in program.FIGURES
        for operator in program.COLOURS
        if section != "first-call" or operator == "converted"
    }
    for row in rows:
        assert all(row[name] > 0 for name in program.FIGURES[row["section"]] if name != "both_mib")
    assert f"| {layout} | 128 |" in capsys.readouterr().out
    assert (tmp_path / "converted_layer.png").read_bytes().startswith(b"\x89PNG")


def test_reduced_form_of_generation(folder_of_programs, tmp_path, capsys):
    program = load(folder_of_programs, "generation")
    assert program.main(["--device", "cpu", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "generation.json").read_text())["rows"]
    assert {(r["layout"], r["case"], r["operator"]) for r in rows} == set(
        itertools.product(program.LAYOUTS, (64, 100), program.COLOURS)
    )
    assert all(row[name] > 0 for row in rows for name in program.FIGURES["generation"])
    held = {(r["case"], r["operator"]): r["state_mib"] for r in rows if r["layout"] == "llama-3.2-1b"}
    assert held[64, "converted"] == held[100, "converted"] and held[64, "teacher"] < held[100, "teacher"]
    assert "| llama-3.2-1b | 100 |" in capsys.readouterr().out
    assert (tmp_path / "generation.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("program", ["converted_layer", "generation"])
def test_models_take_no_backend(program, folder_of_programs, tmp_path, capsys):
    program = load(folder_of_programs, program)
    with pytest.raises(SystemExit):
        program.main(["--device", "cpu", "--backend", "triton", "--output", str(tmp_path)])
    assert "--backend triton is not for this program" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["llama-3.2-1b", "gemma-2-2b"])
def test_layers_that_are_measured_attend_causally(layout, folder_of_programs):
    program = load(folder_of_programs, "converted_layer")
    for converted in (True, False):
        layer = program.Layer(layout, converted, "cpu")
        hidden = torch.randn(2, 100, layer.width).bfloat16()
        changed = hidden.clone()
        changed[:, 60:] += 1
        with torch.no_grad():
            before, after = (layer.prepare(100)(x)[:, :60] for x in (hidden, changed))
        assert torch.equal(before, after) and before.any()
        assert bool(layer.trained) == converted


def test_language_models_of_bytes_from_two_runs(folder_of_programs, tmp_path, capsys):
    program = load(folder_of_programs, "latte_language_modelling")
    text = tmp_path / "text.txt"
    text.write_text("Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. " * 40)
    size = "--hidden 32 --layers 1 --heads 2 --length 32 --batch 2 --steps 2".split()
    data = ["--data", str(text), "--eval-data", str(text), "--tokenizer", "bytes"]
    one = tmp_path / "one"
    assert program.main([*data, *size, "--models", "Latte++", "--seeds", "0", "--output", str(one)]) == 0
    report = json.loads((one / "latte_language_modelling.json").read_text())
    (result,) = report["results"]
    assert (
        report["setting"]["tokenizer"] == "bytes" and 100 < result["perplexity"]["32"] < 500
    )  # of 256 after two steps
    other = tmp_path / "other.json"
    other.write_text(json.dumps(report | {"results": [result | {"model": "Latte"}]}))

    files = [str(one / "latte_language_modelling.json"), str(other)]
    assert program.main(["--plot", *files, "--output", str(tmp_path / "both")]) == 0
    joined = json.loads((tmp_path / "both" / "latte_language_modelling.json").read_text())
    assert [r["model"] for r in joined["results"]] == ["Latte", "Latte++"]
    assert (tmp_path / "both" / "latte_language_modelling.png").read_bytes().startswith(b"\x89PNG")

    for wrong, message in (
        (report | {"setting": report["setting"] | {"steps": 3}}, "different settings"),
        (report, "the same model and seed more than once"),
    ):
        other.write_text(json.dumps(wrong))
        with pytest.raises(SystemExit):
            program.main(["--plot", *files, "--output", str(tmp_path / "both")])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("values", [(3.3, 29.8), (51.8, 217.3), (120.0, 130.0)])
def test_perplexities_fill_their_plot(values, folder_of_programs, tmp_path):
    from matplotlib import pyplot

    program = load(folder_of_programs, "latte_language_modelling")
    results = [{"model": "Latte", "perplexity": {"32": low, "64": high}} for low, high in (values, sorted(values))]
    program.plot(results, tmp_path / "plot.png")
    (axes,) = pyplot.gcf().axes
    low, high = axes.get_ylim()
    assert low <= min(values) <= 1.2 * low and max(values) <= high <= 1.2 * max(values)
    assert all(low <= tick <= high for tick in axes.get_yticks())


def test_bytes_hold_the_whole_text(folder_of_programs):
    program = load(folder_of_programs, "latte_language_modelling")
    assert bytes(program.as_bytes(["ab", "ü"]).tolist()) == "ab\0ü".encode()
