# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Writing converted checkpoints: base shards byte for byte, new weights beside them, all of it or nothing."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import PreTrainedConfig

from hf_linattn.models.retrofit.configuration_retrofit import LOADER, convertible_layers

from .recipe import Recipe
from .source import INDEX, PICKLES, SINGLE, CheckpointError, Source, open_source

NEW_WEIGHTS = "model-linattn.safetensors"
BASE_SHARD = "model-base.safetensors"  # from_pretrained would take a model.safetensors for the whole checkpoint
BASE_FILE = "linattn_base.json"
BASE_FOLDER = "linattn_base"  # the base's files that the conversion replaces
REPLACED = ("config.json", INDEX, "README.md")
WEIGHTS = (".safetensors", *PICKLES, ".h5", ".msgpack", ".onnx", ".gguf")
CHUNK = 1 << 23
MARGIN = 1 << 26  # bytes of tokenizer, report and file system overhead


class DiskFullError(OSError):
    """There is not enough room; the message says how much is needed and where."""


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or one it came from, says that the device is full (some libraries only say it in words)."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def check_space(directory: Path, needed: int) -> None:
    """Raises `DiskFullError` if the file system of `directory` has less than `needed` bytes free."""
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise DiskFullError(
            f"{directory} has {free / 1e6:,.0f} MB free and {needed / 1e6:,.0f} MB are needed; make room or choose "
            "another output."
        )


class WorkDirectory:
    """Everything is made in the hidden folder `.NAME.partial` beside the output and renamed to it at the end.

    `checkpoint` is the folder that becomes the output, `scratch(name)` gives folders that do not. A context manager:
    when an error leaves it before a first stage is finished, nothing stays behind; later, `resume` continues.
    Raises `ValueError` if the output or an unfinished run is there and neither `overwrite` nor `resume` decides.
    """

    def __init__(
        self, output: str | Path, key: str = "", overwrite: bool = False, resume: bool = False, resumable: bool = True
    ):
        self.output = Path(os.path.abspath(Path(output).expanduser()))
        self.partial = self.output.with_name(f".{self.output.name}.partial")
        self.old = self.output.with_name(f".{self.output.name}.old")
        self.checkpoint = self.partial / "checkpoint"
        self.marker = self.partial / "stages.json"
        self.key, self.finished = key, {}
        if self.old.exists() and not self.output.exists():  # killed between the two renames of an overwrite
            os.rename(self.old, self.output)
        if self.output.exists():
            if not overwrite:
                raise ValueError(f"{self.output} exists; choose another output, or replace it with --overwrite.")
            known = ("config.json", BASE_FILE)
            if not self.output.is_dir() or not any((self.output / name).is_file() for name in known):
                raise ValueError(
                    f"{self.output} exists and is no checkpoint, so it is not overwritten; remove it yourself."
                )
        if self.partial.exists() and (not resumable or not self.marker.exists() or not self.checkpoint.exists()):
            shutil.rmtree(self.partial)  # nothing in it is worth keeping
        if self.partial.exists():
            if resume:
                state = json.loads(self.marker.read_text())
                if state["key"] != key:
                    raise ValueError(
                        f"the unfinished run in {self.partial} has another recipe; resume it with its own settings, "
                        "or start over with --overwrite."
                    )
                self.finished = state["finished"]
            elif overwrite:
                shutil.rmtree(self.partial)
            else:
                raise ValueError(
                    f"an unfinished run for {self.output} exists; continue it with --resume, or start "
                    "over with --overwrite."
                )

    def __enter__(self) -> "WorkDirectory":
        self.checkpoint.mkdir(parents=True, exist_ok=True)
        self._mark()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None or not self.finished:
            shutil.rmtree(self.partial, ignore_errors=True)
        if error is not None and is_disk_full(error) and not isinstance(error, DiskFullError):
            hint = ", then continue with --resume" if self.finished else ""
            raise DiskFullError(f"the disk that holds {self.output} is full; make room{hint}.") from error

    def fresh_checkpoint(self) -> Path:
        """The empty folder that will become the output."""
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        self.checkpoint.mkdir()
        return self.checkpoint

    def scratch(self, name: str) -> Path:
        """A folder for files that are needed while the work goes on only."""
        folder = self.partial / "scratch" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def finish(self, stage: str, notes: dict | None = None) -> None:
        """Records on disk that a stage is complete, and what the report needs to know of it."""
        _sync_tree(self.checkpoint)
        self.finished[stage] = notes or {}
        self._mark()

    def _mark(self) -> None:
        _write_json(self.marker, {"key": self.key, "finished": self.finished})

    def publish(self) -> Path:
        """Moves the checkpoint to its final name; an output that was there is removed after that."""
        _sync_tree(self.checkpoint)
        if self.output.exists():
            shutil.rmtree(self.old, ignore_errors=True)
            os.rename(self.output, self.old)
        os.rename(self.checkpoint, self.output)
        _sync(self.output.parent)
        shutil.rmtree(self.old, ignore_errors=True)
        return self.output


