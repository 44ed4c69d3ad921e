"""What `help` says of a class: its own words, then those under each of its fields, which Python does not keep."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type[Any])


def fields_in_help(cls: Class) -> Class:
    """A class whose ``__doc__`` goes on with its fields, their types and the docstrings under them.

    They are read from the source when somebody asks, so that none is written twice and importing costs nothing.
    """
    cls.__doc__ = _Help(cls.__doc__ or "")  # type: ignore[assignment]  # a descriptor, which gives the text
    return cls


class _Help:
    def __init__(self, about: str) -> None:
        self._about = about

    def __get__(self, instance: object, owner: type) -> str:
        return _with_fields(owner, self._about)


@cache
def _with_fields(cls: type, about: str) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # there is no source: an installation without, a prompt
        return about
    (found,) = ast.parse(source).body
    assert isinstance(found, ast.ClassDef)
    lines = []
    for one, after in zip(found.body, [*found.body[1:], None], strict=True):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            words = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                words = f": {' '.join(str(after.value.value).split())}"
            lines.append(f"{one.target.id} ({ast.unparse(one.annotation)}){words}")
    wrapped = (textwrap.fill(line, 100, initial_indent="  ", subsequent_indent="      ") for line in lines)
    return "\n".join([inspect.cleandoc(about), "", "Fields:", *wrapped]) if lines else about
