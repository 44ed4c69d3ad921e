"""One call at a time of what is for one thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from iclperm.errors import RequestError

_P = ParamSpec("_P")
_T = TypeVar("_T")


class InUse:
    """Whether a call runs now; ``held`` has its mark."""

    def __init__(self) -> None:
        self.held: dict[str, object] = {}


class _Single(Protocol):
    _in_use: InUse


_Owner = TypeVar("_Owner", bound=_Single)


def alone(verb: Callable[Concatenate[_Owner, _P], _T]) -> Callable[Concatenate[_Owner, _P], _T]:
    """A method that raises RequestError while another call of the same object runs, in whichever thread.

    Marked by what only this call has, so that an interrupt, which may come between any two steps, leaves no mark.
    """

    @wraps(verb)
    def called(self: _Owner, /, *args: _P.args, **options: _P.kwargs) -> _T:
        held, mark = self._in_use.held, object()
        try:
            if held.setdefault("call", mark) is not mark:
                raise RequestError(
                    "another call of this session runs now (in another thread, or this is asked from its progress or a "
                    "hook); let threads take turns by a lock, or open a session for each with engine.session()"
                )
            return verb(self, *args, **options)
        finally:
            if "call" in held and held["call"] is mark:  # no call between, after which an interrupt may come
                del held["call"]

    return called
