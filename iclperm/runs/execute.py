"""From a study to its results: one loop over the missing parts of a plan, resumable whenever it stops."""

from __future__ import annotations

import platform
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from iclperm import compound, results
from iclperm import work as works
from iclperm.answering import Answerer, answerer
from iclperm.compound import StudyRuns
from iclperm.errors import RunError
from iclperm.results import Run, RunReport, finish, finished
from iclperm.scores import Layout, Scores, reading_of, tables
from iclperm.store import DamagedItem, RunFolder, RunStopped, recorded_extents
from iclperm.study import COMPOUND, Study
from iclperm.tasks import builtin_tasks
from iclperm.work import Setting, StudyPlan, Work, lay_out, open_reader, sample_answer, sample_prompt, sample_tokens

__all__ = [
    "Progress",
    "Run",
    "RunReport",
    "StudyPlan",
    "StudyRuns",
    "open_run",
    "plan",
    "run",
    "sample_answer",
    "sample_prompt",
    "sample_tokens",
]

Progress = Callable[[int, int], None]
"""Told the number of finished parts and of all parts, at the start and after each."""

_SECONDS_BETWEEN_LOOKS = 0.2
_REMEDIES = {
    "threads": "set OMP_NUM_THREADS={there}",
    "dtype": "set dtype to {there}",
    "device": "choose that device",
    "torch": "install torch=={there}",
    "transformers": "install transformers=={there}",
    "memory_budget": "set memory_budget to {there} (null for none)",
}


def run(
    study: Study,
    out: str | Path | None = None,
    *,
    extend: bool = False,
    mixed: bool = False,
    progress: Progress | None = None,
) -> Run | StudyRuns:
    """Runs a study, or what is missing of it in the run folder ``out``; without a folder results are kept in memory.

    ``out`` is the study's own unless given. ``extend`` lets a run grow in sets, permutations and queries; what is there
    stays. ``mixed`` accepts parts whose last bits may differ, from another machine or version. Several processes may
    run one study into one folder. Raises `ConfigError`, `DataError`, `TokenizationError` or `ModelError` for what does
    not fit, `RunError` for a folder of another run, `RunStopped` where the folder cannot be written or memory does not
    suffice. Cost: the plan's distinct tokens, each once.
    """
    if study.kind in COMPOUND:
        parts = Path(out or study.out or "") if out or study.out else None
        return compound.run_all(study, parts, lambda part, at: _run_one(part, at, extend, mixed, progress))
    return _run_one(study, out, extend, mixed, progress)


def plan(study: Study) -> StudyPlan | dict[str, StudyPlan]:
    """What ``study`` will compute: needs data, tokenizer and the model's configuration, no weights.

    Of a study of several runs the plan of each, by name. Raises the errors of `run` that can be known beforehand.
    O(tokens of demonstrations and queries), and a second for the estimate of the time, which there is none of for a
    device that this machine lacks.
    """
    return compound.plans(study, works.plan) if study.kind in COMPOUND else works.plan(study)


def open_run(
    path: str | Path, *, normalize: str | None = None, criterion: str | None = None, unparsed: str | None = None
) -> Run | StudyRuns:
    """A finished run, or the runs of a compound study, from its folder alone: see `iclperm.results.open_run`."""
    if compound.is_compound(path):
        return compound.open_all(Path(path), normalize=normalize, criterion=criterion, unparsed=unparsed)
    return results.open_run(path, normalize=normalize, criterion=criterion, unparsed=unparsed)


