# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Fixtures that all tests share; nothing here reaches the network."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, so it stands before the imports below

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

REPO_ROOT = Path(__file__).resolve().parent.parent
FAMILY_DEFAULTS = {
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 32},
    "mistral": {"sliding_window": None},
}


def pytest_configure(config: pytest.Config) -> None:
    threads = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    torch.set_num_threads(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # for the programs that tests start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return REPO_ROOT


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models so small that further threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real checkpoints and texts, which is not part of the repository."""
    path = Path(os.environ.get("HF_LINATTN_SHARED_DATA") or REPO_ROOT.parent / "shared" / "data")
    if not path.is_dir():
        pytest.skip("no real data: put it into ../shared/data or name its folder in HF_LINATTN_SHARED_DATA")
    return path


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte after `<s>`, `</s>` and `<pad>`, 259 in all; adds no special token by itself."""
    specials = ["<s>", "</s>", "<pad>"]
    vocab = {token: i for i, token in enumerate(specials + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos, eos, pad = specials
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns `make(family="llama", layers=2, seed=0, dtype=torch.float32, max_shard_size=None, **config) -> Path`.

    Each call writes a new random checkpoint of 64 hidden units, 4 heads on 2 key/value heads of size 16 and 264
    tokens, with a byte tokenizer; a test may damage it. `max_shard_size="100KB"` gives several shards.
    """

    def make(
        family: str = "llama",
        layers: int = 2,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        max_shard_size: str | None = None,
        **config,
    ) -> Path:
        path = tmp_path_factory.mktemp(family)
        tokenizer = byte_tokenizer()
        settings = {
            "vocab_size": 264,  # Qwen 2 adds an end-of-text token of its own
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "initializer_range": 0.1,  # five times the usual, so that attention is not uniform
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        settings |= FAMILY_DEFAULTS.get(family, {}) | config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).to(dtype)
        model.save_pretrained(path, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
        tokenizer.save_pretrained(path)
        return path

    return make
