"""What a study will compute and cost, in numbers, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from iclperm.base.help import fields_in_help
from iclperm.endpoint.bill import Bill, product_bill
from iclperm.errors import ConfigError
from iclperm.prompts.chat import TextTokenizer
from iclperm.prompts.tokenise import PromptCounts
from iclperm.report.notebook import ShownFields
from iclperm.runs.layout import general_plans, lay_out, plans_of
from iclperm.runs.limits import WorkLimits
from iclperm.runs.raced_shots import RacedShots
from iclperm.runs.recorded import recorded_limits
from iclperm.runs.setting import ResolvedStudy
from iclperm.runs.waves import Decision, Racing
from iclperm.runs.work import Work
from iclperm.study.kinds import RACE
from iclperm.study.sizes import SearchBudget
from iclperm.study.study import Study

if TYPE_CHECKING:
    from iclperm.engine.estimate import Estimate


@fields_in_help
@dataclass(frozen=True)
class StudyPlan(ShownFields):
    """What a study will compute; tokens as `Engine.report` counts them.

    ``num_asked`` queries are wanted of all splits together, and ``num_queries`` of them are distinct: examples of a
    class that is short count several times. ``num_content_free`` more queries are there to calibrate by. Of the data,
    ``num_duplicates`` rows repeat another row, ``num_conflicting`` of them under another label; ``num_excluded`` and
    ``num_overlong`` queries are left out because they repeat a demonstration or are too long. ``num_near`` queries
    nearly repeat a demonstration, ``num_near_dev`` of test a query of dev.

    ``opening`` are the tokens that every prompt begins with, ``label_tokens`` the numbers of tokens of the labels,
    empty where there are none or they are not known. Of a study that generates, ``max_new_tokens`` is the longest that
    an answer can be, ``tokens_unique`` are those of the prompts alone, and the peak of keys and values is that of a
    unit whose answers are all so long. Where labels are scored, ``kv_peak_bytes`` is what these tokens would take in
    all layers; only the open path does, and ``estimate`` says what is held. ``bill`` is for a model behind an API,
    ``estimate`` for this machine; ``untimed`` says why there is no time.

    With ``plain`` nothing is shared: ``plain_tokens`` are those that are forwarded, every prompt, and once more before
    each further token of a label; there is no saving (1), and no peak of keys and values. Else they are None.
    ``crossed_tokens`` are the distinct ones of a study that asks each ordering queries of its own, had it asked all.
    With a ``budget`` other than exhaustive the counts are those of asking everything, of which it asks a part.
    ``notes`` are lines on data and model: that one file was split by content, how a GGUF file's weights are stored.
    Where labels are compared by ``normalize: pmi``, ``num_alone`` of the prompts are the tokens ``nothing`` alone,
    before the labels, or before a query's choices.
    """

    task: str
    num_sets: int
    num_permutations: int
    shots: tuple[int, ...]
    num_asked: int
    num_queries: int
    num_contexts: int
    num_prompts: int
    tokens_naive: int
    tokens_unique: int
    kv_peak_tokens: int
    kv_peak_bytes: int
    num_units: int
    num_parts: int
    num_overlong: int
    num_excluded: int
    num_duplicates: int
    num_conflicting: int
    disk_bytes: int
    opening: tuple[str, ...]
    label_tokens: tuple[int, ...]
    prompts: PromptCounts
    num_near: int = 0
    num_near_dev: int = 0
    num_content_free: int = 0
    max_new_tokens: int | None = None
    bill: Bill | None = None
    estimate: Estimate | None = None
    plain_tokens: int | None = None
    untimed: str = ""
    crossed_tokens: int | None = None
    budget: str = "exhaustive"
    notes: tuple[str, ...] = ()
    num_alone: int = 0
    nothing: tuple[str, ...] = ()

    @property
    def saving(self) -> float:
        """Tokens of plain prompting over distinct tokens; 1 where prompts are run so."""
        return 1.0 if self.plain_tokens is not None else self.tokens_naive / self.tokens_unique

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        bill = None
        if self.bill is not None:
            bill = {**asdict(self.bill.spent), "cost": self.bill.cost, "is_estimate": self.bill.is_estimate}
        return {**asdict(self), "bill": bill, "saving": self.saving}


def plan_one(study: Study, limits: WorkLimits | None = None) -> StudyPlan:
    """What ``study`` will compute: needs data, tokenizer and the model's configuration, no weights.

    Raises the errors of `run` that can be known beforehand. Cost: O(tokens of demonstrations and queries), and a second
    to estimate the time, which is left out for a device that this machine lacks, and where a slower way of running is
    chosen (``plain``, ``attention``, ``layers``).
    """
    limits = limits or (recorded_limits(study.out) if study.out else None)
    work = lay_out(ResolvedStudy.of(study, weights=False, limits=limits))
    from iclperm.engine.estimate import estimate  # after what is quickly known to be wrong
    from iclperm.engine.load import has_device

    if study.is_adaptive and (study.endpoint is not None or has_device(study.device)):
        races_of(work)
    plans = plans_of(work)
    if study.cells != "crossed":  # most of them are in no product
        plans += general_plans(work)
    if not plans or study.endpoint is not None:
        return _summary(work)
    if study.plain:
        return replace(_summary(work), untimed="what prompts run one by one take is not known")
    if not has_device(study.device):
        return replace(_summary(work), untimed=f"this machine has no {study.device}")
    assert work.setting.model is not None
    found = estimate(work.setting.model, plans, **_ways(work))
    ways = " and ".join(f"{key} {value}" for key in ("attention", "layers") if (value := getattr(study, key)) != "auto")
    return replace(
        _summary(work), estimate=found, untimed=f"how fast {ways} runs is not known" if found.seconds is None else ""
    )


def races_of(work: Work, decided: Sequence[Decision] = ()) -> Racing | RacedShots:
    """The races of an adaptive study, as far as they are decided; `ConfigError` for a budget that does not reach."""
    races = RacedShots if work.setting.study.kind == RACE.name else Racing
    return races.of(work.setting, work.prompts, partial(tokens_within, work), decided)


def tokens_within(work: Work, budget: SearchBudget) -> float:
    """The tokens that a budget buys of a study that asks everything: as many as it has of its tokens, its time as
    estimated on this machine, or its price.

    Raises `ConfigError` where time or price are not known.
    """
    whole, study = float(work.tokens.unique), work.setting.study
    if budget.unit in ("tokens", "share"):
        return budget.amount * (1.0 if budget.unit == "tokens" else whole)
    if budget.unit == "cost":
        bill = None if work.setting.model is not None else _bill(work)
        if bill is None or not bill.cost:
            raise ConfigError(
                f"budget is {study.budget!r}, but no price is known; give the endpoint's 'price', or tokens"
            )
        return whole * budget.amount / bill.cost
    from iclperm.engine.estimate import estimate

    if work.setting.model is None:
        raise ConfigError(
            f"budget is {study.budget!r}, but how fast an API answers is not known; give tokens or dollars"
        )
    plans = [product.plan for growth in work.growths for product in growth.products]
    seconds = None if study.plain else estimate(work.setting.model, plans, **_ways(work)).seconds
    if not seconds:
        raise ConfigError(f"budget is {study.budget!r}, but how long this way takes is not known; give tokens")
    return whole * budget.amount / seconds


def _ways(work: Work) -> dict[str, Any]:
    """How a study's model is run, as `iclperm.engine.estimate.estimate` takes it."""
    keys = ("device", "dtype", "memory_budget", "pack_tokens", "attention", "layers")
    max_new_tokens = work.setting.max_new_tokens if work.setting.is_generated else 0
    return {key: getattr(work.setting.study, key) for key in keys} | {"max_new_tokens": max_new_tokens}


