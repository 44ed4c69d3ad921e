"""The options that commands share: a flag for each key of a study, ``--json``, ``--quiet``, ``--debug``, and how a help
groups them. Loads nothing but click."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from iclperm.base.remote import is_url
from iclperm.study import kinds
from iclperm.study.orderings import ORDER_DESIGNS

STUDY_KEYS = {
    "kind": f"What is studied: {kinds.in_words(kinds.STUDIES)}.",
    "model": "demo, a model folder, a GGUF file or a hub id.",
    "revision": "Revision of a hub id.",
    "adapter": "Folder of a PEFT adapter, merged into the model.",
    "task": "Built-in task or path of a task file.",
    "tasks": kinds.KEYS["tasks"],
    "models": kinds.KEYS["models"],
    "data": "Folder or file with the task's data, where they are not where the task says.",
    "sets": "Number of demonstration sets.",
    "permutations": "Number of orders, shared by all sets.",
    "demonstrations": "Sets of train rows to use instead of drawn ones: 4,17,9;3,2,11; or per query.",
    "neighbours": kinds.KEYS["neighbours"],
    "order": kinds.KEYS["order"],
    "shots": "Number of demonstrations, several (0,1,2,4,8), or all.",
    "resample": "none: several shots are prefixes of one order; per_k: each has sets and orders of its own.",
    "queries": "Number of test queries.",
    "dev_queries": "Number of dev queries, scored beside them.",
    "balance": "classes: queries of every class alike, a short one oversampled; natural: as they come, each once.",
    "seed": "Seed of every random choice.",
    "design": "Which orders come together: random, latin, antithetic (pairs), prefix_coupled, exhaustive (all).",
    "cells": kinds.KEYS["cells"],
    "queries_per_ordering": kinds.KEYS["queries_per_ordering"],
    "scoring": "How answers are found: loglikelihood (of every label), first_token (of theirs), or generate.",
    "normalize": "Labels are compared by the sum of log-likelihoods, their mean over tokens, bytes or characters, or "
    "pmi: less what they have without a context.",
    "calibration": "none, or contextual: labels freed of what each context prefers by itself.",
    "criterion": kinds.KEYS["criterion"],
    "budget": kinds.KEYS["budget"],
    "rule": kinds.KEYS["rule"],
    "tolerance": kinds.KEYS["tolerance"],
    "precision": kinds.KEYS["precision"],
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
    "attention": "Attention by our C++ kernel (native, on a CPU), our GPU kernel (triton), or torch.",
    "layers": "Decoder layers: ours where they know the architecture (auto), or those of transformers.",
    "pack_tokens": "Most tokens of a forward pass.",
    "out": "Run folder; an unfinished run continues.",
}
RECOMMEND_KEYS = (
    "model",
    "out",
    "budget",
    "shots",
    "sets",
    "permutations",
    "queries",
    "dev_queries",
    "seed",
    "normalize",
    "chat",
    "endpoint",
    "dtype",
    "device",
)
"""The keys of a study that a recommendation has flags for."""
CHOICES: Mapping[str, tuple[str, ...]] = {
    "resample": ("none", "per_k"),
    "balance": ("classes", "natural"),
    "design": ORDER_DESIGNS,
    "order": ("similar_last", "similar_first", "permuted"),
    "cells": ("crossed", "blocks", "random"),
    "scoring": ("loglikelihood", "first_token", "generate"),
    "normalize": ("sum", "mean", "bytes", "characters", "pmi"),
    "calibration": ("none", "contextual"),
    "criterion": (
        "dev_accuracy",
        "majority_agreement",
        "global_entropy",
        "local_entropy",
        "mutual_information",
        "dev_log_likelihood",
    ),
    "rule": ("calibrated", "certified"),
    "on_overlong": ("error", "drop"),
    "chat": ("none", "single", "multiturn"),
    "think": ("keep", "strip"),
    "unparsed": ("wrong", "drop"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "attention": ("auto", "native", "triton", "torch"),
    "layers": ("auto", "transformers"),
}
"""Keys that have one of fixed values."""
SUGGESTED: Mapping[str, tuple[str, ...]] = {
    "kind": kinds.STUDIES,
    "device": ("auto", "cpu", "cuda", "balanced"),
    "model": ("demo",),
}
"""What a shell completes for keys that have other values, too."""
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Model options": ("model", "models", "revision", "adapter", "endpoint", "chat", "max_new_tokens", "plain"),
    "Answer options": ("scoring", "normalize", "calibration", "criterion", "on_overlong", "think", "unparsed"),
    "Resource options": ("dtype", "device", "memory_budget", "attention", "layers", "pack_tokens", "out"),
}
"""Under which heading a help lists the keys of a study; the others are "Study options"."""
NUMBERS = frozenset(
    {
        "sets",
        "permutations",
        "shots",
        "queries",
        "dev_queries",
        "queries_per_ordering",
        "seed",
        "select",
        "max_new_tokens",
        "pack_tokens",
    }
)
"""Keys whose value is a whole number."""
SWITCHES = frozenset({"plain"})
"""Keys that are on or off; their flags take no value."""
LISTS = frozenset({"tasks", "models"})
"""Keys whose value is names with commas between."""

_QUIET = "quiet"
Command = TypeVar("Command", bound=Callable[..., Any])


def with_debug(command: Command) -> Command:
    """Adds ``--debug``, which `iclperm.cli.main.main` looks for itself."""
    return click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")(command)


class SectionedCommand(click.Command):
    """A command whose help lists the options of a study in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What ``--help`` says of the options."""
        found: dict[str, list[tuple[str, str]]] = {
            "Study options": [],
            **{name: [] for name in SECTIONS},
            "Options": [],
        }
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                found[_section(parameter.name or "")].append(record)
        for name, records in found.items():
            if not records:
                continue
            with formatter.section(name):
                formatter.write_dl(records)


def _section(key: str) -> str:
    if key not in STUDY_KEYS:
        return "Options"
    return next((name for name, keys in SECTIONS.items() if key in keys), "Study options")


def with_quiet(command: Command) -> Command:
    """Adds ``--quiet``, which `is_quiet` tells whoever prints."""

    def keep(context: click.Context, _parameter: click.Parameter, given: bool) -> None:
        context.meta[_QUIET] = given

    words = "Print no tables, notes on progress or names of files; errors remain."
    return click.option("--quiet", "-q", is_flag=True, expose_value=False, callback=keep, help=words)(command)


def is_quiet() -> bool:
    """Whether the command that is running was given ``--quiet``."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET))


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
        help="A figure as .pdf, .svg or .png: NAME, else the one that FILE is called like, else the first. Repeatable.",
    )(command)


