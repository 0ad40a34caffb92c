# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The recipe: one YAML file, one dataclass, that describes a whole conversion. All defaults stand here."""

import dataclasses
import hashlib
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path

import yaml

STAGES = ("write", "calibrate", "align", "distil", "report")


@dataclass
class Calibrate:
    """Text on which the latents are placed; rows are at most as long as the teacher's trained length."""

    tokens: int = 65_536
    length: int = 1024


@dataclass
class Align:
    """Each converted layer against the teacher's own output of that layer."""

    steps: int = 300
    batch: int = 8
    length: int = 512
    learning_rate: float = 1e-2
    window_dropout: float = 0.25


@dataclass
class Distil:
    """Divergence from the teacher's logits and next-token loss."""

    steps: int = 300
    batch: int = 8
    length: int = 512
    learning_rate: float = 5e-3
    kl_weight: float = 1.0
    lm_weight: float = 0.0


CHOICES = {
    "to": ("latte",),
    "gate": ("lse", "learned"),
    "init": ("data", "random"),
    "assignment": ("soft", "hard"),
    "source_mixer": ("none", "conv", "rglru"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
}
RANGES = {  # smallest and largest value allowed
    "window": (1, None),
    "sinks": (0, None),
    "latents": (1, None),
    "mass_length": (1, None),
    "tokens": (1, None),
    "eval_tokens": (2, None),
    "seed": (0, 2**32 - 1),
    "steps": (0, None),
    "batch": (1, None),
    "length": (2, None),
    "learning_rate": (0.0, None),
    "window_dropout": (0.0, 1.0),
    "kl_weight": (0.0, None),
    "lm_weight": (0.0, None),
}


@dataclass
class Recipe:
    """A whole conversion. Raises `ValueError` naming the field, its value and what is allowed.

    `layers` is "default" (the family's choice), "all", "global" (layers without a window of their own) or a list of
    layer numbers. `mass_length` is the number of tokens outside the window up to which their mass counts in full; None
    stands for a quarter of the trained length. `tokens` is a shorthand: it sets the steps of align and distil so that both
    together see that many tokens.
    The report is made on the first `eval_tokens` tokens of `eval_data`, or of `data`, which then are not trained on.
    `lengths` None stands for 1/2, 1, 2, 4 and 8 times the trained length (at most 2,048) as far as the text reaches,
    `distances` (of planted repeats) None for twice the window, four times and so on up to the trained length.
    """

    source: str
    output: str
    data: str | None = None
    eval_data: str | None = None
    eval_tokens: int = 32_768
    to: str = "latte"
    gate: str = "lse"
    init: str = "data"
    assignment: str = "soft"
    source_mixer: str = "none"
    window: int = 64
    sinks: int = 4
    latents: int = 128
    mass_length: int | None = None
    layers: str | list[int] = "default"
    tokens: int | None = None
    lengths: list[int] | None = None
    distances: list[int] | None = None
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    overwrite: bool = False
    resume: bool = False
    calibrate: Calibrate = field(default_factory=Calibrate)
    align: Align = field(default_factory=Align)
    distil: Distil = field(default_factory=Distil)

    def __post_init__(self):
        parts = (("calibrate", Calibrate), ("align", Align), ("distil", Distil))
        for name, kind in parts:
            if isinstance(getattr(self, name), dict):
                setattr(self, name, _build(kind, getattr(self, name), f"{name}."))
        _check(self, "")
        for name, _ in parts:
            _check(getattr(self, name), f"{name}.")
        if isinstance(self.layers, str) and self.layers not in ("default", "all", "global"):
            raise ValueError(f"layers is {self.layers!r}; use default, all, global or a list of layer numbers.")
        if isinstance(self.layers, list) and (not self.layers or min(self.layers) < 0):
            raise ValueError(f"layers is {self.layers}; name at least one layer, counted from 0.")
        if self.lengths is not None and (not self.lengths or min(self.lengths) < 2):
            raise ValueError(f"lengths is {self.lengths}; name at least one length, each 2 or more.")
        if self.distances and min(self.distances) < 1:
            raise ValueError(f"distances is {self.distances}; each must be 1 or more.")
        unknown = [stage for stage in self.stages if stage not in STAGES]
        if unknown or not self.stages:
            raise ValueError(f"stages is {self.stages}; choose some of {', '.join(STAGES)}.")
        self.stages = [stage for stage in STAGES if stage in self.stages]
        if "write" not in self.stages:
            raise ValueError(
                f"stages is {self.stages}; a conversion begins with write (train and evaluate work later)."
            )
        needs_data = [
            s for s in self.stages if s in ("align", "distil", "report") or s == "calibrate" and self.init == "data"
        ]
        if needs_data and self.data is None:
            raise ValueError(f"the stages {', '.join(needs_data)} need text: give data, or stages: [write] alone.")
        if self.tokens is not None:
            self._spend(self.tokens)

    def _spend(self, tokens: int) -> None:
        parts = [part for name, part in (("align", self.align), ("distil", self.distil)) if name in self.stages]
        total = sum(part.steps * part.batch * part.length for part in parts)
        for part in parts if total else []:
            part.steps = max(1, round(part.steps * tokens / total))
        self.tokens = None  # from here on the steps say it

    @classmethod
    def from_dict(cls, values: dict) -> "Recipe":
        """A recipe from plain values; unknown keys are refused."""
        return _build(cls, values, "")

    @classmethod
    def from_file(cls, path: str | Path, **changes) -> "Recipe":
        """A recipe from a YAML file, with `changes` put over what the file says."""
        return cls.from_dict(read_recipe(path) | changes)

    def to_dict(self) -> dict:
        """Plain values, ready for JSON or YAML."""
        return dataclasses.asdict(self)

    def to_file(self, path: str | Path) -> None:
        """Writes the recipe as YAML."""
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")

    def key(self) -> str:
        """A hash of everything that decides the result; two runs with one key can continue each other."""
        skip = ("output", "overwrite", "resume", "device")
        values = {name: value for name, value in self.to_dict().items() if name not in skip}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_recipe(path: str | Path) -> dict:
    """The plain values of a YAML recipe. Raises `ValueError` if the file is not a mapping."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"recipe {path} does not exist.")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"recipe {path} holds no `name: value` lines.")
    return values


def _build(kind: type, values: dict, prefix: str):
    known = [entry.name for entry in dataclasses.fields(kind)]
    if unknown := [name for name in values if name not in known]:
        raise ValueError(f"unknown recipe entry {prefix}{unknown[0]}; known are: {', '.join(known)}.")
    required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
    if absent := [name for name in required if name not in values]:
        raise ValueError(f"the recipe does not say {prefix}{absent[0]}; add it.")
    return kind(**values)


def _check(part: object, prefix: str) -> None:
    for name, hint in typing.get_type_hints(type(part)).items():
        value = getattr(part, name)
        if hint is float:
            try:
                value = float(value)  # YAML reads 1e-3 as text
            except (TypeError, ValueError):
                raise ValueError(f"{prefix}{name} is {value!r}; give a number.") from None
            setattr(part, name, value)
        elif hint in (str, str | None, str | list[int]) and isinstance(value, Path):
            setattr(part, name, value := str(value))
        if not _fits(value, hint):
            label = getattr(hint, "__name__", str(hint)) if not isinstance(hint, types.UnionType) else str(hint)
            raise ValueError(f"{prefix}{name} is {value!r}; it must be of type {label}.")
        if name in CHOICES and value not in CHOICES[name]:
            raise ValueError(f"{prefix}{name} is {value!r}; choose one of {', '.join(CHOICES[name])}.")
        low, high = RANGES.get(name, (None, None))
        if value is not None and (low is not None and not value >= low or high is not None and value > high):
            allowed = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ValueError(f"{prefix}{name} is {value}; it must be {allowed}.")


def _fits(value, hint) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
