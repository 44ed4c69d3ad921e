"""Runs and files of answers side by side: what they share is found, what is said is borne out, and what is printed."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import iclperm
from iclperm import Study, api, demo, stats
from iclperm.cli.main import main
from iclperm.errors import ConfigError, RequestError
from iclperm.report.figures import save
from iclperm.runs.identity import Identities, identities
from iclperm.studies.compared import Compared, of_array, of_run, short_names, together
from iclperm.studies.comparing import comparing
from iclperm.studies.comparing_findings import Comparing

Array = npt.NDArray[Any]
SHAPE = (8, 8, 150)
WORDS = ("sets", "permutations", "queries")


def names(shape: tuple[int, ...] = SHAPE, of: str = "a") -> Identities:
    return Identities(
        *(tuple(f"{of}{axis}{level}" for level in range(size)) for axis, size in zip("SPQ", shape, strict=True))
    )


def study(
    name: str,
    seed: int,
    *,
    order: float = 0.05,
    selection: float = 0.05,
    of: str = "a",
    shape: Any = SHAPE,
) -> Compared:
    """Answers [S, P, 1, Q] at k = 4 with Gaussian effects of these sizes; those of one `of` have names in common."""
    generator = np.random.default_rng(seed)
    chance = 0.6 + selection * generator.standard_normal((shape[0], 1, 1))
    chance = chance + order * generator.standard_normal((shape[1], 1)) + generator.uniform(-0.15, 0.15, shape[2])
    answers = (generator.random(shape) < chance).astype(np.uint8)[:, :, None]
    return Compared(name, answers, None, np.ones(shape[2], np.int64), (4,), names(shape, of))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Small runs of the bundled model: two that differ in how labels are compared, a grown one, and another seed."""
    folder = tmp_path_factory.mktemp("runs")
    small: dict[str, Any] = {"sets": 3, "permutations": 3, "shots": [0, 2, 4], "queries": 16}
    made = {
        "one": Study(**small, out=str(folder / "one")),
        "mean": Study(**small, normalize="mean", out=str(folder / "mean")),
        "grown": Study(**(small | {"sets": 4, "queries": 20}), out=str(folder / "grown")),
        "seed": Study(**small, seed=7, out=str(folder / "seed")),
    }
    return {name: iclperm.run(one) for name, one in made.items()}


class TestIdentities:
    def test_a_run_in_memory_has_the_names_of_one_in_a_folder(self, runs: dict[str, Any]) -> None:
        one = runs["one"]
        found = identities(one)
        assert [len(part) for part in (found.sets, found.permutations, found.queries)] == [3, 3, 16]
        assert all(len(set(part)) == len(part) for part in (found.sets, found.permutations, found.queries))
        assert identities(replace(one, folder=None)) == found

    def test_names_are_those_of_the_same_content(self, runs: dict[str, Any]) -> None:
        one, mean, grown, seed = (identities(runs[name]) for name in ("one", "mean", "grown", "seed"))
        assert mean == one
        assert grown.sets[:3] == one.sets
        assert grown.queries[:16] == one.queries
        assert not set(seed.permutations) & set(one.permutations)
        assert not set(seed.sets) & set(one.sets)


