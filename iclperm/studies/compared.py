"""Studies made ready to be compared: what they have in common is found by its names, and the rest is left out or said.

A level that only some of the studies have, such as sets that one run has grown by, is left out of the others, so that
level i of one is level i of all that share the axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm.errors import DataError, RequestError, printable
from iclperm.report.parts import listed
from iclperm.runs.identity import Identities, identities
from iclperm.runs.run import FinishedRun
from iclperm.stats.comparison import AXES
from iclperm.studies import bearing
from iclperm.studies.classes import are_by_design, classes_by_design

_PLACES = {"sets": 0, "permutations": 1, "queries": 3}
_WORDINGS = "; where they word the same rows, 'shared' says so (docs/comparing.md, Two wordings of the same rows)"
_SAID = ("normalize", "calibration", "chat", "scoring", "unparsed", "resample", "on_overlong", "balance")
"""Keys of a study that change what an answer is; a difference there is named."""


@dataclass(frozen=True)
class Compared:
    """One study that is compared with others."""

    name: str
    values: npt.NDArray[Any]
    """[S, P, K, Q] of 0 and 1, or floating-point accuracies [S, P, K]."""
    state: npt.NDArray[Any] | None = None
    """Of the answers, 0 = ok."""
    weights: npt.NDArray[Any] | None = None
    """[Q]"""
    shots: tuple[int, ...] = ()
    """[K]; empty where not known."""
    names: Identities | None = None
    """Of its levels; None where nothing is known of them."""
    about: Mapping[str, str] | None = None
    """Choices that change what an answer is, by the key of the study."""
    unborne: tuple[str, ...] = ()
    """Why nothing can be concluded from the study by itself; empty where something can, or that is not known."""
    is_growing: bool = False
    """Whether these are its results before a growth that is not finished."""
    task: str = ""
    """Empty where not known, as is the model."""
    model: str = ""
    chance: float | None = None
    """Accuracy of guessing a label; None where any answer may be given, or that is not known."""
    is_drawn: bool = True
    """Whether sets were drawn at random, so that they stand for others; not where rows were given or chosen."""
    called: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By axis, what a file calls its levels; empty where it does not. Two files may mean different things by one name:
    looked at where the caller says that the axis is shared."""
    notes: tuple[str, ...] = ()
    """What a reader of the numbers should know of how a file was read."""
    classes: npt.NDArray[Any] | None = None
    """[Q] of queries of which every class was given its number; None where that is not known, or not so."""

    @property
    def has_answers(self) -> bool:
        """Whether there are single answers, not accuracies alone."""
        return self.values.ndim == 4

    def size(self, axis: str) -> int:
        """Levels of an axis (`AXES`); 0 queries of accuracies."""
        place = _PLACES[axis]
        return int(self.values.shape[place]) if place < self.values.ndim else 0

    def only(self, axis: str, levels: Sequence[int]) -> Compared:
        """With these levels of an axis, in this order."""
        place, names = _PLACES[axis], self.names
        return replace(
            self,
            values=np.take(self.values, levels, place),
            state=None if self.state is None else np.take(self.state, levels, place),
            weights=self.weights[list(levels)] if axis == "queries" and self.weights is not None else self.weights,
            classes=self.classes[list(levels)] if axis == "queries" and self.classes is not None else self.classes,
            names=None if names is None else replace(names, **{axis: tuple(getattr(names, axis)[i] for i in levels)}),
            called={
                key: tuple(called[i] for i in levels) if key == axis and called else called
                for key, called in self.called.items()
            },
        )


@dataclass(frozen=True)
class Together:
    """Studies of which those that share an axis have the same levels of it, in one order."""

    studies: tuple[Compared, ...]
    groups: Mapping[str, tuple[int, ...]]
    """By axis, a number for each study: those with the same number share the axis."""
    notes: tuple[str, ...]
    """What was left out, and what is not known to be shared."""

    def shared(self, one: int, other: int) -> tuple[str, ...]:
        """The axes that two studies share, of `AXES`."""
        return tuple(axis for axis in AXES if self.groups[axis][one] == self.groups[axis][other])


def of_run(name: str, run: FinishedRun) -> Compared:
    """A finished run; reads its answers, states and tables."""
    if run.decisions:
        raise DataError(
            f"{name} asked its orderings different queries, so single answers cannot be compared; run it with all "
            "cells into another folder"
        )
    about = {key: str(getattr(run.study, key)) for key in _SAID}
    about["metric"] = "right or wrong" if run.metric is None else run.metric.words
    unborne = tuple(reason.words for reason in bearing.of_run(run).reasons)
    return Compared(
        name,
        run.correct,
        run.state,
        run.weights,
        run.shots,
        identities(run),
        about,
        unborne,
        run.report.is_growing,
        task=run.task,
        model=Path(run.study.model_name).name,
        chance=run.chance,
        is_drawn=not run.study.demonstrations,
        classes=classes_by_design(run),
    )


