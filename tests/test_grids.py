"""Grids: which studies they are of, what they cost, and how they are run, continued, watched and compared."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from tiny import byte_level_tokenizer, make_model, make_task

import iclperm
from iclperm.cli.cells import print_grid_plan
from iclperm.cli.main import main
from iclperm.errors import ConfigError, RunError
from iclperm.grids.costs import CellCost, GridPlan, in_order
from iclperm.grids.grid import Exemption, Grid, builtin_grids, cells
from iclperm.runs.presence import at_work

SIZES = {"sets": 2, "permutations": 3, "shots": [0, 1, 3], "queries": 6}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two models, two tasks, and a grid of them and two kinds, run by one process."""
    folder = tmp_path_factory.mktemp("grid")
    for number, name in enumerate(("one", "two")):
        make_model(folder / name, byte_level_tokenizer(), seed=number)
    make_task(folder)
    task = yaml.safe_load((folder / "colours.yaml").read_text())
    (folder / "hues.yaml").write_text(yaml.safe_dump({**task, "name": "hues", "query": "Hue of {{ text }}:"}))
    (folder / "grid.yaml").write_text(yaml.safe_dump(choices()))
    iclperm.run_grid(Grid.from_file(folder / "grid.yaml"), folder / "alone")
    return folder


def choices(**changes):
    return {
        "models": ["one", "two"],
        "tasks": ["colours.yaml", "hues.yaml"],
        "kinds": ["sensitivity", {"kind": "curve", "shots": 3}],
        "study": SIZES,
    } | changes


def digests(folder):
    grid = iclperm.open_grid(folder)
    return {name: run.digest for name, run in grid.runs()}


