"""Dealing parts by cost, what a part is predicted to cost, and the simulation of workers (benchmarks/balance.py)."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import byte_level_tokenizer, greedy_tokenizer, make_model, make_task

from iclperm import Study
from iclperm.engine.facts import plan_flops, unit_flops
from iclperm.reference.dealing import finished_at
from iclperm.runs.costs import part_flops
from iclperm.runs.layout import lay_out
from iclperm.runs.limits import WorkLimits
from iclperm.runs.setting import ResolvedStudy
from iclperm.workers.shares import Shares

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
LIMITS = WorkLimits(unit_tokens=(60, 60), general_cells=5, generated_cells=2)


@pytest.fixture(scope="module", name="balance")
def loaded_balance():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("balance")


PART = st.tuples(st.integers(1, 9), st.integers(0, 3), st.sampled_from([1, 2, 3, 20]))  # seconds, jump, cost


@given(
    st.lists(PART, max_size=14),
    st.integers(1, 6),
    st.fixed_dictionaries({"start": st.integers(0, 5), "deal": st.integers(0, 2), "commit": st.integers(0, 3)}),
)
def test_the_simulation_says_what_happens_second_by_second(balance, parts, workers, times):
    seconds, jumps, costs = zip(*parts, strict=True) if parts else ((), (), ())
    found = balance.simulated(balance.Parts(seconds, jumps, costs, **times), workers)
    assert found == finished_at(seconds, jumps, costs, workers=workers, **times)


def test_the_simulation_of_what_is_known(balance):
    even = balance.Parts([2.0] * 12, [0.0] * 12, [1.0] * 12)
    assert [balance.simulated(even, count) for count in (1, 2, 3, 12, 100)] == [24, 12, 8, 2, 2]
    slow = {"deal": 0.0, "commit": 1.0}
    assert balance.simulated(balance.Parts([2.0] * 12, [0.0] * 12, [1.0] * 12, **slow), 100) == 14  # one by one
    quick = {"deal": 0.0, "commit": 0.0}
    rows = {row["workers"]: row for row in balance.scaling("even", even, {4: quick, 1024: slow})}
    assert (rows[1]["efficiency"], rows[4]["efficiency"], rows[1]["limited by"]) == (1.0, 1.0, "")
    assert (rows[128]["seconds"], rows[128]["limited by"]) == (14, "driver")
    few = balance.scaling("few", balance.Parts([2.0] * 3, [0.0] * 3, [1.0] * 3), {1024: quick})
    assert {row["limited by"] for row in few if row["workers"] > 2} == {"few parts"}


def test_dear_parts_go_first_and_halves_are_by_cost():
    costs = dict(enumerate([1, 1, 1, 1, 2, 2, 9, 12]))
    shares = Shares(range(8), costs)
    assert [shares.next("a"), shares.next("b")] == [7, 6]  # each more than twice the mean
    assert shares.answered(7)
    assert shares.next("a") == 0
    assert shares.next("c") == 4  # of 1 1 1 2 2 the rear half by cost: 2 2
    for part in (6, 0, 4):
        assert shares.answered(part)


def test_an_idle_worker_costs_nothing_where_all_parts_are_given_twice():
    shares = Shares(range(2))
    assert [shares.next(worker) for worker in range(1000)] == [0, 1, 0, 1] + [None] * 996


def laid_out(folder, tokenizer, separator=None, **changes):
    make_model(folder / "model", tokenizer)
    make_task(folder, **({} if separator is None else {"separator": separator}))
    choices = {"sets": 2, "permutations": 3, "shots": [0, 1, 3], "queries": 6, "seed": 1} | changes
    study = Study(model=str(folder / "model"), task=str(folder / "colours.yaml"), **choices)
    return lay_out(ResolvedStudy.of(study, limits=LIMITS))


def test_parts_cost_what_their_plan_does(tmp_path):
    work = laid_out(tmp_path, byte_level_tokenizer())
    facts, (product,) = work.setting.facts, work.products
    assert len(work.parts) == product.plan.num_units > 5
    np.testing.assert_allclose(part_flops(work), unit_flops(facts, product.plan))
    rows, _, row_pairs = product.plan.unit_pairs()
    assert (rows.sum(), row_pairs.sum()) == (product.plan.scored_rows, product.plan.scored_pairs)
    assert part_flops(work).sum() == pytest.approx(plan_flops(facts, product.plan, is_fused=True), rel=0.02)


def test_a_unit_of_longer_contexts_costs_more_a_token(tmp_path):
    work = laid_out(tmp_path, byte_level_tokenizer())
    plan = work.products[0].plan
    lengths = [plan.context_lengths[plan.unit_contexts(unit)].mean() for unit in range(plan.num_units)]
    a_token = unit_flops(work.setting.facts, plan) / plan.core.unit_tokens
    assert np.corrcoef(lengths, a_token)[0, 1] > 0.5


@pytest.mark.parametrize("changes", [{}, {"scoring": "generate", "max_new_tokens": 4}], ids=["scored", "generated"])
def test_cells_outside_products_and_texts_cost_something(tmp_path, changes):
    work = laid_out(tmp_path, greedy_tokenizer(), "", **changes)
    costs = part_flops(work)
    general = [part.product is None for part in work.parts]
    assert any(general)
    assert len(costs) == len(work.parts)
    assert (costs > 0).all()
    if changes:
        scored = part_flops(laid_out(tmp_path / "scored", greedy_tokenizer(), ""))
        assert costs.sum() > scored.sum()


def test_the_published_figures_are_of_all_stages():
    figures = json.loads((BENCHMARKS / "results/balance.json").read_text())["figures"]
    assert {row["what"] for row in figures} == {"part", "start-up", "driver", "links that sleep", "simulated"}
    assert {row["workers"] for row in figures if row["what"] == "simulated"} == {1 << power for power in range(11)}
