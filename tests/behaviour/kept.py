"""The portion of a recording that is kept as a fixture, and how another machine's recording is held against it.

Ids, rows, states, predictions, file names and words are compared exactly; numbers within a tolerance, as the last bits
are another processor's. Commands, options, public names and parameters with defaults may be added, never taken away.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tolerances import TOLERANCES

from behaviour.compare import is_text, shown

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "behaviour"
KEPT = FIXTURES / "kept.json"
GROWING = ("help", "names", "objects")
"""Parts of a recording in which there may be more than was kept."""
_TOLERANCE = TOLERANCES["behaviour"]["float32"]
IN_FULL = ("sensitivity", "search", "transfer", "curve", "selection", "convergence", "generated")
"""Cases whose tables are kept, as they are printed."""
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
_ITEM = re.compile(r"(items/\d{6})-[0-9a-f]{16}")
_RULE = re.compile("[─━]+")
_MEMORY = re.compile(r"^memory .*?in\s+packs\s+of\s+(\d+)\s+tokens", re.MULTILINE | re.DOTALL)  # a machine's
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.(\d+))?")
_IN_FULL = 5
"""Decimals from which a number is not rounded for a reader, and its last digits are those of a machine."""
_OF_PLAN = ("digest", "tokens")
_OF_SESSION = ("closed", "parts", "tokens_forwarded", "replies")


def kept(recording: Mapping[str, Any]) -> dict[str, Any]:
    """What of a recording does not depend on the machine, but for the last digits, and in less room."""
    return {
        "help": {
            command: {key: parsed[key] for key in ("options", "commands")}
            for command, parsed in recording["help"].items()
        },
        "names": {
            module: {name: _surface(value) for name, value in found.items()}
            for module, found in recording["names"].items()
        },
        "objects": {name: _surface(value) for name, value in recording["objects"].items()},
        **{part: portable(recording[part]) for part in ("cases", "shown", "refusals")},
    }


def _surface(about: Mapping[str, Any]) -> dict[str, Any]:
    """Without annotations, and with every parameter as one word."""
    found: dict[str, Any] = {"is": about["is"]}
    if "parameters" in about:
        found["parameters"] = _parameters(about["parameters"])
    if about.get("members"):
        found["members"] = {
            name: value if isinstance(value, str) else {"parameters": _parameters(value["parameters"])}
            for name, value in about["members"].items()
            if name not in found["parameters"]  # a field of a dataclass
        }
    if set(about.get("fields", {})) - set(found.get("parameters", {})):
        found["fields"] = {name: field["default"] for name, field in about["fields"].items()}
    return found | ({"arrays": about["arrays"]} if about.get("arrays") else {})


def _parameters(parameters: Mapping[str, Any]) -> dict[str, str]:
    marks = {"POSITIONAL_ONLY": "/", "KEYWORD_ONLY": "!", "VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    return {
        name: marks.get(parameter["kind"], "") + ("" if parameter["default"] is None else f"={parameter['default']}")
        for name, parameter in parameters.items()
    }


def portable(value: Any, key: str = "") -> Any:
    """A part of a recording without what depends on the machine; rows by column."""
    if key == "answers":
        return {
            run: {name: _column(name, column) for name, column in columns.items()} for run, columns in value.items()
        }
    if key == "files" and isinstance(value, Mapping):
        found = {_ITEM.sub(r"\1", name): _file(name, content) for name, content in value.items()}
        return {"names": [*found]} | {name: content for name, content in found.items() if content is not None}
    if isinstance(value, Mapping):
        if "verify" in value:
            value = _told(value, is_whole=key in IN_FULL)
        return {name: portable(entry, name) for name, entry in value.items() if name != "memory"}
    if is_text(value):
        text = _MEMORY.sub(r"memory ... in packs of \1 tokens", "\n".join(value))
        value = [" ".join(_RULE.sub("─", line).split()) for line in text.splitlines()]
    if isinstance(value, list):
        return [portable(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return _ITEM.sub(r"\1", _DIGEST.sub("DIGEST", value)) if isinstance(value, str) else value


def _column(name: str, column: list[Any]) -> Any:
    """Of numbers every 31st, of predictions and states a digit for each row, of ids and other words a hash."""
    if any(isinstance(value, float) for value in column):
        return [None if value is None else round(value, 4) for value in column[::31]]
    values = list(dict.fromkeys(column))
    if len(values) > 8 or name not in ("prediction", "state", "finish"):
        return hashlib.sha256(json.dumps(column).encode()).hexdigest()[:16]
    return {"of": values, "at": len(column) if len(values) == 1 else "".join(map(str, map(values.index, column)))}


def _told(said: Mapping[str, Any], is_whole: bool) -> dict[str, Any]:
    """A run says in brief what its report says; of a case that is not of `IN_FULL` both in its conclusion alone."""
    found = dict(said)
    for name, about in said.items():
        if is_whole and name == "run":
            found[name] = {"code": about["code"], "err": about["err"]}
        elif (
            isinstance(about, Mapping) and "Conclusion" in about.get("out", ()) and not (is_whole and name == "report")
        ):
            found[name] = {**about, "out": about["out"][about["out"].index("Conclusion") :]}
    return found


def _file(name: str, content: Any) -> Any:
    """Of most files it is enough that they are there."""
    if "/environment/" in f"/{name}":
        return {key: content[key] for key in _OF_SESSION if key in content}
    if "/plan" in f"/{name}" and name.endswith(".json"):
        return {key: content[key] for key in _OF_PLAN if key in content}
    if "/api/" in f"/{name}":
        return [[entry["key"][:16], *entry["spent"]] for entry in content]
    return None


def write(content: Mapping[str, Any], path: Path = KEPT) -> None:
    """A fixture that can be read: a line for each thing that is compared by itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_laid_out(content, 4) + "\n", encoding="utf-8")


