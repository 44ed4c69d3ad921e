"""The options that commands share: a flag for each key of a study, ``--json``, ``--debug``. Loads nothing but click."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from iclperm.study import kinds

STUDY_KEYS = {
    "kind": f"What is studied: {kinds.in_words(kinds.STUDIES)}.",
    "model": "demo, a model folder or a hub id.",
    "revision": "Revision of a hub id.",
    "task": "Built-in task or path of a task file.",
    "tasks": kinds.KEYS["tasks"],
    "models": kinds.KEYS["models"],
    "data": "Folder with the task's data, where they are not where the task says.",
    "sets": "Number of demonstration sets.",
    "permutations": "Number of orders, shared by all sets.",
    "demonstrations": "Sets of train rows to use instead of drawn ones: 4,17,9;3,2,11.",
    "shots": "Number of demonstrations, several (0,1,2,4,8), or all.",
    "resample": "none: several shots are prefixes of one order; per_k: each has sets and orders of its own.",
    "queries": "Number of test queries.",
    "dev_queries": "Number of dev queries, scored beside them.",
    "balance": "classes: queries of every class alike, a short one oversampled; natural: as they come, each once.",
    "seed": "Seed of every random choice.",
    "design": "How sets and orders are drawn: random.",
    "scoring": "How answers are found: loglikelihood (of every label), first_token (of theirs), or generate.",
    "normalize": "Labels are compared by the sum of log-likelihoods, their mean over tokens, or over bytes.",
    "calibration": "none, or contextual: labels freed of what each context prefers by itself.",
    "criterion": kinds.KEYS["criterion"],
    "select": kinds.KEYS["select"],
    "on_overlong": "error, or drop the queries that do not fit the context window.",
    "chat": "The model's chat template: none, single (one user message), or multiturn (a turn a demonstration).",
    "max_new_tokens": "Most tokens of a generated answer; the task's own by default.",
    "think": "keep, or strip blocks of reasoning from generated text before it is read.",
    "unparsed": "Text that no answer can be read from counts as wrong, or as a missing answer (drop).",
    "endpoint": "API that serves --model: its URL, or base_url=URL,api_key_env=NAME,max_cost=2 and so on.",
    "options": "Those of another package's kind: key=value, with commas between.",
    "dtype": "auto, float32, bfloat16 or float16.",
    "device": "auto, cpu, cuda, ..., or balanced: a model over several devices.",
    "memory_budget": "Memory for weights, keys and values, activations and logits: 4GiB, or 50% of what is free.",
    "plain": "Prompt by prompt, at the cost of every token: for an architecture that the prefix tree does not serve.",
    "out": "Run folder; an unfinished run continues.",
}
NUMBERS = frozenset({"sets", "permutations", "shots", "queries", "dev_queries", "seed", "select", "max_new_tokens"})
"""Keys whose value is a whole number."""
SWITCHES = frozenset({"plain"})
"""Keys that are on or off; their flags take no value."""
LISTS = frozenset({"tasks", "models"})
"""Keys whose value is names with commas between."""

Command = TypeVar("Command", bound=Callable[..., Any])


def with_debug(command: Command) -> Command:
    """Adds ``--debug``, which `iclperm.cli.main.main` looks for itself."""
    return click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")(command)


def with_json(command: Command) -> Command:
    """Adds ``--json``, as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")(command)


def with_figures(command: Command) -> Command:
    """Adds ``--figure`` and ``--width``, as texts."""
    command = click.option("--width", help="How wide these figures are: 3.3in, 8.4cm, 240pt.")(command)
    return click.option(
        "--figure",
        "figures",
        multiple=True,
        metavar="[NAME=]FILE",
        help="A figure as .pdf, .svg or .png; the first unless a NAME is given. Repeatable.",
    )(command)


def with_text(words: str) -> Callable[[Command], Command]:
    """Adds ``--with-text/--without-text``, None where neither is given; ``words`` say what holds texts."""
    about = f"Whether {words} holds texts of the data; by default unless the task is restricted."
    return click.option("--with-text/--without-text", "with_text", default=None, help=about)


def with_folder(command: Command) -> Command:
    """Adds the folder of a run."""
    return click.argument("folder", type=click.Path(path_type=Path))(command)


def with_study(command: Command) -> Command:
    """Adds a study file, or the folder of a run, and a flag for each key of a study, as text where it is given."""
    for key, words in reversed(STUDY_KEYS.items()):
        metavar = "N" if key in NUMBERS else "TEXT"
        switch = {"is_flag": True, "flag_value": "true"} if key in SWITCHES else {"metavar": metavar}
        command = click.option(f"--{key.replace('_', '-')}", key, default=None, help=words, **switch)(command)
    return click.argument("study", required=False, type=click.Path(path_type=Path))(command)