def exit_code_of(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


def grid_of(**changes):
    return Grid(**choices(**changes))


class TestCells:
    def test_every_combination_is_one(self):
        found = cells(grid_of(seeds=[0, 7]))
        assert len(found) == 2 * 2 * 2 * 2
        cell = found["two--hues--curve--7"]
        assert (cell.study.model, cell.study.task, cell.study.seed, cell.study.shots) == ("two", "hues.yaml", 7, 3)
        assert found["one--colours--sensitivity--0"].study.shots == [0, 1, 3]

    def test_what_is_nearer_wins(self):
        grid = Grid(
            models=[{"model": "demo", "dtype": "bfloat16", "queries": 2}],
            tasks=[{"task": "mini_news", "queries": 3}, {"name": "again", "task": "mini_news"}],
            kinds=[{"kind": "curve", "permutations": 4}],
            study={"queries": 1, "permutations": 9, "sets": 5},
            exceptions=[{"where": {"task": "again"}, "study": {"queries": 8}}],
        )
        found = cells(grid)
        study = found["demo--mini_news--curve--0"].study
        assert (study.queries, study.permutations, study.sets, study.dtype) == (3, 4, 5, "bfloat16")
        assert found["demo--again--curve--0"].study.queries == 8

    def test_exceptions_skip(self):
        grid = grid_of(exceptions=[{"where": {"model": "one", "kind": ["curve"], "seed": 0}, "skip": True}])
        assert [name for name in cells(grid) if name.startswith("one")] == [
            "one--colours--sensitivity--0",
            "one--hues--sensitivity--0",
        ]
        assert Exemption(where={"seed": [0, 3]}).names("seed") == ["0", "3"]

    def test_a_kind_of_several_tasks_has_one_cell_of_all(self):
        kinds = [{"kind": "transfer", "dev_queries": 4, "shots": 2}]
        assert cells(grid_of(kinds=kinds))["one--colours+hues--transfer--0"].study.tasks == [
            "colours.yaml",
            "hues.yaml",
        ]
        some = [{**kinds[0], "tasks": ["hues.yaml", "third.yaml"]}]
        assert cells(grid_of(kinds=some))["one--hues+third--transfer--0"].study.tasks == ["hues.yaml", "third.yaml"]

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"models": [{"dtype": "float32"}]}, "a grid's models have .*, which names no model; add the key 'model'"),
            ({"study": {"seed": 3}}, "a grid's study have the key 'seed'; that is for 'seeds'"),
            (
                {"tasks": [{"task": "a", "out": "x"}]},
                "a grid's tasks have the key 'out'; that is for 'out', of the grid",
            ),
            ({"study": {"permutation": 3}}, "have the key 'permutation', which no study has; leave it out"),
            ({"models": ["a/one", "b/one"]}, "a grid has two models called one; give one a 'name'"),
            (
                {"models": ["a b", "a-b"]},
                "two cells for the folder a-b--colours--.*; give one of the entries",
            ),
            (
                {"exceptions": [{"where": {"task": "color"}, "skip": True}]},
                "name the task 'color', which it does not",
            ),
            ({"exceptions": [{"where": {"seed": 0}, "skip": True}]}, "a grid has no cells: its exceptions skip all"),
            ({"exceptions": [{"where": {"sed": 0}}]}, "key 'where.sed'"),
            ({"kinds": ["sensitivty"]}, "sensitivty"),
            (
                {"study": {"shots": "some"}},
                "the cell one, colours, sensitivity, seed 0: .* 'shots' is 'some'",
            ),
            ({"seeds": list(range(50_000))}, "a grid has 400,000 cells, and at most 100,000 are run"),
            ({"modles": ["demo"]}, "a grid has no key 'modles'; did you mean 'models'"),
        ],
    )
    def test_what_makes_no_grid_is_told(self, changes, words):
        with pytest.raises(ConfigError, match=words):
            grid_of(**changes)

    def test_tasks_of_one_cell_must_agree(self):
        tasks = [{"task": "a", "scoring": "generate"}, {"task": "b", "scoring": "loglikelihood"}]
        with pytest.raises(ConfigError, match="a grid's task b has scoring 'loglikelihood', another 'generate'"):
            grid_of(tasks=tasks, kinds=["transfer"])

    @pytest.mark.parametrize("name", builtin_grids())
    def test_the_grids_of_the_papers_come_with_the_package(self, name):
        grid = Grid.from_file(name)
        assert len(cells(grid)) == {"order_matters": 14 * (2 * 8 + 1), "monte_carlo": 3 * 2 * 3}[name]

    def test_files_beside_the_grid_are_found_and_links_keep_their_names(self, world, tmp_path):
        (tmp_path / "linked").symlink_to(world / "one")
        (tmp_path / "grid.yaml").write_text(yaml.safe_dump({"models": ["linked"], "tasks": ["mini_news"]}))
        grid = Grid.from_file(tmp_path / "grid.yaml")
        assert [*cells(grid)] == ["linked--mini_news--sensitivity--0"]
        assert cells(grid)["linked--mini_news--sensitivity--0"].study.model == str(tmp_path / "linked")


