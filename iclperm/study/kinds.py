"""The kinds of study that there are: what each asks, which choices are its own, and by which names it is run.

A declaration loads nothing. What runs a kind stands in it as ``module:object`` and is loaded (`loaded`) when a study
is planned, run or reported. Ours are declared here; another package adds one by an entry point of the group
``iclperm.kinds`` whose object is a `Kind`. Entry points are looked through only for a name that is not ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from iclperm.errors import ConfigError, IclpermError, UnknownKind

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "iclperm.kinds"
"""The group of entry points in which other packages declare theirs."""
_NAME = re.compile(r"[a-z][a-z0-9_]*")
LEAST_QUERIES = 10
"""Dev queries, and test queries, without which nothing is recommended."""
PER_QUERY = "per query"
"""The key ``demonstrations`` of a study in which each query has its own."""
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class Kind:
    """A kind of study: sets x permutations x shots x queries, and what is made of their answers.

    Raises `ConfigError` for a name that is no lower-case word, for findings or stages that are not ``module:object``,
    and for a check that cannot be called.
    """

    name: str
    question: str
    """What it asks, in one line."""
    findings: str
    """``module:object`` of the function that makes `iclperm.Findings` of a finished run; of a kind with stages of its
    runs by name and of what its stages chose by theirs."""
    stages: str | None = None
    """``module:object`` of the `iclperm.Stage` objects by name, in order, of a kind that is made of several runs."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the study whose default is another one here."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of the study that only kinds which name them here take, with what ``--help`` says of each."""
    free: tuple[str, ...] = ()
    """Keys of the study that may change in a folder of several runs: another value of them is the same study there."""
    options: str | Callable[..., Any] | None = None
    """Model of the study's key ``options``: a subclass of `iclperm.Choices`, or its ``module:object``. None takes no
    options."""
    check: Callable[[Any], None] | None = None
    """Raises `ConfigError` for a `Study` whose choices do not go together; it sees no data and no model."""
    over_all_shots: bool = False
    """Whether one number of ``shots`` stands for every number from 0 to it."""
    compares_sets: bool = True
    """Whether sets are compared, so that ``demonstrations`` must not hold one set twice."""
    is_report: bool = False
    """Whether it is no study but a report that can be asked of a run of any other kind."""
    page: str = ""
    """Where it is described."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(f"a kind's name is {self.name!r}; give a word of lower-case letters, digits and _")
        for what, reference in (("findings", self.findings), ("stages", self.stages), ("options", self.options)):
            is_named = isinstance(reference, str) and _REFERENCE.fullmatch(reference)
            if not is_named and (what == "findings" or isinstance(reference, str)):
                raise ConfigError(f"the kind {self.name!r} has the {what} {reference!r}; give 'module:object'")
        if self.check is not None and not callable(self.check):
            raise ConfigError(f"the kind {self.name!r} has the check {self.check!r}; give a function")
        if self.is_report and self.stages is not None:
            raise ConfigError(f"the kind {self.name!r} is a report of one run, but has stages; leave them out")


def _needs_dev_queries(study: Any) -> None:
    if not study.dev_queries:
        raise ConfigError(
            f"a study's key 'dev_queries' is 0, but a {study.kind} chooses by them; give some, such as 1000"
        )


_RACING = ("dev_accuracy", "dev_log_likelihood", "local_entropy")


def _is_a_search(study: Any) -> None:
    _needs_dev_queries(study)
    if not study.is_adaptive:
        for key in ("rule", "tolerance"):
            if getattr(study, key) != type(study).model_fields[key].default:
                raise ConfigError(f"a study's key {key!r} is for an adaptive search; set its 'budget', or leave it out")
        return
    if study.criterion not in _RACING:
        raise ConfigError(
            f"criterion is {study.criterion!r}, which is no mean over dev queries, so a part of them says nothing; "
            f"an adaptive search chooses by {in_words(_RACING)}"
        )
    for key, value in (("calibration", "none"), ("resample", "none")):
        if getattr(study, key) != value:
            raise ConfigError(
                f"a study's key {key!r} is {getattr(study, key)!r}, which asks every context; set it to "
                f"{value}, or budget to exhaustive"
            )
    if (isinstance(study.shots, list) and len(study.shots) > 1) or study.shots == "all":
        raise ConfigError("an adaptive search is one of a single number of 'shots'; name one")
    if study.rule == "certified" and study.criterion != "dev_accuracy":
        raise ConfigError("rule is 'certified', which bounds answers in 0..1; set criterion to dev_accuracy")
    if study.rule == "certified" and study.budget != "adaptive":
        raise ConfigError(
            f"rule is 'certified', which asks until its choice is proved, whatever that takes, but budget is "
            f"{study.budget!r}; set budget to adaptive, or rule to calibrated"
        )


