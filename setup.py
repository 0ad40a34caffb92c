# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Maps the top-level folders kernels/ and conversion/ into the package; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

packages, package_dir = find_packages(include=["hf_linattn", "hf_linattn.*"]), {}
for top in ("kernels", "conversion"):
    for name in [top] + [f"{top}.{sub}" for sub in find_packages(top)]:
        packages.append(f"hf_linattn.{name}")
        package_dir[packages[-1]] = name.replace(".", "/")
setup(packages=packages, package_dir=package_dir)
