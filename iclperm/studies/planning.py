"""The sizes of a study that is to know something to a wanted precision, from a pilot or from given components."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from iclperm.base.help import fields_in_help
from iclperm.errors import ConfigError, DataError
from iclperm.prompts.design import draw
from iclperm.report.notebook import ShownFields
from iclperm.report.parts import Table, percent, plain
from iclperm.runs.layout import lay_out
from iclperm.runs.setting import ResolvedStudy
from iclperm.stats.components import Effects
from iclperm.stats.demonstrations import demonstration_scores
from iclperm.stats.sensitivity import accuracy
from iclperm.stats.sizing import (
    LEAST,
    SizeChoice,
    StudySizes,
    TokenCosts,
    look_at,
    permutations_for_rank,
    rank_half_width,
    size_choices,
)
from iclperm.studies.classes import classes_by_design
from iclperm.study.precision import Precision, parse_precision

if TYPE_CHECKING:
    from iclperm.runs.run import FinishedRun
    from iclperm.study.study import Study

_MOST_SETS, _MOST_PERMUTATIONS = 64, 512
_GIVEN = ("order", "selection", "accuracy")


class PlannedSizes(NamedTuple):
    """One choice of sizes."""

    sets: int
    """S."""
    permutations: int
    """P."""
    queries: int
    """Test queries."""
    tokens: int
    """Distinct tokens of the study."""
    half_width: float
    """Median of what the interval's half-width will be."""
    chance: float | None
    """That it is short enough; None of a rank, whose noise is that of permutations alone."""


@fields_in_help
@dataclass(frozen=True)
class PrecisionPlan(ShownFields):
    """Sizes of a study that may know a quantity to a precision, the cheapest first."""

    wanted: str
    """What is to be known, and how well."""
    source: str
    """What the sizes rest on."""
    sizes: tuple[PlannedSizes, ...]
    """The choices; none is worse than another in tokens, chance, sets and queries together."""
    most: tuple[int, int, int]
    """The most sets, permutations and queries that were looked at."""

    def table(self) -> Table:
        """The choices as a table."""
        rows = [
            (
                *(f"{size:,}" for size in (one.sets, one.permutations, one.queries, one.tokens)),
                f"{one.half_width:.3g}",
                "-" if one.chance is None else percent(one.chance),
            )
            for one in self.sizes
        ]
        header = ("sets", "permutations", "queries", "distinct tokens", "half-width", "chance")
        caption = (
            f"From {self.source}, taken as known: what a pilot does not know is not in the chance. Half-width: median "
            "of that of the 95 % interval, where effects are Gaussian. A study with the key 'precision' finds its size "
            "by itself."
        )
        return Table(f"Sizes for {self.wanted}", header, rows, caption=caption)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        content: dict[str, Any] = plain(self)
        return content


def precision_plan(
    study: Study, precision: str, *, pilot: FinishedRun | None = None, components: str | None = None
) -> PrecisionPlan:
    """The cheapest sizes of ``study`` for a precision (`iclperm.study.precision`), in distinct tokens.

    Args:
        study: the study to be sized; its own sizes do not matter.
        precision: as "order_effect +- 0.01".
        pilot: a finished run of the same task and model, at the wanted numbers of demonstrations.
        components: in place of a pilot, standard deviations as "order=.05,selection=.03,accuracy=.7", or of single
            effects, as "S=.03,P=.02,SP=.04,I=.2,SI=.1,PI=.05,SPI=.3" (`parse_components`).

    Raises `ConfigError` for what is no precision or no components, `DataError` for a pilot that does not tell, and
    what `iclperm.api.plan` raises. Cost: that of a plan for each of a handful of choices.
    """
    try:
        wanted = parse_precision(precision)
    except ValueError as error:
        raise ConfigError(f"precision is {precision!r}: {error}") from None
    if (pilot is None) == (components is None):
        raise ConfigError("sizes need a pilot or components: give one of --pilot RUN and --components order=.05,...")
    if wanted.is_of_verdicts:
        raise ConfigError(
            f"precision is {precision!r}, which no sizes are computed for: give the most queries that a trajectory may "
            "take, and each is asked until it is decided"
        )
    setting = ResolvedStudy.of(_sized(study, StudySizes(1, 1, 1)), weights=False)
    most = _most(setting)
    if wanted.quantity == "rank":
        if pilot is None:
            raise ConfigError("the noise of a rank is that of a pilot's curve; give --pilot RUN of the kind curve")
        found, source = _for_rank(setting, wanted, pilot, most), _pilot_words(pilot)
    else:
        sigma2, source = _components(study, wanted, pilot, components)
        if missing := [k for k in wanted.shots if k not in setting.design.shots]:
            raise ConfigError(f"precision is {precision!r}, but the study has no k = {missing[0]}; add it to 'shots'")
        choices = size_choices(wanted.quantity, sigma2, wanted.half_width, _costs(setting), most, seed=study.seed)
        found = [_planned(setting, choice) for choice in choices]
    words = f"{wanted.words} \N{PLUS-MINUS SIGN} {wanted.half_width:g}"
    if not found:
        sizes = " x ".join(f"{size:,}" for size in most)
        raise ConfigError(
            f"{words} is not reached by {sizes} sets, permutations and queries, the most there are; ask for less"
        )
    return PrecisionPlan(words, source, tuple(sorted(found, key=lambda one: one.tokens)), most)


