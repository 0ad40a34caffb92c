# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""A checkpoint to convert: found, read from its headers only, and checked before anything is written."""

import json
import math
import re
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from tqdm import tqdm

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HEADER_LIMIT = 100_000_000  # bytes, the limit of the format itself
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class CheckpointError(ValueError):
    """The source checkpoint cannot be converted; the message names what is wrong and what to do."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a shard as its header declares it."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Source:
    """A checked checkpoint on disk. `tensors` maps parameter names to what the shard headers say of them."""

    name: str
    directory: Path
    config: object
    family: object
    tensors: dict[str, Tensor]

    @property
    def shards(self) -> list[str]:
        """File names of the weight shards, in order."""
        return sorted({tensor.file for tensor in self.tensors.values()})

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most of the weights are stored in."""
        sizes = Counter()
        for tensor in self.tensors.values():
            sizes[tensor.dtype] += tensor.bytes
        return DTYPES[sizes.most_common(1)[0][0]]

    @property
    def bytes(self) -> int:
        """Size of all weights."""
        return sum(tensor.bytes for tensor in self.tensors.values())

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


def open_source(path_or_id: str | Path, scan: bool = True) -> Source:
    """Finds a checkpoint (a local folder, else a Hub id), checks it and returns its description.

    Only headers are read, except that `scan` reads every weight once and refuses NaN and infinity.
    Raises `CheckpointError` for whatever cannot be converted.
    """
    directory = _find(path_or_id)
    config, family = _read_config(directory)
    tensors = _read_tensors(directory)
    source = Source(str(path_or_id), directory, config, family, tensors)
    _check_against_family(source)
    if scan:
        scan_values(source)
    return source


def _find(path_or_id: str | Path) -> Path:
    path = Path(path_or_id).expanduser()
    if path.is_file():
        raise CheckpointError(f"{path} is a file; pass the folder that holds config.json and the safetensors weights.")
    if path.is_dir():
        return path
    name = str(path_or_id)
    if isinstance(path_or_id, Path) or not HUB_ID.fullmatch(name):
        raise CheckpointError(f"{name} does not exist; pass the folder of a checkpoint or a Hub id such as user/name.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        small = ["*.json", "tokenizer*", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
        directory = Path(snapshot_download(name, allow_patterns=small, ignore_patterns=["*/*"]))
        _read_config(directory)  # refuse before gigabytes come down
        patterns = {"allow_patterns": [*small, "*.safetensors"], "ignore_patterns": ["*/*", "consolidated*"]}
        return Path(snapshot_download(name, **patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name} is neither a local folder nor a Hub checkpoint that can be read ({reason}); check the spelling, "
            "the network, and for a private or gated repository the login (hf auth login)."
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object; download it again.")
    return value


def _read_config(directory: Path) -> tuple:
    """The config of the checkpoint and its row of the family table."""
    from hf_linattn.models.retrofit.families import FAMILIES

    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} is no checkpoint: it has no config.json.")
    raw = _read_json(path)
    model_type = raw.get("model_type")
    supported = ", ".join(sorted(FAMILIES))
    if str(model_type).startswith("linattn_"):
        raise CheckpointError(
            f"{directory} is already converted (model_type {model_type}); pass the original checkpoint, "
            "or get it back with: hf-linattn revert"
        )
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"model_type {model_type!r} of {directory} is not supported; supported are: {supported}."
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown method")
        raise CheckpointError(f"{directory} is quantized ({method}); convert the unquantized checkpoint instead.")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(
            f"rope type {rope_type!r} of {path} is not supported; supported: {', '.join(ROPE_TYPES)}."
        )
    family = FAMILIES[model_type]
    try:
        config = family.native_config.from_dict(raw)
    except Exception as error:  # strict configs raise their own types for values that do not fit
        raise CheckpointError(f"{path} is not a valid {model_type} config: {_line(error)}") from error
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise CheckpointError(
            f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}."
        )
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and config.hidden_size % heads:
        raise CheckpointError(
            f"{path}: hidden_size {config.hidden_size} is not a multiple of num_attention_heads {heads} and there "
            "is no head_dim; correct the config."
        )
    head_dim = head_dim or config.hidden_size // heads
    if head_dim % 2:
        raise CheckpointError(f"{path}: head size {head_dim} is odd, rotary positions need an even one; correct it.")
    return config, family


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by name, from the shard headers, checked against the index if there is one."""
    if (directory / SINGLE).is_file():  # the order of preference is that of from_pretrained
        return _read_header(directory / SINGLE)
    if not (directory / INDEX).is_file():
        pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLES)
        if pickles:
            raise CheckpointError(
                f"{directory} has only pickle weights ({', '.join(pickles[:3])}), which can run code when read and "
                "are refused; on a machine where you trust them, load the model and save it again: "
                "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) writes safetensors."
            )
        raise CheckpointError(f"{directory} has no weights: neither {SINGLE} nor {INDEX}; download it again.")
    weight_map = _read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{directory / INDEX} has no weight_map; download it again.")
    tensors = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{directory / INDEX} names {file!r}, which is not a file name; download it again.")
        if not (directory / file).is_file():
            raise CheckpointError(f"{directory / INDEX} names the shard {file}, which is missing; download it again.")
        shard = _read_header(directory / file)
        wanted = {name for name, where in weight_map.items() if where == file}
        if absent := sorted(wanted - shard.keys()):
            raise CheckpointError(
                f"{directory / INDEX} places {absent[0]} in {file}, which lacks it; download it again."
            )
        tensors |= shard
    return tensors


def _read_header(path: Path) -> dict[str, Tensor]:
    """Names, dtypes and shapes in a safetensors file; raises `CheckpointError` if its size is not the declared one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else 0
        if not 2 <= length <= min(HEADER_LIMIT, size - 8):
            raise CheckpointError(f"{path} is no safetensors file or is cut off in its header; download it again.")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = [
                (name, info["dtype"], tuple(info["shape"]), *info["data_offsets"]) for name, info in header.items()
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} has a corrupt safetensors header ({error}); download it again.") from error
    tensors, end = {}, 0
    for name, dtype, shape, start, stop in sorted(entries, key=lambda entry: entry[3:]):
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{path}: {name} is stored as {dtype}; only {', '.join(DTYPES)} weights can be converted, use the "
                "unquantized checkpoint."
            )
        if start != end or stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
            raise CheckpointError(f"{path} has a corrupt safetensors header at {name}; download it again.")
        tensors[name], end = Tensor(path.name, dtype, shape, stop - start), stop
    if size != 8 + length + end:
        raise CheckpointError(
            f"{path} has {size} bytes where its header declares {8 + length + end}; download it again."
        )
    return tensors


