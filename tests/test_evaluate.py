# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
import importlib
import json
import math
import types

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_linattn import FAMILIES
from hf_linattn.conversion.data import read_documents, token_stream
from hf_linattn.conversion.evaluate import (
    LEAD,
    evaluate,
    kl_to_teacher,
    perplexity,
    planted_rows,
    recall,
    tokens_per_second,
)
from hf_linattn.conversion.report import format_table, model_card, write_report
from hf_linattn.models.retrofit.modeling_retrofit import build_teacher

module = importlib.import_module("hf_linattn.conversion.evaluate")  # the package exports a function of this name
ROWS = ["teacher", "converted", "window_only", "linear_only", "window_equal_state"]


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint):
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint())


@pytest.fixture(scope="module")
def other(tiny_checkpoint):
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint(seed=1))


@pytest.fixture(scope="module")
def converted(tiny_checkpoint):
    path, family = tiny_checkpoint(), FAMILIES["llama"]
    config = family.config_class.from_dict(
        {
            k: v
            for k, v in AutoConfig.from_pretrained(path).to_dict().items()
            if k not in ("model_type", "architectures")
        }
        | {"linattn_window": 8, "linattn_sinks": 2, "linattn_latents": 4}
    )
    torch.manual_seed(0)
    return family.causal_lm_class.from_pretrained(path, config=config)


@pytest.fixture(scope="module")
def report(converted):
    calls = []
    found = evaluate(
        converted,
        build_teacher(converted),
        stream(400),
        [32, 64, 128],
        [40, 100],
        equal_window=128,
        recall_rows=4,
        progress=lambda done, total: calls.append((done, total)),
    )
    found["progress"] = calls
    return found


def stream(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 259, (size,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def log_probs(model, ids: torch.Tensor) -> torch.Tensor:
    return model.double()(ids[None]).logits[0].log_softmax(-1)


class Copier(torch.nn.Module):
    """Knows nothing before position `distance` and then that everything repeats."""

    def __init__(self, distance: int, vocabulary: int = 300):
        super().__init__()
        self.distance, self.device = distance, torch.device("cpu")
        self.config = types.SimpleNamespace(get_text_config=lambda: types.SimpleNamespace(vocab_size=vocabulary))
        self.vocabulary = vocabulary

    def forward(self, ids, use_cache, logits_to_keep):
        logits = torch.zeros(*ids.shape, self.vocabulary)
        copied = ids[:, 1 : ids.shape[1] - self.distance + 1, None]
        logits[:, self.distance : self.distance + copied.shape[1]].scatter_(2, copied, 50.0)
        return types.SimpleNamespace(logits=logits[:, logits_to_keep])


def test_perplexity_is_the_plain_formula_on_each_row(tiny, monkeypatch):
    ids = stream(250)
    found = perplexity(tiny, ids, 48)
    nll = []
    for row in ids[:240].view(5, 48):
        expected = log_probs(tiny, row)
        nll += [-expected[i - 1, row[i]] for i in range(1, 48)]
    tiny.float()
    assert found == pytest.approx(math.exp(torch.stack(nll).mean()), rel=1e-5)
    monkeypatch.setattr(module, "TOKENS", 100)
    monkeypatch.setattr(module, "PIECE", 264 * 2 * 7)
    assert perplexity(tiny, ids, 48) == pytest.approx(found, rel=1e-6)


def test_kl_is_the_plain_formula_and_zero_to_itself(tiny, other):
    ids = stream(200)
    found = kl_to_teacher(other, tiny, ids, 100)
    expected = []
    for row in ids.view(2, 100):
        teacher, model = log_probs(tiny, row), log_probs(other, row)
        expected.append((teacher.exp() * (teacher - model)).sum(-1))
    tiny.float(), other.float()
    expected = torch.stack(expected).mean(0)
    assert found["mean"] == pytest.approx(expected.mean().item(), rel=1e-4)
    assert list(found["by_position"]) == ["0-63", "64-99"]
    assert found["by_position"]["64-99"] == pytest.approx(expected[64:].mean().item(), rel=1e-4)
    assert kl_to_teacher(tiny, tiny, ids, 100)["mean"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("size", "distance", "span"), [(500, 40, 8), (LEAD + 40, 40, 8), (100, 8, 8)])
def test_planted_rows_repeat_a_span_from_elsewhere(size, distance, span):
    text = torch.arange(size)
    found = planted_rows(text, distance, span, 20, seed=3)
    assert found.shape == (20, LEAD + distance + span)
    planted = found[:, LEAD : LEAD + span]
    host = torch.cat([found[:, :LEAD], found[:, LEAD + span : -span]], dim=1)
    assert torch.equal(found[:, -span:], planted)
    assert (planted.diff() == 1).all() and (host.diff() == 1).all()
    for line, part in zip(host, planted, strict=True):
        assert not set(line.tolist()) & set(part.tolist())
    assert torch.equal(found, planted_rows(text, distance, span, 20, seed=3))
    if size > 100:
        assert not torch.equal(found, planted_rows(text, distance, span, 20, seed=4))
        assert (planted[:, 0] < host[:, 0]).any() and (planted[:, 0] > host[:, 0]).any()


def test_planted_rows_that_do_not_fit():
    with pytest.raises(ValueError, match=f"has {LEAD + 39} tokens and .* need {LEAD + 40}"):
        planted_rows(torch.arange(LEAD + 39), 40, 8, 2, seed=0)
    with pytest.raises(ValueError, match="overlaps with its span of 8"):
        planted_rows(torch.arange(500), 7, 8, 2, seed=0)
    with pytest.raises(ValueError, match="span of 4 tokens is too short"):
        recall(Copier(40), torch.arange(300), [40], span=4)


def test_recall_sees_who_copies():
    found = recall(Copier(40), torch.arange(300), [40, 41], span=16, count=10)
    assert found["40"] == {
        "nats": pytest.approx(0, abs=1e-6),
        "accuracy": 1.0,
        "first": pytest.approx(math.log(300), rel=1e-6),
    }
    assert found["41"]["accuracy"] == 0 and found["41"]["nats"] == pytest.approx(50, rel=0.01)


def test_models_are_left_as_they_were(tiny_checkpoint):
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(), dtype=torch.bfloat16).train()
    model.lm_head.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = stream(96)
    in_float, as_loaded = perplexity(model, ids, 48), perplexity(model, ids, 48, dtype=None)
    assert model.training and not model.lm_head.training
    for name, value in model.state_dict().items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, before[name])
    assert perplexity(model.float(), ids, 48) == in_float != as_loaded


