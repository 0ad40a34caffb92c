# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Text in, token ids out: files, folders, JSON lines and datasets become one stream that is cut into rows."""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

TEXT = (".txt", ".md", ".py")
LINES = (".jsonl", ".ndjson", ".json-lines")
MARGIN = 1024  # tokens near a cut that may depend on what follows it


def read_documents(data: str | Path, split: str = "train") -> Iterator[str]:
    """The documents of a text source, lazily and always in the same order.

    Args:
        data: a text file (one document), JSON lines with a field `text` (one document a line), a folder of both,
            searched recursively in sorted order, each plain or gzipped; or else a dataset, `owner/name` or
            `owner/name:config`.
        split: of the dataset.

    Raises:
        ValueError: at once if nothing is there; while reading if a file is no UTF-8, no JSON lines or damaged, or if
            there is no text at all.
    """
    path = Path(data)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p) in TEXT + LINES)
        if not files:
            raise ValueError(f"folder {path} holds no {' '.join(TEXT + LINES)} file, plain or .gz.")
        return _not_empty((text for file in files for text in _read_file(file)), data)
    if path.exists():
        return _not_empty(_read_file(path), data)
    if _kind(path) in TEXT + LINES or not re.fullmatch(r"[\w.-]*\w(/[\w.-]*\w)?(:[\w.-]+)?", str(data)):
        raise ValueError(f"{data} does not exist: give a text file, a folder, JSON lines or the name of a dataset.")
    return _not_empty(_read_dataset(str(data), split), data)


def token_stream(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None = None,
    progress: bool = False,
) -> torch.Tensor:
    """All documents as one row of token ids, with BOS before each (EOS where the tokenizer has no BOS).

    Args:
        documents: texts; read no further than `max_tokens` needs.
        tokenizer: adds no special tokens of its own here.
        max_tokens: stop after so many; all if `None`.
        progress: show a progress bar.

    Returns:
        (N,), int64, N <= max_tokens.

    Raises:
        ValueError: if there is no token or neither BOS nor EOS.
    """
    border = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if border is None:
        raise ValueError("the tokenizer has neither a BOS nor an EOS token to set between documents: give it one.")
    pieces, count = [], 0
    with tqdm(
        total=max_tokens, unit="tok", unit_scale=True, desc="tokenising", disable=not progress, leave=False
    ) as bar:
        for text in documents:
            left = None if max_tokens is None else max_tokens - count
            piece = torch.tensor([border, *_encode(text, tokenizer, left)][:left])
            pieces.append(piece)
            count += len(piece)
            bar.update(len(piece))
            if count == max_tokens:
                break
    if not pieces:
        raise ValueError("there is no text: the data holds no document.")
    return torch.cat(pieces)


def rows(stream: torch.Tensor, length: int) -> torch.Tensor:
    """Cuts a stream (N,) into non-overlapping rows (N // length, length); what is left over at the end is dropped.

    Raises:
        ValueError: if there is not one row.
    """
    if len(stream) < length:
        raise ValueError(
            f"the text is too short: it has {len(stream)} tokens and rows of {length} need at least {length}; "
            "give more text or ask for a shorter length."
        )
    return stream[: len(stream) // length * length].view(-1, length)


def _kind(path: Path) -> str:
    return Path(path.stem if path.suffix == ".gz" else path.name).suffix


def _not_empty(texts: Iterable[str], data: str | Path) -> Iterator[str]:
    empty = True
    for text in texts:
        if text:
            empty = False
            yield text
    if empty:
        raise ValueError(f"{data} is empty: give a source with text in it.")


def _read_file(path: Path) -> Iterator[str]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            if _kind(path) in LINES:
                yield from _read_lines(file, path)
            else:
                yield _decode(file.read(), path, 0)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is damaged ({error}): fetch it again.") from error


def _read_lines(file: Iterable[bytes], path: Path) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(file, 1):
        decoded = _decode(line, path, offset)
        offset += len(line)
        if not decoded.strip():
            continue
        try:
            record = json.loads(decoded)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: no JSON ({error}); each line must be an object.") from error
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise ValueError(f"{path}, line {number}: no field `text` that holds a string; each line needs one.")
        yield record["text"]


def _decode(content: bytes, path: Path, offset: int) -> str:
    try:
        return content.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {offset + error.start}: convert it to UTF-8 first.") from error


def _read_dataset(data: str, split: str) -> Iterator[str]:
    from datasets import load_dataset  # slow to import

    name, _, config = data.partition(":")
    try:
        for number, record in enumerate(load_dataset(name, config or None, split=split, streaming=True)):
            if not isinstance(record.get("text"), str):
                raise ValueError(f"record {number} has no column `text` but {', '.join(record)}")
            yield record["text"]
    except Exception as error:  # whatever the Hub, the network or a loader raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{data} is no file or folder here, and no dataset could be read under that name ({reason}): check the "
            "spelling and the network."
        ) from error


def _encode(text: str, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[int]:
    """Ids of a text; only the front of a long one is read if that holds `limit` ids, the same as of the whole."""
    size = len(text) if limit is None else 8 * (limit + MARGIN)
    while (end := text.rfind("\n", 0, size) + 1) and size < len(text):
        ids = tokenizer(text[:end], add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= limit + MARGIN:
            return ids[:limit]
        size *= 2
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
