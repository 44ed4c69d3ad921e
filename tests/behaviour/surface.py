"""The surface: all ``--help`` texts, and every public name with what it takes and has."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pydantic

import iclperm
from behaviour.place import Place
from iclperm import demo

MODULES = (
    "iclperm", "iclperm.stats", "iclperm.report", "iclperm.models", "iclperm.demo", "iclperm.tasks", "iclperm.engine",
    "iclperm.endpoint", "iclperm.errors", "iclperm.bench",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
_OF_BASES = {name for base in (pydantic.BaseModel, tuple, dict, Exception) for name in dir(base)}
_ENTRY = re.compile(r"^  (-[^ ]+(?: [^ ]+)*?|\S+)(?:  +(.*))?$")


def helps(place: Place) -> dict[str, Any]:
    """The help of every command, recursively: commands are those that a help lists."""
    found: dict[str, Any] = {}

    def walk(*words: str) -> None:
        code, out, err = place.raw(*words, "--help")
        assert (code, err) == (0, ""), (words, err)
        parsed = _sections(out)
        found[" ".join(("iclperm", *words))] = {"text": out.splitlines(), **parsed}
        for name in parsed["commands"]:
            walk(*words, name)

    walk()
    return found


def _sections(text: str) -> dict[str, dict[str, str]]:
    """Options and commands with what is said of each, however the lines are broken."""
    found: dict[str, dict[str, str]] = {"options": {}, "commands": {}}
    section, last = None, ""
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            section = found.get(line[:-1].lower().split()[-1])  # "Model options:" are options
        elif section is not None and (match := _ENTRY.match(line)):
            last = match[1]
            section[last] = match[2] or ""
        elif section is not None and line.strip():
            section[last] = f"{section[last]} {line.strip()}".strip()
    return found


def names() -> dict[str, Any]:
    """Every public name by its module: those of ``__all__``, or without one what is defined there."""
    return {name: {key: about(value) for key, value in _public(name).items()} for name in MODULES}


def _public(name: str) -> dict[str, Any]:
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", None)
    if listed is None:
        listed = [
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and getattr(value, "__module__", "").startswith(name)
        ]
    return {key: getattr(module, key) for key in sorted(listed)}


def about(value: Any) -> dict[str, Any]:
    """What a name is: parameters, members and fields; never the module that it lives in."""
    if isinstance(value, ModuleType):
        return {"is": "module"}
    if inspect.isclass(value):
        return {"is": "class", "parameters": _parameters(value), "members": _members(value), **_fields(value)}
    if callable(value) and hasattr(value, "__name__"):
        return {"is": "function", "parameters": _parameters(value), "returns": _returns(value)}
    return {"is": type(value).__name__, "value": value if isinstance(value, int | float | str) else None}


def _parameters(value: Any) -> dict[str, Any]:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return {}
    return {
        name: {
            "kind": str(parameter.kind.name),
            "default": _default(parameter.default),
            "annotation": _annotation(parameter.annotation),
        }
        for name, parameter in signature.parameters.items()
    }


def _default(value: Any) -> str | None:
    """None where a value must be given."""
    if value is inspect.Parameter.empty or value is dataclasses.MISSING:
        return None
    return re.sub(r" at 0x[0-9a-f]+", "", re.sub(r"\biclperm[\w.]*\.", "", repr(value)))


def _annotation(value: Any) -> str:
    """Without the modules of the names in it."""
    if value is inspect.Parameter.empty:
        return ""
    text = value if isinstance(value, str) else inspect.formatannotation(value)
    return re.sub(r"\biclperm[\w.]*\.", "", text)


def _returns(value: Any) -> str:
    try:
        return _annotation(inspect.signature(value).return_annotation)
    except (TypeError, ValueError):
        return ""


def _members(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in sorted(set(dir(kind)) - _OF_BASES):
        if name.startswith("_"):
            continue
        value = inspect.getattr_static(kind, name)
        if isinstance(value, property | functools.cached_property):
            found[name] = "property"
        elif isinstance(value, classmethod | staticmethod) or inspect.isfunction(value):
            found[name] = {"parameters": _parameters(getattr(kind, name)), "returns": _returns(getattr(kind, name))}
        else:
            found[name] = "attribute"
    return found


def _fields(kind: type) -> dict[str, Any]:
    fields: Mapping[str, Any] = {}
    if dataclasses.is_dataclass(kind):
        fields = {field.name: (field.type, field.default) for field in dataclasses.fields(kind)}
    elif issubclass(kind, pydantic.BaseModel):
        fields = {
            name: (field.annotation, inspect.Parameter.empty if field.is_required() else field.default)
            for name, field in kind.model_fields.items()
        }
    elif hasattr(kind, "_fields"):
        defaults = getattr(kind, "_field_defaults", {})
        fields = {name: ("", defaults.get(name, inspect.Parameter.empty)) for name in kind._fields}
    return {
        "fields": {
            name: {"annotation": _annotation(annotation), "default": _default(default)}
            for name, (annotation, default) in fields.items()
        }
    }


def objects() -> dict[str, Any]:
    """What public functions give back, by how one comes to it; needs the finished runs of the cases."""
    run, runs = iclperm.open_run("runs/sensitivity"), iclperm.open_run("runs/selection")
    generated, calibrated = iclperm.open_run("runs/generated"), iclperm.open_run("runs/calibrated")
    task, planned = iclperm.Task.load("mini_news"), iclperm.plan(run.study)
    engine = iclperm.Engine.from_pretrained(demo.model_path(), device="cpu")
    likelihoods = engine.loglikelihood([("Article:", " World")])
    found = {
        "run": run,
        "run.report": run.report,
        "run.splits": run.splits["test"],
        "run.summary()": run.summary(),
        "run.curve()": run.curve(),
        "run.over_shots()": run.over_shots(),
        "run.demonstrations": run.demonstrations,
        "calibrated.calibration": calibrated.calibration,
        "generated.generation": generated.generation,
        "generated.splits": generated.splits["test"].generated,
        "selection": runs,
        "selection.choice": runs.choice,
        "plan": planned,
        "plan.estimate": planned.estimate,
        "engine.loglikelihood()": likelihoods,
        "engine.generate()": engine.generate(["Article:"], max_new_tokens=1),
        "engine.report": engine.report,
        "task.examples()": task.examples("train"),
        **{f"findings of {kind}": iclperm.open_run(f"runs/{kind}").findings() for kind in _KINDS},
        "table": run.findings().tables(True)[0],
        "accuracy": iclperm.stats.accuracy(run.correct[:, :, -1]),
        "components": iclperm.stats.variance_components(run.correct[:, :, -1]),
        "figures": next(iter(run.findings().plots().values())),
    }
    return {name: about(type(value)) | _attributes(value) for name, value in found.items()}


_KINDS = ("sensitivity", "search", "curve", "convergence", "transfer", "selection")


def _attributes(value: Any) -> dict[str, Any]:
    """Of arrays the type and the number of axes, too."""
    arrays = {
        name: f"{field.dtype} of {field.ndim} axes"
        for name, field in getattr(value, "__dict__", {}).items()
        if isinstance(field, np.ndarray) and not name.startswith("_")
    }
    return {"arrays": arrays}


def documented() -> dict[str, Any]:
    """Every name below ``iclperm`` that README and docs write out, and whether it is there."""
    found: dict[str, bool] = {}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"^\s*from (iclperm[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
            found |= {f"{match[1]}.{name.strip()}": False for name in match[2].split(",")}
        found |= {match[0]: False for match in re.finditer(r"(?<![\w./-])iclperm(?:\.[A-Za-z_]\w*)+", text)}
    return {name: is_there(name) for name in sorted(found) if not name.endswith((".kinds", ".yaml", ".py"))}


def is_there(name: str) -> bool:
    """Whether a dotted name can be imported and looked up."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False