def test_evaluate_runs_each_component(report):
    assert [name for name in report if name in ROWS] == ROWS
    for name in ROWS:
        assert list(report[name]["perplexity"]) == ["32", "64", "128"]
        assert list(report[name]["perplexity_by_position"]["128"]) == ["1-63", "64-127"]
        assert list(report[name]["recall"]) == ["40", "100"]
    assert "kl_to_teacher" not in report["teacher"]
    assert report["equal_window"] == 128
    # A window of the whole row is the teacher; no other row may be.
    assert report["window_equal_state"]["kl_to_teacher"]["128"] < 1e-8
    assert report["window_equal_state"]["perplexity"] == pytest.approx(report["teacher"]["perplexity"], rel=1e-5)
    divergences = [report[name]["kl_to_teacher"]["128"] for name in ("converted", "window_only", "linear_only")]
    assert min(divergences) > 1e-4 and len(set(divergences)) == 3
    for name in ("converted", "teacher"):
        assert list(report[name]["decoding"]) == ["32", "64", "128"]
        assert all(found["tokens_per_second"] > 0 for found in report[name]["decoding"].values())
    assert report["state_bytes"]["65536"]["teacher"] == 65536 * 2 * 2 * 16 * 2 * 2  # tokens, k and v, heads, d, layers
    assert report["state_bytes"]["65536"]["converted"] == report["state_bytes"]["1024"]["converted"]
    assert report["model"]["linattn_window"] == 8 and report["model"]["trained_length"] == 512


def test_rows_of_a_report_are_what_the_single_functions_give(report, converted):
    ids = stream(400)
    with converted.linattn_variant(latents=False):
        assert perplexity(converted, ids, 64) == pytest.approx(report["window_only"]["perplexity"]["64"], rel=1e-9)
        alone = recall(converted, ids, [100], count=4)["100"]
    assert alone == pytest.approx(report["window_only"]["recall"]["100"], rel=1e-6)
    alone = kl_to_teacher(converted, build_teacher(converted), ids, 128)
    assert alone["mean"] == pytest.approx(report["converted"]["kl_to_teacher"]["128"], rel=1e-6)


def test_progress_reaches_its_total(report):
    done, totals = zip(*report["progress"], strict=True)
    assert len(set(totals)) == 1 and done[-1] == totals[0]
    assert list(done) == sorted(done) and len(done) > 20