def _run_one(study: Study, out: str | Path | None, extend: bool, mixed: bool, progress: Progress | None) -> Run:
    """See `run`."""
    started = time.perf_counter()
    setting = Setting.of(study)
    study = setting.study
    path = None if (out or study.out) is None else Path(out or study.out or "")
    if path is not None and (whole := finished(path, setting)) is not None:
        return whole
    work = lay_out(setting, _grown_from(path, setting, extend))
    by_stage = [tables(work, number) for number in range(len(work.stages))]
    model = answerer(work, path)
    if path is not None:
        _refuse_bad_growth(path, work, by_stage, model, mixed)
    folder = None if path is None else RunFolder.create(path, work.identities(), _canonical_study(setting), by_stage)
    layout = Layout.of_tables(by_stage[-1]["demonstrations"], by_stage[-1]["queries"], work.identities())
    plan = work.identities()[0]
    scores = Scores(layout, layout.scale(plan, study), folder, **reading_of(plan, study))
    quarantined = 0 if folder is None else _recover(folder, scores)
    missing = [part for part in range(len(work.parts)) if part not in scores.parts]
    forwarded = _compute(work, missing, scores, folder, model, mixed, progress) if missing else 0
    scores.refuse_gaps()
    counts = {
        **layout.counts,
        "num_parts": len(work.parts),
        "num_parts_resumed": len(work.parts) - len(missing),
        "num_quarantined": quarantined,
    }
    return finish(plan, study, scores, counts, folder, started, forwarded, model.replies)


def _grown_from(path: Path | None, setting: Setting, extend: bool) -> list[dict[str, int]]:
    """The extents that a run had before the one that is asked for; raises `RunError` where it would not be a growth."""
    there = [] if path is None else recorded_extents(path, setting.identity)
    last, here = (there or [{}])[-1], setting.study.extent
    if not there or last == here:
        return there[:-1]
    changes = "; ".join(
        f"{key} is {last[key]} there and {size} here" for key, size in here.items() if size != last[key]
    )
    if any(size < last[key] for key, size in here.items()):
        raise RunError(f"{path} holds a larger run: {changes}; ask for at least that, or give another folder")
    if not extend:
        raise RunError(f"{path} holds a smaller run: {changes}; add --extend to let it grow, or give another folder")
    return there


def _admit(model: Answerer, work: Work, folder: RunFolder, mixed: bool) -> None:
    """Raises `RunStopped` where the disk is too small, `RunError` for other numerics than those in the folder."""
    _refuse_small_disk(work, folder)
    numerics = model.numerics
    if not mixed:
        _refuse_other_numerics(folder, numerics)


def _refuse_bad_growth(
    path: Path, work: Work, by_stage: Sequence[Mapping[str, pa.Table]], model: Answerer, mixed: bool
) -> None:
    """Raises what forbids a run to grow before its folder says that it is larger: it would no longer be finished."""
    try:
        folder = RunFolder.open(path)
    except RunError:
        return  # there is none yet, or it is to be mended first
    num_stages = len(folder.plans)
    if not any(stage.num_cells for stage in work.stages[num_stages:]):
        return
    with suppress(DamagedItem):  # what is to be mended cannot be asked
        states = folder.table("queries")["state"], by_stage[num_stages - 1]["queries"]["state"]
        if num_overlong := np.sum(np.not_equal(*(state.to_numpy() for state in states))):
            raise RunError(
                f"{path} cannot grow: with the new demonstrations {num_overlong} of its queries no longer fit the "
                "context window and would be dropped from what is there; give another folder"
            )
        _admit(model, work, folder, mixed)


def _recover(folder: RunFolder, scores: Scores) -> int:
    """Reads back what is done; damaged files are set aside, the number of those with results is returned."""
    for record in folder.unreadable_sessions():
        folder.set_aside(record)
    quarantined = 0
    for part, file in folder.parts().items():
        try:
            scores.fill(part, folder.read(file))
        except DamagedItem:
            folder.set_aside(file)
            quarantined += 1
    return quarantined


def _compute(
    work: Work,
    missing: Sequence[int],
    scores: Scores,
    folder: RunFolder | None,
    model: Answerer,
    mixed: bool,
    progress: Progress | None,
) -> int:
    """Has the missing parts answered, one file each, as far as no other process does; returns the tokens that took."""
    if folder is not None:
        _admit(model, work, folder, mixed)
    numerics, before = model.numerics, model.tokens
    session = _Session(folder, _environment(model), lambda: model.replies)
    tell = progress or (lambda _done, _total: None)
    num_parts = len(work.parts)
    session.write(tokens=0)
    try:
        tell(len(scores.parts), num_parts)
        with open_reader(work.setting) as checker:
            while missing:
                with closing(model.tables(missing, partial(_claimed, folder=folder), checker)) as answered:
                    for part, table in answered:
                        session.num_parts += 1
                        session.write(tokens=model.tokens - before)
                        committed = table if folder is None else folder.write(part, table, numerics)
                        scores.fill(part, committed)
                        tell(len(scores.parts), num_parts)
                missing = [part for part in missing if part not in scores.parts]
                if folder is not None and missing:
                    _read_others(folder, missing, scores)
                    tell(len(scores.parts), num_parts)
                    missing = [part for part in missing if part not in scores.parts]
    finally:
        session.write(tokens=model.tokens - before, closed=True)
        model.close()
    return model.tokens - before