def _has_cells(study: Any) -> None:
    """Whether orderings can be asked queries of their own as a study says."""
    cells, each = study.cells, study.queries_per_ordering
    if cells == "crossed":
        if each is not None:
            raise ConfigError(
                f"a study's key 'queries_per_ordering' is {each}, but its cells are crossed, where every ordering is "
                "asked all queries; set 'cells' to blocks, or leave it out"
            )
        return
    if each is None:
        raise ConfigError(
            f"a study's key 'cells' is {cells!r}; say how many queries each ordering is asked: queries_per_ordering, "
            "such as 25"
        )
    if each >= study.queries:
        raise ConfigError(
            f"a study's key 'queries_per_ordering' is {each}, and 'queries' {study.queries}; ask for fewer of each "
            "ordering, or set 'cells' to crossed"
        )
    for key in ("sets", "permutations"):
        if getattr(study, key) < 2:
            raise ConfigError(
                f"a study's key {key!r} is {getattr(study, key)}, which cannot tell its effect from that of queries; "
                "give 2 at least, or set 'cells' to crossed"
            )
    for key, value in (("design", "random"), ("resample", "none"), ("dev_queries", 0)):
        if (given := getattr(study, key)) != value:
            raise ConfigError(
                f"a study's key {key!r} is {given!r}, whose estimates compare answers to the same queries; set it to "
                f"{value}, or 'cells' to crossed"
            )


def refuse_own_demonstrations(study: Any) -> None:
    """Raises `ConfigError` for what does not go with demonstrations of each query's own, or is for these alone."""
    if not study.is_per_query:
        for key in ("neighbours", "order"):
            if (given := getattr(study, key)) is not None:
                raise ConfigError(
                    f"a study's key {key!r} is {given!r}, which is for demonstrations of each query's own; set "
                    "'demonstrations' to per query, or leave it out"
                )
        return
    if "neighbours" not in named(study.kind).keys:
        able = in_words(kind.name for kind in OURS.values() if "neighbours" in kind.keys)
        raise ConfigError(
            f"a study's key 'demonstrations' is {PER_QUERY!r}, but a {study.kind} compares sets that all queries "
            f"share; set 'kind' to {able}, or leave it out"
        )
    if study.neighbours is None:
        raise ConfigError(
            f"a study's key 'demonstrations' is {PER_QUERY!r}; name the file of each query's own: 'neighbours'"
        )
    if study.order in ("similar_last", "similar_first") and study.permutations != 1:
        raise ConfigError(
            f"a study's key 'permutations' is {study.permutations}, but the order {study.order} is one; set it to 1, "
            "or 'order' to permuted"
        )
    for key, value, why in (
        ("design", "random", "which deals orders of one number of demonstrations"),
        ("resample", "none", "but every number of shots has the nearest of the same neighbours"),
        ("cells", "crossed", "but orders are compared on all queries"),
        ("precision", None, "but such a run does not grow by itself"),
        ("dev_queries", 0, "but neighbours are those of test queries"),
        ("calibration", "none", "but its content-free queries have no demonstrations of their own"),
    ):
        if (given := getattr(study, key)) != value:
            raise ConfigError(
                f"a study's key {key!r} is {given!r}, {why} where 'demonstrations' are {PER_QUERY}; leave it out"
            )


def _can_stop(study: Any) -> None:
    if (wanted := study.wanted) is None:
        return
    if not wanted.can_stop_a_run:
        raise ConfigError(
            f"a study's key 'precision' is {study.precision!r}, for which no run can stop by itself; iclperm plan "
            "--precision sizes it from a pilot"
        )
    if wanted.is_of_verdicts:
        _can_decide(study)
        return
    if study.design != "random":
        raise ConfigError(
            f"a study's key 'precision' has a run grow order by order, but its 'design' {study.design} deals several "
            "at once; set it to random, or leave precision out"
        )
    if min(study.sets, study.permutations) < 2 or study.queries < 2:
        raise ConfigError("a study's key 'precision' needs 2 sets, permutations and queries at most, or more")
    listed = study.shots if isinstance(study.shots, list) else None
    if listed is not None and (missing := [k for k in wanted.shots if k not in listed]):
        raise ConfigError(f"a study's key 'precision' is {study.precision!r}, but 'shots' lack {missing[0]}; add it")


