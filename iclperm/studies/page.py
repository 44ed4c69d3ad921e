"""The page of finished runs: what they say, every ordering with its demonstrations, and where the numbers come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iclperm import stats
from iclperm.base.files import writable
from iclperm.errors import ConfigError, DamagedItem, DataError, RunError, printable
from iclperm.report import page
from iclperm.report.figures import heat_map
from iclperm.report.page import Explorer, Page
from iclperm.report.parts import Table, evenly, percent
from iclperm.report.wording import reworded_plot
from iclperm.runs.folder import RunFolder
from iclperm.runs.prompt import worth
from iclperm.runs.run_texts import RunPrompts, kept_prompts
from iclperm.studies.prompts import (
    ALPHABET,
    restricted_tasks,
    restricted_words,
    verdict_codes,
    verdict_names,
    viewer_of,
)
from iclperm.studies.report import COMPARED, SCORED, Run
from iclperm.studies.several import StudyRuns
from iclperm.studies.taking import RecommendedCell, recommended_by
from iclperm.studies.tokens import TokenSavings
from iclperm.studies.told import by_name, told
from iclperm.study import kinds

_MOST_RUNS = 8
_MOST_CELLS = 2_000
_MOST_LINES = 200
_MOST_ANSWERS = 800_000
_MOST_QUERIES = 100
_MOST_LETTERS, _MOST_LETTERS_OF_ALL = 800, 500_000
_MISSING = "."
_ELSEWHERE = "Read the prompts shows them as they were scored, where the run's folder keeps their texts."


def write_page(
    run: Run | StudyRuns, folder: str | Path | None = None, kind: str | None = None, *, with_text: bool | None = None
) -> Path:
    """Writes report.html into ``folder``, by default the run's own; returns its path.

    The page holds the texts of demonstrations and queries unless ``with_text`` is False, or a task's data may not be
    handed on and it is not True. Its figures can be pointed at
    where the libraries of the extra ``page`` are installed (`iclperm.report.page.can_draw`), else they are pictures.
    """
    target = folder or run.folder
    if target is None:
        raise RunError("this run is in memory only; name a folder for its page")
    content = page_of(run, kind, with_text=with_text)
    with writable(Path(target)):
        return page.write_page(target, content, is_interactive=page.can_draw())


def page_of(run: Run | StudyRuns, kind: str | None = None, *, with_text: bool | None = None) -> Page:
    """What the page shows; see `write_page`."""
    withheld = restricted_tasks(run) if with_text is None else []
    with_text = not withheld if with_text is None else with_text
    said = told(run, kind)
    runs = by_name(run)
    plots = said.plots
    if isinstance(run, Run):
        plots = {stem: plot for stem, plot in plots.items() if stem != "heatmap"}  # the explorer has it
    notes = [] if with_text else ["The texts of demonstrations and queries were left out of this page."]
    notes += [f"{words[:1].upper()}{words[1:]}." for words in [restricted_words(withheld)] if withheld]
    if len(runs) > _MOST_RUNS:
        notes.append(f"The orderings of {_MOST_RUNS} of the {len(runs)} runs are shown one by one.")
    num_shown = min(len(runs), _MOST_RUNS)
    chosen = recommended_by(run.findings(kind)) if isinstance(run, Run) else None
    found = [_explorer(whose.removesuffix(": "), one, with_text, num_shown, chosen) for whose, one in runs[:_MOST_RUNS]]
    if None in found:
        notes.append("Orderings are not shown where one of them has no answer at all.")
    tables = said.tables if with_text else [table.without_texts() for table in said.tables]
    return Page(
        title=printable(run.title),
        question=_question(kind or run.study.kind),
        alerts=said.alerts,
        answer=said.conclusion,
        warnings=said.notes,
        plots=plots,
        tables=tables,
        facts=facts([(whose.removesuffix(": "), one) for whose, one in runs]),
        explorers=[explorer for explorer in found if explorer is not None],
        notes=notes,
    )


def _question(kind: str) -> str:
    asked = kinds.named(kind).question
    return f"{asked[:1].upper()}{asked[1:]}"


def _explorer(name: str, run: Run, with_text: bool, num_shown: int, chosen: RecommendedCell | None) -> Explorer | None:
    """One of ``num_shown`` of a page; None where an ordering has no answer. The page opens on the ``chosen`` one."""
    notes: list[str] = []
    accuracy = np.stack(
        [stats.accuracy(run.correct[:, :, k], run.state[:, :, k], run.weights).values for k in range(len(run.shots))],
        axis=2,
    )
    if not np.isfinite(accuracy).all():
        return None
    num_sets, num_permutations = accuracy.shape[:2]
    shown = _shown_permutations(accuracy, [] if chosen is None else [chosen.permutation])
    if len(shown) < num_permutations:
        notes.append(
            f"{len(shown):,} of the {num_permutations:,} permutations are in this page: every one at equal distances, "
            "and the best and the worst. Tables and conclusion rest on all."
        )
    if num_sets * len(shown) > _MOST_LINES and len(run.shots) > 1:
        notes.append(f"About {_MOST_LINES} of the {num_sets * len(shown):,} curves are drawn, at equal distances.")
    data: dict[str, Any] = {
        "sets": num_sets,
        "permutations": shown.tolist(),
        "shots": list(run.shots),
        "chance": run.chance,
        "labels": list(run.shared_labels),
        "accuracy": np.rint(accuracy[:, shown] * 10_000).astype(int).tolist(),
        "chosen": None
        if chosen is None
        else {
            "set": chosen.set,
            "place": shown.tolist().index(chosen.permutation),
            "words": "; ".join([*chosen.notes, *_worth(run, chosen)]),
            "is_held_out": chosen.is_held_out,
        },
        **({} if run.metric is None else {"measure": run.said("accuracy")}),
        "most_lines": _MOST_LINES,
        "most_queries": _MOST_QUERIES,
        **_answers(run, shown, notes),
        **_demonstrations(run, shown, with_text, notes),
    }
    if data["answers"] is None:
        data["queries"] = None  # which stand beside what was answered
    title = f"{run.title}, k = {run.shots[-1]}"
    prompts, told_of = viewer_of(run, shown, 1 / num_shown) if with_text else (None, [])
    still = reworded_plot(heat_map(accuracy[:, :, -1], title=title), run.said)
    return Explorer(name, still, data, [*notes, *told_of], prompts, run.said)


def _worth(run: Run, chosen: RecommendedCell) -> list[str]:
    """What `iclperm prompt` tells of the recommended cell: its interval, the commonest label, right by label."""
    return worth(run, chosen.set, chosen.permutation, run.shots[-1], is_held_out=chosen.is_held_out)


def _shown_permutations(accuracy: NDArray[np.float64], wanted: Sequence[int]) -> NDArray[np.int64]:
    """Which of accuracy [S, P, K] there is room for; the ``wanted``, the best and the worst at the largest k always."""
    num_sets, num_permutations = accuracy.shape[:2]
    last = accuracy[:, :, -1]
    extremes = [int(find(last)) % num_permutations for find in (np.argmax, np.argmin)]
    even = evenly(num_permutations, max(_MOST_CELLS // num_sets, 1))
    return np.unique(np.array([*even, *extremes, *wanted], dtype=np.int64))


def _answers(run: Run, shown: NDArray[np.int64], notes: list[str]) -> dict[str, Any]:
    """What was answered, a sign a query: its place in ``alphabet`` is that in ``codes``; another sign is no answer.

    By number of shots, set and permutation; only for the largest k where all would be too much.
    """
    items, num_labels = run.splits["test"], len(run.shared_labels)
    codes = [*run.labels, "no label"] if num_labels else verdict_names(run.metric)
    found: dict[str, Any] = {"codes": codes, "alphabet": ALPHABET, "answers": None, "weights": run.weights.tolist()}
    found["gold"] = run.gold.tolist() if num_labels else []
    of_k = len(run.correct) * len(shown) * len(items.gold)
    if len(codes) > len(ALPHABET) or of_k > _MOST_ANSWERS:
        notes.append("Single answers are left out, as there are too many; iclperm export writes them all.")
        return found
    is_all = of_k * len(run.shots) <= _MOST_ANSWERS
    if not is_all:
        notes.append(f"Single answers are in this page for k = {run.shots[-1]} alone; iclperm export writes them all.")
    signs = np.frombuffer(ALPHABET.encode(), dtype=np.uint8)
    found["answers"] = [None] * len(run.shots)
    for k in range(len(run.shots)) if is_all else [len(run.shots) - 1]:
        contexts = items.context_of[:, shown, k]
        if num_labels:
            given = items.context_prediction[contexts]
            code = np.where((given >= 0) & (given < num_labels), given, num_labels)
        else:
            code = verdict_codes(run.correct[:, shown, k])
        written = np.where(items.context_state[contexts] == 0, signs[code], ord(_MISSING)).astype(np.uint8)
        found["answers"][k] = [[one.tobytes().decode() for one in of_set] for of_set in written]
    return found


def _demonstrations(run: Run, shown: NDArray[np.int64], with_text: bool, notes: list[str]) -> dict[str, Any]:
    """What stood in the prompts: ``orders`` rearrange the ``rows`` of each set, which name ``texts``."""
    nothing: dict[str, Any] = {"orders": None, "rows": None, "texts": None, "queries": None, "row_numbers": []}
    nothing |= {"row_labels": [], "reason": ""}
    try:
        found = run.demonstrations
    except (ConfigError, DataError) as error:
        return {**nothing, "reason": f"Demonstrations are not listed here: {error}. {_ELSEWHERE}"}
    numbers, places = np.unique(found.sets, return_inverse=True)
    labels = dict(zip(found.rows.ravel().tolist(), found.labels.ravel().tolist(), strict=True))
    nothing |= {
        "orders": found.permutations[shown].tolist(),
        "rows": places.reshape(found.sets.shape).tolist(),
        "row_numbers": numbers.tolist(),
        "row_labels": [labels.get(row, 0) for row in numbers.tolist()],
    }
    if not with_text:
        return {**nothing, "reason": "Texts were left out of this page; rows of the training data stand for them."}
    texts, queries = [found.texts[row] for row in numbers.tolist()], found.query_texts("test")
    if (kept := _kept(run)) is not None:  # what the model read, and no field that the task's wording leaves out
        texts = [kept.texts.demonstrations[row].worded for row in numbers.tolist()]
        queries = [piece.text for piece in kept.texts.queries["test"]]
    if max(map(len, [*texts, *queries]), default=0) > _MOST_LETTERS:
        notes.append(f"Texts of more than {_MOST_LETTERS} letters are cut, which … marks.")
    texts, queries = ([_cut(text) for text in given] for given in (texts, queries))
    if sum(map(len, texts)) > _MOST_LETTERS_OF_ALL:
        return {**nothing, "reason": "The texts are too long for a page; rows of the training data stand for them."}
    if sum(map(len, queries)) > _MOST_LETTERS_OF_ALL:
        notes.append("The queries are left out, as they are too long for a page.")
        return {**nothing, "texts": texts}
    return {**nothing, "texts": texts, "queries": queries}


def _kept(run: Run) -> RunPrompts | None:
    """The prompts in the run's folder; None where it has none, or they are damaged, which the viewer says."""
    try:
        return kept_prompts(run)
    except DamagedItem:
        return None


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]} …"


