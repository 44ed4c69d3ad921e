"""Everything that is said of finished runs, in the order in which it is said; a terminal and a page show the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from iclperm.report.parts import Findings, Plot, Table
from iclperm.report.wording import sort_of
from iclperm.runs.run import RunReport, near_notes
from iclperm.studies.report import Run
from iclperm.studies.several import StudyRuns
from iclperm.study.endpoint import EndpointChoices, Spent
from iclperm.study.study import Study


@dataclass(frozen=True)
class Told:
    """What finished runs say, ready to be shown."""

    alerts: list[str]
    """What comes before anything else: where many answers are missing."""
    head: list[str]
    """What was run, a line for each run."""
    tables: list[Table]
    paid: str | None
    """What an API was paid for."""
    conclusion: list[str]
    notes: list[str]
    """What should be known before the numbers are believed."""
    plots: dict[str, Plot]


def told(run: Run | StudyRuns, kind: str | None = None, *, full: bool = True) -> Told:
    """What a run or a study of several says; ``kind`` as `Run.findings` takes it, ``full`` as `Findings.tables`."""
    findings = run.findings(kind)
    asides = [(whose, stem, about) for whose, stem, about in _asides(run) if sort_of(about) is not sort_of(findings)]
    beside = [table._replace(title=whose + table.title) for whose, _, about in asides for table in about.tables(full)]
    others = [whose + line for whose, _, about in asides for line in about.conclusion()]
    endpoint = run.study.endpoint
    plots = {f"{stem}{end}": plot for _, end, about in asides for stem, plot in about.plots().items()}
    return Told(
        alerts=[whose + line for whose, one in by_name(run) if (line := one.missing.first_line())],
        head=[whose + one.headline for whose, one in by_name(run)],
        tables=[*findings.tables(full), *beside],
        paid=None if endpoint is None else _paid(run.report, endpoint),
        conclusion=[*findings.conclusion(), *others],
        notes=[*findings.warnings, *run.warnings, *_foreign_tasks(run), *_run_notes(run.report)],
        plots={**findings.plots(), **plots} if full else {},
    )


def by_name(run: Run | StudyRuns) -> list[tuple[str, Run]]:
    """The runs, each with what a line about it begins with: nothing for one run, its name for one of several."""
    return [("", run)] if isinstance(run, Run) else [(f"{name}: ", one) for name, one in run.runs.items()]


def _asides(run: Run | StudyRuns) -> Iterator[tuple[str, str, Findings]]:
    """What is reported beside the findings: how its lines begin, how the stems of its figures end, and itself."""
    found = {"": run.asides} if isinstance(run, Run) else run.asides
    for name, asides in found.items():
        for about in asides.values():
            yield f"{name}: " if name else "", f"-{name}" if name else "", about


def _foreign_tasks(run: Run | StudyRuns) -> list[str]:
    runs = [run] if isinstance(run, Run) else run.runs.values()
    return list(dict.fromkeys(note for one in runs for note in foreign_task(one.study, one.task)))


def foreign_task(study: Study, task: str) -> list[str]:
    """A note where the bundled model, which has learnt its own task alone, is run on another."""
    if study.endpoint is not None or study.model != "demo" or task == "mini_news":
        return []
    return [f"the bundled model only knows its own headlines (mini_news); what it answers on {task} says little"]


def growth_note(report: RunReport) -> list[str]:
    """That these are the results before a growth that is not finished, where that is so."""
    told = "the run is growing, which is not finished: these are its results before; run the larger study to continue"
    return [told] if report.is_growing else []


def _run_notes(report: RunReport) -> list[str]:
    counts = (report.num_duplicates, report.num_conflicting, report.num_excluded, report.num_oversampled)
    notes = data_notes(*counts, report.num_near, report.num_near_dev)
    notes += growth_note(report)
    if report.num_numerics > 1:
        notes.append(
            f"parts come from {report.num_numerics} machines or versions whose last bits may differ (--mixed); "
            "environment/ names them"
        )
    return notes


def data_notes(
    duplicates: int, conflicting: int, excluded: int, oversampled: int, near: int, near_dev: int
) -> list[str]:
    """What of the data was left out because it repeats other data, what nearly does, and what counts several times."""
    notes = near_notes(near, near_dev)
    if duplicates:
        others = f", {conflicting:,} of them under another label" if conflicting else ""
        notes.append(f"{duplicates:,} rows of the data repeat another row and were left out{others}")
    if excluded:
        notes.append(f"{excluded:,} query rows repeat a training row (or a test row) and were left out")
    if oversampled:
        notes.append(
            f"{oversampled:,} of the queries asked for repeat another, because a class is short: the repeated ones "
            "count several times in accuracies, once in intervals"
        )
    return notes


def _paid(report: RunReport, endpoint: EndpointChoices) -> str:
    """What an API was paid for, by all sessions."""
    spent = Spent(report.num_requests, report.num_prompt_tokens, report.num_cached_tokens, report.num_reply_tokens)
    cost = "" if endpoint.prices is None else f", {endpoint.prices.cost(spent):,.4g} in all"
    return f"paid for: {bill_words(spent, report.num_lost_requests, report.num_lost_tokens, cost)}"


def bill_words(spent: Spent, num_lost: int, num_lost_tokens: int, cost: str = "") -> str:
    """What an API was paid for; what brought no reply is booked at its upper bound."""
    lost = f"; without a reply {num_lost:,} of them, with at most {num_lost_tokens:,} tokens" if num_lost else ""
    return (
        f"{spent.requests:,} requests, {spent.prompt_tokens:,} prompt tokens ({spent.cached_tokens:,} in the "
        f"provider's cache), {spent.completion_tokens:,} tokens of replies{cost}{lost}"
    )
