# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Converted checkpoints on disk: base shards byte for byte, all or nothing, and the way back."""

import errno
import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import hf_linattn.conversion.write as write
from hf_linattn.conversion.recipe import Recipe
from hf_linattn.conversion.source import CheckpointError, open_source
from hf_linattn.conversion.write import (
    DiskFullError,
    WorkDirectory,
    base_weights_identical,
    check_separate,
    converted_config,
    load_delta,
    new_tensors,
    revert,
    save_delta,
    save_new_weights,
    write_converted,
)


def converted(path: Path, output: Path, **fields) -> Path:
    source = open_source(path)
    recipe = Recipe(str(path), str(output), stages=["write"], **fields)
    output.mkdir()
    write_converted(source, converted_config(source, recipe), output)
    return output


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("family", ["llama", "gemma", "gemma2", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("max_shard_size", [None, "100KB"])
def test_written_checkpoint_is_whole(tiny_checkpoint, tmp_path, family, max_shard_size):
    path = tiny_checkpoint(family, max_shard_size=max_shard_size, dtype=torch.bfloat16)
    before = files_of(path)
    (output := tmp_path / "output").mkdir()
    source = open_source(path)
    config = converted_config(source, Recipe(str(path), "unused", stages=["write"], window=16, latents=8, layers=[1]))
    record = write_converted(source, config, output)
    assert files_of(path) == before
    for shard in source.shards:
        assert (output / record["stored_as"].get(shard, shard)).read_bytes() == before[shard]
    assert not (output / "model.safetensors").exists()  # would be loaded alone, without the index

    model, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(model) is source.family.causal_lm_class and model.dtype is torch.bfloat16
    assert model.config.converted_layers == [1] and model.config.linattn_base == str(path)
    new = load_file(output / "model-linattn.safetensors")
    assert new.keys() == model.new_parameters().keys() and all(".layers.1.self_attn.linattn." in name for name in new)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    stored = sum(v.nbytes for shard in output.glob("*.safetensors") for v in load_file(shard).values())
    assert index["metadata"]["total_size"] == stored
    base = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in base.items())
    assert (output / "tokenizer.json").read_bytes() == before["tokenizer.json"]


@pytest.mark.parametrize("options", [{}, {"init": "random", "gate": "learned", "source_mixer": "rglru"}])
def test_new_weights_are_initialised_as_in_a_fresh_model(tiny_checkpoint, options):
    source = open_source(tiny_checkpoint())
    config = converted_config(source, Recipe(source.name, "unused", stages=["write"], **options))
    torch.manual_seed(0)
    fresh = source.family.causal_lm_class(config).new_parameters()
    tensors = new_tensors(source.family, config)
    assert tensors.keys() == fresh.keys()
    for name, value in tensors.items():
        assert torch.isfinite(value).all()
        spread = max(0.3 * fresh[name].std().item(), 1e-6) if fresh[name].numel() > 1 else 1.0
        assert value.std(unbiased=False).item() == pytest.approx(fresh[name].std(unbiased=False).item(), abs=spread), (
            name
        )
        assert value.mean().item() == pytest.approx(fresh[name].mean().item(), abs=10 * spread), name


def test_layer_choices(tiny_checkpoint):
    source = open_source(tiny_checkpoint("gemma2", layers=4))

    def layers(choice):
        return converted_config(source, Recipe("a", "b", stages=["write"], layers=choice)).converted_layers

    assert layers("default") == layers("global") == [1, 3]
    assert layers("all") == [0, 1, 2, 3]
    assert layers([2, 0, 2]) == [0, 2]
    with pytest.raises(ValueError, match="layers names layer 4; .* has layers 0 to 3"):
        layers([1, 4])


@pytest.mark.parametrize("max_shard_size", [None, "100KB"])
def test_revert_gives_the_source_back(tiny_checkpoint, tmp_path, max_shard_size):
    path = tiny_checkpoint(max_shard_size=max_shard_size)
    (path / "README.md").write_text("# The card of the base\n")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    output = converted(path, tmp_path / "output")
    (output / "README.md").write_text("# Our card\n")
    result = revert(output, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(path)
    assert result == {"output": str(tmp_path / "back"), "base": str(path), "files": len(files_of(path))}


def test_revert_refuses_what_changed(tiny_checkpoint, tmp_path):
    path = tiny_checkpoint()
    output = converted(path, tmp_path / "output")
    assert base_weights_identical(output)
    shard = output / "model-base.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert not base_weights_identical(output)
    with pytest.raises(CheckpointError, match="model-base.safetensors has changed"):
        revert(output, tmp_path / "back")
    shard.unlink()
    with pytest.raises(CheckpointError, match="lacks model-base.safetensors"):
        revert(output, tmp_path / "back")
    with pytest.raises(CheckpointError, match="no linattn_base.json"):
        revert(path, tmp_path / "back")
    record = json.loads((output / "linattn_base.json").read_text())
    record["stored_as"]["config.json"] = "../../secret"
    (output / "linattn_base.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        revert(output, tmp_path / "back")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["output"]


def test_delta_and_base_are_the_checkpoint(tiny_checkpoint, tmp_path):
    path = tiny_checkpoint(max_shard_size="100KB")
    output = converted(path, tmp_path / "output")
    model = AutoModelForCausalLM.from_pretrained(output)
    save_new_weights(output, {name: torch.randn_like(value) for name, value in model.new_parameters().items()})
    delta = save_delta(output, tmp_path / "delta")
    assert sum(map(len, files_of(delta).values())) < sum(map(len, files_of(output).values())) / 2
    assert files_of(load_delta(delta, tmp_path / "full")) == files_of(output)
    assert files_of(load_delta(delta, tmp_path / "again", base=path)) == files_of(output)
    with pytest.raises(CheckpointError, match="is not the file that"):
        load_delta(delta, tmp_path / "other", base=tiny_checkpoint(max_shard_size="100KB", seed=1))
    assert not (tmp_path / "other").exists() and not (tmp_path / ".other.partial").exists()


def test_new_weights_are_replaced_in_one_step(tiny_checkpoint, tmp_path, monkeypatch):
    output = converted(tiny_checkpoint(dtype=torch.bfloat16), tmp_path / "output")
    before = files_of(output)
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    torch.manual_seed(0)
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}

    monkeypatch.setattr(write, "save_file", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError):
        save_new_weights(output, state)
    assert files_of(output) == before
    monkeypatch.undo()

    save_new_weights(output, state)
    after = files_of(output)
    assert {name for name in after if after[name] != before.get(name)} == {"model-linattn.safetensors"}
    stored = load_file(output / "model-linattn.safetensors")
    assert all(torch.equal(stored[name], state[name].bfloat16()) for name in stored)

    name = next(iter(stored))
    with pytest.raises(ValueError, match="pass the weights of this model"):
        save_new_weights(output, state | {name: torch.ones(1)})
    with pytest.raises(ValueError, match="got nothing"):
        save_new_weights(output, {k: v for k, v in state.items() if k != name})
    assert files_of(output) == after


def test_output_appears_complete_or_not_at_all(tmp_path):
    output = tmp_path / "parent" / "output"
    with pytest.raises(RuntimeError), WorkDirectory(output, "key") as work:
        (work.fresh_checkpoint() / "config.json").write_text("{}")
        assert not output.exists()
        raise RuntimeError
    assert list((tmp_path / "parent").iterdir()) == []  # no stage was finished: nothing is worth keeping

    with WorkDirectory(output, "key") as work:
        (work.fresh_checkpoint() / "config.json").write_text("{}")
        (work.scratch("align") / "optimizer").write_text("big")
        work.publish()
    assert files_of(tmp_path) == {"parent/output/config.json": b"{}"}


def test_unfinished_run_is_resumed_or_replaced_only_when_asked(tmp_path):
    output = tmp_path / "output"
    with pytest.raises(KeyboardInterrupt), WorkDirectory(output, "key") as work:
        (work.fresh_checkpoint() / "config.json").write_text("one")
        (work.scratch("align") / "step").write_text("7")
        work.finish("write", {"seconds": 1})
        raise KeyboardInterrupt
    left = files_of(tmp_path)
    with pytest.raises(ValueError, match="continue it with --resume, or start over with --overwrite"):
        WorkDirectory(output, "key")
    with pytest.raises(ValueError, match="another recipe"):
        WorkDirectory(output, "other", resume=True)
    assert files_of(tmp_path) == left

    with pytest.raises(KeyboardInterrupt), WorkDirectory(output, "key", resume=True) as work:
        assert work.finished == {"write": {"seconds": 1}} and (work.scratch("align") / "step").read_text() == "7"
        assert (work.checkpoint / "config.json").read_text() == "one"
        raise KeyboardInterrupt
    with WorkDirectory(output, "other", overwrite=True) as work:
        assert work.finished == {} and not (work.scratch("align") / "step").exists()
        (work.fresh_checkpoint() / "config.json").write_text("two")
        work.publish()
    assert files_of(tmp_path) == {"output/config.json": b"two"}


def test_existing_output_is_replaced_only_when_asked_and_only_at_the_end(tmp_path, monkeypatch):
    output = tmp_path / "output"
    output.mkdir()
    (output / "config.json").write_text("old")
    with pytest.raises(ValueError, match="exists; choose another output, or replace it with --overwrite"):
        WorkDirectory(output, "key")
    with pytest.raises(RuntimeError), WorkDirectory(output, "key", overwrite=True) as work:
        work.fresh_checkpoint()
        raise RuntimeError
    assert files_of(tmp_path) == {"output/config.json": b"old"}

    real, calls = write.os.rename, []

    def killed(source, target):  # between the two renames
        if calls:
            raise SystemExit
        calls.append(real(source, target))

    monkeypatch.setattr(write.os, "rename", killed)
    with pytest.raises(SystemExit), WorkDirectory(output, "key", overwrite=True) as work:
        (work.fresh_checkpoint() / "config.json").write_text("new")
        work.publish()
    monkeypatch.undo()
    assert not output.exists()
    with WorkDirectory(output, "key", overwrite=True) as work:
        assert (output / "config.json").read_text() == "old"
        (work.fresh_checkpoint() / "config.json").write_text("new")
        work.publish()
    assert files_of(tmp_path) == {"output/config.json": b"new"}


def test_folders_that_are_no_checkpoint_are_never_overwritten(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(ValueError, match="no checkpoint, so it is not overwritten"):
        WorkDirectory(tmp_path / "thesis", overwrite=True)


def test_source_and_output_must_not_overlap(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "source")
    for output in ("source", "source/inside", ".", "link", "source/../source"):
        with pytest.raises(ValueError, match="overlap"):
            check_separate(tmp_path / "source", tmp_path / output)
    check_separate(tmp_path / "source", tmp_path / "source-converted")


def test_full_disk_is_told_before_and_while_writing(tiny_checkpoint, tmp_path, monkeypatch):
    path = tiny_checkpoint()
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda where: usage(10**9, 10**9, 10**6))
        with pytest.raises(DiskFullError, match=r"has 1 MB free and \d+ MB are needed"):
            converted(path, tmp_path / "early")

    def full(*args, **kwargs):
        raise RuntimeError("I/O error: No space left on device (os error 28)")  # how safetensors says it

    monkeypatch.setattr(write, "save_file", full)
    with pytest.raises(DiskFullError, match="the disk that holds .*late is full; make room.$"):
        with WorkDirectory(tmp_path / "late") as work:
            source = open_source(path)
            recipe = Recipe(str(path), "late", stages=["write"])
            write_converted(source, converted_config(source, recipe), work.fresh_checkpoint())
    assert not (tmp_path / "late").exists() and not (tmp_path / ".late.partial").exists()


def test_real_checkpoint_round_trip(shared_data, tmp_path):
    output = converted(shared_data / "books-llama", tmp_path / "output")
    assert AutoConfig.from_pretrained(output).linattn_base == str(shared_data / "books-llama")
    revert(output, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(shared_data / "books-llama")