class TestCosts:
    def test_cells_are_planned_and_what_is_not_here_is_named(self, world):
        grid = Grid.from_file(world / "grid.yaml").model_copy(update={"models": ["nowhere/x", str(world / "one")]})
        told = []
        plan = iclperm.plan_grid(grid, told=told.append)
        assert sorted(told) == sorted(cell.name for cell in plan.cells)
        assert [cell.source for cell in plan.cells] == ["planned"] * 4 + ["unknown"] * 4
        flops = [cell.flops for cell in plan.cells[:4]]
        assert flops == sorted(flops)
        alone = iclperm.plan(cells(grid)[plan.cells[0].name].study)
        assert (plan.cells[0].tokens, plan.cells[0].prompts) == (alone.tokens_unique, alone.num_prompts)
        assert plan.total("tokens") == sum(cell.tokens for cell in plan.cells[:4])
        assert plan.unknown("tokens") == [cell.name for cell in plan.cells[4:]]
        assert plan.hours(1e-9, 8) == pytest.approx(plan.total("flops") / 1e3 / 3600 / 8)

    def test_models_of_the_papers_are_reckoned_by_typical_lengths(self, monkeypatch):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        grid = Grid(models=["Qwen/Qwen2.5-0.5B"], tasks=["ag_news", "gsm8k"], kinds=["sensitivity", "selection"])
        found = {cell.name: cell for cell in iclperm.plan_grid(grid).cells}
        chosen = found["Qwen2.5-0.5B--ag_news--selection--0"]
        assert chosen.problem.endswith("; reckoned without the runs of what it chooses")
        assert chosen.prompts == 1_961 * 512  # the contexts of a curve, on dev and test queries
        scored, written = (found[f"Qwen2.5-0.5B--{task}--sensitivity--0"] for task in ("ag_news", "gsm8k"))
        assert (scored.source, written.source) == ("typical lengths", "typical lengths")
        assert scored.problem
        # As the tables of docs/models.md have them.
        assert (scored.prompts, scored.tokens) == (50_000, 2_945_320)
        assert written.flops == pytest.approx(0.0176e18, rel=0.01)

    def test_the_cheapest_comes_first_but_models_stay_together(self):
        grid = grid_of(kinds=["sensitivity"])
        costs = {"one--colours": 5.0, "one--hues": 1.0, "two--colours": 3.0, "two--hues": 2.0}
        made = [CellCost(f"{name}--sensitivity--0", "planned", flops=flops) for name, flops in costs.items()]
        assert [cost.flops for cost in in_order(cells(grid), made)] == [1.0, 5.0, 2.0, 3.0]


