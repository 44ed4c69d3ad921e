"""What a study would take: the command ``plan``, and how a plan is told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from rich.console import Console

from iclperm import api
from iclperm.cli import terminal
from iclperm.cli.arguments import study_of
from iclperm.endpoint.bill import Bill
from iclperm.errors import printable
from iclperm.progress import duration
from iclperm.runs.checks import uneven_labels
from iclperm.runs.plan import StudyPlan
from iclperm.stats.racing import RaceRule
from iclperm.stats.verdicts import looks_until
from iclperm.studies.told import data_notes, foreign_task
from iclperm.study.endpoint import Spent
from iclperm.study.sizes import bytes_in_words
from iclperm.study.study import Study

_LEAST_SPEEDUP = 1.3  # times faster


def plan(source: Path | None, flags: Mapping[str, str | None], *, as_json: bool) -> None:
    """Shows the plan of the study that `study_of` finds, or those of its runs."""
    study = study_of(source, flags)
    planned = api.plan(study)
    if isinstance(planned, dict):
        show_plans(planned, study, as_json=as_json)
    elif as_json:
        click.echo(json.dumps(planned.to_dict(), indent=1))
    else:
        print_plan(terminal.stdout(), planned, study)


def show_plans(planned: Mapping[str, StudyPlan], study: Study, *, as_json: bool) -> None:
    """Shows the plans of the runs of a study."""
    if as_json:
        click.echo(json.dumps({name: part.to_dict() for name, part in planned.items()}, indent=1))
    else:
        print_plans(terminal.stdout(), planned, study)


def plan_sizes(
    source: Path | None, flags: Mapping[str, str | None], pilot: Path | None, components: str | None, *, as_json: bool
) -> None:
    """Shows the sizes that a study needs for a precision, that of the flags or its own; without a study the pilot's."""
    study = study_of(source or pilot, {**flags, "precision": None})
    found = api.plan_sizes(study, flags.get("precision"), pilot=pilot, components=components)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=1))
    else:
        terminal.print_tables(terminal.stdout(), [found.table()])


def print_plan(console: Console, planned: StudyPlan, study: Study) -> None:
    """The plan as a table, with what should be known before it runs."""
    rows = {
        "sets x permutations": f"{planned.num_sets} x {planned.num_permutations}",
        "shots": terminal.listed(planned.shots),
        "queries": f"{planned.num_queries:,}",
        **({"content-free queries": f"{planned.num_content_free}"} if planned.num_content_free else {}),
        **_dealt_row(study),
        "distinct contexts": f"{planned.num_contexts:,}",
        "distinct prompts": f"{planned.num_prompts:,}",
        **({"of them without a context": _alone(planned)} if planned.num_alone else {}),
        **(_local_cost(planned) if planned.bill is None else _api_rows(planned.bill)),
        **_about_generation(planned),
        **({"units of work": f"{planned.num_units:,}"} if planned.num_units else {}),
        "files": f"{planned.num_parts:,}",
        "disk space": f"about {planned.disk_bytes / 1e6:.1f} MB",
        **(_local_prompts(planned) if planned.bill is None else {}),
    }
    console.print(terminal.facts_table(f"Plan for {printable(planned.task)}", rows))
    counts = (planned.num_duplicates, planned.num_conflicting, planned.num_excluded)
    near = (planned.num_near, planned.num_near_dev)
    oversampled = planned.num_asked - planned.num_queries
    uneven = uneven_labels(planned.label_tokens, study.normalize)
    notes = [*planned.notes, *foreign_task(study, planned.task), *uneven, *data_notes(*counts, oversampled, *near)]
    if planned.budget != "exhaustive":
        part = f"with budget {planned.budget!r} it asks a part of this; how much follows from the answers"
        if planned.budget == "adaptive":
            error = 100 * RaceRule().error
            part += (
                f". By the {study.rule} rule it ends within {study.tolerance:g} of the best, but for {error:g} % of "
                "the races; where it can leave nothing out it asks all, and has the demonstrations anew in every wave"
            )
        notes.insert(0, part)
    if study.wanted is not None:
        how = (
            f"it stops where it knows {study.precision}. Sizes for that come from --pilot RUN, or --components "
            "order=.05,selection=.03,accuracy=.7"
        )
        if study.wanted.is_of_verdicts:
            first = looks_until(study.queries)[0]
            how = (
                f"all are asked the first {first:,} queries, and then each trajectory until it is shown to be flat or "
                "to change"
            )
        notes.insert(0, f"these sizes are the most that a run asks; {how}")
    if planned.crossed_tokens is not None:
        notes.insert(
            0,
            f"every ordering on all queries would have {planned.crossed_tokens:,} distinct tokens: this is "
            f"{planned.tokens_unique / planned.crossed_tokens:.0%} of them",
        )
    terminal.print_notes(console, [*notes, *_faster_dtype(planned)])