class TestTogether:
    def test_levels_that_only_one_has_are_left_out_and_named(self, runs: dict[str, Any]) -> None:
        ready = together([of_run("one", runs["one"]), of_run("grown", runs["grown"])])
        assert ready.shared(0, 1) == WORDS
        assert ready.studies[1].values.shape == ready.studies[0].values.shape
        np.testing.assert_array_equal(ready.studies[1].values, runs["grown"].correct[:3, :, :, :16])
        assert [note for note in ready.notes if "compared" in note] == [
            "grown: 3 of 4 sets are compared, those that the others have too",
            "grown: 16 of 20 queries are compared, those that the others have too",
        ]

    def test_an_order_of_its_own_is_brought_into_one(self) -> None:
        one = study("one", 1)
        turned = np.arange(8)[::-1]
        other = replace(
            one,
            name="turned",
            values=one.values[turned],
            names=replace(one.names, sets=one.names.sets[::-1]),  # type: ignore[type-var,union-attr]
        )
        ready = together([one, other])
        np.testing.assert_array_equal(ready.studies[1].values, one.values)

    def test_a_small_overlap_is_none_and_said(self) -> None:
        one, other = study("one", 1), study("other", 2)
        mixed = (*one.names.queries[:40], *(f"own{i}" for i in range(110)))  # type: ignore[union-attr]
        ready = together([one, replace(other, names=replace(other.names, queries=mixed))])  # type: ignore[type-var]
        assert ready.shared(0, 1) == ("sets", "permutations")
        assert any("one and other have 40 of 150 or more queries in common" in note for note in ready.notes)
        same = together([one, replace(other, names=replace(other.names, queries=mixed)), study("third", 3)])  # type: ignore[type-var]
        assert "queries" in same.shared(0, 2)
        assert "queries" not in same.shared(0, 1)

    def test_of_other_answers_nothing_is_known_until_it_is_said(self) -> None:
        arrays = [of_array(f"file {seed}", study("", seed).values[:, :, 0], "SPQ") for seed in (1, 2)]
        ready = together(arrays)
        assert ready.shared(0, 1) == ()
        assert "file 1 and file 2 have in common with others is not known" in ready.notes[0]
        assert together(arrays, ["permutations"]).shared(0, 1) == ("permutations",)
        with pytest.raises(RequestError, match="queries are said to be shared, but there are 150 and 99"):
            together([arrays[0], of_array("short", np.ones((8, 8, 99), np.uint8), "SPQ")], ["queries"])
        with pytest.raises(RequestError, match="contexts has the axes CQ"):
            of_array("contexts", np.ones((3, 9), np.uint8), "CQ")

    def test_other_weights_and_choices_are_said(self) -> None:
        one, other = study("one", 1), study("other", 2)
        weighted = replace(other, weights=np.r_[5, np.ones(149, np.int64)], about={"normalize": "mean"})
        notes = together([replace(one, about={"normalize": "sum"}), weighted]).notes
        assert any("weigh their common queries otherwise" in note for note in notes)
        assert any("differ in 'normalize' (one sum, other mean)" in note for note in notes)

    def test_names_are_what_differs(self) -> None:
        folders = [Path("runs/a"), Path("runs/b")]
        assert short_names([("ag_news", "small"), ("ag_news", "large")], folders) == ["small", "large"]
        assert short_names([("ag_news", "small"), ("math", "small")], folders) == ["ag_news", "math"]
        assert short_names([("ag_news", "small"), ("math", "large")], folders) == ["ag_news, small", "math, large"]
        assert short_names([("ag_news", "small")] * 2, folders) == ["a", "b"]
        assert short_names([("ag_news", "small")] * 2, [Path("a/run"), Path("b/run")]) == ["a/run", "b/run"]
        assert short_names([("ag_news", "small")] * 2, [None, None]) == ["ag_news, small"] * 2
        twice = comparing([study("one", 1), study("one", 2)])
        assert [each.name for each in twice.studies] == ["one (1)", "one (2)"]