def with_tables(words: str) -> Callable[[Command], Command]:
    """Adds ``--table``, as texts; ``words`` say which tables there are, by name."""
    about = f"A table as .md, .tex (booktabs) or .csv: NAME, else the first; {words}. Repeatable."
    return click.option("--table", "tables", multiple=True, metavar="[NAME=]FILE", help=about)


def with_text(words: str) -> Callable[[Command], Command]:
    """Adds ``--with-text/--without-text``, None where neither is given; ``words`` say what holds texts."""
    about = f"Whether {words} holds texts of the data; by default unless the task is restricted."
    return click.option("--with-text/--without-text", "with_text", default=None, help=about)


def with_workers(command: Command) -> Command:
    """Adds what says who answers: ``--workers``, ``--ray`` and ``--send-key``."""
    command = click.option(
        "--send-key",
        "send_keys",
        multiple=True,
        metavar="TEXT",
        help="VARIABLE=HOST[:PORT], a host that the key in a variable may go to; no study can name one. Repeatable.",
    )(command)
    command = click.option(
        "--ray",
        metavar="[ADDRESS]",
        is_flag=False,
        flag_value="auto",
        help="Have them on the machines of a Ray cluster: that at ADDRESS, or the one that runs here.",
    )(command)
    return click.option(
        "--workers", metavar="N", type=int, help="Processes that run the model, each on a GPU or cores of its own."
    )(command)


def place(text: str) -> Path | str:
    """A path, or the URL of what fsspec reads and writes, which is left as it is."""
    return text if is_url(text) else Path(text)


def with_folder(command: Command) -> Command:
    """Adds the folder of a run."""
    return click.argument("folder", type=click.Path(path_type=Path))(command)


def with_place(command: Command) -> Command:
    """Adds the folder of a run, or its URL."""
    return click.argument("folder", type=place)(command)


def with_study(command: Command) -> Command:
    """Adds a study file, or the folder of a run, and a flag for each key of a study, as text where it is given."""
    command = with_keys(*STUDY_KEYS)(command)
    return click.argument("study", required=False, type=click.Path(path_type=Path))(command)


def with_keys(*keys: str) -> Callable[[Command], Command]:
    """Adds a flag for each of these keys of a study, as text where it is given."""

    def added(command: Command) -> Command:
        for key in reversed(keys):
            flag = f"--{key.replace('_', '-')}"
            command = click.option(flag, key, default=None, help=STUDY_KEYS[key], **_form(key))(command)
        return command

    return added


def _form(key: str) -> dict[str, Any]:
    """What a flag takes."""
    if key in SWITCHES:
        return {"is_flag": True, "flag_value": "true"}
    if key in CHOICES:
        return {"type": click.Choice(CHOICES[key])}
    return {"metavar": "N" if key in NUMBERS else "TEXT", "shell_complete": suggested(SUGGESTED.get(key, ()))}


def suggested(words: Sequence[str]) -> Callable[..., list[str]]:
    """What a shell completes an option by, as click asks for it."""
    return lambda _context, _parameter, begun: [word for word in words if word.startswith(begun)]
