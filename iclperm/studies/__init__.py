"""The kinds of study, one file each: its statistics and its section of the report.

`findings_of` makes a kind's findings of a finished run. Any run has the design of the kinds of one run, so each of them
can be asked of it, as far as its numbers of shots, sets and splits allow. Which kinds there are is declared in
`iclperm.study.kinds`; they are loaded here, by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from iclperm.errors import ConfigError
from iclperm.report.parts import Findings
from iclperm.study import kinds

if TYPE_CHECKING:
    from iclperm.runs.run import FinishedRun


def findings_of(run: FinishedRun, kind: str) -> Findings:
    """What ``kind`` makes of a run; raises `ConfigError` for another name, `DataError` where the run lacks what it
    needs."""
    found = kinds.find(kind)
    if found is None or found.stages is not None:
        names = kinds.in_words(kinds.of_one_run(), ", ")
        raise ConfigError(kinds.refused(f"there is no report of the kind {kind!r}; choose one of {names}"))
    return made_by(found, run)


def made_by(kind: kinds.Kind, *given: Any) -> Findings:
    """The findings that a kind makes of a run, or of runs and choices; raises `ConfigError` for what are none."""
    function = findings_function(kind)
    with kinds.calling(kind, "findings"):
        found: Findings = function(*given)
    members = [name for name in vars(Findings) if not name.startswith("_")]
    # Of the class first: a property need not be computed for this.
    missing = [name for name in members if not (hasattr(type(found), name) or hasattr(found, name))]
    if missing:
        raise ConfigError(
            f"{kinds.origin(kind)} makes findings of the type {type(found).__name__}, which lack "
            f"{kinds.in_words(missing, ' and ')}; repair or update it"
        )
    return found


def findings_function(kind: kinds.Kind) -> Callable[..., Any]:
    """What makes the findings of a kind: takes a run or, of a kind with stages, runs and choices.

    Raises `ConfigError` where the declaration names nothing that can be called so.
    """
    function: Callable[..., Any] = kinds.loaded(kind, kind.findings)
    if not callable(function):
        raise ConfigError(f"{kinds.origin(kind)} names {kind.findings}, which is no function; repair it")
    given = ("run",) if kind.stages is None else ("runs", "choices")
    try:
        inspect.signature(function).bind(*given)
    except TypeError as error:
        raise ConfigError(
            f"{kinds.origin(kind)} names {kind.findings}, which cannot be called with {' and '.join(given)} ({error}); "
            "repair or update it"
        ) from error
    except ValueError:  # a function that is not written in Python may have no signature
        pass
    return function