def converted_config(source: Source, recipe: Recipe) -> PreTrainedConfig:
    """The config of the converted model. Raises `ValueError` for layers that the model does not have."""
    count = source.config.num_hidden_layers
    layers = convertible_layers(source.config) if recipe.layers in ("default", "global") else recipe.layers
    layers = list(range(count)) if layers == "all" else sorted(set(layers))
    if layers[-1:] and layers[-1] >= count:
        raise ValueError(f"layers names layer {layers[-1]}; {source.name} has layers 0 to {count - 1}.")
    values = {name: value for name, value in source.config.to_dict().items() if name not in ("model_type", "auto_map")}
    values |= {
        "linattn_mixer": recipe.to,
        "linattn_gate": recipe.gate,
        "linattn_init": recipe.init,
        "linattn_assignment": recipe.assignment,
        "linattn_source": recipe.source_mixer,
        "linattn_window": recipe.window,
        "linattn_sinks": recipe.sinks,
        "linattn_latents": recipe.latents,
        "linattn_layers": layers,
        "linattn_mass_length": recipe.mass_length or max(1, source.config.max_position_embeddings // 4),
        "linattn_base": source.name,
    }
    return source.family.config_class.from_dict(values)


def new_tensors(family: object, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Freshly initialised new parameters of a converted model, by name; the rest of the model takes no memory."""
    with torch.device("meta"):
        model = family.causal_lm_class(config)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(".linattn"):
            module.to_empty(device="cpu")
            for parameter in module.parameters():
                parameter._is_hf_initialized = False
            for part in reversed(list(module.modules())):  # the mixer itself last, its values count
                model._init_weights(part)
            tensors |= {f"{name}.{key}": value.detach() for key, value in module.state_dict().items()}
    return tensors


def write_converted(source: Source, config: PreTrainedConfig, directory: Path) -> dict:
    """Writes a converted checkpoint into an empty folder, streaming; new weights are fresh, in the source's dtype.

    Returns the content of `linattn_base.json`: `base`, `files` (name -> sha256 of every file of the base) and
    `stored_as` (name -> path, where that differs). Memory: the new weights and one buffer.
    """
    directory = Path(directory)
    new = {name: value.to(source.dtype).contiguous() for name, value in new_tensors(source.family, config).items()}
    size = sum(value.nbytes for value in new.values())
    check_space(directory, source.bytes + size + MARGIN)

    record = {"base": source.name, "files": {}, "stored_as": {}}
    (directory / BASE_FOLDER).mkdir()
    with tqdm(total=source.bytes, unit="B", unit_scale=True, desc="copying weights", leave=False) as bar:
        for name in [*_side_files(source.directory), *source.shards]:
            stored = BASE_SHARD if name == SINGLE else f"{BASE_FOLDER}/{name}" if name in REPLACED else name
            if stored != name:
                record["stored_as"][name] = stored
            step = bar.update if name in source.shards else None
            record["files"][name] = _copy(source.directory / name, directory / stored, step)
    _write_json(directory / BASE_FILE, record)

    _save_tensors(new, directory / NEW_WEIGHTS)
    weight_map = {
        name: BASE_SHARD if tensor.file == SINGLE else tensor.file for name, tensor in source.tensors.items()
    }
    weight_map |= dict.fromkeys(new, NEW_WEIGHTS)
    _write_json(directory / INDEX, {"metadata": {"total_size": source.bytes + size}, "weight_map": weight_map})

    names = {"AutoConfig": source.family.config_class, "AutoModelForCausalLM": source.family.causal_lm_class}
    config.architectures = [source.family.causal_lm_class.__name__]
    config.auto_map = {auto: f"{LOADER}.{kind.__name__}" for auto, kind in names.items()}
    config.dtype = config.dtype or source.dtype
    config.save_pretrained(directory)
    return record


def save_new_weights(directory: str | Path, state: dict[str, torch.Tensor]) -> None:
    """Replaces the new weights of a converted checkpoint in one step; `state` may hold other tensors too.

    Values are stored in the dtype of the file. Raises `ValueError` if a new weight is missing or has another shape.
    """
    path = Path(directory) / NEW_WEIGHTS
    tensors = {}
    for name, value in load_file(path).items():
        if name not in state or state[name].shape != value.shape:
            got = list(state[name].shape) if name in state else "nothing"
            raise ValueError(
                f"{name} of {path} has shape {list(value.shape)}, got {got}; pass the weights of this model."
            )
        # A copy: safetensors refuses tensors that share memory.
        tensors[name] = state[name].detach().to("cpu", value.dtype, copy=True).contiguous()
    _save_tensors(tensors, path)


def base_weights_identical(directory: str | Path) -> bool:
    """Whether every base shard of a converted checkpoint still has the hash it had in the source."""
    directory, record = Path(directory), read_base(directory)
    shards = [name for name in record["files"] if name.endswith(".safetensors")]
    return all(_hash(_stored(directory, record, name)) == record["files"][name] for name in shards)


def read_base(directory: str | Path) -> dict:
    """The record of the base in a converted checkpoint. Raises `CheckpointError` if there is none."""
    path = Path(directory) / BASE_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has no {BASE_FILE}; only a folder that `hf-linattn convert` wrote knows its base's files."
        )
    record = json.loads(path.read_text(encoding="utf-8"))
    names = [*record["files"], *record["stored_as"].values()]
    if bad := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise CheckpointError(f"{path} names {bad[0]!r}, outside of the checkpoint; do not use it.")
    return record


def revert(directory: str | Path, output: str | Path, overwrite: bool = False) -> dict:
    """Writes the original checkpoint of a converted one, every file bit for bit.

    Returns `output`, `base` and the number of `files`. Raises `CheckpointError` if a file is gone or has changed.
    """
    directory, record = Path(directory), read_base(directory)
    check_separate(directory, output)
    sizes = {}
    for name in record["files"]:
        if not _stored(directory, record, name).is_file():
            raise CheckpointError(f"{directory} lacks {record['stored_as'].get(name, name)}; it cannot be reverted.")
        sizes[name] = _stored(directory, record, name).stat().st_size
    check_space(Path(output).absolute(), sum(sizes.values()) + MARGIN)
    with WorkDirectory(output, overwrite=overwrite, resumable=False) as work:
        folder = work.fresh_checkpoint()
        with tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, desc="reverting", leave=False) as bar:
            for name, expected in record["files"].items():
                stored = _stored(directory, record, name)
                if _copy(stored, folder / name, bar.update) != expected:
                    raise CheckpointError(
                        f"{stored} has changed since the conversion; it cannot be reverted bit for bit."
                    )
        work.publish()
    return {"output": str(work.output), "base": record["base"], "files": len(record["files"])}


def save_delta(directory: str | Path, output: str | Path, overwrite: bool = False) -> Path:
    """Writes what a conversion adds, without the base: new weights, config and the hashes of the base's files."""
    directory = Path(directory)
    read_base(directory)
    with WorkDirectory(output, overwrite=overwrite, resumable=False) as work:
        folder = work.fresh_checkpoint()
        for name in (NEW_WEIGHTS, BASE_FILE, "config.json", f"{LOADER}.py"):
            _copy(directory / name, folder / name)
        return work.publish()


def load_delta(delta: str | Path, output: str | Path, base: str | Path | None = None, overwrite: bool = False) -> Path:
    """Writes the full checkpoint of a delta and its base (a folder or Hub id; by default the one it was made from).

    Raises `CheckpointError` if the base is not the one that the delta was made for.
    """
    from transformers import AutoConfig

    delta, record = Path(delta), read_base(delta)
    source = open_source(base or record["base"])
    with WorkDirectory(output, overwrite=overwrite, resumable=False) as work:
        folder = work.fresh_checkpoint()
        written = write_converted(source, AutoConfig.from_pretrained(delta), folder)
        for name in source.shards:
            if written["files"][name] != record["files"].get(name):
                raise CheckpointError(
                    f"{name} of {source.name} is not the file that {delta} was made for; pass its base."
                )
        _copy(delta / NEW_WEIGHTS, folder / NEW_WEIGHTS)
        return work.publish()


def check_separate(source: str | Path, output: str | Path) -> None:
    """Raises `ValueError` if writing the output would touch the source."""
    source, output = Path(source).resolve(), Path(output).expanduser().resolve()
    if source == output or output in source.parents or source in output.parents:
        raise ValueError(f"output {output} and source {source} overlap; choose an output outside of the source.")


def _side_files(directory: Path) -> list[str]:
    """Everything of a checkpoint that is not weights: tokenizer, configs, templates, card."""
    files = [path for path in directory.iterdir() if path.is_file() and path.suffix not in WEIGHTS]
    files += [path for path in directory.glob("additional_chat_templates/*") if path.is_file()]
    return sorted(path.relative_to(directory).as_posix() for path in files if not path.name.startswith("."))


def _stored(directory: Path, record: dict, name: str) -> Path:
    return directory / record["stored_as"].get(name, name)


def _copy(source: Path, target: Path, step=None) -> str:
    """Copies a file and returns its sha256. No hard link: later changes of one must not reach the other."""
    digest = hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(CHUNK):
            digest.update(chunk)
            writer.write(chunk)
            if step is not None:
                step(len(chunk))
    return digest.hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    temporary = path.with_name(f".{path.name}.new")
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read
    _sync(temporary)
    os.replace(temporary, path)


def _write_json(path: Path, value: dict) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    _sync(temporary)
    os.replace(temporary, path)


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
