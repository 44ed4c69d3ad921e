"""Whether the tree says of whole prompts what plain scoring says, and how that is judged in half precision.

In float32 the two may differ by `TOLERANCE`. Half precision rounds so often that a right engine may be off by a nat,
and a wrong one by less. So it is judged twice: what the library's own layers, attention and head give through the
tree, computed in float32 with the same weights, is held against plain scoring computed so, as in float32; and what
kernels and layers of ours give is held against that by how far off plain half precision is itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from iclperm.engine.executor import Report, execute
from iclperm.engine.footprint import Sizes, checked_tokens
from iclperm.engine.memory import PackLimit
from iclperm.engine.model import TreeModel
from iclperm.engine.plan import Plan, plan_requests
from iclperm.engine.tree import Rows
from iclperm.errors import PLAINLY, NoNumbers, SelfCheckError
from iclperm.reference import scoring
from iclperm.reference.precision import in_float32

Float64s = npt.NDArray[np.float64]

TOLERANCE = 1e-3
"""Largest difference in nats of a token in float32."""
MOST_TIMES = 2.5
"""How many times plain half precision's own error the tree's may be (benchmarks/bfloat16_check.py)."""

_LAST = 3
"""Tokens at the end of each prompt after which something is asked."""
_IDS = 16
"""Token ids that are asked for after each of them: a row's errors differ from id to id."""
_TILE = 64  # keys, the largest that is shipped
_LEAST = 1e-3  # nats: less is no error of half precision
_SMALL_SHARE = 0.25  # of the tree's tokens that a small pack holds: keys and values cross pack borders


