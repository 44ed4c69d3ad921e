"""The study that a command line means: a file or a run's folder, and flags that win over it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from iclperm.base.files import Folder
from iclperm.cli.options import LISTS, NUMBERS, SWITCHES
from iclperm.errors import ConfigError, RunError, UnknownKind
from iclperm.study.choices import MAX_YAML_BYTES, scalar
from iclperm.study.kinds import PER_QUERY
from iclperm.study.study import Study, is_cut_off


def study_of(source: Path | None, flags: Mapping[str, str | None]) -> Study:
    """The study of ``source``, a study file or a run's folder, or the default one, with the flags that are given.

    Raises `ConfigError` for what is no study, and `RunError` for a folder that holds none, or a damaged one.
    """
    given: dict[str, Any] = {key: value_of(key, text) for key, text in flags.items() if text is not None}
    if source is None:
        return Study(**given)
    if not source.is_dir():
        return Study(**{**Study.from_file(source).model_dump(), **given})
    return Study(**{**_study_of_run(source).model_dump(), "out": str(source), **given})


def value_of(key: str, text: str) -> Any:
    """A flag's text as the study wants it; "1,2,4" is a list of shots, "4,17;3,2" are two sets of demonstrations."""
    if key in SWITCHES:
        return text == "true"
    if key in LISTS:
        return text.split(",")
    if key == "demonstrations":
        return text if text == PER_QUERY else _rows(text)
    if key == "endpoint":
        return _endpoint(text)
    if key == "options":
        return _choices(text, "--options", "key=value with commas between")
    if key == "tolerance":
        return _share(key, text)
    if key not in NUMBERS or (key, text) == ("shots", "all"):
        return text
    try:
        return [int(part) for part in text.split(",")] if key == "shots" and "," in text else int(text)
    except ValueError:
        raise ConfigError(f"--{key.replace('_', '-')} is {text!r}; give a whole number") from None


def _share(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--{key} is {text!r}; give a number of 0 or more, as 0.02") from None


def _study_of_run(folder: Path) -> Study:
    """The study in a run's folder; of a file that was cut off, the rest would be another study."""
    files = Folder(folder)
    if not files.has(folder / "FORMAT"):
        raise RunError(f"{folder} is not a run folder; give a study file, or the folder that a run was written to")
    path = folder / "study.yaml"
    try:
        raw = files.read(path, MAX_YAML_BYTES)
        study = None if is_cut_off(raw) else Study.from_file(path, raw)
    except UnknownKind:
        raise
    except (ConfigError, OSError):
        study = None
    if study is None:
        raise RunError(f"{path} is damaged; run the study from its own file with --out {folder}, which mends the run")
    return study


def _rows(text: str) -> list[list[int]]:
    try:
        return [[int(row) for row in rows.split(",")] for rows in text.split(";")]
    except ValueError:
        raise ConfigError(
            f"--demonstrations is {text!r}; give rows with commas and sets with semicolons between"
        ) from None


def _endpoint(text: str) -> dict[str, Any]:
    """A URL, or "key=value" with commas between; the keys of prices are prices.input and so on."""
    if "=" not in text.split("://")[0]:
        return {"base_url": text}
    return _choices(text, "--endpoint", "a URL, or key=value with commas between")


def _choices(text: str, flag: str, form: str) -> dict[str, Any]:
    """What "key=value" with commas between stands for; a key such as prices.input is one of a group."""
    choices: dict[str, Any] = {}
    for entry in text.split(","):
        key, equals, value = entry.partition("=")
        if not equals:
            raise ConfigError(f"{flag} has {entry!r}; give {form}")
        *groups, name = key.strip().split(".")
        place = choices
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = scalar(value)
    return choices
