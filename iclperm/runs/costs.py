"""What each part of a run is predicted to take, for dealing parts out; no result depends on it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iclperm.engine.facts import ModelFacts, unit_flops
from iclperm.runs.work import Part, Product, Work


def part_flops(work: Work) -> NDArray[np.float64]:
    """About the floating-point operations of each part of a run by a model of ours, [parts].

    Texts that are generated count as long as they may be. O(nodes of the query blocks + units + other cells).
    """
    facts = work.setting.facts
    assert facts is not None
    until = [np.append(0, np.cumsum(_of_units(work, facts, product))) for product in work.products]
    place = {id(product): number for number, product in enumerate(work.products)}

    def of(part: Part) -> float:
        if part.product is None:
            return _of_cells(work, facts, part)
        ends = until[place[id(part.product)]]
        return float(ends[part.units.stop] - ends[part.units.start])

    return np.array([of(part) for part in work.parts])


def _of_units(work: Work, facts: ModelFacts, product: Product) -> NDArray[np.float64]:
    flops = unit_flops(facts, product.plan)
    if work.setting.is_generated:
        core, sizes = product.plan.core, np.diff(product.plan.block_offsets)
        texts = (core.unit_context_end - core.unit_context_begin) * sizes[core.unit_block]
        flops = flops + texts * facts.flops(_steps(work), _steps(work), 0)
    return flops


def _of_cells(work: Work, facts: ModelFacts, part: Part) -> float:
    """Of cells outside the products, which share their contexts."""
    prompts, contexts = work.prompts.contexts, {cell.context for cell in part.cells}
    shared = sum(len(prompts[context]) for context in contexts)
    own = sum(
        max(0, len(cell.prompt) - len(prompts[cell.context])) + sum(len(ids) - 1 for ids in cell.continuations)
        for cell in part.cells
    )
    mean_length = sum(len(cell.prompt) for cell in part.cells) // len(part.cells)
    flops = facts.flops(shared + own, len(part.cells), (shared + own) * mean_length)
    if work.setting.is_generated:
        flops += len(part.cells) * facts.flops(_steps(work), _steps(work), 0)
    return flops


def _steps(work: Work) -> int:
    return max(0, work.setting.max_new_tokens - 1)  # the last token generated is never fed