def _check_against_family(source: Source) -> None:
    """Compares names and shapes with those of the family's own model, built without memory."""
    try:
        with torch.device("meta"):
            model = source.family.native_causal_lm(source.config)
    except Exception as error:  # whatever a config that does not fit sets off inside the model
        raise CheckpointError(
            f"{source.directory / 'config.json'} does not describe a model: {_line(error)}"
        ) from error
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    optional = set()
    if source.config.tie_word_embeddings:
        for left, right in model._tied_weights_keys.items():
            if left in source.tensors or right in source.tensors:
                optional |= {left, right}
    missing = sorted(expected.keys() - source.tensors.keys() - optional)
    unexpected = sorted(n for n in source.tensors.keys() - expected.keys() if not n.endswith("rotary_emb.inv_freq"))
    kind = f"a {source.config.model_type} of {source.config.num_hidden_layers} layers"
    for names, what in ((missing, "lacks"), (unexpected, "has too many")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(
                f"{source.directory} {what} weights of {kind}: {', '.join(names[:3])}{more}; config.json and the "
                "weights must belong together."
            )
    for name, tensor in source.tensors.items():
        if name in expected and tensor.shape != expected[name]:
            head_dim = getattr(source.config, "head_dim", None)
            raise CheckpointError(
                f"{name} in {tensor.file} has shape {list(tensor.shape)}, config.json asks for {list(expected[name])} "
                f"(hidden_size {source.config.hidden_size}, {source.config.num_attention_heads} heads, "
                f"{source.config.num_key_value_heads} key-value heads, head size {head_dim}); correct config.json."
            )


def scan_values(source: Source) -> None:
    """Reads every weight once, one tensor in memory at a time."""
    with tqdm(total=source.bytes, unit="B", unit_scale=True, desc="checking weights", leave=False) as bar:
        for shard in source.shards:
            with safe_open(source.directory / shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    value = file.get_tensor(name)
                    # NaN and infinity both survive min and max, and no mask of the tensor's size is made
                    if value.numel() and not torch.isfinite(torch.stack(torch.aminmax(value))).all():
                        raise CheckpointError(f"{name} in {shard} holds NaN or infinity; use a sound checkpoint.")
                    bar.update(value.nbytes)
