# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The teacher that the package carries: it loads as it is, is small, and copies from far back."""

import argparse
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

SPAN = 64


@pytest.fixture(scope="module")
def code_teacher(repo_root: Path) -> Path:
    return repo_root / "hf_linattn" / "assets" / "code_teacher"


def test_checkpoint_is_small_and_bfloat16(code_teacher: Path):
    assert (code_teacher / "model.safetensors").stat().st_size < 8_000_000
    with safe_open(code_teacher / "model.safetensors", "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}
    model = AutoModelForCausalLM.from_pretrained(code_teacher)
    assert model.dtype == torch.bfloat16
    assert 1e6 < model.num_parameters() < 3e6
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)


@pytest.mark.parametrize("text", ["def f(x):\n\treturn  x ** 2\r\n", "  naïve Ω 漢字 🧪 ,  don 't .", "\x00\x7f", ""])
def test_tokenizer_keeps_any_text(code_teacher: Path, text: str):
    tokenizer = AutoTokenizer.from_pretrained(code_teacher)
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id == 1
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("distance", [256, 512, 900])
def test_copies_random_tokens_from_far_back(code_teacher: Path, distance: int):
    tokenizer = AutoTokenizer.from_pretrained(code_teacher)
    model = AutoModelForCausalLM.from_pretrained(code_teacher, dtype=torch.float32)
    row = tokenizer(Path(argparse.__file__).read_text(encoding="utf-8"), verbose=False).input_ids[:1024]
    generator = torch.Generator().manual_seed(distance)
    rows = torch.tensor([row] * 2)
    span = torch.randint(3, len(tokenizer), (2, SPAN), generator=generator)
    start = int(torch.randint(1, 1024 - SPAN - distance + 1, (), generator=generator))
    rows[:, start : start + SPAN] = rows[:, start + distance : start + distance + SPAN] = span
    with torch.no_grad():
        losses = F.cross_entropy(model(rows).logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none")
    first, second = (losses[:, at - 1 : at - 1 + SPAN].mean() for at in (start, start + distance))
    assert second < first - 1
