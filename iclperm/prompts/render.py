"""Rows as text: the demonstrations and queries of a design, in the task's words and the model's chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iclperm.errors import ConfigError
from iclperm.prompts.chat import ChatFormat, Message
from iclperm.prompts.design import Design
from iclperm.report.notebook import prompt_html
from iclperm.study.study import Scoring
from iclperm.tasks.task import Examples, Task


@dataclass(frozen=True)
class PromptText:
    """The text of one prompt of a study, part by part, and the right label or answer.

    ``gold`` is the place of the right label in ``continuations``, the first of several, -1 where there is none. In a
    chat the texts are what the template renders, and ``messages`` what it renders them from.
    """

    context: str
    query: str
    continuations: list[str]
    gold: int
    answer: str = ""
    messages: tuple[Message, ...] = ()
    has_own_choices: bool = False
    """Whether the continuations are those of this query alone."""

    @property
    def text(self) -> str:
        """All of it, up to where the label or the answer begins."""
        return self.context + self.query

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        labels = ", ".join(map(repr, self.continuations))
        return prompt_html(
            [f"right: {self.answer}" if self.is_generated else f"right: {self.answer}, of {labels}"], str(self)
        )

    @property
    def is_generated(self) -> bool:
        """Whether the model writes on after the query."""
        return self.continuations == [""]


def prompt_text(
    design: Design,
    task: Task,
    examples: Mapping[str, Examples],
    *,
    cell: tuple[int, int, int, int],
    scoring: Scoring = "loglikelihood",
    chat: ChatFormat | None = None,
) -> PromptText:
    """The text of the prompt at ``cell`` = (set, permutation, position in shots, query)."""
    query = cell[3]
    texts = DesignTexts(design, task, examples, scoring, chat)
    demonstrations = texts.of_rows(design.demonstrations(*cell))
    return PromptText(
        context=texts.context(demonstrations),
        query=texts.queries[query],
        continuations=texts.after(query),
        gold=int(texts.gold[query]),
        answer=texts.answers[query],
        messages=tuple(texts.messages(demonstrations, query)),
        has_own_choices=texts.choices is not None,
    )


class DesignTexts:
    """The rendered parts of a design.

    ``demonstrations`` are its distinct ones, each with the separator after it, and ``orderings`` hold, for each group
    of the design, their places, int64 [S, P, K], and the numbers of shots (none where each query has its own).
    ``queries`` [Q] are texts up to the label,
    split by split; ``continuations`` [L] those of the labels, one "" where the model writes on; ``choices`` [Q] those
    of queries that have some of their own, and then there are no labels; ``gold`` int64 [Q] and
    ``answers`` the right ones. In a chat all of these hold the template's text around the turns, too;
    ``bare_demonstrations`` (a text, or what user and assistant say) and ``bare_queries`` do not.
    """

    def __init__(
        self,
        design: Design,
        task: Task,
        examples: Mapping[str, Examples],
        scoring: Scoring,
        chat: ChatFormat | None = None,
    ) -> None:
        train = examples["train"]
        self._rows = design.used_rows
        self._design = design
        self._chat = chat
        is_shared = design.neighbours is None
        self.orderings = [(self.of_rows(group.rows), group.shots) for group in design.orderings] if is_shared else []
        queries = [(examples[split.split], row) for split in design.queries for row in split.rows]
        right = {id(split): split.gold for split, _ in queries}
        self.gold = np.array([right[id(split)][row] for split, row in queries], dtype=np.int64)
        self.answers = [split.answers[row] for split, row in queries]
        self.bare_queries = task.render_queries([split.fields[row] for split, row in queries])
        render = _turns if chat and chat.mode == "multiturn" else _whole
        self.bare_demonstrations = render(
            task, [train.fields[row] for row in self._rows], [train.answers[row] for row in self._rows]
        )
        continuations = [""] if scoring == "generate" else task.continuations()
        self.is_open = continuations == [""]
        self.choices = _continued(task, queries) if task.has_row_choices else None
        if chat:
            trim = str.strip if chat.mode == "multiturn" else str.rstrip
            self.bare_queries = list(map(trim, self.bare_queries))
            continuations = list(map(str.strip, continuations))
            self.choices = self.choices and [list(map(str.strip, own)) for own in self.choices]
        after = (chat.generation if self.is_open else chat.reply) if chat else ""
        self.opening = chat.opening if chat else task.opening()
        self.demonstrations = [chat.demonstration(bare) if chat else bare[0] for bare in self.bare_demonstrations]
        self.queries = [text + after for text in self.bare_queries]
        self.continuations = continuations

    def after(self, query: int) -> list[str]:
        """What may follow a query: its own choices, else the labels of all."""
        return self.continuations if self.choices is None else self.choices[query]

    def messages(self, demonstrations: Sequence[int] | NDArray[np.int64], query: int) -> list[Message]:
        """The messages of one prompt; none without a chat."""
        bare = [self.bare_demonstrations[demonstration] for demonstration in demonstrations]
        return self._chat.messages(bare, self.bare_queries[query]) if self._chat else []

    def contents(self) -> list[str]:
        """All texts that come from task and data, without the chat's template."""
        before = [self._chat.system, self._chat.preface] if self._chat else [self.opening]
        demonstrations = [text for bare in self.bare_demonstrations for text in bare]
        choices = [text for own in self.choices or () for text in own]
        return [*before, *demonstrations, *self.bare_queries, *self.continuations, *choices]

    @property
    def rows(self) -> NDArray[np.int64]:
        """The rows of train that ``demonstrations`` are, ascending."""
        return self._rows

    def shown(self) -> Iterator[NDArray[np.int64]]:
        """The places of all demonstrations that stand together, in order: int64 [..., k], group by group."""
        if self._design.neighbours is None:
            yield from (places for places, _ in self.orderings)
            return
        own = self.of_rows(self._design.own)
        yield from (own[..., group.permutations] for group in self._design.orderings)

    def of_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in ``demonstrations`` of rows of train."""
        return np.searchsorted(self._rows, rows)

    def context(self, demonstrations: Sequence[int] | NDArray[np.int64]) -> str:
        """The text before a query: the opening and these demonstrations, in this order."""
        return self.opening + "".join(self.demonstrations[demonstration] for demonstration in demonstrations)


def _continued(task: Task, queries: Sequence[tuple[Examples, int]]) -> list[list[str]]:
    """The text of each of its own choices after each query."""
    own = [split.chosen[row].texts for split, row in queries if split.chosen is not None]
    texts = iter(task.continued([text for choices in own for text in choices]))
    return [[next(texts) for _ in choices] for choices in own]


def _whole(task: Task, rows: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> list[tuple[str, ...]]:
    """Demonstrations, each with the separator after it."""
    return [(text + task.separator,) for text in task.render_demonstrations(rows, answers)]


def _turns(task: Task, rows: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> list[tuple[str, ...]]:
    """What user and assistant say in each demonstration: its query, and what follows it."""
    queries = [text.strip() for text in task.render_queries(rows)]
    if not task.is_generated:
        return [(query, text.strip()) for query, text in zip(queries, task.continued(answers), strict=True)]
    said: list[tuple[str, ...]] = []
    for query, text in zip(queries, task.render_demonstrations(rows, answers), strict=True):
        demonstration = text.strip()
        if not demonstration.startswith(query):
            raise ConfigError(
                f"task {task.name!r}: with chat multiturn the template 'demonstration' must begin as 'query' does; let "
                "it or set chat to single"
            )
        said.append((query, demonstration[len(query) :].strip()))
    return said
