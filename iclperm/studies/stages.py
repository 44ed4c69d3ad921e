"""What a kind that is made of several runs goes through: rounds of runs, and what is chosen between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from iclperm.errors import ConfigError
from iclperm.studies import findings_function
from iclperm.studies.report import Run
from iclperm.study import kinds
from iclperm.study.study import Study

_NAME = re.compile(r"[\w-][\w.-]*")
_TAKEN = re.compile(r"FORMAT|study\.yaml|choices\.json|quarantine|report([.-].*)?|damaged-[0-9a-f]{8}\.yaml")
"""What else lies in the folder of a study of several runs."""


@dataclass(frozen=True)
class Stage:
    """One round of the runs of a study, and what is chosen from them for the rounds after it."""

    studies: Callable[[Study, Mapping[str, Any]], Mapping[str, Study]]
    """The studies of this round by the names of their runs, from the whole study and what earlier stages chose, by the
    names of these. `Study.of_kind` makes them; every run of a study has its own name. Raises `ConfigError` for a study
    that this kind cannot serve."""
    choose: Callable[[Study, Mapping[str, Run]], Any] | None = None
    """What is chosen from the finished runs of this round, by name: anything that JSON can hold, but not None. It is
    kept in the study's folder, so that it is made once for the same runs. A stage without it chooses nothing."""
    stand_in: Callable[[Study], Any] | None = None
    """What `choose` could choose, as far as later `studies` look at it: plans are made with it, before there are
    runs."""
    check: Callable[[Study], None] | None = None
    """Raises `ConfigError` for what would only fail once earlier runs are done; it may read the task."""
    read: Callable[[Any], Any] | None = None
    """The choice as an object of this kind, for `StudyRuns.choice`; unless given that is the choice as it is kept."""

    def parts(self, study: Study, choices: Mapping[str, Any], earlier: Collection[str] = ()) -> dict[str, Study]:
        """As `studies`, after rounds whose runs have the names ``earlier``.

        Raises `ConfigError` for what is no mapping of names to studies, for a name that no folder can have or that is
        taken, and for runs that are several.
        """
        with kinds.calling(kinds.named(study.kind), "studies"):
            found = self.studies(study, choices)
        if not isinstance(found, Mapping):
            raise ConfigError(f"{_about(study)} has a stage whose 'studies' are no mapping of names to them; repair it")
        for name, part in found.items():
            if not (isinstance(name, str) and _NAME.fullmatch(name)):
                raise ConfigError(f"{_about(study)} calls a run {name!r}; give letters, digits, _, - and .")
            if _TAKEN.fullmatch(name):
                raise ConfigError(f"{_about(study)} calls a run {name!r}, as a file of the study's; give another name")
            if name in earlier:
                raise ConfigError(f"{_about(study)} calls two runs {name!r}; give every run of its stages its own name")
            if not isinstance(part, Study):
                raise ConfigError(f"{_about(study)} makes {name!r} a {type(part).__name__}, not a study; repair it")
            if kinds.named(part.kind).stages is not None:
                raise ConfigError(f"{_about(study)} makes {name!r} a {part.kind}; its runs must be of kinds of one run")
        return dict(found)


def load(kind: kinds.Kind) -> None:
    """Loads what runs and reports a kind; raises `ConfigError` in one line where its declaration cannot be used."""
    if kind.stages is not None:
        _loaded_stages(kind)
    findings_function(kind)


def stages_of(study: Study) -> Mapping[str, Stage]:
    """The stages of a study of several runs, by name, in order; raises `ConfigError` as `load` does."""
    return _loaded_stages(kinds.named(study.kind))


def _loaded_stages(kind: kinds.Kind) -> Mapping[str, Stage]:
    about = f"{kinds.origin(kind)} names {kind.stages}"
    found = kinds.loaded(kind, kind.stages or "")
    if not (isinstance(found, Mapping) and found and all(map(_is_stage, found.items()))):
        raise ConfigError(f"{about}, which is no mapping of names to iclperm.Stage; repair it")
    for name, stage in found.items():
        if stage.choose is not None and stage.stand_in is None:
            raise ConfigError(f"{about}, whose stage {name!r} chooses but has no 'stand_in' for plans; repair it")
    return found


def _is_stage(item: tuple[object, object]) -> bool:
    name, stage = item
    return isinstance(name, str) and isinstance(stage, Stage)


def _about(study: Study) -> str:
    return kinds.origin(kinds.named(study.kind))