def parse_components(given: str) -> Effects:
    """Variance components from standard deviations in units of accuracy, as "order=.05,selection=.03,accuracy=.7".

    Names are those of the effects (S, P, SP, I, SI, PI, SPI), or ``order`` = √(σ²_P + σ²_SP) and ``selection`` =
    √(σ²_S + σ²_SP), of which half the smaller is then common to both, SP. What is not given is 0, but SPI, which with
    ``accuracy`` is what remains of the variance p(1 - p) of a single answer. Raises `ConfigError` for other names,
    numbers below 0, and where SPI follows from nothing.
    """
    form = "order=.05,selection=.03,accuracy=.7, or S, P, SP, I, SI, PI, SPI, each a standard deviation"
    values: dict[str, float] = {}
    for entry in given.split(","):
        name, equals, text = (part.strip() for part in entry.partition("="))
        try:
            values[name] = float(text)
        except ValueError:
            raise ConfigError(f"components have {entry!r}; give {form}") from None
        if not equals or name not in (*Effects._fields, *_GIVEN) or not 0 <= values[name] < 1:
            raise ConfigError(f"components have {entry!r}; give {form}, from 0 to 1")
    order, selection = (values.pop(name, None) for name in ("order", "selection"))
    mean = values.pop("accuracy", None)
    found = {name: values.get(name, 0.0) ** 2 for name in Effects._fields}
    if (order is not None or selection is not None) and {"S", "P", "SP"} & values.keys():
        raise ConfigError("components give both effects and their parts S, P and SP; leave one out")
    squares = [0.0 if value is None else value**2 for value in (order, selection)]
    if order is not None or selection is not None:
        common = min(squares) / 2
        found |= {"P": squares[0] - common, "S": squares[1] - common, "SP": common}
    if "SPI" not in values:
        rest = 0.0 if mean is None else mean * (1 - mean) - sum(found.values())
        if rest <= 0:
            raise ConfigError("components leave nothing for single answers; give accuracy=.7 (of this task), or SPI")
        found["SPI"] = rest
    return Effects(**found)


def _components(
    study: Study, wanted: Precision, pilot: FinishedRun | None, components: str | None
) -> tuple[Effects, str]:
    """The components that sizes follow from, and where they are from."""
    if components is not None:
        return parse_components(components), f"the components {components}"
    assert pilot is not None
    refuse_other_pilot(study, pilot)
    test = pilot.splits["test"]
    places = [_place(pilot, shots) for shots in wanted.shots or (pilot.shots[-1],)]
    scores, state = (np.stack([values[:, :, place] for place in places]) for values in (test.correct, test.state))
    if min(scores.shape[1:]) < 2:
        raise DataError(
            "the pilot has one set, permutation or query only, so nothing tells how they differ; run one with at "
            f"least {LEAST.sets} sets and {LEAST.permutations} permutations"
        )
    if wanted.quantity != "difference":
        scores, state = scores[0], state[0]
    found = look_at(
        wanted.quantity, scores, state, weights=test.weights, classes=classes_by_design(pilot), seed=study.seed
    )
    return found.sigma2, _pilot_words(pilot)


