"""Strict configuration: YAML read with caps, pydantic models whose complaints are one line."""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import date
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from iclperm.base.files import read_given
from iclperm.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_YAML_BYTES = 1 << 20
MAX_YAML_DEPTH = 20


class Choices(BaseModel):
    """A frozen, strictly validated set of choices; every violation is a one-line `ConfigError`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)

    def __init__(self, /, **choices: Any) -> None:
        for key in choices:
            if key not in type(self).model_fields:
                raise ConfigError(f"{_noun(type(self))} has no key {key!r}; {_nearest(key, type(self).model_fields)}")
        choices = {key: as_written(value) for key, value in choices.items()}
        try:
            super().__init__(**choices)
        except ValidationError as error:
            raise ConfigError(_first_problem(_noun(type(self)), choices, error)) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Tooltips and `help` show keys and defaults, without how each is checked."""
        keys = [key.replace(annotation=Parameter.empty) for key in signature(cls).parameters.values()]
        cls.__signature__ = Signature(keys)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """What is not the default, so that a choice is seen."""
        for name, field in type(self).model_fields.items():
            if (value := getattr(self, name)) != field.get_default(call_default_factory=True):
                yield name, value

    @classmethod
    def from_file(cls, path: str | Path, raw: bytes | None = None) -> Self:
        """Reads and validates one YAML file, whose content is ``raw`` where the caller has read it.

        Raises `ConfigError` naming the file and the key.
        """
        path = given_path(path)
        try:
            return cls(**read_yaml(path, raw))
        except ConfigError as error:
            raise type(error)(f"{path}: {error}") from None

    def to_yaml(self) -> str:
        """The canonical text: every key, in the order of the class, defaults written out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=1000)


_PART = re.compile(r"(.*?\.ya?ml):(.*)", re.DOTALL)


def given_path(path: Any) -> str:
    """The path that a user gave as text; raises `ConfigError` for what is none."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{shown(path)} is no path{_quotes(path)}")
    return os.fspath(path)


def file_and_part(name: str) -> tuple[str, str]:
    """The file that a task's name means, and what follows it after a colon; nothing where the whole is a file."""
    found = _PART.fullmatch(name)
    return (name, "") if found is None or os.path.exists(name) else (found[1], found[2])


def read_yaml(path: str | Path, raw: bytes | None = None) -> dict[str, Any]:
    """One mapping from a YAML file, or from its content: no aliases, no repeated keys, no NUL, at most 1 MiB and 20
    levels; else `ConfigError`."""
    try:
        return yaml_in(read_given(path, MAX_YAML_BYTES) if raw is None else raw)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}; give the path of a YAML file") from None


def yaml_in(raw: bytes, loader: type[StrictLoader] | None = None) -> dict[str, Any]:
    """The mapping in the content of a YAML file; see `read_yaml`. A ``loader`` of one's own may know other tags."""
    if len(raw) > MAX_YAML_BYTES:
        raise ConfigError(f"has {len(raw)} bytes; at most {MAX_YAML_BYTES} are read")
    try:
        content = yaml.load(
            raw.decode("utf-8"), Loader=loader or StrictLoader
        )  # a SafeLoader: constructs plain data only
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except yaml.constructor.ConstructorError as error:
        tag = re.search(r"the tag '([^']+)'", str(error))
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        what = f"it uses the tag {tag[1]!r}{line}, and no tag is run" if tag else " ".join(str(error).split())
        raise ConfigError(f"is not valid YAML: {what}; write the value out") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that there is not
        what = " ".join(str(error).split())
        raise ConfigError(f"is not valid YAML: {what}{'' if '; ' in what else '; repair the file'}") from None
    if not isinstance(content, dict):
        raise ConfigError("must be a mapping of keys to values; write lines such as 'seed: 1'")
    refuse_other_keys(content)
    return content


def scalar(text: str) -> Any:
    """One value as YAML reads it: a number, true, null, or text; raises `ConfigError` for anything with parts."""
    try:
        value = yaml.load(text, Loader=StrictLoader)
    except (yaml.YAMLError, ValueError):
        return text
    if isinstance(value, dict | list):
        raise ConfigError(f"{text!r} is not one value; write it into a YAML file")
    return value


