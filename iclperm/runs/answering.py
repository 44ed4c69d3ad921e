"""What a model is asked and what it says: units of plans and single prompts in, log-likelihoods or texts out.

It knows token ids alone, neither task nor data, so that it runs in this process or in a worker's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iclperm.base.environment import processor
from iclperm.engine.plan import Plan
from iclperm.engine.tree import Ids
from iclperm.runs.setting import ResolvedStudy
from iclperm.runs.work import Work
from iclperm.study.sizes import Budget

if TYPE_CHECKING:
    from iclperm.engine.engine import Engine
    from iclperm.engine.scores import UnitResult
    from iclperm.engine.texts import GeneratedUnit, Generations


@dataclass(frozen=True)
class ModelUse:
    """How a model is loaded and asked; JSON-safe."""

    model: str
    """A folder, or the id of a model that has one in the hub's cache."""
    digest: str
    """Of the files of the model."""
    adapter: str | None
    """The folder of what is merged into it."""
    adapter_digest: str | None
    """Of its files."""
    device: str
    dtype: str
    memory_budget: Budget | None
    plain: bool
    attention: str
    layers: str
    pack_tokens: int | None
    """Of a forward pass at most; None for as many as the plan has."""
    max_new_tokens: int
    """0 where labels are scored and nothing is generated."""
    stop: list[str]

    @classmethod
    def of(cls, setting: ResolvedStudy) -> ModelUse:
        """As a study has it."""
        study, hashes = setting.study, setting.identity["hashes"]
        assert setting.model is not None
        return cls(
            model=str(setting.model),
            digest=hashes["model"],
            adapter=study.adapter,
            adapter_digest=hashes.get("adapter"),
            device=study.device,
            dtype=study.dtype,
            memory_budget=study.memory_budget,
            plain=study.plain,
            attention=study.attention,
            layers=study.layers,
            pack_tokens=study.pack_tokens,
            max_new_tokens=setting.max_new_tokens if setting.is_generated else 0,
            stop=setting.stop if setting.is_generated else [],
        )


@dataclass(frozen=True)
class Asked:
    """What a part of a run asks: ``units`` of the plan of this number, or ``prompts`` with their ``continuations``
    where the number is None."""

    part: int
    plan: int | None
    units: range
    prompts: Sequence[Ids]
    continuations: Sequence[Sequence[Ids]]

    @classmethod
    def of(cls, work: Work, number: int) -> Asked:
        """What the part of this number asks."""
        part = work.parts[number]
        plans = [plan for plan, product in enumerate(work.products) if product is part.product]
        return cls(
            number,
            plans[0] if plans else None,
            part.units,
            [cell.prompt for cell in part.cells],
            [cell.continuations for cell in part.cells],
        )


