# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The wheel, the editable install and a bare checkout give the same package, beside the Hub library `kernels` too."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

IMPORTS = """
import importlib, json, sys
import transformers.modeling_utils
import hf_linattn
names = ["hf_linattn.kernels.dispatch", "hf_linattn.conversion", "hf_linattn.cli"]
print(json.dumps([hf_linattn.__file__] + [importlib.import_module(name).__file__ for name in names]))
"""


def run(*arguments: object, cwd: Path, path: tuple[Path, ...] = (), python: str | Path = sys.executable) -> str:
    """Standard output of `python` with `arguments`, run in `cwd` with `path` in front of its import path."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [str(python), *map(str, arguments)]
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def source(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, so that building leaves nothing in the checkout."""
    path = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(repo_root / name, path)
    for name in ("hf_linattn", "kernels", "conversion", "tests"):
        shutil.copytree(repo_root / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return path


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, so that this one is known to be complete."""
    path = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", path, source, cwd=path)
    return next(path.glob("*.whl"))


PIP_INSTALL = ("install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("installed")
    run("-m", "pip", *PIP_INSTALL, "--target", path, wheel, cwd=path)
    return path


@pytest.fixture(scope="module")
def hub_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stand-in of the Hub library `kernels`."""
    path = tmp_path_factory.mktemp("hub")
    (path / "kernels").mkdir()
    (path / "kernels" / "__init__.py").write_text("__version__ = '0.1.0'\n")
    return path


def test_wheel_contents(source: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read("hf_linattn-0.1.0.dist-info/METADATA").decode()
    assert {name.split("/")[0] for name in names} == {"hf_linattn", "hf_linattn-0.1.0.dist-info"}
    expected = set()
    for folder, inside in (("hf_linattn", ""), ("kernels", "hf_linattn/"), ("conversion", "hf_linattn/")):
        expected |= {inside + path.relative_to(source).as_posix() for path in (source / folder).rglob("*.py")}
    assets = source / "hf_linattn" / "assets"
    expected |= {path.relative_to(source).as_posix() for path in assets.rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith("hf_linattn/")} == expected
    assert "hf_linattn/kernels/__init__.py" not in names
    assert "License-Expression: Apache-2.0" in metadata
    assert "hf_linattn-0.1.0.dist-info/licenses/LICENSE" in names


@pytest.mark.parametrize("with_hub_kernels", [False, True])
def test_wheel_imports_from_another_directory(
    installed: Path, hub_kernels: Path, tmp_path: Path, with_hub_kernels: bool
) -> None:
    path = (installed, hub_kernels) if with_hub_kernels else (installed,)
    assert run("-c", IMPORTS, cwd=tmp_path, path=path).count(str(installed)) == 4


@pytest.mark.parametrize("with_hub_kernels", [False, True])
def test_checkout_imports_in_its_root(
    repo_root: Path, installed: Path, hub_kernels: Path, with_hub_kernels: bool
) -> None:
    path = (installed, hub_kernels) if with_hub_kernels else (installed,)
    output = run("-c", IMPORTS + "import kernels; print(kernels.__file__)", cwd=repo_root, path=path)
    assert output.count(str(installed)) == 0 and output.count(f'"{repo_root}/') == 4
    assert output.splitlines()[-1] == (str(hub_kernels / "kernels" / "__init__.py") if with_hub_kernels else "None")


def test_editable_install_imports_from_another_directory(source: Path, tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    python = tmp_path / "bin" / "python"
    # A .pth file lends the new environment this one's packages, but not this one's own editable install.
    next(tmp_path.glob("lib/*/site-packages")).joinpath("lent.pth").write_text(sysconfig.get_path("purelib"))
    run("-m", "pip", "--python", python, *PIP_INSTALL, "--editable", source, cwd=tmp_path)
    assert run("-c", IMPORTS, cwd=tmp_path, python=python).count(str(source)) == 4


def test_console_script(installed: Path) -> None:
    entry_points = (installed / "hf_linattn-0.1.0.dist-info" / "entry_points.txt").read_text()
    assert "hf-linattn = hf_linattn.cli:main" in entry_points
    assert "convert" in run("-c", "from hf_linattn.cli import main; main(['--help'])", cwd=installed)


def test_constraints_meet_the_bounds(repo_root: Path) -> None:
    from packaging.requirements import Requirement

    lines = (repo_root / "constraints.txt").read_text().splitlines()
    pinned = dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"] + project["optional-dependencies"]["test"]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(pinned[requirement.name.lower().replace("_", "-")]), line
