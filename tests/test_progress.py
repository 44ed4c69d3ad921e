"""What a run tells while it computes: model, stage, tokens and parts, also inside one long part, and the time left."""

import io
import math
import os
import re

import pytest
from rich.console import Console
from rich.progress import Progress

import iclperm
from iclperm import Study
from iclperm.cli import commands
from iclperm.cli import main as cli
from iclperm.progress import Advance, ProgressBar, ProgressLines, Watcher, columns, words
from iclperm.runs.limits import WorkLimits
from iclperm.runs.progress import ANSWERING, FINISHING, LOADING, READING, TOKENISING

STUDY = Study(sets=6, permutations=4, shots=[2, 8], queries=60)


class Kept:
    """Keeps all that it is told."""

    interval = 0.005

    def __init__(self):
        self.told = []

    def show(self, advance):
        self.told.append(advance)


def test_a_watcher_is_told_every_stage_and_tokens_inside_one_part():
    watcher = Kept()
    assert isinstance(watcher, Watcher)
    run = iclperm.run(STUDY, progress=watcher)
    assert run.report.num_parts == 1
    stages = list(dict.fromkeys(told.stage for told in watcher.told))
    assert stages == [READING, TOKENISING, LOADING, ANSWERING, FINISHING]
    assert {(told.model, told.task) for told in watcher.told} == {("demo", "mini_news")}
    assert sum(told.stage == LOADING for told in watcher.told) > 2  # by the thread, while nothing else happens
    answering = [told for told in watcher.told if told.stage == ANSWERING]
    assert {told.tokens_wanted for told in answering} == {run.report.tokens_unique}
    inside = [told for told in answering if told.num_parts_done == 0 and 0 < told.tokens < run.report.tokens_unique]
    assert inside
    assert all(0 < told.share < 1 and told.seconds_left > 0 for told in inside)
    assert answering[-1].tokens == run.report.tokens_forwarded
    assert (answering[-1].share, answering[-1].seconds_left) == (1.0, 0.0)


def test_a_session_counts_its_own_work(tmp_path):
    limits = WorkLimits(unit_tokens=(1, 1))
    study = Study(sets=2, permutations=2, shots=2, queries=8)

    def stop(done, total):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        iclperm.run(study, tmp_path / "run", progress=stop, limits=limits)
    watcher = Kept()
    run = iclperm.run(study, tmp_path / "run", progress=watcher, limits=limits)
    first = next(told for told in watcher.told if told.stage == ANSWERING)
    parts = run.report.num_parts
    assert (first.num_parts_before, first.num_parts_done, first.num_parts) == (1, 1, parts)
    assert (first.share, first.seconds_left, first.tokens) == (0.0, None, 0)
    assert first.tokens_wanted == round(run.report.tokens_unique * (parts - 1) / parts)


def test_what_a_watcher_raises_in_the_thread_ends_the_run():
    class Broken(Kept):
        def show(self, advance):
            super().show(advance)
            if len(self.told) == 4:
                raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        iclperm.run(STUDY, progress=Broken())


ADVANCE = Advance("a\nmodel\x1b[2J", "task", ANSWERING, 30.0, 1, 4, 1_500, 6_000, 0)


def test_the_share_is_of_parts_or_tokens_whichever_says_more():
    assert ADVANCE.share == 0.25
    assert ADVANCE.seconds_left == 90.0
    assert Advance("m", "t", ANSWERING, 10.0, 3, 4, 0, None, 2).share == 0.5
    assert Advance("m", "t", ANSWERING, 10.0, 0, 4, 9_000, 6_000).share == 0.999  # more than was foretold is no end
    assert Advance("m", "t", LOADING, 10.0).seconds_left is None


def test_an_advance_is_one_line_that_steers_no_terminal():
    line = words(ADVANCE)
    assert line == "a\\nmodel\\x1b[2J on task: scoring, 1,500 of about 6,000 tokens, 1 of 4 parts, about 90 s left"
    assert words(Advance("m", "t", LOADING, 130.0)) == "m on t: loading the model, for 2 min"


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 5), (math.inf, 2)])
def test_lines_tell_the_beginning_and_the_end_and_what_takes_long(seconds, expected):
    file = io.StringIO()
    lines = ProgressLines(file, seconds)
    assert lines.interval + ProgressLines(file)._seconds <= 60
    for stage, done in ((TOKENISING, 0), (LOADING, 0), (ANSWERING, 0), (ANSWERING, 1), (ANSWERING, 2)):
        lines.show(Advance("m", "t", stage, 1.0, done, 2))
    assert len(file.getvalue().splitlines()) == expected


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_bar_says_the_same_on_a_terminal(width):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width)
    with Progress(*columns(), console=console) as bar:
        shown = ProgressBar(bar)
        assert shown.interval <= 10
        shown.show(ADVANCE)
        assert bar.tasks[0].percentage == 25
    assert set(words(ADVANCE).split()) <= set(re.sub(r"\x1b\[[\d;?]*\w", " ", file.getvalue()).split())


def test_progress_is_shown_in_python_where_it_is_asked_for(capsys):
    iclperm.run(Study(sets=2, permutations=2, shots=2, queries=8), progress=True)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("demo on mini_news: scoring, 0 of about ")
    assert last.endswith(" tokens, 1 of 1 parts")
    iclperm.run(Study(sets=2, permutations=2, shots=2, queries=8), progress=False)
    assert capsys.readouterr().err == ""


def files(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*") if path.is_file()}


def test_status_is_watched_until_the_run_is_finished(tmp_path, capsys, monkeypatch):
    study, folder = Study(sets=2, permutations=2, shots=2, queries=8), tmp_path / "run"
    limits = WorkLimits(unit_tokens=(1, 1))

    def stop(done, total):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        iclperm.run(study, folder, progress=stop, limits=limits)
    before, looks = files(folder), []

    def slept(seconds):
        assert files(folder) == before  # it only reads
        looks.append(seconds)
        if len(looks) == 2:
            iclperm.run(study, folder, limits=limits)

    monkeypatch.setattr(commands.time, "sleep", slept)
    assert commands.watch(folder, seconds=1.5) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("demo on mini_news: 1 of ")
    assert "left" in first
    assert last.startswith(f"demo on mini_news: {iclperm.status(folder).num_parts:,} of ")
    assert looks == [1.5, 1.5]
    for item in (folder / "items").iterdir():
        os.remove(item)

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.time, "sleep", interrupted)
    with pytest.raises(SystemExit) as done:
        cli.main(["status", str(folder), "--watch"])
    assert done.value.code == 0
    assert capsys.readouterr().out.startswith("demo on mini_news: 0 of ")