class Engines:
    """The engine of the model that was used last: runs of one model that follow each other load it once."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._use: ModelUse | None = None

    def of(self, use: ModelUse) -> Engine:
        """Loaded unless it is there; the one before it is given up first."""
        alone = replace(use, max_new_tokens=0, stop=[])
        if self._engine is None or self._use != alone:
            from iclperm.engine.engine import Engine

            self._engine = None
            size: dict[str, Any] = {} if use.pack_tokens is None else {"pack_tokens": use.pack_tokens}
            self._engine = Engine.from_pretrained(
                Path(use.model),
                device=use.device,
                dtype=use.dtype,
                memory_budget=use.memory_budget,
                adapter=use.adapter,
                plain=use.plain,
                attention=use.attention,
                layers=use.layers,
                **size,
            )
            self._use = alone
        return self._engine


class Answering:
    """A model that answers the parts of one run; ``engines`` has it, or loads it at the first use."""

    def __init__(self, use: ModelUse, plans: Sequence[Plan], engines: Engines | None = None) -> None:
        self._use = use
        self._plans = list(plans)
        self._engines = engines or Engines()
        self._is_in_a_call = False

    @property
    def engine(self) -> Engine:
        """Loaded at the first use."""
        return self._engines.of(self._use)

    @cached_property
    def numerics(self) -> dict[str, Any]:
        """What the last bits of an answer depend on: the engine's, and the processor's name where it computes."""
        numerics = self.engine.numerics
        return numerics if "gpu_driver" in numerics else {**numerics, "processor": processor()}

    def _plan(self, number: int) -> Plan:
        """In packs of the size that is wanted: as given, else of a device that takes larger ones in these."""
        plan, given = self._plans[number], self._use.pack_tokens
        size = given or (plan.pack_tokens if self._use.plain else max(plan.pack_tokens, self.engine.pack_tokens))
        if size != plan.pack_tokens:
            plan = self._plans[number] = plan.repacked(size)
        return plan

    @property
    def tokens(self) -> int:
        """Forwarded through the first layer, those of a call of the engine that is still open among them."""
        open_call = self.engine.report.tokens_so_far if self._is_in_a_call else 0
        return self.engine.totals.tokens_forwarded + open_call

    def answers(self, asked: Iterator[Asked]) -> Generator[tuple[int, pa.Table]]:
        """The answers of each part, a row for each of its prompts: of a unit context by context.

        Scored ones have columns ``logprob`` (of each continuation, in nats) and ``state``, generated ones the fields of
        `iclperm.runs.generated.Text`. A part is taken only when the answers of the one before it were. Parts of one
        plan that follow each other are one call of the engine, which keeps what they share.
        """
        one = next(asked, None)
        while one is not None:
            if one.plan is None:
                yield one.part, self._of_prompts(one)
                one = next(asked, None)
            else:
                one = yield from self._of_units(one, asked)

    def _of_units(self, one: Asked, asked: Iterator[Asked]) -> Generator[tuple[int, pa.Table], None, Asked | None]:
        """Answers this part and those after it as long as they are of the same plan; returns the one that is not."""
        begun: deque[Asked] = deque()
        other: Asked | None = one

        def units() -> Iterator[int]:
            nonlocal other
            while other is not None and other.plan == one.plan:
                begun.append(other)
                yield from other.units
                other = next(asked, None)

        assert one.plan is not None
        pieces: list[pa.Table] = []
        self._is_in_a_call = True
        try:
            # Closed even when the run is interrupted here: only then does the engine count what it forwarded.
            with closing(self._results(self._plan(one.plan), units())) as results:
                for result in results:
                    pieces.append(_of_unit(result))
                    if len(pieces) == len(begun[0].units):
                        yield begun.popleft().part, pa.concat_tables(pieces)
                        pieces = []
        finally:
            self._is_in_a_call = False
        return other

    def _results(self, plan: Plan, units: Iterator[int]) -> Generator[UnitResult | GeneratedUnit]:
        use = self._use
        found: Iterator[UnitResult | GeneratedUnit] = (
            self.engine.generate_units(plan, units, max_new_tokens=use.max_new_tokens, stop=use.stop)
            if use.max_new_tokens
            else self.engine.execute(plan, units)
        )
        return cast("Generator[UnitResult | GeneratedUnit]", found)

    def _of_prompts(self, asked: Asked) -> pa.Table:
        if self._use.max_new_tokens:
            return _written(self.engine.generate(asked.prompts, self._use.max_new_tokens, self._use.stop))
        requests = [
            (prompt, ids) for prompt, each in zip(asked.prompts, asked.continuations, strict=True) for ids in each
        ]
        scores = self.engine.loglikelihood(requests)
        num_prompts = len(asked.prompts)
        return _scored(scores.logprob.reshape(num_prompts, -1), scores.state.reshape(num_prompts, -1).max(axis=1))


def _of_unit(result: UnitResult | GeneratedUnit) -> pa.Table:
    if hasattr(result, "outputs"):
        return _written(result.outputs)
    return _scored(result.logprob.reshape(-1, result.logprob.shape[-1]), result.state.ravel())


def _scored(logprob: NDArray[np.float32], state: NDArray[np.uint8]) -> pa.Table:
    """Of log-likelihoods [N, L] and states [N]."""
    values = pa.array(np.ascontiguousarray(logprob).ravel(), pa.float32())
    lists = pa.FixedSizeListArray.from_arrays(values, logprob.shape[1])
    return pa.table({"logprob": lists, "state": pa.array(state, pa.uint8())})


def _written(outputs: Generations) -> pa.Table:
    assert outputs.text is not None  # a study has a tokenizer
    return pa.table(
        {
            "text": pa.array(outputs.text, pa.string()),
            "finish": pa.array(outputs.finish, pa.string()),
            "num_tokens": pa.array(outputs.num_tokens, pa.int32()),
            "logprob": pa.array(outputs.logprob, pa.float32()),
            "state": pa.array(outputs.state, pa.uint8()),
        }
    )
