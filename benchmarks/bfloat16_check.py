"""How the first-use check judges half precision: of many drawn prompts, a right engine and coarsely broken ones.

    python benchmarks/bfloat16_check.py [--model FOLDER] [--dtype bfloat16] [--seeds 300] [--json FILE]

A seed draws other prompts. ``times`` is how many times as far from float32 as plain half precision the tree is
(`iclperm.engine.agreement.HalfErrors`), ``in float32`` the largest difference in nats of the tree to plain scoring
where both are computed in float32. ``refused`` is the share of seeds that the check refuses, ``refused before`` that of
a bound of 0.5 nats on the tree against plain half precision. ``chance`` is that of a seed beyond the limit if the
logarithm of ``times`` has normal tails, and ``chance, heavy`` if its upper twentieth goes on falling exponentially as
it does within the seeds drawn. Broken engines have a tenth of the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from _machine import options, publish

from iclperm.demo import model_path
from iclperm.engine import Engine
from iclperm.engine.agreement import (
    MOST_TIMES,
    TOLERANCE,
    DrawnPrompts,
    HalfErrors,
    exact_logprobs,
    exact_tree_logprobs,
    plain_logprobs,
    tree_logprobs,
)
from iclperm.engine.device import fixed_precision
from iclperm.engine.forward import TreeForward
from iclperm.engine.layers import FusedLayer
from iclperm.engine.model import TreeModel
from iclperm.engine.tables import Inputs

SHARE = 0.25
"""Of the tree's tokens that a pack holds, so that prefixes cross the borders of packs."""
BEFORE = 0.5  # nats
TAIL = 0.05  # of the seeds, whose logarithms are taken to fall exponentially


@contextmanager
def layer_left_out() -> Iterator[None]:
    """Our second layer gives what it was given."""
    call = FusedLayer.__call__

    def broken(self: FusedLayer, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        out = call(self, hidden_states, **given)
        return hidden_states if self.module.self_attn.layer_idx == 1 else out

    with mock.patch.object(FusedLayer, "__call__", broken):
        yield


@contextmanager
def prefix_lost() -> Iterator[None]:
    """What a pack leaves for later ones is zero."""
    with mock.patch.object(TreeForward, "_keep", lambda self, new, pool: pool.zero_()):
        yield


@contextmanager
def positions_one_on() -> Iterator[None]:
    """What follows another piece of the tree stands one position too far."""
    arrays = Inputs.arrays

    def broken(self: Inputs, tables: Any) -> tuple[Any, ...]:
        ids, positions = arrays(self, tables)
        pack = tables.pack
        for visit in np.flatnonzero(pack.visit_pos > 0):
            positions[0, pack.visit_row_offsets[visit] : pack.visit_row_offsets[visit + 1]] += 1
        return ids, positions

    with mock.patch.object(Inputs, "arrays", broken):
        yield


DEFECTS: dict[str, Callable[[], Any]] = {
    "a layer left out": layer_left_out,
    "the prefix lost between packs": prefix_lost,
    "positions one on after a branch": positions_one_on,
}


@dataclass(frozen=True)
class Seed:
    """Of one seed, and the largest differences in nats of the tree to plain scoring, in half precision and float32."""

    errors: HalfErrors
    in_half: float
    in_float32: float

    @property
    def is_refused(self) -> bool:
        return not (self.errors.times <= MOST_TIMES and self.in_float32 <= TOLERANCE)


def found_of(model: TreeModel, seed: int, cases: dict[str, Callable[[], Any]]) -> Iterator[tuple[str, Seed]]:
    prompts = DrawnPrompts.of(model, seed)
    plain, exact = plain_logprobs(model, prompts), exact_logprobs(model, prompts)
    for name, broken in cases.items():
        with broken():
            tree, exact_tree = (of(model, prompts, SHARE) for of in (tree_logprobs, exact_tree_logprobs))
        in_half, in_float32 = (float(np.nanmax(np.abs(a - b))) for a, b in ((tree, plain), (exact_tree, exact)))
        yield name, Seed(HalfErrors.of(tree, plain, exact), in_half, in_float32)


def row(model: str, case: str, seeds: list[Seed]) -> dict[str, Any]:
    logs = np.log([seed.errors.times for seed in seeds])
    line: dict[str, Any] = {"model": model, "case": case, "seeds": len(seeds)}
    line |= {
        f"times {name}": float(np.exp(of(logs)))
        for name, of in (("min", np.min), ("median", np.median), ("max", np.max))
    }
    line["sd of log"] = float(logs.std())
    line["in float32 min"] = min(seed.in_float32 for seed in seeds)
    line["in float32 max"] = max(seed.in_float32 for seed in seeds)
    line["refused"] = float(np.mean([seed.is_refused for seed in seeds]))
    line["refused before"] = float(np.mean([seed.in_half > BEFORE for seed in seeds]))
    if case == "right":
        border = np.quantile(logs, 1 - TAIL)
        beyond = math.log(MOST_TIMES)
        line["chance"] = 0.5 * math.erfc((beyond - logs.mean()) / logs.std() / math.sqrt(2))
        line["chance, heavy"] = TAIL * math.exp(-(beyond - border) / float((logs[logs > border] - border).mean()))
    return line


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--model", type=Path, action="append", help="a folder; the bundled model by default")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--seeds", type=int, default=300)
    arguments = parser.parse_args()
    rows = []
    for folder in arguments.model or [model_path()]:
        model = Engine.from_pretrained(folder, dtype=arguments.dtype)._model
        assert isinstance(model, TreeModel)
        found: dict[str, list[Seed]] = {}
        with fixed_precision():
            for seed in range(arguments.seeds):
                cases = {"right": nullcontext} | (DEFECTS if seed % 10 == 0 else {})
                for case, of_seed in found_of(model, seed, cases):
                    found.setdefault(case, []).append(of_seed)
        rows += [row(model.config.model_type, case, seeds) for case, seeds in found.items()]
    publish(f"{arguments.dtype} in the first-use check", rows, arguments.json)


if __name__ == "__main__":
    main()