def _alone(planned: StudyPlan) -> str:
    """What is asked for pointwise mutual information."""
    return f"{planned.num_alone:,}, the labels after {printable(' '.join(planned.nothing))!r} alone"


def _dealt_row(study: Study) -> dict[str, str]:
    """How many queries each ordering is asked, where these are its own; and whose demonstrations are, likewise."""
    if study.is_per_query:
        return {"demonstrations": "each query's own, by rank"}
    return {} if study.cells == "crossed" else {"of its own, each ordering": f"{study.queries_per_ordering:,}"}


def print_plans(console: Console, planned: Mapping[str, StudyPlan], study: Study) -> None:
    """The plans of a study of several runs, and what they come to together."""
    for name, part in planned.items():
        console.print("", f"[bold]{name}[/bold]", sep="\n")
        print_plan(console, part, study)
    bills = [part.bill for part in planned.values() if part.bill is not None]
    rows = {
        "runs": f"{len(planned)}",
        "distinct prompts": f"{sum(part.num_prompts for part in planned.values()):,}",
        **(_api_rows(_together(bills)) if bills else _local_total(list(planned.values()))),
    }
    console.print("", terminal.facts_table("Together", rows), sep="\n")


def recommendation_cost(planned: Mapping[str, StudyPlan]) -> str:
    """What a recommendation takes at most, in one line: its race, and the test of what the race chose."""
    race, *tests = planned.values()
    parts = {f"the race asks a part of {race.num_prompts:,} prompts": [race], "its test is": tests}
    words = [
        f"{what}{'' if of == [race] else f' {sum(part.num_prompts for part in of):,} prompts'} ({_cost_words(of)})"
        for what, of in parts.items()
    ]
    return f"{' and '.join(words)}; --budget bounds the race, --plan shows all of it"


def _cost_words(planned: Sequence[StudyPlan]) -> str:
    if any(part.bill is not None for part in planned):
        return f"{sum(part.tokens_naive for part in planned):,} tokens at most"
    seconds = [part.estimate.seconds for part in planned if part.estimate is not None and part.estimate.seconds]
    time = f", {duration(sum(seconds))}" if len(seconds) == len(planned) else ""
    return f"{sum(part.tokens_unique for part in planned):,} distinct tokens{time} at most"


def _local_cost(planned: StudyPlan) -> dict[str, str]:
    if planned.plain_tokens is not None:
        return {
            "tokens, prompt by prompt": f"{planned.plain_tokens:,}, all of them forwarded",
            "estimated time": _estimated(planned),
        }
    return {
        "tokens, prompt by prompt": f"{planned.tokens_naive:,}",
        "tokens, distinct": f"{planned.tokens_unique:,}",
        "saving": f"{planned.saving:.1f} times",
        "peak of keys and values": _kv_peak(planned),
        "memory": _memory(planned),
        "estimated time": _estimated(planned),
    }


def _kv_peak(planned: StudyPlan) -> str:
    """Tokens, and bytes where all of them are held in every layer: a scored pack has keys and values of one at a time,
    which are among the activations."""
    tokens = f"{planned.kv_peak_tokens:,} tokens"
    if planned.max_new_tokens is not None:
        return f"{tokens}, {bytes_in_words(planned.kv_peak_bytes)}"
    return f"{tokens}: an open path, held in every layer, and a pack, in one layer at a time"