def refuse_other_pilot(study: Study, pilot: FinishedRun) -> None:
    """Raises `DataError` for a pilot whose answers do not speak of the study's."""
    if pilot.decisions:
        raise DataError(
            "the pilot asked its orderings different queries, so its components are not those of a crossed study; give "
            "a run whose orderings all answered the same"
        )
    ours, theirs = study.model_name, pilot.study.model_name
    if study.task != pilot.study.task or ours != theirs:
        raise DataError(
            f"the pilot is a run of {pilot.study.task} on {theirs}, the study one of {study.task} on {ours}; give a "
            "pilot of the same task and model"
        )


def _pilot_words(pilot: FinishedRun) -> str:
    sets, permutations, _, queries = pilot.correct.shape
    return f"a pilot of {sets} sets x {permutations} permutations x {queries:,} queries"


def _place(pilot: FinishedRun, shots: int) -> int:
    if shots not in pilot.shots:
        has = ", ".join(map(str, pilot.shots))
        raise DataError(f"the pilot has k = {has}, but not k = {shots}; give one that has, or another precision")
    return pilot.shots.index(shots)


def _for_rank(setting: ResolvedStudy, wanted: Precision, pilot: FinishedRun, most: StudySizes) -> list[PlannedSizes]:
    """Permutations alone make a rank surer; sets and queries are the pilot's."""
    refuse_other_pilot(setting.study, pilot)
    orders = pilot.demonstrations.permutations
    num_permutations, num_demonstrations = orders.shape
    score = wanted.score or ""
    cells = accuracy(pilot.correct, pilot.state, pilot.weights).values
    found = demonstration_scores(cells, orders, pilot.shots, [score])[score]
    noise2 = float(np.nanmean(found.se**2)) * num_permutations
    spread = math.sqrt(max(float(np.nanmean(np.nanvar(found.values, axis=1, ddof=1))) - noise2 / num_permutations, 0.0))
    size = permutations_for_rank(spread, math.sqrt(noise2), num_demonstrations, wanted.half_width, most.permutations)
    if size is None:
        return []
    sizes = StudySizes(len(cells), size, len(pilot.gold))
    half = rank_half_width(spread, math.sqrt(noise2 / size), num_demonstrations)
    return [PlannedSizes(*sizes, _tokens(setting, sizes), half, None)]


def _planned(setting: ResolvedStudy, choice: SizeChoice) -> PlannedSizes:
    return PlannedSizes(*choice.sizes, _tokens(setting, choice.sizes), choice.half_width, choice.chance)


def _sized(study: Study, sizes: StudySizes) -> Study:
    return study.model_copy(update={**sizes._asdict(), "precision": None})


def _tokens(setting: ResolvedStudy, sizes: StudySizes) -> int:
    """Distinct tokens of the study at some sizes, exactly."""
    study = _sized(setting.study, sizes)
    sized = replace(setting, study=study, design=draw(study, setting.task, setting.examples))
    return lay_out(sized).tokens.unique


def _costs(setting: ResolvedStudy) -> TokenCosts:
    """Tokens of an ordering and of a query under it, from two small studies that differ in their queries."""
    small, more = LEAST._replace(permutations=8), LEAST._replace(permutations=8, queries=2 * LEAST.queries)
    orderings = small.sets * small.permutations
    one, other = _tokens(setting, small), _tokens(setting, more)
    query = (other - one) / (more.queries - small.queries) / orderings
    return TokenCosts(max(one / orderings - query * small.queries, 1.0), query)


def _most(setting: ResolvedStudy) -> StudySizes:
    """The most sets, permutations and queries there are: of queries those that no class has to repeat."""
    study, test, labels = setting.study, setting.examples["test"], len(setting.task.words)
    queries = len(test.labels)
    if study.balance == "classes" and labels:
        queries = labels * int(np.bincount(test.labels, minlength=labels).min())
    shots = setting.design.shots[-1]
    sets = _MOST_SETS if study.given_sets is None else len(study.given_sets)
    permutations = min(_MOST_PERMUTATIONS, math.factorial(min(shots, 10)))
    most = StudySizes(sets, permutations, queries)
    if any(size < least for size, least in zip(most, LEAST, strict=True)):
        words = " x ".join(map(str, most))
        raise ConfigError(
            f"this study can have at most {words} sets, permutations and queries, too few to be sized; give more "
            "data, or more demonstrations"
        )
    return most