def _can_decide(study: Any) -> None:
    """Whether single trajectories can be asked until their plateaus are shown or excluded."""
    if study.kind != CURVE.name:
        raise ConfigError(
            f"a study's key 'precision' is {study.precision!r}, which is for curves; set 'kind' to {CURVE.name}"
        )
    if study.queries < 2:
        raise ConfigError("a study's key 'queries' is 1, which decides nothing; give some, such as 4200")
    for key, value, why in (
        ("resample", "none", "where no ordering has a trajectory"),
        ("dev_queries", 0, "which no verdict needs"),
        ("calibration", "none", "which asks every context"),
    ):
        if (given := getattr(study, key)) != value:
            raise ConfigError(
                f"a study's key {key!r} is {given!r}, {why}, but precision is {study.precision!r}; leave one out"
            )


def _has_design(study: Any) -> None:
    """Whether the cells and the precision of a study go together."""
    _has_cells(study)
    _can_stop(study)
    if study.cells != "crossed" and study.wanted is not None:
        raise ConfigError(
            f"a study's key 'cells' is {study.cells!r}, but a run that stops at a precision asks every ordering the "
            "same queries; leave 'precision' out, or set 'cells' to crossed"
        )


def _is_a_choice(study: Any) -> None:
    """Of a race and a recommendation."""
    for key in ("queries", "dev_queries") if study.kind == RECOMMEND.name else ("dev_queries",):
        if (number := getattr(study, key)) < LEAST_QUERIES:
            raise ConfigError(
                f"a study's key {key!r} is {number}; give at least {LEAST_QUERIES}, or nothing is told of a prompt"
            )
    for key, value in (("balance", "natural"), ("calibration", "none"), ("resample", "none")):
        if (given := getattr(study, key)) != value:
            raise ConfigError(f"a study's key {key!r} is {given!r}, but a {study.kind} needs {value}; leave it out")
    if not study.is_adaptive:
        raise ConfigError(
            f"budget is 'exhaustive', but a {study.kind} asks only what its choice needs; give adaptive, or \"5 %\""
        )
    if study.demonstrations is not None:
        raise ConfigError(f"a study's key 'demonstrations' is what a {study.kind} is to choose; leave it out")


_PRECISION = 'Grow in waves to at most these sizes until "order_effect +- 0.01" (curve: "plateaus +- 0.02") is known.'
_CRITERION = "What a search chooses an order by: dev_accuracy, majority_agreement, global_entropy, ..."
_CELLS = {
    "cells": "crossed: every ordering is asked all queries; blocks, random: queries of its own.",
    "queries_per_ordering": "How many.",
}
_OWN = {
    "neighbours": "File of each query's own train rows, best first.",
    "order": "similar_last, similar_first or permuted.",
}
_BUDGET = 'exhaustive, adaptive, or at most "5 %", "2M tokens", "10 min", "$5".'
_TOLERANCE = "How far below the best its choice may be."
_CHOICE: Mapping[str, Any] = {
    "sets": 6,
    "permutations": 8,
    "dev_queries": 400,
    "balance": "natural",
    "budget": "adaptive",
    "tolerance": 0.02,
}
_OVER_ALL_SHOTS = {"sets": 5, "permutations": 20, "shots": 20, "queries": 256}