class TestFindings:
    def test_numbers_are_those_of_the_statistics(self) -> None:
        one, two = study("one", 1), study("two", 2)
        found = comparing([one, two])
        expected = stats.compare(one.values, two.values, shots=((4,), (4,)))
        assert found.pairs[0].comparison == expected
        assert found.studies[0].ratio_free == pytest.approx(stats.variance_components(one.values[:, :, 0]).ratio)
        matrix = one.values[:, :, 0].mean(axis=2)
        assert found.studies[0].ratio == stats.jackknife_ratio_interval(matrix)  # as in the study's own report
        assert found.pooled is None
        assert found.conclusion()[-1].startswith("one and two have the same 8 sets, 8 permutations and 150 queries")

    def test_holm_counts_every_test_of_every_pair(self) -> None:
        found = comparing([study(str(seed), seed) for seed in range(3)])
        tests = [test for pair in found.pairs for test in pair.comparison.tests().values()]
        assert len(tests) == 12
        np.testing.assert_allclose([t.p_holm for t in tests], stats.holm([t.p_value for t in tests]))

    def test_r_that_differs_is_called_different(self) -> None:
        shape = (30, 30, 200)
        large = study("choosy", 5, order=0.02, selection=0.12, shape=shape)
        small = study("fickle", 6, order=0.12, selection=0.02, shape=shape)
        found = comparing([large, small])
        lines = "\n".join(found.conclusion())
        assert re.search(r"r of choosy is .* times that of fickle .*: r differs\.", lines)
        assert "The order effect of fickle is larger than that of choosy" in lines
        assert "The selection effect of choosy is larger than that of fickle" in lines

    def test_r_that_does_not_stays_open(self) -> None:
        lines = "\n".join(comparing([study("one", 1), study("two", 2)]).conclusion())
        assert "whether r differs between them stays open" in lines
        assert "larger" not in lines

    def test_an_interval_that_is_not_adjusted_says_so_where_it_would_mislead(self) -> None:
        found = comparing([study("one", 1), study("two", 2)])
        accuracy = found.pairs[0].comparison.accuracy[0]._replace(low=0.024, high=0.539, p_value=0.03, p_holm=0.1459)
        for given, is_told in ((accuracy, True), (accuracy._replace(p_holm=0.04), False)):
            comparison = replace(found.pairs[0].comparison, accuracy=(given,), mcnemar=(None,))
            (line,) = (
                line
                for line in replace(found, pairs=(replace(found.pairs[0], comparison=comparison),)).conclusion()
                if line.startswith("Accuracy")
            )
            assert ("Holm over all tests; the interval is for this one alone): no difference shows." in line) == is_told
            assert line.endswith("it differs.") != is_told

    def test_a_difference_that_item_noise_may_have_made_stays_open(self) -> None:
        found = comparing([study("one", 1), study("two", 2)])
        ratio = found.pairs[0].comparison.ratio._replace(estimate=2.0, low=1.5, high=2.7, p_value=0.001, p_holm=0.004)
        comparison = replace(found.pairs[0].comparison, ratio=ratio)
        lines = replace(found, pairs=(replace(found.pairs[0], comparison=comparison),)).conclusion()
        assert any(
            "without item noise, which pulls every r towards 1" in line and "stays open" in line for line in lines
        )

    def test_too_few_sets_are_said_and_no_r_is_compared(self) -> None:
        found = comparing([study("few", 1, shape=(2, 8, 150)), study("enough", 2, of="b")])
        lines = found.conclusion()
        assert lines[0].startswith("Accuracy at k = 4: few less enough is ")  # the answer is what is known
        assert lines[1].startswith("few has 2 sets x 8 permutations: too few to compare r")
        assert not any("times that of" in line for line in lines)
        assert math.isnan(found.pairs[0].comparison.ratio.estimate)
        assert not math.isnan(found.pairs[0].comparison.accuracy[0].low)

    def test_other_shots_and_other_numbers_of_queries_are_said(self) -> None:
        one = study("one", 1)
        other = replace(study("other", 2, of="b", shape=(8, 8, 400)), shots=(8,))
        found = comparing([one, other])
        assert any("one has k = 4 and other k = 8" in warning for warning in found.warnings)
        assert any("no number of shots in common" in warning for warning in found.warnings)
        assert any("one has 150 queries and other 400: item noise" in warning for warning in found.warnings)
        assert found.pairs[0].comparison.accuracy == ()

    def test_missing_answers_are_said(self) -> None:
        one, other = study("one", 1), study("other", 2)
        state = np.zeros(one.values.shape, np.uint8)
        state[..., :30] = 3
        found = comparing([replace(one, state=state), other])
        assert any("20.0 % and 20.0 % of the queries are left out" in warning for warning in found.warnings)
        state[0, 0] = 3
        with pytest.raises(RequestError, match="has no answer at all; leave this set or permutation out"):
            comparing([replace(one, state=state), other])

    def test_many_studies_are_pooled_and_drawn(self, tmp_path: Path) -> None:
        found = comparing([study(f"model {seed}", seed) for seed in range(5)])
        assert found.pooled is not None
        logs = [stats.log_sensitivity(each.values[:, :, 0].mean(axis=2)) for each in (study("", s) for s in range(5))]
        covariance = stats.jackknife_covariance(logs, [[WORDS] * 5] * 5)
        expected = stats.pool([each.estimate for each in logs], covariance)
        assert found.pooled.mean == pytest.approx(expected.mean)
        lines = "\n".join(found.conclusion())
        assert "Over 5 studies r is" in lines
        assert "In none of 10 pairs can r be told apart" in lines
        assert [path.name for path in save(found.plots()["forest"], tmp_path / "forest")] == [
            "forest.png",
            "forest.svg",
        ]
        titles = [table.title for table in found.tables(full=False)]
        assert titles == ["Studies", "Is r different?", "r over all studies, partially pooled"]
        json.dumps(found.to_dict(), allow_nan=False)

    def test_more_studies_than_sets_share(self) -> None:
        found = comparing([study(f"model {seed}", seed, shape=(3, 3, 100)) for seed in range(7)])
        assert found.pooled is not None
        assert found.pooled.se > 0

    def test_a_slope_on_size(self) -> None:
        sizes = [1e8, 1e9, 1e10, 1e11]
        falling = [study(f"m{i}", i, order=0.16 / 2**i, selection=0.08, shape=(12, 12, 300)) for i in range(4)]
        found = comparing(falling, sizes=sizes)
        assert found.slopes_are_free
        order = found.slopes["order"].factor
        assert order.low < 0.5 < order.high
        assert order.high < 1
        assert any("At ten times the parameters the order effect is" in line for line in found.conclusion())
        assert found.tables(full=False)[-1].title == "Sensitivity against model size"
        flat = comparing([study(f"m{i}", i, order=0.0) for i in range(3)], sizes=sizes[:3])
        assert not flat.slopes_are_free
        few = comparing(falling[:2], sizes=sizes[:2])
        assert "a slope on model size takes 3 studies" in few.warnings[-1]

    def test_accuracies_and_answers_go_together(self) -> None:
        answers = of_array("answers", study("", 1).values[:, :, 0], "SPQ")
        cells = of_array("cells", study("", 2).values[:, :, 0].mean(axis=2), "SP")
        found = comparing([answers, cells], shared=["sets", "permutations"])
        assert found.studies[1].shape == (8, 8, 0)
        assert math.isnan(found.pairs[0].comparison.order.estimate)
        assert not math.isnan(found.pairs[0].comparison.ratio.low)

    def test_one_study_is_no_comparison(self) -> None:
        with pytest.raises(ConfigError, match="at least 2 studies, got 1"):
            comparing([study("one", 1)])
        with pytest.raises(ConfigError, match="2 studies and 1 sizes"):
            comparing([study("one", 1), study("two", 2)], sizes=[1e9])