@dataclass(frozen=True)
class DrawnPrompts:
    """Token ids of prompts that begin alike, and the ids whose log-probability is asked after their last tokens."""

    rows: list[list[int]]
    ids: list[int]

    @classmethod
    def of(cls, model: TreeModel, seed: int = 0) -> DrawnPrompts:
        """Drawn ones that branch within a tile of keys and at its border, and outgrow a short sliding window."""
        rng = np.random.default_rng(seed)
        length = checked_tokens(model.facts, model.device)
        drawn = [int(i) for i in rng.integers(0, model.vocab_size, length + 24 + _IDS)]
        stem, other, ids = drawn[:length], drawn[length:-_IDS], drawn[-_IDS:]
        border = length // _TILE * _TILE or length // 2
        rows = [
            stem + other[:4],
            stem + other[4:6],
            stem[:border] + other[6:9],
            stem[: border // 2 + 1] + other[9:12],
            stem[:1] + other[12:14],
            other[14:18],
        ]
        most = min(model.facts.max_tokens, model.max_positions)
        return cls([row[:most] for row in rows], ids)

    @property
    def num_last(self) -> list[int]:
        """How many of a prompt's tokens something is asked after."""
        return [min(_LAST, len(row)) for row in self.rows]

    def plan(self) -> Plan:
        """The tree of all that is asked, in one pack."""
        contexts = [
            row[: len(row) - back]
            for row, num_last in zip(self.rows, self.num_last, strict=True)
            for back in range(num_last - 1, -1, -1)
        ]
        rows = Rows.of([[*context, token] for context in contexts for token in self.ids])
        plan = plan_requests(rows, rows.lengths - 1)
        return plan.repacked(max(plan.pack_tokens, plan.tokens))


def check_agreement(model: TreeModel, seed: int = 0) -> bool:
    """Score a few branching prompts both ways; whether they have the same bits in small packs and in one.

    Raises SelfCheckError if the tree and plain scoring disagree, NoNumbers for a model that gives NaN whatever it
    reads. Cost: 6 prompts of up to 76 tokens (217 on an accelerator, more for a window up to 600), three times; in half
    precision three times more, two of them in float32.
    """
    prompts = DrawnPrompts.of(model, seed)
    plain = plain_logprobs(model, prompts)
    name, dtype = type(model.model).__name__, str(model.dtype).removeprefix("torch.")
    if np.isnan(plain).all():
        raise NoNumbers(
            f"{name} in {dtype} gives no number, only NaN or infinity, for every prompt of the first-use check; "
            "give another dtype (float32 holds them all), or look at its weights"
        )
    together, apart = tree_logprobs(model, prompts), tree_logprobs(model, prompts, _SMALL_SHARE)
    if model.dtype.itemsize >= torch.float32.itemsize:
        _refuse_difference(model, apart, plain)
    else:
        exact = exact_logprobs(model, prompts)
        _refuse_difference(model, exact_tree_logprobs(model, prompts, _SMALL_SHARE), exact)
        errors = HalfErrors.of(apart, plain, exact)
        if not errors.times <= MOST_TIMES:
            raise SelfCheckError(
                f"{model.config.model_type!r}: the tree is {errors.tree:.3f} nats from float32 where plain {dtype} is "
                f"{errors.plain:.3f} ({errors.times:.1f} times as far, {MOST_TIMES} are allowed); {PLAINLY}"
            )
    return np.array_equal(together, apart, equal_nan=True)


def _refuse_difference(model: TreeModel, tree: Float64s, plain: Float64s) -> None:
    """Raises SelfCheckError where log-probabilities of the tree are not those of plain scoring, in float32."""
    differences = np.where(np.isnan(plain), 0.0, np.abs(tree - plain))
    worst = np.unravel_index(np.nan_to_num(differences, nan=np.inf).argmax(), plain.shape)
    if not differences[worst] <= TOLERANCE:
        raise SelfCheckError(
            f"{model.config.model_type!r}: the tree gives {tree[worst]:.4f} nats where plain scoring gives "
            f"{plain[worst]:.4f} (self-check row {worst[0]}); {PLAINLY}"
        )


@dataclass(frozen=True)
class HalfErrors:
    """How far from float32, as root mean squares in nats, and ``times`` as far as plain scoring the tree is.

    Of rows whose errors are of all sizes a few may be larger by chance, and of all rows together the largest decide;
    so ``times`` is the smaller of the typical row's (a geometric mean) and of the errors together.
    """

    tree: float
    plain: float
    times: float

    @classmethod
    def of(cls, tree: Float64s, plain: Float64s, exact: Float64s) -> HalfErrors:
        """Of log-probabilities [R, ids], where plain scoring gives numbers; infinite where the tree then does not."""
        told = ~np.isnan(plain).any(axis=1)
        by_row = [np.square((each - exact)[told]).mean(axis=1) for each in (tree, plain)]
        of_tree, of_plain = (np.sqrt(np.maximum(np.nan_to_num(each, nan=np.inf), _LEAST**2)) for each in by_row)
        together = [float(np.sqrt(np.square(each).mean())) for each in (of_tree, of_plain)]
        typical = float(np.exp(np.log(of_tree / of_plain).mean()))
        return cls(together[0], together[1], min(typical, together[0] / together[1]))


def plain_logprobs(model: TreeModel, prompts: DrawnPrompts) -> Float64s:
    """What plain scoring says [R, ids], one prompt at a time; R rows in the order of prompts and their last tokens."""
    with model.plainly() as plain:
        return np.concatenate(
            [
                scoring.last_logprobs(plain, row, num_last, prompts.ids)
                for row, num_last in zip(prompts.rows, prompts.num_last, strict=True)
            ]
        )


def exact_logprobs(model: TreeModel, prompts: DrawnPrompts) -> Float64s:
    """As ``plain_logprobs``, the model's weights computed with in float32."""
    with in_float32():
        return plain_logprobs(model, prompts)


def tree_logprobs(model: TreeModel, prompts: DrawnPrompts, share: float = 1.0) -> Float64s:
    """As ``plain_logprobs``, through the tree; packs hold at most a ``share`` of its tokens."""
    plan = prompts.plan()
    plan = plan.repacked(max(8, int(share * plan.tokens)))
    limit = PackLimit(Sizes.of(model, model.device).peak, model.device)
    units = list(execute(model, plan, range(plan.num_units), Report(), limit))
    values = np.concatenate([unit.logprob for unit in units])[plan.contexts.row_items]
    return values.astype(np.float64).reshape(-1, len(prompts.ids))


def exact_tree_logprobs(model: TreeModel, prompts: DrawnPrompts, share: float = 1.0) -> Float64s:
    """As ``tree_logprobs`` in float32, through the library's own layers, attention and head: kernels of ours are made
    for the model's dtype."""
    with model.all_by_the_library(), in_float32():
        return tree_logprobs(model, prompts, share)
