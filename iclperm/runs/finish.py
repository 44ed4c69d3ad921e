"""A finished run put together: from its folder alone, or from what was just computed."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from iclperm.endpoint.ledger import paid
from iclperm.errors import ConfigError, IclpermError, RunError
from iclperm.prompts.design import CONTENT_FREE
from iclperm.runs.checks import refuse_normalized_lists
from iclperm.runs.folder import RunFolder
from iclperm.runs.limits import DEFAULT, WorkLimits
from iclperm.runs.read import ContextAnswers, Layout, reading_of
from iclperm.runs.run import REPLIES, FinishedRun, RunReport, as_counts
from iclperm.runs.setting import ResolvedStudy
from iclperm.study.metrics import Metric
from iclperm.study.study import Study


def open_one(
    path: str | Path,
    *,
    normalize: str | None = None,
    criterion: str | None = None,
    unparsed: str | None = None,
    extent: Mapping[str, int] | None = None,
    limits: WorkLimits = DEFAULT,
    may_wait: bool = False,
) -> FinishedRun:
    """A finished run from its folder alone; needs neither model nor data.

    ``normalize``, ``criterion`` and ``unparsed`` replace the study's. ``extent`` is one that the run has had, by
    default the last that is finished: a run that is still growing is read as it was before (`RunReport.is_growing`).

    Raises `RunError` for a folder that is no run, is not finished or is damaged, naming the file. Reads every file
    once; states and predictions are kept in memory, a byte or two a distinct prompt, and log-likelihoods stay in the
    folder and are read where they are used. With ``may_wait`` the answers of a run that has more than
    ``limits.cells_at_opening`` are read where they are first used, and damage to their files is raised there.
    """
    started = time.perf_counter()
    whole = RunFolder.open(path)
    folder = whole.at_finished_extent() if extent is None else whole.at_extent(extent)
    if folder is None:
        raise RunError(f"{path} never had the extent {dict(extent or {})}; run the study into it again")
    files = folder.parts.finished()
    if len(files) < folder.num_parts:
        raise RunError(
            f"{path} is not finished ({len(files)} of {folder.num_parts} parts); run the same study into it to "
            f"continue (iclperm run {shlex.quote(str(path))})"
        )
    if folder.is_open:
        raise RunError(
            f"{path} is not finished (wave {len(folder.plans)} is answered, the next not yet asked); run the same "
            f"study into it to continue (iclperm run {shlex.quote(str(path))})"
        )
    given = {"normalize": normalize, "criterion": criterion, "unparsed": unparsed}
    for key, value in given.items() if folder.has_unasked else ():
        if value not in (None, decided_by := folder.plan["study"].get(key, value)):
            raise ConfigError(
                f"{key} is {value!r}, but what this run asked was decided by {decided_by!r}; run the study so into "
                "another folder"
            )
    layout = Layout.of_folder(folder)
    changes = folder.extents[-1] | {key: value for key, value in given.items() if value is not None}
    study = Study(**{**whole.study().model_dump(), **changes})
    if folder.plan["study"]["scoring"] == "generate" and study.normalize != "sum":
        raise ConfigError(f"normalize is {study.normalize!r}, but generated answers have no label scores; leave it out")
    scale = layout.scale(folder.plan, study)
    is_growing = len(whole.plans) > len(folder.plans)

    def read() -> FinishedRun:
        reading = reading_of(folder.plan, study)
        scores = ContextAnswers(layout, scale, folder.parts, limits=limits, **reading)
        for part, table in zip(files, folder.parts.read_each(files.values(), scores.columns), strict=True):
            scores.fill(part, table)
        if folder.has_unasked:
            scores.give_up_unasked()
        scores.refuse_gaps()
        counts = {**layout.counts, "num_parts": len(files), "num_parts_resumed": len(files), "num_quarantined": 0}
        return finish(folder.plan, study, scores, counts, folder, started, is_growing=is_growing, limits=limits)

    if not may_wait or folder.num_cells <= limits.cells_at_opening:
        return read()
    return FinishedRun.later(read, **_known(folder.plan, study, folder.path, limits))


def _known(plan: Mapping[str, Any], study: Study, folder: Path | None, limits: WorkLimits) -> dict[str, Any]:
    """The fields of a `FinishedRun` that are known without its answers."""
    return {
        "study": study,
        "task": plan["task"],
        "labels": tuple(plan["labels"]),
        "has_row_choices": bool(plan.get("row_choices")),
        "metric": Metric.of_plan(plan),
        "shots": tuple(plan["study"]["shots"]),
        "label_tokens": tuple(plan["label_lengths"]["mean"]),
        "folder": folder,
        "limits": limits,
    }


def finish(
    plan: Mapping[str, Any],
    study: Study,
    scores: ContextAnswers,
    counts: Mapping[str, int],
    folder: RunFolder | None,
    started: float,
    forwarded: int = 0,
    replies: Mapping[str, int] | None = None,
    is_growing: bool = False,
    limits: WorkLimits = DEFAULT,
    decisions: tuple[Mapping[str, Any], ...] = (),
) -> FinishedRun:
    """The run of a ``plan`` whose answers are all in ``scores``.

    ``counts`` are fields of `RunReport`, ``started`` is when this call began by `time.perf_counter`. ``forwarded``
    tokens and counts of an API's ``replies`` are those of this process; with a folder they are read from the records of
    all sessions instead.
    """
    items, is_complete = scores.items(), True
    if folder is not None:
        decisions = tuple(folder.decisions)
    numerics: tuple[Mapping[str, Any], ...] = ()
    if folder is not None:
        forwarded, is_complete = forwarded_tokens(folder)
        numerics = tuple(folder.parts.numerics())
        replies = _replies(folder)
        counts = {**counts, **_near(folder)}
    replies = {name: (replies or {}).get(name, 0) for name in REPLIES}
    if replies["num_listed"]:
        refuse_normalized_lists(study)
    if replies["num_bounds"]:
        items = {name: replace(found, has_bounds=True) for name, found in items.items()}
    report = RunReport(
        **counts,
        tokens_forwarded=forwarded,
        num_numerics=1 if folder is None else len(numerics),
        is_token_count_complete=is_complete,
        seconds=time.perf_counter() - started,
        is_growing=is_growing,
        **replies,
    )
    return FinishedRun(
        **_known(plan, study, None if folder is None else folder.path, limits),
        splits={name: found for name, found in items.items() if name != CONTENT_FREE},
        report=report,
        content_free=items.get(CONTENT_FREE),
        numerics=numerics,
        decisions=tuple(decision for decision in decisions if "extent" not in decision),
        looks=tuple(decision for decision in decisions if "extent" in decision),
    )


def forwarded_tokens(folder: RunFolder) -> tuple[int, bool]:
    """The tokens that all sessions of a run are known to have forwarded, and whether they cannot have been more."""
    sessions = folder.sessions()
    forwarded = sum(session.get("tokens_forwarded", 0) for session in sessions)
    recorded = sum(session.get("parts", 0) for session in sessions)
    is_complete = all(session.get("closed", False) for session in sessions) and recorded >= len(folder.parts.finished())
    return forwarded, is_complete


def _near(folder: RunFolder) -> dict[str, int]:
    """What the last session that knew of near-duplicates says of them; nothing where none did."""
    recorded = [session["near"] for session in folder.sessions() if session.get("near")]
    return recorded[-1] if recorded else {}


def _replies(folder: RunFolder) -> dict[str, int]:
    """The counts of an API's replies of all sessions together; all sessions meet the same damaged replies. What was
    paid is what the replies themselves say, as a killed session has no record of its last ones."""
    recorded = [session.get("replies", {}) for session in folder.sessions()]
    counts = {name: [int(each.get(name, 0)) for each in recorded] for name in REPLIES}
    found = {
        name: max(each, default=0) if name == "num_damaged_replies" else sum(each) for name, each in counts.items()
    }
    books = paid(folder.path)
    return found | as_counts(books.spent, books.lost) if books.spent.requests else found


def finished(path: Path, setting: ResolvedStudy) -> FinishedRun | None:
    """The run in a folder if it is that of this study and nothing is missing, else None.

    Loads neither tokenizer nor model; what mends a file that answers are read without does, so then it is None, too.
    Where the study differs in how answers are read, its folder's study follows.
    """
    try:
        folder = RunFolder.open(path)
        known = {key: folder.plan.get(key) for key in setting.identity}
        is_grown = setting.study.precision is not None or folder.extents[-1] == setting.study.extent
        if known != setting.identity or not is_grown:
            return None
        run = open_one(path, normalize=setting.study.normalize, unparsed=setting.study.unparsed, limits=setting.limits)
        if run.report.is_growing or folder.has_other_damage() or folder.is_open:
            return None
        folder.record_statistics(setting.study)
        return replace(run, study=setting.study.model_copy(update=folder.extents[-1]))
    except (IclpermError, OSError):
        return None