class TestRuns:
    def test_every_cell_is_an_ordinary_run(self, world):
        grid = iclperm.open_grid(world / "alone")
        assert (len(grid.finished), grid.failed, grid.missing) == (8, {}, [])
        name = "two--hues--curve--0"
        alone = iclperm.run(grid.cells[name].study)
        assert grid[name].digest == alone.digest
        assert iclperm.open_run(world / "alone/cells" / name).digest == alone.digest
        assert iclperm.status(world / "alone")[name].is_finished
        assert not any(found.damage for found in iclperm.verify(world / "alone").values())
        assert [name for name, _ in grid.runs("curve")] == [name for name in grid.finished if "curve" in name]
        with pytest.raises(KeyError):
            grid["three"]

    def test_a_model_is_loaded_once(self, world, tmp_path, monkeypatch):
        loaded, load = [], iclperm.Engine.from_pretrained.__func__
        monkeypatch.setattr(
            iclperm.Engine,
            "from_pretrained",
            classmethod(lambda cls, path, **given: loaded.append(Path(path).name) or load(cls, path, **given)),
        )
        iclperm.run_grid(Grid.from_file(world / "grid.yaml"), tmp_path / "run")
        assert sorted(loaded) == ["one", "two"]
        assert digests(tmp_path / "run") == digests(world / "alone")

    def test_a_failed_cell_names_its_reason_and_the_rest_goes_on(self, world, tmp_path):
        grid = Grid.from_file(world / "grid.yaml").model_copy(
            update={"models": [{"name": "two", "model": str(tmp_path / "late")}, str(world / "one")]}
        )
        told = []
        grid = grid.model_copy(update={"kinds": ["sensitivity"]})
        found = iclperm.run_grid(grid, tmp_path / "run", told=lambda name, why: told.append((name, why)))
        assert sorted(found.failed) == ["two--colours--sensitivity--0", "two--hues--sensitivity--0"]
        assert all("there is no model folder" in words for words in found.failed.values())
        assert {name for name, why in told if why} == {*found.failed}
        assert len(found.finished) == 2
        make_model(tmp_path / "late", byte_level_tokenizer(), seed=1)
        told.clear()
        found = iclperm.run_grid(grid, tmp_path / "run", told=lambda name, why: told.append((name, why)))
        assert (found.failed, found.missing, len(told)) == ({}, [], 2)  # what is finished is not run again
        assert json.loads((tmp_path / "run/failures.json").read_text()) == {}

    def test_a_grid_may_grow_and_shrink(self, world, tmp_path):
        small = Grid.from_file(world / "grid.yaml").model_copy(update={"kinds": ["sensitivity"], "seeds": [0]})
        iclperm.run_grid(small, tmp_path / "run")
        told = []
        larger = small.model_copy(update={"seeds": [0, 1]})
        found = iclperm.run_grid(larger, tmp_path / "run", told=lambda name, _: told.append(name))
        assert sorted(told) == [name for name in sorted(found.cells) if name.endswith("1")]
        assert len(iclperm.open_grid(tmp_path / "run").finished) == 8
        assert len(iclperm.run_grid(small, tmp_path / "run").finished) == 4

    def test_another_model_under_a_name_is_no_finished_cell(self, world, tmp_path):
        grid = Grid.from_file(world / "grid.yaml").model_copy(update={"kinds": ["sensitivity"], "tasks": ["mini_news"]})
        grid = grid.model_copy(update={"models": [{"name": "it", "model": str(world / "one")}]})
        iclperm.run_grid(grid, tmp_path / "run")
        other = grid.model_copy(update={"models": [{"name": "it", "model": str(world / "two")}]})
        (words,) = iclperm.run_grid(other, tmp_path / "run").failed.values()
        assert "holds another study" in words or "another" in words

    @pytest.fixture
    def own(self, tmp_path):
        """A grid of one model and two seeds in a folder of its own, finished; the file that says it."""
        make_model(tmp_path / "one", byte_level_tokenizer(), seed=0)
        make_task(tmp_path)
        small = choices(models=["one"], tasks=["colours.yaml"], kinds=["sensitivity"], seeds=[0, 1])
        (tmp_path / "grid.yaml").write_text(yaml.safe_dump(small))
        assert exit_code_of("grid", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "run"), "--quiet") == 0
        return tmp_path / "grid.yaml"

    def test_another_normalisation_is_that_of_finished_cells_too(self, own, tmp_path):
        changed = choices(models=["one"], tasks=["colours.yaml"], kinds=["sensitivity"], seeds=[0, 1])
        changed["study"] = SIZES | {"normalize": "bytes"}
        own.write_text(yaml.safe_dump(changed))
        there = iclperm.run_grid(Grid.from_file(own), tmp_path / "run")
        assert len(there.finished) == 2
        assert {run.study.normalize for _, run in there.runs()} == {"bytes"}
        assert iclperm.plan_grid(Grid.from_file(own), tmp_path / "run").cells == ()

    @pytest.mark.parametrize("what", ["wording", "test", "train"])
    def test_finished_cells_of_other_data_are_named(self, own, tmp_path, what):
        if what == "wording":
            task = tmp_path / "colours.yaml"
            task.write_text(task.read_text().replace("Thing:", "Item:"))
        else:
            rows = (tmp_path / f"{what}.jsonl").read_text().splitlines()
            (tmp_path / f"{what}.jsonl").write_text("\n".join(rows[::-1]) + "\n")
        there = iclperm.run_grid(Grid.from_file(own), tmp_path / "run")
        assert len(there.failed) == 2
        said = "the wording of the task" if what == "wording" else f"its {what} rows"
        assert all(said in words and "has changed since" in words for words in there.failed.values())
        assert there.finished == ()

    def test_cells_whose_data_are_gone_stay_finished(self, own, tmp_path):
        (tmp_path / "train.jsonl").unlink()
        assert len(iclperm.run_grid(Grid.from_file(own), tmp_path / "run").finished) == 2

    def test_a_damaged_cell_is_named_and_mended_by_the_same_command(self, own, tmp_path, capsys):
        before = digests(tmp_path / "run")
        name = sorted(before)[0]
        part = next((tmp_path / "run/cells" / name / "items").glob("*.parquet"))
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 255
        part.chmod(0o644)
        part.write_bytes(content)
        command = ["grid", str(own), "--out", str(tmp_path / "run")]
        assert exit_code_of(*command) == 1
        assert f"failed: {name}: " in capsys.readouterr().err
        assert [*iclperm.open_grid(tmp_path / "run").failed] == [name]
        assert exit_code_of(*command) == 0
        assert digests(tmp_path / "run") == before

    def test_other_folders_are_left_alone(self, world, tmp_path):
        grid = Grid.from_file(world / "grid.yaml")
        (tmp_path / "full").mkdir()
        (tmp_path / "full/mine").touch()
        with pytest.raises(RunError, match="holds other files; give another folder"):
            iclperm.run_grid(grid, tmp_path / "full")
        cell = world / "alone/cells/one--hues--curve--0"
        with pytest.raises(RunError, match="holds a run; give another folder"):
            iclperm.run_grid(grid, cell)
        with pytest.raises(RunError, match="is not a grid's folder"):
            iclperm.open_grid(cell)
        with pytest.raises(RunError, match="holds a grid of studies; give one of its folders"):
            iclperm.open_run(world / "alone")
        with pytest.raises(ConfigError, match="a grid has no folder"):
            iclperm.run_grid(grid)

    def test_a_damaged_folder_is_mended_by_its_file(self, world, tmp_path):
        grid = Grid.from_file(world / "grid.yaml").model_copy(
            update={"kinds": ["sensitivity"], "models": [str(world / "one")]}
        )
        iclperm.run_grid(grid, tmp_path / "run")
        before = digests(tmp_path / "run")
        (tmp_path / "run/grid.yaml").write_text("models: [")
        (tmp_path / "run/failures.json").write_text("[1")
        with pytest.raises(RunError, match=r"grid.yaml is damaged .*; run the grid from its own file"):
            iclperm.open_grid(tmp_path / "run")
        (tmp_path / "run/FORMAT").write_text("iclperm-")
        iclperm.run_grid(grid, tmp_path / "run")
        assert digests(tmp_path / "run") == before

    def test_a_killed_grid_is_continued(self, world, tmp_path):
        script = (
            "import os, signal, sys, iclperm\n"
            "def told(name, why):\n"
            "    seen.append(name)\n"
            "    len(seen) > 3 and os.kill(os.getpid(), signal.SIGKILL)\n"
            "seen = []\n"
            "iclperm.run_grid(iclperm.Grid.from_file(sys.argv[1]), sys.argv[2], told=told)\n"
        )
        environment = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        done = subprocess.run(
            [sys.executable, "-P", "-c", script, world / "grid.yaml", tmp_path / "run"], check=False, env=environment
        )
        assert done.returncode == -signal.SIGKILL
        assert len(iclperm.open_grid(tmp_path / "run").finished) == 3
        iclperm.run_grid(Grid.from_file(world / "grid.yaml"), tmp_path / "run", mixed=True)
        assert digests(tmp_path / "run") == digests(world / "alone")

    def test_workers_give_the_same(self, world, tmp_path, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        grid = Grid.from_file(world / "grid.yaml").model_copy(update={"tasks": [str(world / "hues.yaml")]})
        iclperm.run_grid(grid, tmp_path / "run", workers=1)
        found, alone = digests(tmp_path / "run"), digests(world / "alone")
        assert found == {name: alone[name] for name in found}
        assert len(found) == 4


def said(capsys, *arguments, code=0):
    """What a command prints: on standard output, and beside it."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert end.value.code == code, err
    return out, err


class TestCommands:
    def test_a_grid_is_planned_and_watched(self, world, tmp_path, capsys):
        run = tmp_path / "run"
        planned, _ = said(capsys, "grid", world / "grid.yaml", "--plan", "--out", run)
        assert "one--hues--sensitivity--0" in planned
        assert "on one H100" in planned
        assert not run.exists()
        assert "8 cells: 8 finished" in said(capsys, "status", world / "alone")[0]

    def test_run_status_report(self, world, tmp_path, capsys):
        run = tmp_path / "run"
        out, err = said(capsys, "grid", world / "grid.yaml", "--out", run)
        assert "8 cells: 8 finished" in out
        assert "cell 8 of 8" in err
        assert (run / "compare/curve/compare.html").is_file()
        assert "8 finished" in said(capsys, "status", run)[0]
        assert "compare.html" in said(capsys, "report", run)[0]
        told = json.loads(said(capsys, "report", run, "--json")[0])
        assert len(told["finished"]) == 8
        assert [*told["compared"]] == ["sensitivity", "curve"]
        (run / "cells/one--hues--curve--0/FORMAT").unlink()
        assert "7 finished, 1 missing" in said(capsys, "status", run, code=3)[0]

    def test_entries_of_one_model_go_by_their_names(self, world, tmp_path, capsys):
        grid = yaml.safe_load((world / "grid.yaml").read_text()) | {
            "models": ["one", {"name": "by means", "model": "one", "normalize": "mean"}],
            "tasks": ["hues.yaml"],
            "kinds": ["sensitivity"],
        }
        (world / "named.yaml").write_text(yaml.safe_dump(grid))
        said(capsys, "grid", world / "named.yaml", "--out", tmp_path / "run")
        table = (tmp_path / "run/compare/sensitivity/sensitivity.csv").read_text()
        assert [line.split(",")[0] for line in table.splitlines()[1:3]] == ["one", "by means"]

    def test_what_is_at_work_says_so(self, world, tmp_path, capsys):
        with at_work(world / "alone/cells/one--hues--curve--0") as is_seen:
            assert is_seen
            assert iclperm.open_grid(world / "alone").at_work == []  # its answers are all there
        shutil.copytree(world / "alone", tmp_path / "run")
        cell = tmp_path / "run/cells/one--hues--curve--0"
        next((cell / "items").iterdir()).unlink()
        with at_work(cell):
            assert iclperm.open_grid(tmp_path / "run").at_work == ["one--hues--curve--0"]
            assert "at work: one--hues--curve--0" in said(capsys, "status", tmp_path / "run", code=3)[0]

    def test_a_long_plan_shows_its_dearest_cells(self, capsys):
        costs = [CellCost(f"cell {place}", "planned", 1, 1, 3.6e18 * place, 1.0) for place in range(1, 101)]
        print_grid_plan(Console(width=200), GridPlan(tuple(costs), ()), 1000)
        out = capsys.readouterr().out
        assert "and 40 more, none as dear as these:" in out
        assert "cell 81 " in out
        assert "cell 80 " not in out
        assert next(line for line in out.splitlines() if "cell 100 " in line).split()[-2:] == ["100.0", "h"]

    @pytest.mark.parametrize(
        ("arguments", "code", "words"),
        [
            (["grid", "nowhere.yaml"], 2, "error: nowhere.yaml: cannot be read: No such file"),
            (["grid", "order_matters"], 2, "error: there is no folder for the grid; name one with --out"),
            (["report", "GRID", "--kind", "curve"], 2, "is a grid, whose report has no options"),
            (["export", "GRID", "--out", "x.csv"], 1, "holds a grid of studies; give one of its folders"),
            (["prompt", "GRID"], 1, "holds a grid of studies; give one of its folders"),
        ],
    )
    def test_what_cannot_be_is_told_in_a_line(self, world, capsys, arguments, code, words):
        _, err = said(capsys, *(world / "alone" if each == "GRID" else each for each in arguments), code=code)
        assert words in err
        assert err.count("\n") == 1