def facts(runs: Sequence[tuple[str, Run]]) -> list[Table]:
    """What was run, by which hashes it is known and what it cost, of runs by their names."""
    return [
        _facts("What was run", runs, _what),
        _facts("Known by", runs, _hashes),
        _facts("What it cost", runs, _cost),
    ]


def _facts(title: str, runs: Sequence[tuple[str, Run]], about: Any) -> Table:
    """A row for each fact, a column for each run."""
    found: list[Mapping[str, str]] = [dict(about(run)) for _, run in runs]
    names = dict.fromkeys(name for facts in found for name in facts)
    header = ["", *(whose for whose, _ in runs)]
    rows = [(name, *(facts.get(name, "-") for facts in found)) for name in names]
    return Table(title, header, rows, texts=range(1, len(header)))


def _what(run: Run) -> Iterator[tuple[str, str]]:
    study, (sets, permutations, *_) = run.study, run.correct.shape
    yield "task", run.task
    yield "model", Path(study.model_name).name if study.endpoint is None else study.model_name
    yield "revision", study.revision or "none named"
    if run.shared_labels:
        yield "labels", ", ".join(run.labels)
    yield "design", f"{sets} sets x {permutations} permutations, k = {', '.join(map(str, run.shots))}"
    yield "queries", ", ".join(f"{len(items.gold):,} {split}" for split, items in run.splits.items())
    yield "seed", f"{study.seed}"
    yield (
        "demonstrations drawn",
        "given by row" if study.given_sets else f"{study.design}, resample: {study.resample}",
    )
    scored = study.scoring or "loglikelihood"
    yield "scored by", f"{scored}{SCORED[scored]}{COMPARED[study.normalize]}"
    yield "calibrated", study.calibration
    yield "chat", study.chat or "none"
    for number, machine in enumerate(run.numerics):
        told_of = (machine.get(key) for key in ("device", "dtype", "stored_as", "processor"))
        versions = (f"{name} {machine[name]}" for name in ("torch", "transformers") if machine.get(name))
        yield (
            f"machine{f' {number + 1}' if number else ''}",
            ", ".join([*(str(one) for one in told_of if one), *versions]),
        )


def _hashes(run: Run) -> Iterator[tuple[str, str]]:
    yield "results", run.quick_digest or "too many for their digest here; iclperm verify prints it"
    if run.folder is not None:
        yield from RunFolder.open(run.folder).plan["hashes"].items()


def _cost(run: Run) -> Iterator[tuple[str, str]]:
    report, tokens = run.report, TokenSavings.of(run.report)
    yield "tokens, prompt by prompt", f"{tokens.naive:,}"
    yield "tokens, distinct", f"{tokens.unique:,} ({tokens.saving:.1f} times fewer)"
    yield "tokens forwarded", f"{'' if tokens.complete else 'at least '}{tokens.forwarded:,}"
    if run.study.endpoint is not None:
        yield "requests paid for", f"{report.num_requests:,}"
        yield "tokens paid for", f"{report.num_prompt_tokens:,} of prompts, {report.num_reply_tokens:,} of replies"
    yield "answers missing", percent(run.missing.answers)
    near = run.summary().near_ties if run.splits["test"].has_scores and not run.decisions else None
    yield "near-ties", "not known" if near is None else f"{percent(near)} of the answers at k = {run.shots[-1]}"
    yield "damaged files set aside", f"{report.num_quarantined}"