def _local_prompts(planned: StudyPlan) -> dict[str, str]:
    return {
        "every prompt begins with": terminal.in_one_line(planned.opening) or "no special token",
        "prompts outside the product": f"{planned.prompts.num_general_cells:,}",
        "queries too long": f"{planned.num_overlong:,}",
    }


def _together(bills: Sequence[Bill]) -> Bill:
    costs = [bill.cost for bill in bills if bill.cost is not None]
    spent = sum((bill.spent for bill in bills), Spent())
    return Bill(spent, sum(costs) if len(costs) == len(bills) else None, any(bill.is_estimate for bill in bills))


def _local_total(planned: Sequence[StudyPlan]) -> dict[str, str]:
    timed = [part.estimate.seconds for part in planned if part.estimate is not None]
    seconds = [each for each in timed if each is not None]
    plain = [part.plain_tokens for part in planned if part.plain_tokens is not None]
    tokens = (
        {"tokens, prompt by prompt": sum(plain)}
        if plain
        else {"tokens, distinct": sum(part.tokens_unique for part in planned)}
    )
    return {
        **{name: f"{count:,}" for name, count in tokens.items()},
        "estimated time": f"about {duration(sum(seconds))}" if len(seconds) == len(planned) else "-",
    }


def _api_rows(bill: Bill) -> dict[str, str]:
    """The requests and tokens that a study costs of an API, and what they come to."""
    spent, about = bill.spent, "about " if bill.is_estimate else ""
    return {
        "requests": f"{spent.requests:,}",
        "prompt tokens": f"{about}{spent.prompt_tokens:,}, {spent.cached_tokens:,} of them in the provider's cache",
        "tokens of replies": f"at most {spent.completion_tokens:,}",
        "bill": "not known: give the endpoint's prices" if bill.cost is None else f"at most {about}{bill.cost:,.4g}",
    }


def _about_generation(planned: StudyPlan) -> dict[str, str]:
    if planned.max_new_tokens is None:
        return {}
    most = planned.num_prompts * planned.max_new_tokens
    return {"new tokens": f"at most {planned.max_new_tokens:,} a prompt, {most:,} in all"}


def _memory(planned: StudyPlan) -> str:
    estimate = planned.estimate
    if estimate is None or estimate.memory is None:
        return _unknown(planned)
    budget = estimate.memory_budget
    packs = f"in packs of {estimate.pack_tokens} tokens"
    lines = [f"{estimate.memory}, {packs}" + (f" (budget {bytes_in_words(budget)})" if budget is not None else "")]
    if (path := estimate.long_path) is not None:
        does = "computed again" if path.recomputes else "read back, layer by layer"
        lines.append(f"keys and values of a path do not fit and are {does}: about {duration(path.seconds)} more")
    return "; ".join(lines)


def _unknown(planned: StudyPlan) -> str:
    return f"- ({planned.untimed})" if planned.untimed else "-"


def _estimated(planned: StudyPlan) -> str:
    estimate = planned.estimate
    if estimate is None or estimate.seconds is None:
        return _unknown(planned)
    rate = f"{estimate.flops_per_second / 1e9:,.0f} GFLOP/s"
    if not estimate.is_measured:
        rate += "; an estimate from one model on one GPU"
    return f"about {duration(estimate.seconds)} on this machine ({estimate.device}, {estimate.dtype}, {rate})"


def _faster_dtype(planned: StudyPlan) -> list[str]:
    speedup = planned.estimate and planned.estimate.bfloat16_speedup
    if not speedup or speedup < _LEAST_SPEEDUP:
        return []
    return [
        f"dtype: bfloat16 would multiply {speedup:.1f} times faster on this processor; some predictions come out "
        "otherwise than in float32 (about 1 in 100 where labels nearly tie)"
    ]