SENSITIVITY = Kind(
    name="sensitivity",
    question="does the order matter more, or the choice?",
    findings="iclperm.studies.sensitivity:findings",
    keys={**_CELLS, **_OWN, "precision": _PRECISION},
    check=_has_design,
    page="docs/statistics.md",
)
SEARCH = Kind(
    name="search",
    question="how good an order does a dev set find, and how much of that is luck?",
    findings="iclperm.studies.search:findings",
    defaults={"permutations": 128, "dev_queries": 1000},
    keys={
        "criterion": _CRITERION,
        "budget": _BUDGET,
        "rule": "What ends an adaptive search.",
        "tolerance": _TOLERANCE,
    },
    check=_is_a_search,
    page="docs/studies/search.md",
)
CURVE = Kind(
    name="curve",
    question="what do more demonstrations do: on average, and in every single order?",
    findings="iclperm.studies.curve:findings",
    defaults=_OVER_ALL_SHOTS,
    keys={**_CELLS, **_OWN, "precision": _PRECISION},
    check=_has_design,
    over_all_shots=True,
    compares_sets=False,
    page="docs/studies/curve.md",
)
CONVERGENCE = Kind(
    name="convergence",
    question="how many orders, sets and queries are enough?",
    findings="iclperm.studies.convergence:findings",
    defaults={"permutations": 50, "shots": 20, "queries": 1024},
    over_all_shots=True,
    page="docs/studies/convergence.md",
)
TRANSFER = Kind(
    name="transfer",
    question="does a good order of one task, or model, serve another?",
    findings="iclperm.studies.transfer:findings",
    stages="iclperm.studies.transfer:STAGES",
    defaults={"permutations": 128, "dev_queries": 1000},
    keys={
        "tasks": "Those of a transfer, with commas between.",
        "models": "Those of a transfer, likewise.",
        "criterion": _CRITERION,
    },
    check=_needs_dev_queries,
    page="docs/studies/transfer.md",
)
SELECTION = Kind(
    name="selection",
    question="which demonstrations are good, and what does choosing them cost?",
    findings="iclperm.studies.selection:findings_of_runs",
    stages="iclperm.studies.choosing:STAGES",
    defaults={**_OVER_ALL_SHOTS, "dev_queries": 256},
    keys={"select": "How many demonstrations a selection keeps."},
    free=("select",),
    over_all_shots=True,
    page="docs/studies/selection.md",
)
RACE = Kind(
    name="race",
    question="at every number of demonstrations, which of them in which order do best on dev?",
    findings="iclperm.studies.race:findings",
    defaults={**_CHOICE, "queries": 1},
    keys={"budget": _BUDGET, "tolerance": _TOLERANCE},
    check=_is_a_choice,
    page="docs/recommend.md",
)
RECOMMEND = Kind(
    name="recommend",
    question="how many demonstrations, which, and in what order?",
    findings="iclperm.studies.recommend:findings",
    stages="iclperm.studies.recommending:STAGES",
    defaults=_CHOICE,
    keys={"budget": _BUDGET, "tolerance": _TOLERANCE},
    check=_is_a_choice,
    page="docs/recommend.md",
)
FEATURES = Kind(
    name="features",
    question="which demonstrations help, by length, label, overlap?",
    findings="iclperm.studies.features:findings",
    is_report=True,
    page="docs/studies/features.md",
)
CALIBRATION = Kind(
    name="calibration",
    question="what did calibration change?",
    findings="iclperm.studies.calibration:findings",
    is_report=True,
    page="docs/studies/calibration.md",
)
GENERATION = Kind(
    name="generation",
    question="what was read of generated answers, and what could not be?",
    findings="iclperm.studies.generation:findings",
    is_report=True,
    page="docs/studies.md",
)
OURS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        SENSITIVITY,
        SEARCH,
        CURVE,
        CONVERGENCE,
        TRANSFER,
        SELECTION,
        RACE,
        RECOMMEND,
        FEATURES,
        CALIBRATION,
        GENERATION,
    )
}
"""The kinds of this package, reports last."""
STUDIES = tuple(kind.name for kind in OURS.values() if not kind.is_report)
"""Those of them that a study can have."""
OF_ONE_RUN = tuple(kind.name for kind in OURS.values() if kind.stages is None)
"""Those of them that a single run can be asked for."""
KEYS: Mapping[str, str] = {key: words for kind in OURS.values() for key, words in kind.keys.items()}
"""The keys of a study that are not for every kind, with what ``--help`` says of each."""


def find(name: object) -> Kind | None:
    """The kind of this name, ours or another package's; None where no package declares one.

    Raises `ConfigError` where its declaration cannot be used, or several packages declare it.
    """
    if not isinstance(name, str):
        return None
    return OURS.get(name) or (_theirs(name) if name in _declared() else None)