def of_array(
    name: str,
    values: npt.NDArray[Any],
    axes: str,
    state: npt.NDArray[Any] | None = None,
    weights: npt.NDArray[Any] | None = None,
    shots: Sequence[int] = (),
    classes: Sequence[str] = (),
) -> Compared:
    """Answers SPQ or SPKQ, or accuracies SP or SPK, of whose levels nothing is known; raises RequestError for other
    axes."""
    if axes not in ("SP", "SPK", "SPQ", "SPKQ"):
        raise RequestError(f"{name} has the axes {axes}; studies are compared that have SP, SPK, SPQ or SPKQ")
    if "K" not in axes:
        values, state = values[:, :, None], None if state is None else state[:, :, None]
    is_known = bool(classes) and are_by_design(classes, weights)
    return Compared(name, values, state, weights, tuple(shots), classes=np.array(classes) if is_known else None)


def together(studies: Sequence[Compared], shared: Sequence[str] | None = None) -> Together:
    """The studies with what they have in common brought into one order.

    `shared` are the axes that the caller says all have in common: levels that are called alike where every study calls
    them something, else level by level. By default that is found by the contents of the levels, and a study of which
    these are not known shares nothing. Studies that overlap on an axis keep the levels that
    all of them have, if these are at least half of each; else only those that are wholly the same share it. Raises
    RequestError where what is said to be shared has other sizes, or is called otherwise.
    """
    if shared is not None and (unknown := [word for word in shared if word not in AXES]):
        raise RequestError(f"studies share some of {', '.join(AXES)}; got {unknown[0]!r}")
    notes = [f"{study.name}: {note}" for study in studies for note in study.notes]
    notes += [
        f"{study.name!r} is growing, which is not finished: compared are its results before"
        for study in studies
        if study.is_growing
    ]
    groups: dict[str, tuple[int, ...]] = {}
    found = list(studies)
    if shared is None and (nameless := [study.name for study in studies if study.names is None]):
        notes.append(
            f"what {listed(nameless)} {'has' if len(nameless) == 1 else 'have'} in common with others is not known: "
            "taken as nothing; say it with 'shared'"
        )
    for axis in AXES:
        if shared is None:
            found, groups[axis] = _by_names(found, axis, notes)
        elif axis not in shared:
            groups[axis] = tuple(range(len(studies)))
        else:
            found, groups[axis] = _said(found, axis, notes), (0,) * len(studies)
    _note_weights(found, groups["queries"], notes)
    _note_choices(found, notes)
    _note_tasks(found, len(set(groups["queries"])) == 1, notes)
    return Together(tuple(found), groups, tuple(notes))


def short_names(titles: Sequence[tuple[str, str]], folders: Sequence[Path | None]) -> list[str]:
    """A name for each (task, model): what differs between them, or their folders where nothing does; not always one
    that no other has."""
    tasks, models = ({title[place] for title in titles} for place in (0, 1))
    if len(tasks) == 1 and len(models) == len(titles):
        names = [model for _, model in titles]
    elif len(models) == 1 and len(tasks) == len(titles):
        names = [task for task, _ in titles]
    else:
        names = [", ".join(title) for title in titles]
    if len(set(names)) < len(names):
        paths = [name if folder is None else folder.name for name, folder in zip(names, folders, strict=True)]
        whole = [name if folder is None else str(folder) for name, folder in zip(names, folders, strict=True)]
        names = paths if len(set(paths)) == len(paths) else whole
    return names


def _said(studies: list[Compared], axis: str, notes: list[str]) -> list[Compared]:
    """The studies with the levels of an axis that the caller says all share, by what they are called, else by place."""
    levels = [study.called.get(axis, ()) for study in studies]
    if not all(levels):
        if len(sizes := {study.size(axis) for study in studies}) > 1:
            raise RequestError(f"{axis} are said to be shared, but there are {listed(sorted(map(str, sizes)))}")
        return studies
    everyone = set(levels[0]).intersection(*levels[1:])
    if 2 * len(everyone) < max(map(len, levels)):
        told = [f"{study.name} calls them {_begun(called)}" for study, called in zip(studies, levels, strict=True)]
        raise RequestError(
            f"{axis} are said to be shared, but only {len(everyone):,} are called alike ({listed(told)}); give what is "
            f"the same one name, or leave {axis} out of 'shared'"
        )
    found = list(studies)
    _keep(found, range(len(found)), levels, everyone, axis, notes)
    return found


