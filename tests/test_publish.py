# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Publishing, against a stand-in for the Hub on a loopback port; clients run in processes of their own."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


class Hub(BaseHTTPRequestHandler):
    """The few routes that an upload and a download of a public repository need; content is kept in memory."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, value=None, status=200, raw=b"", headers=()):
        content = json.dumps(value).encode() if value is not None else raw
        self.send_response(status)
        for name, text in (("Content-Length", str(len(content))), *headers):
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self):
        body, repos = self.body(), self.server.repos
        parts = self.path.split("?")[0].strip("/").split("/")
        if self.headers.get("Authorization") != "Bearer secret":
            return self.answer({"error": "Invalid credentials"}, 401)
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'user'}/{asked['name']}"
            repos.setdefault(name, {})
            self.server.private[name] = asked.get("private", asked.get("visibility") == "private")
            return self.answer({"url": f"{self.server.url}/{name}", "id": name})
        if parts == ["api", "validate-yaml"]:
            return self.answer({"errors": [], "warnings": []})
        if parts[:2] == ["api", "models"] and parts[4] == "preupload":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        if parts[:2] == ["api", "models"] and parts[4] == "commit":
            name = "/".join(parts[2:4])
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    repos[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.answer({"commitUrl": f"{self.server.url}/{name}/commit/{'a' * 40}", "commitOid": "a" * 40})
        self.answer({"error": f"no route {self.path}"}, 404)

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "whoami-v2"]:
            return self.answer({"name": "user", "type": "user", "orgs": []})
        if parts[:2] == ["api", "models"]:
            name = "/".join(parts[2:4])
            if name not in self.server.repos:
                return self.answer({"error": "not found"}, 404, headers=[("X-Error-Code", "RepoNotFound")])
            if len(parts) > 4 and parts[4] == "tree":
                files = self.server.repos[name].items()
                return self.answer([{"type": "file", "path": p, "size": len(c), "oid": "b" * 40} for p, c in files])
            siblings = [{"rfilename": path} for path in self.server.repos[name]]
            return self.answer({"id": name, "modelId": name, "sha": "a" * 40, "siblings": siblings, "private": False})
        name, file = "/".join(parts[:2]), "/".join(parts[4:])
        if name not in self.server.repos:
            return self.answer(status=404, headers=[("X-Error-Code", "RepoNotFound")])
        content = self.server.repos[name].get(file)
        if content is None:
            return self.answer(status=404, headers=[("X-Error-Code", "EntryNotFound"), ("X-Repo-Commit", "a" * 40)])
        etag = hashlib.sha256(content).hexdigest()
        self.answer(raw=content, headers=[("ETag", f'"{etag}"'), ("X-Repo-Commit", "a" * 40)])

    do_HEAD = do_GET


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url, server.repos, server.private = f"http://127.0.0.1:{server.server_port}", {}, {}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def client(hub, tmp_path):
    """Runs a script in a process whose Hub is the stand-in; returns its standard output."""

    def run(code: str, *arguments, token: str = "secret") -> str:
        settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HOME": str(tmp_path / "cache")}
        settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        settings |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(
            command, env=os.environ | settings, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def source(tiny_checkpoint):
    return tiny_checkpoint()


@pytest.fixture
def converted(source, tmp_path):
    from hf_linattn.conversion.recipe import Recipe
    from hf_linattn.conversion.source import open_source
    from hf_linattn.conversion.write import converted_config, write_converted

    (output := tmp_path / "converted").mkdir()
    found = open_source(source)
    write_converted(found, converted_config(found, Recipe(str(source), "unused", stages=["write"], window=8)), output)
    (output / "README.md").write_text('---\nlibrary_name: transformers\n---\nfrom_pretrained("converted")\n')
    return output


DOWNLOAD = """
import sys, torch, transformers
if len(sys.argv) > 2:
    import hf_linattn
options = {} if len(sys.argv) > 2 else {"trust_remote_code": True}
model = transformers.AutoModelForCausalLM.from_pretrained("user/small", **options)
ids = torch.arange(40)[None]
print(type(model).__module__, type(model).__name__)
torch.save(model(ids).logits, sys.argv[1])
"""

PUSH = """
import sys
from hf_linattn.conversion.publish import PublishError, push
try:
    print(push(sys.argv[1], "user/small", private=True)["url"])
except PublishError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("imported", [True, False], ids=["imported", "trust_remote_code"])
def test_pushed_checkpoint_comes_back_from_the_hub(hub, client, converted, tmp_path, imported):
    import torch
    from transformers import AutoModelForCausalLM

    assert "user/small" in client(PUSH, converted)
    assert hub.private["user/small"] is True
    on_disk = {p.relative_to(converted).as_posix(): p.read_bytes() for p in converted.rglob("*") if p.is_file()}
    pushed = dict(hub.repos["user/small"])
    card = pushed.pop("README.md").decode()
    assert card == on_disk.pop("README.md").decode().replace('"converted"', '"user/small"') and '"user/small"' in card
    assert pushed == on_disk

    out = client(DOWNLOAD, tmp_path / "logits.pt", *(["import"] if imported else []))
    assert out.split()[-2:] == ["hf_linattn.models.retrofit.modeling_retrofit", "LinAttnLlamaForCausalLM"]
    ids = torch.arange(40)[None]
    torch.testing.assert_close(
        torch.load(tmp_path / "logits.pt"), AutoModelForCausalLM.from_pretrained(converted)(ids).logits.detach()
    )


def test_models_own_push_to_hub(hub, client, converted, tmp_path):
    code = """
import sys, hf_linattn, transformers
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).push_to_hub("user/small")
"""
    client(code, converted)
    assert {"config.json", "model.safetensors", "hf_linattn_loader.py"} <= hub.repos["user/small"].keys()
    client(DOWNLOAD, tmp_path / "logits.pt")


def test_hub_checkpoint_is_a_source(hub, client, source):
    hub.repos["user/base"] = {path.name: path.read_bytes() for path in source.iterdir()}
    hub.repos["user/base"] |= {"pytorch_model.bin": b"pickle", "original/consolidated.safetensors": b"other"}
    code = """
from hf_linattn.conversion.source import CheckpointError, open_source
print(sorted(path.name for path in open_source("user/base").directory.iterdir()))
try:
    open_source("user/absent")
except CheckpointError as error:
    print(error)
"""
    files, error = client(code).strip().splitlines()
    assert files == str(sorted(path.name for path in source.iterdir()))
    assert "user/absent" in error and "hf auth login" in error


def test_refused_login_is_told(client, converted):
    out = client(PUSH, converted, token="wrong")
    assert out.startswith("refused: user/small could not be pushed") and "hf auth login" in out


def test_only_complete_converted_checkpoints_are_pushed(source, converted, tmp_path):
    from hf_linattn.conversion.publish import push
    from hf_linattn.conversion.source import CheckpointError

    with pytest.raises(CheckpointError, match="no checkpoint"):
        push(tmp_path / "absent", "user/small")
    with pytest.raises(CheckpointError, match="not converted"):
        push(source, "user/small")
    (converted / "model-linattn.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks model-linattn.safetensors"):
        push(converted, "user/small")
