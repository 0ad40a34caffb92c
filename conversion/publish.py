# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Publishing a converted checkpoint on the Hub."""

import json
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from .source import INDEX, CheckpointError


class PublishError(RuntimeError):
    """The Hub did not take the checkpoint; the message says why and what to do."""


def push(directory: str | Path, repo_id: str, private: bool = False, token: str | None = None) -> dict:
    """Uploads a converted checkpoint as it is on disk, with its model card and the loader file, as one commit.

    Returns `repo_id`, `url` and `commit`. Raises `CheckpointError` if the folder is no complete converted checkpoint,
    `PublishError` if the Hub refuses.
    """
    directory = Path(directory)
    _check_complete(directory)
    api = HfApi(token=token)
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        operations = []
        for path in sorted(directory.rglob("*")):
            name, content = path.relative_to(directory).as_posix(), path
            if name == "README.md":  # its examples load the checkpoint by the name that it gets now
                card = path.read_text(encoding="utf-8")
                content = card.replace(f'"{directory.resolve().name}"', f'"{url.repo_id}"').encode()
            if path.is_file() and not path.name.startswith("."):
                operations.append(CommitOperationAdd(name, content))
        commit = api.create_commit(url.repo_id, operations, commit_message="Upload a converted checkpoint")
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()
        raise PublishError(
            f"{repo_id} could not be pushed ({reason[0] if reason else type(error).__name__}); check the name and the "
            "network, and log in with `hf auth login` or set HF_TOKEN to a token that may write."
        ) from error
    return {"repo_id": url.repo_id, "url": str(url), "commit": commit.oid}


def _check_complete(directory: Path) -> None:
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} is no checkpoint: it has no config.json.")
    model_type = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("model_type")
    if not str(model_type).startswith("linattn_"):
        raise CheckpointError(
            f"{directory} is not converted (model_type {model_type}); run `hf-linattn convert` first."
        )
    files = {"model.safetensors"}  # what save_pretrained writes for a small model
    if (directory / INDEX).is_file():
        files = set(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    if absent := sorted(name for name in files if not (directory / name).is_file()):
        raise CheckpointError(f"{directory} lacks {absent[0]}; convert again.")