def _read_others(folder: RunFolder, missing: Sequence[int], scores: Scores) -> None:
    """Reads what other processes finished meanwhile; where that is nothing, waits a moment for them."""
    there = folder.parts()
    if not any(part in there for part in missing):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    for part in missing:
        if part in there:
            scores.fill(part, folder.read(there[part]))


class _Session:
    """The record of one session, written before each part is: a killed session leaves what it cost until then.

    ``num_parts`` counts the parts that it wrote or was about to write.
    """

    def __init__(
        self, folder: RunFolder | None, environment: Mapping[str, Any], replies: Callable[[], dict[str, int]]
    ) -> None:
        self.num_parts = 0
        self._started = time.time()
        self._name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"
        self._folder = folder
        self._environment = environment
        self._replies = replies

    def write(self, *, tokens: int, closed: bool = False) -> None:
        if self._folder is not None:
            seconds = round(time.time() - self._started, 3)
            counts = {"tokens_forwarded": tokens, "parts": self.num_parts, "seconds": seconds, "closed": closed}
            about = {**self._environment, **({"replies": told} if (told := self._replies()) else {})}
            # What it cost is told to the last part after a kill; after a power loss the count may be incomplete.
            self._folder.write_session(self._name, {**about, **counts}, durable=closed)


def _claimed(parts: Sequence[int], folder: RunFolder | None) -> Iterator[int]:
    """Parts that nobody else works at or has finished; each is given back when the next is asked for."""
    for part in parts:
        if folder is None:
            yield part
        elif folder.claim(part):
            try:
                if not folder.has(part):
                    yield part
            finally:
                folder.release(part)


def _refuse_small_disk(work: Work, folder: RunFolder) -> None:
    """Raises `RunStopped` where the files that are to come would not fit."""
    needed = work.disk_bytes - sum(file.stat().st_size for file in folder.parts().values())
    free = shutil.disk_usage(folder.path).free
    if needed > free:
        raise RunStopped(
            f"{folder.path} needs about {needed / 1e6:.0f} MB more, but its disk has {free / 1e6:.0f} MB free; make "
            "room, then run the same command to continue, or give another folder"
        )


def _environment(model: Answerer) -> dict[str, Any]:
    """Versions and what decides about the last bits of a result; never a setting that could hold a secret."""
    versions = {name: _version(name) for name in model.libraries}
    return {
        "numerics": model.numerics,
        "versions": {**versions, "python": platform.python_version()},
        "platform": platform.platform(),
    }


def _refuse_other_numerics(folder: RunFolder, numerics: Mapping[str, Any]) -> None:
    """A folder's parts come from equal numerics; each part says itself from which."""
    for recorded in folder.numerics():
        for key, here in numerics.items():
            there = recorded.get(key)
            if there != here:
                remedy = _REMEDIES.get(key, "continue where it began").format(there=there)
                raise RunError(
                    f"{folder.path} was computed with {key} {there}, here it is {here}, and results could differ in "
                    f"the last bits; {remedy}, accept that with --mixed, or give another folder"
                )


def _canonical_study(setting: Setting) -> Study:
    """The study with its number of shots, and with paths that hold from any working directory."""
    study = setting.study
    named = {"demo", *builtin_tasks()}
    given = {key: getattr(study, key) for key in ("task", "data", "model", "out")}
    paths = {key: value for key, value in given.items() if value is not None and value not in named}
    absolute = {key: str(Path(value).resolve()) for key, value in paths.items() if key == "out" or Path(value).exists()}
    return study.model_copy(update={**absolute, "shots": list(setting.design.shots)})


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
