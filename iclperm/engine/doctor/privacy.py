"""What a report may show of a text that others made: a line that steers nothing, and names no person, place or key."""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from iclperm.errors import printable, said_by

_CUTS = (
    (re.compile(r"://[^/@\s]+@"), "://"),  # who logs in at a URL
    # Paths: in quotes, where they may hold spaces, and bare; of Unix, then of Windows.
    (re.compile(r"""(['"])~?/[^'"]*/([^'"/]*)\1"""), r"\1.../\2\1"),
    (re.compile(r"""(['"])(?:[A-Za-z]:|\\)\\[^'"]*\\([^'"\\]*)\1"""), r"\1.../\2\1"),
    (re.compile(r"""(?<![\w/.])~?/(?:[^/\s'":;,()<>|]+/+)+"""), ".../"),
    (re.compile(r"""(?<![\w\\])(?:[A-Za-z]:|\\)\\(?:[^\\\s'":;,()<>|]+\\+)+"""), ".../"),
    (re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_)[\w-]{8,}"), "***"),
    (re.compile(r"\b(GPU|MIG)-[0-9A-Fa-f-]{8,}"), r"\1-***"),
)
_NEVER = r"(?!)"
_Cut = tuple[re.Pattern[str], str]
_GIVEN: ContextVar[_Cut] = ContextVar("the path of a model as it was given", default=(re.compile(_NEVER), ""))
_FOLDER_NAME: ContextVar[re.Pattern[str]] = ContextVar("the name of a model's folder", default=re.compile(_NEVER))
_SHORTEST_NAME = 3  # letters; what is shorter is part of many words


def without_names(text: str) -> str:
    """The text in one line that steers no terminal and ends no fence of Markdown; of a path its last part is left, of
    user, machine and keys nothing."""
    line = printable(" ".join(text.split())).replace("`", "'")
    for pattern, instead in (_GIVEN.get(), *_CUTS, *_names()):
        line = pattern.sub(instead, line)
    return _FOLDER_NAME.get().sub("FOLDER", line)


@contextmanager
def naming_no_folder(path: str) -> Iterator[None]:
    """Within, `without_names` cuts this path, too, and the name of its folder in any path or in quotes; of "" nothing.

    A link has two names; of a file in a folder, which is no model, it is the folder's, and the file's own is left.
    """
    places = [Path(path), Path(path).absolute(), Path(path).resolve()] if path else []
    places += [place.parent for place in places if place.is_file()]
    found = {place.name for place in places if place.name.strip(".") and not place.is_file()}
    names = "|".join(map(re.escape, sorted(found, key=len, reverse=True)))
    given = _GIVEN.set(_as_given(path))
    token = _FOLDER_NAME.set(re.compile(rf"""(?<=['"/\\])(?:{names})(?![\w-])""" if names else _NEVER))
    try:
        yield
    finally:
        _FOLDER_NAME.reset(token)
        _GIVEN.reset(given)


def _as_given(path: str) -> _Cut:
    """Cuts a relative path where it stands as a user gave it, which no pattern knows; a single word, which may mean
    anything, is left."""
    if os.path.isabs(path):
        return re.compile(_NEVER), ""
    is_file = Path(path).is_file()
    texts = {os.path.dirname(text) if is_file else text for text in (path, os.path.normpath(path)) if path}
    texts = {text.rstrip("/\\") for text in texts if not text.strip("./\\").isalpha()} - {"", ".", ".."}
    names = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    return re.compile(rf"(?<![\w/.-])(?:{names})(?![\w-])" if names else _NEVER), "..." if is_file else "FOLDER"


def first_line(error: BaseException) -> str:
    """What an error says first, with its kind; of one in a kernel what it came of."""
    return without_names(said_by(error))


@cache
def _names() -> tuple[tuple[re.Pattern[str], str], ...]:
    names = {platform.node(): "HOST", platform.node().partition(".")[0]: "HOST"}
    try:
        names[getpass.getuser()] = "USER"
    except (OSError, KeyError):  # in a container a user may have none
        names[""] = "USER"
    return tuple(
        (re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE), instead)
        for name, instead in names.items()
        if len(name) >= _SHORTEST_NAME and name != "root"
    )
