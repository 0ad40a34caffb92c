# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""Converted checkpoints of any supported family."""

from .families import FAMILIES

for _family in FAMILIES.values():
    for _class in (_family.config_class, _family.model_class, _family.causal_lm_class):
        globals()[_class.__name__] = _class