def test_evaluate_refuses_before_it_computes(converted, tiny, monkeypatch):
    monkeypatch.setattr(module, "_score", None)
    for ids, lengths, distances, message in (
        (stream(100), [32, 128], [40], "has 100 tokens and rows of 128 need at least 128"),
        (stream(100), [32], [200], "has 100 tokens and repeats 200"),
        (stream(100), [1], [], "length of 2 or more"),
        (stream(100), [], [], "lengths is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(converted, tiny, ids, lengths, distances, progress=False)


def test_other_models_get_a_row(converted, other):
    found = evaluate(
        converted, build_teacher(converted), stream(64), [32], [], others={"tuned": other}, progress=False
    )
    assert found["tuned"]["perplexity"]["32"] == pytest.approx(perplexity(other, stream(64), 32))
    assert found["tuned"]["kl_to_teacher"]["32"] > 0
    assert "tuned" in format_table(found)


def test_speed_does_not_disturb_the_model(tiny):
    found = tokens_per_second(tiny, [4, 20], new_tokens=2)
    assert list(found) == ["4", "20"] and found["4"]["peak_bytes"] is None and found["20"]["prefill_seconds"] > 0


def test_report_files(report, tmp_path):
    report = report | {"trained_tokens": 0, "odd": [float("nan"), float("inf"), 1.5]}
    (tmp_path / "report.json").write_text("old")
    paths = write_report(report, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in paths)
    assert [p.name for p in paths] == ["report.json", "perplexity.png", "recall.png", "cost.png"]
    for path in paths[1:]:
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["odd"] == [None, None, 1.5]
    assert written["converted"]["perplexity"] == report["converted"]["perplexity"]


def test_report_is_not_replaced_by_half_of_one(report, tmp_path, monkeypatch):
    (tmp_path / "report.json").write_text("old")
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space"):
        write_report(report, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]
    assert (tmp_path / "report.json").read_text() == "old"


def test_table_holds_the_numbers(report):
    table = format_table(report)
    line = next(line for line in table.splitlines() if line.startswith("converted"))
    assert line.split()[1:] == [f"{value:.1f}" for value in report["converted"]["perplexity"].values()]
    assert "window 128 + sinks, equal state" in table and "KL(teacher || model)" in table and "256.0 MiB" not in table
    assert max(map(len, table.splitlines())) < 140


def test_model_card_says_who_wins(report):
    for value, said in ((10.0, False), (12.0, True), (13.0, True)):
        changed = {"converted": value, "window_equal_state": 12.0}
        found = report | {
            k: report[k] | {"perplexity": report[k]["perplexity"] | {"128": v}} for k, v in changed.items()
        }
        text = model_card(found, "name")
        assert ("does **not** beat" in text) == said
        assert f"Perplexity at 128 tokens: converted {value:.3f}, teacher" in text


def test_model_card_metadata_and_sections(report):
    card = ModelCard(
        model_card(report, "someone/tiny-latte", base_model="someone/tiny", license="mit", datasets=["someone/texts"])
    )
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.base_model == "someone/tiny" and card.data.base_model_relation == "finetune"
    assert card.data.tags == ["linear-attention", "hf_linattn", "latte"] and card.data.license == "mit"
    assert len(card.data.eval_results) == 3  # read back from model-index, which checks its structure
    assert card.data.eval_results[0].metric_value == pytest.approx(report["converted"]["perplexity"]["32"], abs=1e-4)
    for heading in ("How to load", "What was replaced", "Training", "Evaluation", "Limits", "Citation"):
        assert f"\n## {heading}\n" in card.text
    assert (
        'from_pretrained("someone/tiny-latte", trust_remote_code=True)' in card.text
        and "import hf_linattn" in card.text
    )


def test_model_card_shows_no_local_paths(report, tmp_path):
    text = model_card(report, str(tmp_path / "out"), base_model=str(tmp_path / "source"))
    assert str(tmp_path) not in text and "# out\n" in text and "Base: source" in text
    metadata = yaml.safe_load(text.split("---")[1])
    assert "base_model" not in metadata and "license" not in metadata


@pytest.mark.parametrize(
    ("name", "text", "tokens", "expected"),
    [
        ("stories260K", "tinystories/eval.jsonl", 65536, {512: 3.859}),
        ("books-llama", "books/eval/766-david-copperfield.txt", 16384, {1024: 65.07}),
    ],
)
def test_known_perplexity_of_real_checkpoints(shared_data, name, text, tokens, expected):
    model = AutoModelForCausalLM.from_pretrained(shared_data / name)
    tokenizer = AutoTokenizer.from_pretrained(shared_data / name)
    ids = token_stream(read_documents(shared_data / text), tokenizer, tokens)
    for length, value in expected.items():
        assert perplexity(model, ids, length) == pytest.approx(value, rel=2e-4 if value < 10 else 5e-4)
