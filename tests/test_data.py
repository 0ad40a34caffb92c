# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
import gzip
import json
import sys
import types

import pytest
import torch
from transformers import AutoTokenizer

from hf_linattn.conversion.data import read_documents, rows, token_stream


def lines(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint())


@pytest.mark.parametrize("packed", [False, True])
def test_reads_text_and_json_lines(tmp_path, packed):
    for name, content, expected in (
        ("a.txt", "\ufeffone\r\ntwö\n", ["one\ntwö\n"]),
        ("a.log", "any name\n", ["any name\n"]),
        ("a.jsonl", lines("one", "two\n") + "\n" + lines("", "three"), ["one", "two\n", "three"]),
    ):
        path = tmp_path / (name + ".gz" if packed else name)
        path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
        assert list(read_documents(path)) == list(read_documents(str(path))) == expected


def test_reads_a_folder_recursively_in_sorted_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "inner.py").write_text("x = 1")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.jsonl").write_text(lines("third", "fourth"))
    (tmp_path / "d.md.gz").write_bytes(gzip.compress(b"fifth", mtime=0))
    (tmp_path / "e.bin").write_bytes(b"\xff")
    (tmp_path / "f.txt").write_text("")
    assert list(read_documents(tmp_path)) == ["first", "x = 1", "third", "fourth", "fifth"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty.txt is empty"),
        ("empty.jsonl", b"\n\n", "empty.jsonl is empty"),
        ("latin.txt", "déjà".encode("latin-1"), "latin.txt is not UTF-8 at byte 1"),
        ("latin.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', "latin.jsonl is not UTF-8 at byte 24"),
        ("broken.jsonl", b'{"text": "a"}\n\n{"text"\n', "broken.jsonl, line 3: no JSON"),
        ("other.jsonl", b'{"text": "a"}\n{"txt": "a"}\n', "other.jsonl, line 2: no field `text`"),
        ("list.jsonl", b"[1]\n", "list.jsonl, line 1: no field `text`"),
        ("cut.txt.gz", gzip.compress(b"some text", mtime=0)[:-4], "cut.txt.gz is damaged"),
        ("fake.txt.gz", b"some text", "fake.txt.gz is damaged"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_documents(tmp_path / name))


def test_missing_sources_are_refused_at_once(tmp_path):
    for path in (tmp_path / "absent.txt", tmp_path / "absent", "absent.txt", "./absent"):
        with pytest.raises(ValueError, match="does not exist"):
            read_documents(path)
    with pytest.raises(ValueError, match="holds no .txt"):
        read_documents(tmp_path)


def test_unknown_dataset_names_the_remedy():
    with pytest.raises(ValueError, match="nobody/nothing-here is no file or folder here.*check the spelling"):
        list(read_documents("nobody/nothing-here"))


def test_dataset_is_streamed(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return iter([{"text": "one"}, {"text": "two"}, {"words": "three"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    documents = read_documents("owner/set:config", split="test")
    assert [next(documents), next(documents)] == ["one", "two"]
    assert calls == [(("owner/set", "config"), {"split": "test", "streaming": True})]
    with pytest.raises(ValueError, match="record 2 has no column `text` but words"):
        next(documents)


def test_stream_puts_bos_before_each_document_and_stops_early(tokenizer):
    def documents():
        yield "ab"
        yield "cde"
        raise AssertionError("read further than needed")

    a, b, c, d = tokenizer.convert_tokens_to_ids(list("abcd"))
    bos = tokenizer.bos_token_id
    assert token_stream(documents(), tokenizer, max_tokens=6).tolist() == [bos, a, b, bos, c, d]
    assert token_stream(["ab", "c"], tokenizer).tolist() == [bos, a, b, bos, c]


def test_stream_falls_back_to_eos_then_refuses(tiny_checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint())
    tokenizer.bos_token = None
    assert token_stream(["a"], tokenizer)[0] == tokenizer.eos_token_id
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a BOS nor an EOS"):
        token_stream(["a"], tokenizer)


def test_stream_adds_no_special_tokens_of_the_tokenizer(shared_data):
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "stories260K")
    assert tokenizer("Hello").input_ids[0] == tokenizer.bos_token_id  # it would add one
    assert token_stream(["Hello"], tokenizer).tolist().count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("name", ["stories260K", "books-llama"])
def test_front_of_a_long_document_has_the_ids_of_the_whole(shared_data, name):
    tokenizer = AutoTokenizer.from_pretrained(shared_data / name)
    text = (shared_data / "books/eval/860-baby-mine.txt").read_text(encoding="utf-8")
    whole = token_stream([text], tokenizer)
    for count in (1, 700, 5000, len(whole) - 1, len(whole)):
        assert torch.equal(token_stream([text], tokenizer, count), whole[:count])
    assert torch.equal(token_stream([text], tokenizer, len(whole) + 5), whole)


def test_front_is_found_where_tokens_are_long(tokenizer):
    text = "\n" * 30_000 + "x" * 50_000  # no line end near the first guess's cut
    whole = token_stream([text], tokenizer)
    for count in (10, 29_999, 79_000):
        assert torch.equal(token_stream([text], tokenizer, count), whole[:count])


def test_rows_do_not_overlap_and_say_what_is_missing():
    assert rows(torch.arange(11), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="has 11 tokens and rows of 12 need at least 12"):
        rows(torch.arange(11), 12)
    with pytest.raises(ValueError, match="no text"):
        token_stream([], types.SimpleNamespace(bos_token_id=1, eos_token_id=2))
