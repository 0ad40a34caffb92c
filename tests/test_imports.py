# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Rules that the sources keep: imports go one way, and nothing names a path of one machine."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

LAYERS = {"kernels": "hf_linattn.kernels", "conversion": "hf_linattn.conversion", "hf_linattn": "hf_linattn"}
MACHINE_PATH = re.compile(r"(?<![\w.~])/(?:work|tmp|root|farm|home|Users)/")


def imported_modules(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Absolute names of everything that `source` imports, at any depth; `from a import b` counts as `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
                base = parents + base
            yield from (".".join([*base, alias.name]) for alias in node.names)


def offences(path: str, source: str) -> list[str]:
    """Imports of the file `path` (relative to the root) that break the rule conversion -> hf_linattn -> kernels."""
    parts = Path(path).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = ".".join((LAYERS.get(parts[0], parts[0]), *parts[1 : -1 if is_package else None]))

    def inside(name: str, package: str) -> bool:
        return name == package or name.startswith(package + ".")

    def forbidden(name: str) -> bool:
        if inside(name, "kernels") or inside(
            name, "conversion"
        ):  # the first is the Hub library, the second is nothing
            return True
        if parts[0] == "kernels":
            own = inside(name, "hf_linattn") and not inside(name, "hf_linattn.kernels")
            return own or inside(name, "transformers")
        return parts[0] == "hf_linattn" and path != "hf_linattn/cli.py" and inside(name, "hf_linattn.conversion")

    return [name for name in imported_modules(source, module, is_package) if forbidden(name)]


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("kernels/scan.py", "import hf_linattn.cache", ["hf_linattn.cache"]),
        ("kernels/rg_lru/chunked.py", "from ... import cache", ["hf_linattn.cache"]),
        ("kernels/rg_lru/chunked.py", "from ..scan import f\nfrom .reference import g\nimport torch", []),
        ("kernels/rg_lru/__init__.py", "from .chunked import f\nfrom ..scan import g", []),
        ("kernels/rg_lru/__init__.py", "from ...cache import f", ["hf_linattn.cache.f"]),
        ("kernels/scan.py", "def f():\n    import transformers", ["transformers"]),
        ("hf_linattn/__init__.py", "from . import conversion", ["hf_linattn.conversion"]),
        ("hf_linattn/mixers/latte.py", "from ..conversion.data import f", ["hf_linattn.conversion.data.f"]),
        ("hf_linattn/mixers/latte.py", "from ..kernels.scan import f", []),
        ("hf_linattn/cli.py", "from hf_linattn import conversion", []),
        ("conversion/plan.py", "from .data import f\nfrom ..kernels import scan\nimport transformers", []),
        ("conversion/plan.py", "from kernels.scan import f", ["kernels.scan.f"]),
        ("tests/test_plan.py", "import conversion.plan", ["conversion.plan"]),
    ],
)
def test_the_check_itself(path: str, source: str, expected: list[str]) -> None:
    assert offences(path, source) == expected


def test_imports_go_one_way(repo_root: Path) -> None:
    folders = ("kernels", "hf_linattn", "conversion", "examples", "benchmarks", "tests")
    files = [path for folder in folders for path in sorted((repo_root / folder).rglob("*.py"))]
    relative = [path.relative_to(repo_root).as_posix() for path in files]
    assert any(path.startswith("kernels/") for path in relative)
    found = {
        name: bad
        for name, path in zip(relative, files, strict=True)
        if (bad := offences(name, path.read_text("utf-8")))
    }
    assert not found


def test_no_kernels_init(repo_root: Path) -> None:
    assert not (repo_root / "kernels" / "__init__.py").exists(), "it would shadow the Hub library `kernels`"


def test_no_machine_paths(repo_root: Path) -> None:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=repo_root, capture_output=True, text=True, check=True).stdout.split("\0")
    found = []
    for name in names:
        path = repo_root / name
        if not path.is_file() or name.startswith("hf_linattn/assets/"):  # a tokenizer's vocabulary may hold any text
            continue
        try:
            lines = path.read_text("utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [f"{name}:{i}: {line.strip()[:100]}" for i, line in enumerate(lines, 1) if MACHINE_PATH.search(line)]
    assert not found, "\n".join(found)
