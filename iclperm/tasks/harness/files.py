"""Files of lm-evaluation-harness: what their ``include`` makes of them, and what a group names. Nothing in them is run.

A `!function` is kept as its name (`Function`); whoever needs its value refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from iclperm.base.files import read_given
from iclperm.errors import ConfigError
from iclperm.study.choices import MAX_YAML_BYTES, StrictLoader, yaml_in

_MAX_INCLUDES = 64  # files that one file may be made of
_MAX_SEARCHED = 20_000  # files below a group's folder
_GROUP_KEYS = {"group", "group_alias", "aggregate_metric_list", "metadata", "task", "tag", "include"}
_TELLING = {"dataset_path", "doc_to_text", "doc_to_target", "doc_to_choice", "output_type", "include", "group", "class"}
_NAMES_A_TASK = re.compile(rb"""^task:[ \t]*(['"]?)([^\s'"#]+)\1[ \t]*(?:#.*)?\r?$""", re.MULTILINE)
_NAMES_A_TAG = re.compile(rb"""^tag:[ \t]*((?:[^\n]*)(?:\n[ \t]*-[^\n]*)*)""", re.MULTILINE)


@dataclass(frozen=True)
class Function:
    """A `!function` of a file by its name, such as ``utils.process_docs``; it is never called."""

    name: str


@dataclass(frozen=True)
class GroupMember:
    """What a group names: a task, a tag or another group, and the keys that the group changes of it."""

    name: str
    changes: dict[str, Any]


def is_harness(content: Mapping[str, Any]) -> bool:
    """Whether a file's content is of lm-evaluation-harness: it has a key that no task of ours has."""
    return not _TELLING.isdisjoint(content)


def read_harness(path: str | Path, raw: bytes | None = None) -> dict[str, Any]:
    """The keys of a file, over those of the files that it includes, and theirs; `Function` in place of each
    `!function`. ``raw`` is the file's content where the caller has read it.

    Included files are relative to the file that names them, and later ones win. Raises `ConfigError` naming the file
    that cannot be read, that includes itself, or that is made of more than 64 files.
    """
    return _read(Path(path), raw, (), iter(range(_MAX_INCLUDES)))


def _read(path: Path, raw: bytes | None, above: tuple[Path, ...], left: Iterator[int]) -> dict[str, Any]:
    real = path.resolve()
    if real in above:
        raise ConfigError(f"the key 'include' leads from {path.name} back to itself; leave one of them out")
    if next(left, None) is None:
        raise ConfigError(f"the key 'include' leads to more than {_MAX_INCLUDES} files; write the keys out")
    content = yaml_in(_bytes(path, bool(above)) if raw is None else raw, _Loader)
    merged: dict[str, Any] = {}
    for name in _listed(content.pop("include", None)):
        try:
            merged |= _read(path.parent / name, None, (*above, real), left)
        except ConfigError as error:
            said = str(error)
            raise ConfigError(said if said.startswith("the key 'include'") else f"includes {name}: {said}") from None
    merged.pop("task_list", None)
    return merged | content


def _listed(named: Any) -> list[str]:
    names = named if isinstance(named, list) else [] if named is None else [named]
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"the key 'include' is {named!r}; name a file, or list some")
    return names


def _bytes(path: Path, is_included: bool) -> bytes:
    try:
        return read_given(path, MAX_YAML_BYTES)
    except OSError as error:
        remedy = "repair the key 'include'" if is_included else "give the path of a YAML file"
        raise ConfigError(f"cannot be read: {error.strerror}; {remedy}") from None


class _Loader(StrictLoader):
    """Plain data, as everywhere; the tag `!function` is kept as a name, and of equal keys the last counts, as in the
    harness."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        return yaml.SafeLoader.construct_mapping(self, node, deep)

    def construct_function(self, node: yaml.ScalarNode) -> Function:
        return Function(str(self.construct_scalar(node)))


_Loader.add_constructor("!function", _Loader.construct_function)


def members(content: Mapping[str, Any]) -> list[GroupMember]:
    """What the content of a group's file names, in order; those of a group within it, too.

    Raises `ConfigError` for an entry that names nothing.
    """
    own = {key: value for key, value in content.items() if key not in _GROUP_KEYS and not key.startswith("group")}
    found: list[GroupMember] = []
    named = content.get("task")
    for entry in named if isinstance(named, list) else [named] if named else []:
        if isinstance(entry, str):
            found.append(GroupMember(entry, own))
        elif isinstance(entry, dict) and isinstance(entry.get("task"), str) and "group" not in entry:
            found.append(
                GroupMember(entry["task"], own | {key: value for key, value in entry.items() if key != "task"})
            )
        elif isinstance(entry, dict) and isinstance(entry.get("group"), str):
            within = members(entry)
            changes = {key: value for key, value in entry.items() if key != "group"}
            found += within if "task" in entry else [GroupMember(entry["group"], own | changes)]
        else:
            raise ConfigError(f"the key 'task' of a group holds {entry!r}; name a task, or list some")
    return found


def files_of(name: str, folder: Path) -> list[Path]:
    """The files in a folder and below whose key ``task`` is ``name``, else those that carry the tag ``name``; sorted.

    Looks at these two keys where they are written at the top of a file alone. O(bytes of the folder's YAML files).
    """
    of_name, of_tag = [], []
    wanted = name.encode()
    for number, path in enumerate(sorted(folder.rglob("*.yaml"))):
        if number >= _MAX_SEARCHED:
            raise ConfigError(f"{folder} holds more than {_MAX_SEARCHED} YAML files; name the task's own file")
        raw = _bytes(path, is_included=False)
        if any(match[2] == wanted for match in _NAMES_A_TASK.finditer(raw)):
            of_name.append(path)
        elif any(wanted in re.split(rb"[\s,\[\]'\"]+", match[1]) for match in _NAMES_A_TAG.finditer(raw)):
            of_tag.append(path)
    return of_name or of_tag