def _begun(called: Sequence[str]) -> str:
    return printable(", ".join(called[:3])) + (", …" if len(called) > 3 else "")


def _by_names(studies: list[Compared], axis: str, notes: list[str]) -> tuple[list[Compared], tuple[int, ...]]:
    """The studies with the levels of an axis that those have in common which share it, and who shares it with whom."""
    found, groups = list(studies), list(range(len(studies)))
    levels = [() if study.names is None else getattr(study.names, axis) for study in studies]
    for members in _overlapping(levels):
        everyone = set(levels[members[0]]).intersection(*(levels[member] for member in members[1:]))
        if 2 * len(everyone) < max(len(levels[member]) for member in members):
            for member in members:  # too little: those that are wholly the same
                groups[member] = next(other for other in members if levels[other] == levels[member])
            least = min(len(levels[member]) for member in members)
            alike = [
                studies[member].name
                for member in members
                if [groups[other] for other in members].count(groups[member]) > 1
            ]
            rest = f"so all but {listed(alike)}, whose {axis} are all the same," if alike else "so they"
            notes.append(
                f"{listed([studies[member].name for member in members])} have {len(everyone)} of {least} or more "
                f"{axis} in common: too few to compare on these alone, {rest} count as others, and intervals are "
                "rather too wide"
            )
            continue
        _keep(found, members, levels, everyone, axis, notes)
        for member in members:
            groups[member] = members[0]
    return found, tuple(groups)


def _keep(
    found: list[Compared],
    members: Sequence[int],
    levels: Sequence[Sequence[str]],
    everyone: Set[str],
    axis: str,
    notes: list[str],
) -> None:
    """Leaves `members` of the studies with the levels that all of these have, in the order of the first."""
    order = [level for level in levels[members[0]] if level in everyone]
    for member in members:
        if list(levels[member]) != order:
            place_of = {level: place for place, level in enumerate(levels[member])}
            found[member] = found[member].only(axis, [place_of[level] for level in order])
        if len(order) < len(levels[member]):
            notes.append(
                f"{found[member].name}: {len(order):,} of {len(levels[member]):,} {axis} are compared, those that the "
                "others have too"
            )


def _overlapping(levels: Sequence[Sequence[str]]) -> list[list[int]]:
    """Studies that have a level in common, directly or through others; groups of two or more."""
    groups: list[tuple[set[str], list[int]]] = []
    for place, names in enumerate(levels):
        joined, members = set(names), [place]
        for group in [group for group in groups if group[0] & joined]:
            groups.remove(group)
            joined, members = joined | group[0], [*group[1], *members]
        groups.append((joined, sorted(members)))
    return [members for _, members in groups if len(members) > 1]


def _note_weights(studies: Sequence[Compared], groups: Sequence[int], notes: list[str]) -> None:
    for place, study in enumerate(studies):
        first = studies[groups[place]]
        if first.weights is None and study.weights is None:
            continue
        ones = np.ones(study.size("queries"))
        one, other = (ones if each.weights is None else each.weights for each in (first, study))
        if len(one) == len(other) and not np.array_equal(one, other):
            notes.append(
                f"{first.name} and {study.name} weigh their common queries otherwise: each keeps its own weights"
            )


def _note_choices(studies: Sequence[Compared], notes: list[str]) -> None:
    for key in (*_SAID, "metric"):
        values = {study.name: study.about[key] for study in studies if study.about and key in study.about}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{name} {value}" for name, value in values.items())
            notes.append(f"the studies differ in {key!r} ({told}): part of any difference may be due to that")


def _note_tasks(studies: Sequence[Compared], are_asked_alike: bool, notes: list[str]) -> None:
    """That accuracies of other tasks differ for that reason alone, and where the choice of sets is no sample."""
    tasks = dict.fromkeys(study.task for study in studies if study.task)
    if len(tasks) > 1:
        notes.append(
            f"the studies are of {len(tasks)} tasks ({listed([printable(task) for task in tasks])}): their accuracies "
            f"differ for that reason too{'' if are_asked_alike else _WORDINGS}"
        )
    for study in studies:
        if not study.is_drawn:
            notes.append(
                f"{study.name}: its sets were given or chosen, not drawn, so that its selection sensitivity and r are "
                "of these sets alone"
            )
