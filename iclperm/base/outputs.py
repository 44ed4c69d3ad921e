"""Where commands may write: never onto what a run keeps, whatever the path looks like."""

from __future__ import annotations

import os
import re
from pathlib import Path

from iclperm.errors import ConfigError

KEPT = re.compile(
    r"FORMAT|study\.yaml|grid\.yaml|choices\.json|failures\.json|environment|items|api|tmp|quarantine"
    r"|(plan|demonstrations|queries|texts)(-\d{3})?\.(json|parquet(\.sha256)?)",
    re.IGNORECASE,  # as some file systems are
)
"""The names in the folder of a run, of several or of a grid that hold what cannot be made again from the rest."""


def output(path: str | Path, *, is_folder: bool = False) -> Path:
    """A path that a user, or a study, named for what a command writes: a file, or the folder of files.

    Raises `ConfigError` where it is, by whatever links and dots, among what a run keeps, or is reached by a link inside
    a run folder, which may be of whoever made that; and where a device or a pipe is there, which a file would replace.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{path} is no file but a device, a pipe or a socket; name a file")
    named = Path(os.path.abspath(path))
    # Of "link/../file" the system takes the parent of what the link points to, and words alone another.
    places = (named, *(Path(os.path.realpath(each)) for each in (named, path)))
    for place in (*places, *(Path(os.path.realpath(each.parent)) / each.name for each in (named, path))):
        for run in place.parents:
            inside = place.relative_to(run).parts
            if not _is_run(run):
                continue
            if KEPT.fullmatch(inside[0]):
                raise ConfigError(f"{path} is among what the run {run} keeps ({inside[0]}); name another place")
            links = [run.joinpath(*inside[:number]) for number in range(1, len(inside) + is_folder)]
            for link in filter(Path.is_symlink, links):
                raise ConfigError(f"{path} goes through {link}, a link inside a run folder; name another place")
    return path


def report_folder(path: str | Path, own: Path | None = None) -> Path:
    """A folder for a report, as `output`; raises `ConfigError` for that of a run other than the ``own``, whose report
    lies there."""
    path = output(path, is_folder=True)
    if _is_run(path) and (own is None or os.path.realpath(path) != os.path.realpath(own)):
        raise ConfigError(f"{path} is the folder of another run, whose report would be replaced; name another folder")
    return path


def folder_apart(path: str | Path) -> Path:
    """A folder for files that belong to no run, as `output`; raises `ConfigError` for a run's, or a file's name."""
    path = output(path, is_folder=True)
    if _is_run(path):
        raise ConfigError(f"{path} is the folder of a run, which keeps its own files there; name another folder")
    if path.is_file() or path.suffix.lower() in (".csv", ".json", ".jsonl", ".parquet"):
        raise ConfigError(f"{path} is a file's name, and several files are written; name a folder")
    return path


def _is_run(path: Path) -> bool:
    return os.path.lexists(path / "FORMAT") or ((path / "plan.json").exists() and (path / "items").exists())