class TestOutside:
    def test_runs_folders_and_files(self, runs: dict[str, Any], tmp_path: Path) -> None:
        found = iclperm.compare([runs["one"], runs["mean"].folder])
        assert isinstance(found, Comparing)
        assert [each.name for each in found.studies] == ["one", "mean"]
        assert found.pairs[0].comparison.shared == WORDS
        np.testing.assert_allclose(found.studies[0].accuracy, runs["one"].correct[:, :, -1].mean())
        file = tmp_path / "others.npy"
        np.save(file, study("", 3, shape=(4, 4, 60)).values[:, :, 0])
        mixed = api.compare([runs["one"], file])
        assert [each.name for each in mixed.studies] == ["demo", "others.npy"]
        assert mixed.pairs[0].comparison.shared == ()

    def test_a_run_named_twice(self, runs: dict[str, Any]) -> None:
        folder = Path(runs["one"].folder)
        with pytest.raises(ConfigError, match="one is named twice"):
            iclperm.compare([folder, runs["mean"], str(folder / "." / ".." / folder.name)])

    def test_the_command(self, runs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folders = [str(runs[name].folder) for name in ("one", "mean", "seed")]
        with pytest.raises(SystemExit) as done:
            main(["compare", *folders, "--out", str(tmp_path / "out")])
        assert done.value.code == 0
        out = capsys.readouterr().out
        assert "Is r different?" in out
        assert "Conclusion" in out
        report = json.loads((tmp_path / "out/report.json").read_text())
        assert report["kind"] == "compare"
        assert len(report["pairs"]) == 3
        with pytest.raises(SystemExit):
            main(["compare", *folders[:2], "--json"])
        assert json.loads(capsys.readouterr().out)["pairs"][0]["shared"] == list(WORDS)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--sizes", "7B,1B"], "--sizes must be numbers with commas between"),
            (["--shared", "models"], "'models'"),
        ],
    )
    def test_wrong_options(self, runs: dict[str, Any], arguments: list[str], words: str, capsys: Any) -> None:
        with pytest.raises(SystemExit) as done:
            main(["compare", str(runs["one"].folder), str(runs["mean"].folder), *arguments])
        assert done.value.code != 0
        assert words in capsys.readouterr().err


def test_two_wordings_of_files_of_train_and_test_draw_the_same_rows(tmp_path: Path) -> None:
    """What docs/comparing.md promises: so they may be said to share sets and queries, which no content shows."""
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_bytes((demo.data_path() / f"{split}.jsonl").read_bytes())
    built_in = (Path(iclperm.__file__).parent / "tasks/builtin/mini_news.yaml").read_text()
    plain = re.sub(r"\.\./\.\./demo/data/mini_news/|  dev: .*\n", "", built_in)
    made = []
    for name, text in (("plain", plain), ("terse", plain.replace("Article: ", "").replace("Answer:", "Topic:"))):
        (tmp_path / f"{name}.yaml").write_text(text.replace("name: mini_news", f"name: {name}"))
        task = str(tmp_path / f"{name}.yaml")
        made.append(iclperm.run(Study(task=task, sets=3, permutations=3, shots=[4], queries=8)))
    one, two = (run.to_arrow() for run in made)
    assert one["example"].to_pylist() == two["example"].to_pylist()
    assert made[0].demonstrations.rows.tolist() == made[1].demonstrations.rows.tolist()
    assert made[0].label_logprob.tolist() != made[1].label_logprob.tolist()
    compared = [of_run(run.task, run) for run in made]
    assert comparing(compared).pairs[0].comparison.shared == ("permutations",)
    told = comparing(compared, shared=["sets", "permutations", "queries"])
    assert set(told.pairs[0].comparison.shared) == {"sets", "permutations", "queries"}