def _laid_out(value: Any, depth: int) -> str:
    if depth and isinstance(value, Mapping) and value:
        entries = (f"{json.dumps(key)}: {_laid_out(entry, depth - 1)}" for key, entry in value.items())
        return "{\n" + ",\n".join(entries) + "\n}"
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def read(path: Path = KEPT) -> dict[str, Any]:
    """The fixture."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def differences(there: Any, here: Any, at: str = "", *, may_grow: bool = False) -> Iterator[str]:
    """A line for each thing that is not as it was kept; with ``may_grow`` more than that is allowed."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in there:
            if key not in here:
                yield f"{at}/{key}: gone, was {shown(there[key])}"
            else:
                yield from differences(there[key], here[key], f"{at}/{key}", may_grow=may_grow)
        for key in here:
            if key not in there and not (may_grow and _may_be_added(at, here[key])):
                yield f"{at}/{key}: new, is {shown(here[key])}"
        if may_grow and [key for key in here if key in there] != [key for key in there if key in here]:
            yield f"{at}: the order is {[*here]}, was {[*there]}"
    elif is_text(there) and is_text(here):
        if words := _other_words(" ".join(there), " ".join(here)):
            yield f"{at}: {words}"
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for number, pair in enumerate(zip(there, here, strict=True)):
            yield from differences(*pair, f"{at}[{number}]")
    elif not _is_near(there, here):
        yield f"{at}: {shown(there)} -> {shown(here)}"


def _may_be_added(at: str, value: Any) -> bool:
    """A new parameter must not have to be given."""
    return not at.endswith("/parameters") or "=" in value or value in ("*", "**")


def _is_near(there: Any, here: Any) -> bool:
    if isinstance(there, float) and isinstance(here, float | int):
        return abs(there - here) <= _TOLERANCE * max(1.0, abs(there))
    return type(there) is type(here) and bool(there == here)


def _other_words(there: str, here: str) -> str:
    """The first place where two texts differ: by more than the last digits of a number, or in how a line is broken."""
    words, others = there.split(), here.split()
    for number, pair in enumerate(zip(words, others, strict=False)):
        if not _is_near_word(*pair):
            return f"...{' '.join(words[number : number + 8])}... -> ...{' '.join(others[number : number + 8])}..."
    return "" if len(words) == len(others) else f"{len(words)} words -> {len(others)} words"


def _is_near_word(there: str, here: str) -> bool:
    if there == here or {*there, *here} <= {"─", "━"}:
        return True
    if _NUMBER.sub("0", there) != _NUMBER.sub("0", here):
        return False
    numbers, others = ([*_NUMBER.finditer(word)] for word in (there, here))
    return all(_is_near_number(*pair) for pair in zip(numbers, others, strict=True))


def _is_near_number(there: re.Match[str], here: re.Match[str]) -> bool:
    """Up to two units of the last decimal, and numbers in full up to the tolerance; whole numbers must be equal."""
    decimals, others = (len(found[1] or "") for found in (there, here))
    value, other = (float(found[0].replace(",", "")) for found in (there, here))
    if min(decimals, others) >= _IN_FULL:
        return abs(value - other) <= _TOLERANCE * max(1.0, abs(value))
    if not decimals or decimals != others:
        return there[0] == here[0]
    return abs(value - other) <= 2.5 * 10**-decimals