def named(name: str) -> Kind:
    """As `find`; raises `UnknownKind` where there is none."""
    if (kind := find(name)) is None:
        raise UnknownKind(refused(f"there is no kind {name!r}; choose one of {in_words(studies(), ', ')}"))
    return kind


def studies() -> list[str]:
    """The names of all kinds that a study can have, those of other packages last."""
    return [*STUDIES, *(kind.name for kind in _usable() if not kind.is_report)]


def of_one_run() -> list[str]:
    """The names of all kinds that a single run can be asked for, those of other packages last."""
    return [*OF_ONE_RUN, *(kind.name for kind in _usable() if kind.stages is None)]


def broken() -> dict[str, str]:
    """Why declarations of other packages cannot be used, by the name of their kind; a line for each."""
    found = {name: _refusal(name) for name in _declared()}
    return {name: reason for name, reason in found.items() if reason is not None}


def refused(words: str) -> str:
    """What is said of a name that is not known, and then of every kind that is broken: it may be one of those."""
    return "; ".join((words, *broken().values()))


def in_words(names: Iterable[str], joint: str = " or ") -> str:
    """Names with commas between, and ``joint`` before the last."""
    *others, last = names
    return joint.join((", ".join(others), last)) if others else last


def first_with(key: str) -> str:
    """The name of the first of our kinds that has this key of its own."""
    return next(kind.name for kind in OURS.values() if key in kind.keys)


def loaded(kind: Kind, reference: str) -> Any:
    """The object that ``module:object`` stands for in a declaration; raises `ConfigError` where there is none."""
    module, _, path = reference.partition(":")
    try:
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except Exception as error:  # a module of another package may raise anything while it is imported
        raise ConfigError(
            f"{origin(kind)} names {reference}, which is not to be had ({_in_a_line(error)}); repair or update it"
        ) from error
    return found


@contextmanager
def calling(kind: Kind, what: str) -> Iterator[None]:
    """Around a call into a kind's own code: what it raises by mistake becomes a `ConfigError` that names the kind.

    Errors of iclperm pass, and so does whatever a kind of ours raises.
    """
    try:
        yield
    except IclpermError:
        raise
    except Exception as error:  # as in `loaded`
        if kind.name in OURS:
            raise
        raise ConfigError(f"{origin(kind)} fails in its {what!r} ({_in_a_line(error)}); repair or update it") from error


def origin(kind: Kind) -> str:
    """A kind with the entry point that declares it, for errors."""
    return f"the kind {kind.name!r}" + ("" if kind.name in OURS else f" {_whose(_declared()[kind.name])}")


def _usable() -> list[Kind]:
    """The kinds of other packages, without those that are broken."""
    return [_theirs(name) for name in _declared() if _refusal(name) is None]


@cache
def _declared() -> dict[str, list[EntryPoint]]:
    """The entry points of other packages by name; found once a process, as every installed package is looked into."""
    from importlib.metadata import entry_points  # not for --help, which it would slow down

    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, []).append(entry)
    return found


@cache
def _theirs(name: str) -> Kind:
    """The kind that another package declares under this name; raises `ConfigError` where that cannot be used."""
    entries = _declared()[name]
    about = f"the kind {name!r} {_whose(entries)}"
    if name in OURS:
        raise ConfigError(f"{about} has the name of a kind of iclperm; give it another name")
    if len(entries) > 1:
        raise ConfigError(f"{about} is declared more than once; uninstall all but one")
    try:
        kind = entries[0].load()
    except Exception as error:  # as in `loaded`
        raise ConfigError(f"{about} cannot be loaded ({_in_a_line(error)}); repair or uninstall it") from error
    if not isinstance(kind, Kind):
        raise ConfigError(f"{about} is a {type(kind).__name__}, not an iclperm.Kind; repair or uninstall it")
    if kind.name != name:
        raise ConfigError(f"{about} calls itself {kind.name!r}; give both one name")
    return kind


def _refusal(name: str) -> str | None:
    """Why another package's kind cannot be used, in a line; None where it can."""
    try:
        _theirs(name)
    except ConfigError as error:
        return str(error)
    return None


def _whose(entries: Iterable[EntryPoint]) -> str:
    packages = [f"{entry.dist.name if entry.dist else 'a package'}: {entry.value}" for entry in entries]
    return f"({', '.join(packages)})"


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
