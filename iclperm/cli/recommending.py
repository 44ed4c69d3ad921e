"""What the command ``recommend`` does: a study from a data file, and the prompt that it takes as files."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from iclperm import api
from iclperm.base.files import writable, write_whole
from iclperm.cli import commands, plans, terminal
from iclperm.cli.arguments import value_of
from iclperm.cli.failures import STOPPED, one_line
from iclperm.cli.options import is_quiet
from iclperm.errors import ConfigError
from iclperm.runs.plan import StudyPlan
from iclperm.runs.prompt import Format, RunPrompt
from iclperm.studies.prompts import restricted_tasks
from iclperm.studies.recommended_study import recommended_study
from iclperm.studies.several import StudyRuns
from iclperm.study.study import Study


def recommend(
    data: str,
    flags: Mapping[str, str | None],
    *,
    label: str | None,
    texts: Sequence[str],
    extend: bool,
    workers: int | None,
    as_json: bool,
    with_text: bool | None,
    only_plan: bool = False,
) -> int:
    """Finds the prompt to take, shows what it is worth, and writes it beside the report and its page.

    What it takes at most is told first, where it is not begun, and all that there is with ``only_plan``.
    """
    given = {key: value_of(key, text) for key, text in flags.items() if text is not None}
    out = given.pop("out", None)
    if only_plan:
        with tempfile.TemporaryDirectory() as scratch:  # for the task that is proposed
            study = recommended_study(data, out or Path(scratch) / "plan", given, label=label, texts=texts)
            plans.show_plans(_planned(study), study, as_json=as_json)
        return 0
    if out is None:
        raise ConfigError("there is no folder for the recommendation; name one with --out")
    if not Path(out).exists() and not is_quiet():
        study = recommended_study(data, out, given, label=label, texts=texts)
        click.echo(plans.recommendation_cost(_planned(study)), err=True)
    about: dict[str, Any] = {"label": label, "texts": texts, "with_text": with_text, **given}
    with commands.progress_of(as_json) as progress:
        found = api.recommend(data, out, extend=extend, workers=workers, progress=progress, **about)
    page = partial(api.write_page, with_text=with_text)
    refused = commands.show(terminal.stdout(), found, as_json=as_json, page=page)
    if refused is not None:
        click.echo(f"error: {one_line(refused)}", err=True)
        return STOPPED
    keeps_texts = not restricted_tasks(found) if with_text is None else with_text
    if keeps_texts:
        for path in written_prompt(found, Path(out)):
            click.echo(path, err=as_json or is_quiet())
    return 0


def _planned(study: Study) -> dict[str, StudyPlan]:
    planned = api.plan(study)
    assert isinstance(planned, dict)
    return planned


def written_prompt(found: StudyRuns, folder: Path) -> list[Path]:
    """Writes the prompt into a folder: prompt.txt or, of a chat, prompt-chat.json, and prompt.json; their paths."""
    prompt = found.prompt()
    files = {folder / name: prompt.formatted(form).encode() for name, form in _forms(prompt).items()}
    with writable(folder):
        for path, content in files.items():
            write_whole(path, content)
    return [*files]


def _forms(prompt: RunPrompt) -> dict[str, Format]:
    found: dict[str, Format] = {"prompt.json": "json"}
    if prompt.messages:
        found = {"prompt-chat.json": "chat", **found}
    return {"prompt.txt": "text", **found} if prompt.text else found