def _summary(work: Work) -> StudyPlan:
    """The plan in numbers."""
    setting, design, is_plain = work.setting, work.setting.design, work.setting.study.plain
    counts = setting.counts([queries.split for queries in design.queries])
    num_content_free = len(work.prompts.queries[setting.content_free])
    return StudyPlan(
        task=setting.task.name,
        num_sets=design.num_sets,
        num_permutations=design.num_permutations,
        shots=design.shots,
        num_asked=sum(len(queries.draws) for queries in design.queries) - num_content_free,
        num_queries=design.num_queries - num_content_free,
        num_contexts=work.prompts.num_contexts,
        num_prompts=sum(growth.num_cells for growth in work.growths),
        tokens_naive=work.tokens.naive + work.choice_tokens,
        tokens_unique=work.tokens.unique,
        kv_peak_tokens=0 if is_plain else work.tokens.kv_peak,
        kv_peak_bytes=0 if setting.facts is None or is_plain else work.tokens.kv_peak * setting.facts.kv_token_bytes,
        num_units=sum(growth.num_units for growth in work.growths),
        num_parts=len(work.parts),
        num_overlong=design.num_queries - len(work.kept),
        num_excluded=counts["num_excluded"],
        num_duplicates=counts["num_duplicates"],
        num_conflicting=counts["num_conflicting"],
        disk_bytes=work.disk_bytes,
        opening=work.opening,
        label_tokens=()
        if setting.is_generated or setting.model is None
        else tuple(len(ids) for ids in work.prompts.continuations),
        prompts=work.prompts.counts,
        num_near=setting.near["num_near"],
        num_near_dev=setting.near["num_near_dev"],
        num_content_free=num_content_free,
        max_new_tokens=setting.max_new_tokens if setting.is_generated else None,
        bill=None if setting.model is not None else _bill(work),
        plain_tokens=work.plain_tokens if is_plain else None,
        crossed_tokens=None if setting.study.cells == "crossed" else _crossed_tokens(work),
        budget=setting.study.budget,
        notes=tuple(setting.notes),
        num_alone=sum(len(growth.alone) for growth in work.growths),
        nothing=work.nothing,
    )


def _crossed_tokens(work: Work) -> int:
    """The distinct tokens of all cells of a study that asks each ordering queries of its own."""
    decision = work.growths[-1].decision
    assert decision is not None
    return int(decision.known["crossed"]["unique"])


def _bill(work: Work) -> Bill:
    """What all prompts of a study cost of an API at most."""
    setting, prompts, text = work.setting, work.prompts, TextTokenizer()
    choices = setting.study.endpoint
    assert choices is not None
    contexts, queries = (list(map(text.ids_to_text, parts)) for parts in (prompts.contexts, prompts.queries))
    products = [product for growth in work.growths for product in growth.products]
    own = ([""], [text.ids_to_text(cell.prompt) for part in work.parts for cell in part.cells])
    return product_bill(
        choices,
        [([contexts[c] for c in product.contexts], [queries[q] for q in product.queries]) for product in products]
        + [own] * (not products),
        max_new_tokens=setting.max_new_tokens if setting.is_generated else 1,
        times=None if setting.is_generated else len(setting.task.words) if choices.api == "completions" else 1,
    )
