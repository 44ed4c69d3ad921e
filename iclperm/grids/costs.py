"""What a grid costs before anything runs: by each cell's plan, or by typical lengths of what is not here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from iclperm.base.help import fields_in_help
from iclperm.engine.facts import ModelFacts
from iclperm.engine.plan import Plan
from iclperm.errors import DataError, IclpermError
from iclperm.grids.grid import GridCell
from iclperm.models.costs import WORKLOADS, PaperStudy, Workload, study_cost, study_plan
from iclperm.models.papers import PaperModel, paper_models
from iclperm.report.notebook import ShownFields
from iclperm.runs.plan import StudyPlan
from iclperm.runs.setting import resolved
from iclperm.studies import several
from iclperm.studies.stages import stages_of
from iclperm.study import kinds
from iclperm.study.study import RESOURCES, Study
from iclperm.tasks.task import Task

Source = Literal["planned", "typical lengths", "unknown"]


@fields_in_help
@dataclass(frozen=True)
class CellCost(ShownFields):
    """What a cell costs. ``source`` says where that is from: its data and tokenizer ("planned"), or lengths that are
    typical of its kind of task ("typical lengths"), as they are not here. What is not known is None; ``problem`` says
    why it could not be planned. ``seconds`` are for this machine, of typical lengths for its processor in float32."""

    name: str
    source: Source
    prompts: int | None = None
    tokens: int | None = None
    flops: float | None = None
    seconds: float | None = None
    paid: float | None = None
    """What an API asks for it at most, in the currency of its prices."""
    problem: str = ""

    @classmethod
    def of_plans(cls, name: str, plans: Sequence[StudyPlan]) -> CellCost:
        """Of the plans of its runs."""
        estimates = [plan.estimate for plan in plans if plan.estimate is not None]
        seconds = [each.seconds for each in estimates if each.seconds is not None]
        is_whole = len(estimates) == len(plans)
        bills = [plan.bill.cost for plan in plans if plan.bill is not None]
        return cls(
            name,
            "planned",
            prompts=sum(plan.num_prompts for plan in plans),
            tokens=sum(plan.tokens_unique if plan.plain_tokens is None else plan.plain_tokens for plan in plans),
            flops=sum(each.flops for each in estimates) if is_whole else None,
            seconds=sum(seconds) if is_whole and len(seconds) == len(estimates) else None,
            paid=sum(cost for cost in bills if cost is not None) if bills and None not in bills else None,
        )


@fields_in_help
@dataclass(frozen=True)
class GridPlan(ShownFields):
    """What the cells of a grid cost that are not finished, in the order in which they will run."""

    cells: tuple[CellCost, ...]
    finished: tuple[str, ...]

    def total(self, key: Literal["prompts", "tokens", "flops", "seconds", "paid"]) -> float:
        """Of all cells of which it is known."""
        return sum(getattr(cell, key) or 0 for cell in self.cells)

    def unknown(self, key: str) -> list[str]:
        """The cells of which it is not known."""
        return [cell.name for cell in self.cells if getattr(cell, key) is None]

    def hours(self, rate: float, devices: int = 1) -> float:
        """What all matrix products take on so many devices at ``rate`` TFLOP/s each, dealt out evenly."""
        return self.total("flops") / (rate * 1e12) / 3600 / devices


def cost_of(cell: GridCell, plan: Mapping[str, StudyPlan] | StudyPlan | IclpermError) -> CellCost:
    """A cell's cost from its plan, or the plans of its runs; where that failed, about as much by typical lengths."""
    if isinstance(plan, StudyPlan):
        return CellCost.of_plans(cell.name, [plan])
    if not isinstance(plan, IclpermError):
        return CellCost.of_plans(cell.name, [*plan.values()])
    problem = str(plan)
    try:
        return _typical(cell, problem)
    except IclpermError:
        return CellCost(cell.name, "unknown", problem=problem)


def in_order(cells: Mapping[str, GridCell], costs: Iterable[CellCost]) -> list[CellCost]:
    """The cheapest first, but those of one model after each other, so that it is loaded once; what is not known last.

    Models follow each other by their cheapest cell.
    """
    groups: dict[tuple[Any, ...], list[CellCost]] = {}
    for cost in costs:
        groups.setdefault(_model_key(cells[cost.name].study), []).append(cost)
    ordered = [sorted(group, key=_dearness) for group in groups.values()]
    return [cost for group in sorted(ordered, key=lambda group: _dearness(group[0])) for cost in group]


def _dearness(cost: CellCost) -> tuple[bool, float, float, str]:
    is_known = cost.source != "unknown"
    return not is_known, cost.flops or 0.0, float(cost.tokens or 0), cost.name


def _model_key(study: Study) -> tuple[Any, ...]:
    """What decides whether two studies find the same model loaded."""
    return study.model_name, study.revision, study.adapter, *(getattr(study, key) for key in RESOURCES)


def _typical(cell: GridCell, problem: str) -> CellCost:
    """By the configuration of one of the papers' models, and lengths that are typical of the task's kind.

    Raises what reading the task raises.
    """
    model = _paper_model(cell.study.model)
    if model is None or cell.study.endpoint is not None:
        return CellCost(cell.name, "unknown", problem=problem)
    facts = _facts(model.hub_id)
    kind = kinds.named(cell.study.kind)
    parts = [cell.study]
    if kind.stages is not None:
        try:
            parts = [*several.check(cell.study).values()]
        except DataError:  # what it would choose from is not here
            first = next(iter(stages_of(cell.study).values()))
            parts = [*first.parts(cell.study, {}).values()]
            problem = f"{problem}; reckoned without the runs of what it chooses"
    prompts, tokens, flops = 0, 0, 0.0
    for part in parts:
        study, workload = _asked(part)
        cost = study_cost(facts, study, workload, _plan(study, workload), rate=1.0)
        prompts, tokens, flops = prompts + cost.prompts, tokens + cost.tokens, flops + cost.flops
    seconds = flops / _rate(model.hub_id)
    return CellCost(cell.name, "typical lengths", prompts, tokens, flops, seconds, problem=problem)


def _asked(study: Study) -> tuple[PaperStudy, Workload]:
    """What a study asks, and the lengths that are typical of its task."""
    task = Task.load(study.task, study.data)
    study = resolved(study, task)
    shots = study.shot_list(task.shots)
    labels, written = WORKLOADS
    workload = labels if study.scoring != "generate" else written
    asked = PaperStudy(
        study.kind, study.sets, study.permutations, shots[-1], len(shots) > 1, study.queries + study.dev_queries, 1
    )
    return asked, workload


@cache
def _plan(study: PaperStudy, workload: Workload) -> Plan:
    return study_plan(study, workload)


@cache
def _facts(hub_id: str) -> ModelFacts:
    from iclperm.engine.plain_model import read_facts  # PyTorch, which what is planned here has loaded anyway

    model = _paper_model(hub_id)
    assert model is not None
    with model.folder() as folder:
        return read_facts(folder, device="cpu", dtype="bfloat16")


@cache
def _rate(hub_id: str) -> float:
    from iclperm.engine.estimate import reached_rate  # PyTorch, as above

    return reached_rate(_facts(hub_id))


def _paper_model(name: str) -> PaperModel | None:
    return next((model for model in paper_models() if model.hub_id == name), None)
