# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Checks of a source checkpoint: sound ones are described rightly, each kind of damage is named."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_linattn.conversion.source import CheckpointError, open_source


def edit_config(path, **values):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


def edit_weights(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["llama", "gemma", "gemma2", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("max_shard_size", [None, "100KB"])
def test_sound_checkpoint_is_described(tiny_checkpoint, family, max_shard_size):
    path = tiny_checkpoint(family, dtype=torch.bfloat16, max_shard_size=max_shard_size)
    source = open_source(path)
    assert (source.directory, source.config.model_type, source.dtype) == (path, family, torch.bfloat16)
    stored = {k: v for shard in path.glob("*.safetensors") for k, v in load_file(shard).items()}
    assert {k: t.shape for k, t in source.tensors.items()} == {k: tuple(v.shape) for k, v in stored.items()}
    assert source.parameters == sum(value.numel() for value in stored.values())
    assert source.bytes == 2 * source.parameters
    assert source.shards == sorted(shard.name for shard in path.glob("*.safetensors"))
    assert (len(source.shards) > 1) == (max_shard_size is not None)


def test_real_checkpoints(shared_data):
    assert open_source(shared_data / "stories260K").parameters == 260_032
    assert open_source(str(shared_data / "books-llama")).dtype is torch.bfloat16


def test_tied_head_may_be_stored_or_not(tiny_checkpoint):
    path = tiny_checkpoint(tie_word_embeddings=True)
    assert "lm_head.weight" not in open_source(path).tensors
    edit_weights(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" in open_source(path).tensors
    edit_weights(path, lambda t: t.pop("model.embed_tokens.weight"))
    open_source(path)
    edit_weights(path, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match="lacks weights .*embed_tokens"):
        open_source(path)


def test_rotary_buffers_of_old_checkpoints_are_let_be(tiny_checkpoint):
    path = tiny_checkpoint()
    edit_weights(path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    open_source(path)


def remove_config(path):
    (path / "config.json").unlink()


def break_config(path):
    (path / "config.json").write_text("{")


def drop_weights(path):
    (path / "model.safetensors").unlink()


def only_pickle(path):
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def truncate(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-100])


def truncate_in_header(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:50])


def corrupt_header(path):
    data = bytearray((path / "model.safetensors").read_bytes())
    data[8:40] = b"x" * 32
    (path / "model.safetensors").write_bytes(data)


def overlapping_offsets(path):
    data = (path / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    first, second = [name for name in header if name != "__metadata__"][:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)[:length]
    (path / "model.safetensors").write_bytes(data[:8] + text + data[8 + length :])


def drop_tensor(path):
    edit_weights(path, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))


def extra_tensor(path):
    edit_weights(path, lambda t: t.update({"model.layers.0.self_attn.extra.weight": torch.ones(3)}))


def poison(value):
    def damage(path):
        edit_weights(path, lambda t: t["model.layers.1.mlp.up_proj.weight"].view(-1).__setitem__(7, value))

    return damage


def integer_weights(path):
    edit_weights(path, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_config, "no checkpoint: it has no config.json"),
        (break_config, "config.json is not valid JSON"),
        (drop_weights, "no weights"),
        (only_pickle, r"only pickle weights \(pytorch_model.bin\).*refused.*save_pretrained"),
        (truncate, r"has \d+ bytes where its header declares \d+"),
        (truncate_in_header, "cut off in its header"),
        (corrupt_header, "corrupt safetensors header"),
        (overlapping_offsets, "corrupt safetensors header at"),
        (drop_tensor, "lacks weights .*layers.1.self_attn.k_proj.weight"),
        (extra_tensor, "has too many weights .*extra.weight"),
        (poison(float("nan")), "up_proj.weight in model.safetensors holds NaN or infinity"),
        (poison(float("-inf")), "up_proj.weight in model.safetensors holds NaN or infinity"),
        (integer_weights, "model.norm.weight is stored as I8"),
        (lambda p: edit_config(p, model_type="gpt2"), "model_type 'gpt2' .*supported are: gemma, gemma2, llama"),
        (lambda p: edit_config(p, model_type=None), "model_type None"),
        (lambda p: edit_config(p, model_type="linattn_llama"), "already converted"),
        (lambda p: edit_config(p, quantization_config={"quant_method": "awq"}), r"quantized \(awq\)"),
        (lambda p: edit_config(p, rope_parameters={"rope_type": "longrope"}), "rope type 'longrope'.*llama3, yarn"),
        (lambda p: edit_config(p, rope_parameters=None, rope_scaling={"type": "dynamic"}), "rope type 'dynamic'"),
        (
            lambda p: edit_config(p, head_dim=32),
            r"_proj.* has shape .*asks for .*4 heads, 2 key-value heads, head size 32",
        ),
        (lambda p: edit_config(p, head_dim=15), "head size 15 is odd|even rotary dimension"),
        (lambda p: edit_config(p, num_attention_heads=3), "not a multiple of the number of attention heads"),
        (lambda p: edit_config(p, num_key_value_heads=3), "4 is not a multiple of num_key_value_heads 3"),
        (lambda p: edit_config(p, hidden_size="large"), "config"),
        (lambda p: edit_config(p, num_hidden_layers=3), "lacks weights of a llama of 3 layers"),
        (lambda p: edit_config(p, num_hidden_layers=1), "too many weights of a llama of 1 layers"),
    ],
)
def test_damage_is_named(tiny_checkpoint, damage, message):
    path = tiny_checkpoint(head_dim=16)
    open_source(path)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        open_source(path)


def test_damage_of_sharded_checkpoints_is_named(tiny_checkpoint, tmp_path):
    sound = tiny_checkpoint(max_shard_size="100KB")
    shard = sorted(sound.glob("*.safetensors"))[0].name

    path = shutil.copytree(sound, tmp_path / "missing")
    (path / shard).unlink()
    with pytest.raises(CheckpointError, match=f"names the shard {shard}, which is missing"):
        open_source(path)

    path = shutil.copytree(sound, tmp_path / "moved")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    others = [name for name, file in index["weight_map"].items() if file != shard]
    index["weight_map"][others[0]] = shard
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"places {others[0]} in {shard}, which lacks it"):
        open_source(path)

    index["weight_map"][others[0]] = f"../sound/{shard}"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a file name"):
        open_source(path)

    (path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        open_source(path)


def test_paths_that_are_no_folder(tmp_path, tiny_checkpoint):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_source(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="does not exist"):
        open_source("./absent/folder")
    with pytest.raises(CheckpointError, match="neither a local folder nor a Hub checkpoint"):
        open_source("nobody/nothing-of-that-name")
    with pytest.raises(CheckpointError, match="is a file; pass the folder"):
        open_source(tiny_checkpoint() / "model.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        open_source(tmp_path)