def refuse_other_keys(mapping: Mapping[Any, Any]) -> None:
    """Raises `ConfigError` for a key that is no text."""
    for key in mapping:
        if not isinstance(key, str):
            raise ConfigError(f"the key {shown(key)} is not text{_quotes(key) or '; write a name in its place'}")


class StrictLoader(yaml.SafeLoader):
    """A SafeLoader without the parts that let a small file become a large or a surprising value."""

    _level = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed; write the value out")
        self._level += 1
        if self._level > MAX_YAML_DEPTH:
            raise yaml.YAMLError(f"nested deeper than {MAX_YAML_DEPTH} levels")
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, count in keys.items():
            if count > 1:
                raise yaml.YAMLError(f"the key {key!r} occurs twice (line {node.start_mark.line + 1})")
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if "\0" in value:
            raise yaml.YAMLError(f"a NUL character (line {node.start_mark.line + 1}); remove it")
        return value

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """A whole number of at most 64 bits: a longer one cannot even be shown."""
        try:
            value = super().construct_yaml_int(node)
        except ValueError:  # Python refuses thousands of digits
            value = 1 << 65
        if value.bit_length() > 64:
            raise yaml.YAMLError(
                f"a whole number of more than 64 bits (line {node.start_mark.line + 1}); name a smaller one"
            )
        return int(value)


StrictLoader.add_constructor("tag:yaml.org,2002:int", StrictLoader.construct_yaml_int)


def as_written(value: Any) -> Any:
    """A value of Python as YAML has it: a path as text, tuples, ranges and arrays as lists, NumPy's numbers as
    numbers; any other as it is."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple | range):
        return [as_written(entry) for entry in value]
    as_list = getattr(value, "tolist", None)  # of NumPy, torch and pandas, which are not loaded for this
    return as_list() if callable(as_list) else value


def _quotes(value: Any) -> str:
    """What makes text of a value that YAML took for something else; what makes a task of a table."""
    if hasattr(value, "columns"):
        return "; iclperm.new_task makes a task of a table"
    reason = "YAML reads yes, no, on and off as booleans: " if isinstance(value, bool) else ""
    return f"; {reason}put it in quotes" if isinstance(value, bool | int | float | date) else ""


def _noun(cls: type[Choices]) -> str:
    name = cls.__name__.removesuffix("Choices").lower()
    if name.endswith("s"):
        return f"the block {name!r}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _nearest(key: str, valid: Any) -> str:
    close = difflib.get_close_matches(key, list(valid), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid keys: {', '.join(valid)}"


def _first_problem(noun: str, choices: Mapping[str, Any], error: ValidationError) -> str:
    """The first wrong key as one line; where it may be one of several kinds, what is nearest to being right."""
    problems = [(_place(choices, problem), problem) for problem in error.errors(include_url=False)]
    of_first_key = [(place, problem) for place, problem in problems if place[:1] == problems[0][0][:1]]
    place, problem = max(of_first_key, key=lambda found: len(found[0]))
    if problem["type"] == "missing":
        return f"{noun} needs the key {'.'.join(place)!r}; add it"
    messages = dict.fromkeys(_message(problem) for other, problem in of_first_key if other == place)
    message = " or ".join(messages).replace(" or Input should be ", " or ")
    if any(problem["type"] == "string_type" for other, problem in of_first_key if other == place):
        message += _quotes(problem["input"])
    if not place:
        return message
    return f"{noun}'s key {'.'.join(place)!r} is {shown(problem['input'])}: {message[0].lower()}{message[1:]}"


def _place(choices: Any, problem: ErrorDetails) -> tuple[str, ...]:
    """The keys that lead to a problem, without pydantic's names for the members of a union."""
    place: list[str] = []
    value = choices
    for part in problem["loc"]:
        is_inside = part in value if isinstance(value, Mapping) else isinstance(value, list) and isinstance(part, int)
        if is_inside or not place:
            place.append(str(part))
            value = value[part] if is_inside else None
    return tuple(place)


def _message(problem: ErrorDetails) -> str:
    if problem["type"] == "string_pattern_mismatch":
        return "it should be letters, digits, '_', '.' and '-', the first a letter or digit"
    return problem["msg"].removeprefix("Value error, ")


def shown(value: Any) -> str:
    """A value as an error shows it, cut where it is long."""
    text = f"a {type(value).__name__}" if hasattr(value, "columns") else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
