"""Prompts as token ids: render, tokenise jointly, cut at the seams, and check that the cuts hold everywhere.

A prompt's ids are those of its whole text. The product of contexts and queries is valid only where the ids of a query
do not depend on the context before it; the cells where they do are listed apart, with their own ids.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from iclperm.chat import Chat, ChatFormat, Message, Mode, assistant, chat_format
from iclperm.designs import CONTENT_FREE, CONTENT_FREE_INPUTS, Design, keyed_sample
from iclperm.errors import ConfigError, ModelError, TokenizationError
from iclperm.study import Scoring
from iclperm.tasks import Examples, Task

NUM_CHECKED_PROMPTS = 256
NUM_CHECKED_CHATS = 12
MAX_CHECKED_SEAMS = 8_192

Ids = NDArray[np.int32]
_Seam = tuple[str, int, int]  # what stands on the right, the class of the words before it, of the words after it


class Tokenizer(Protocol):
    """What is used of a fast Hugging Face tokenizer; of one with a chat template also that."""

    is_fast: bool
    all_special_ids: list[int]
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None

    def __call__(self, text: list[str], **options: Any) -> Any: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...

    def get_added_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class PromptCounts:
    """What the checks saw: seams between adjoining parts (distinct by their words), whole prompts, what failed, and
    the queries whose last token merges with a label and was moved to the continuations."""

    num_seams: int
    num_failed_seams: int
    num_checked_prompts: int
    num_failed_prompts: int
    num_general_cells: int
    num_resplit_queries: int


@dataclass(frozen=True)
class Cell:
    """One (context, query) pair that the product cannot hold, with the ids of its own jointly tokenised prompt."""

    context: int
    query: int
    prompt: Ids
    continuations: list[Ids]


@dataclass(frozen=True)
class Prompts:
    """The two factors of the product, and the cells outside it.

    ``contexts`` are distinct, from BOS to the last separator; ``context_ids`` int64 [C] name them by content;
    ``context_of`` int64 [S, P, K] tells each cell's context. The same contexts as prefixes of few ``rows``: ``marks``
    hold, for each row, the lengths of its contexts, ``marked`` their numbers. ``queries`` hold the ids up to the label,
    [Q], split by split; ``continuations`` those of the labels, [L], shared by all queries (one empty row where the
    model writes on); ``gold`` int64 [Q] is the right label, -1 where there is none. Every prompt begins with ``start``,
    BOS if the tokenizer or the chat template puts it there.
    """

    start: Ids
    contexts: list[Ids]
    context_ids: NDArray[np.int64]
    context_of: NDArray[np.int64]
    rows: list[Ids]
    marks: list[Ids]
    marked: list[NDArray[np.int64]]
    queries: list[Ids]
    continuations: list[Ids]
    gold: NDArray[np.int64]
    general: list[Cell]
    counts: PromptCounts

    def fed_tokens(self, num_new: int = 0) -> NDArray[np.int64]:
        """Tokens of each query's longest prompt that enter the model, int64 [Q]; ``num_new`` are the most that it
        writes. The last one, of a label or written, never enters it."""

        def num_after(continuations: Sequence[Ids]) -> int:
            return max(num_new, *map(len, continuations)) - 1

        longest = max(map(len, self.contexts)) + num_after(self.continuations)
        fed = longest + np.array([len(query) for query in self.queries], dtype=np.int64)
        for cell in self.general:
            own = len(cell.prompt) + num_after(cell.continuations)
            fed[cell.query] = max(fed[cell.query], own)
        return fed


@dataclass(frozen=True)
class PromptText:
    """The text of one prompt of a study, part by part, and the right label or answer.

    Of a chat it is the text that the template renders, and ``messages`` are what it was rendered from.
    """

    context: str
    query: str
    continuations: list[str]
    gold: int
    answer: str = ""
    messages: tuple[Message, ...] = ()

    @property
    def is_generated(self) -> bool:
        """Whether the model writes on after the query."""
        return self.continuations == [""]


@dataclass(frozen=True)
class PromptTokens:
    """One prompt as the model reads it.

    ``opening`` is BOS, if tokenizer or chat template put it in front; ``pieces`` all tokens up to the label, of
    which ``num_context`` belong to opening and demonstrations. ``labels`` [L] are the tokens of each label; they follow
    the prompt, from place ``len(pieces)`` on. ``is_resplit`` tells that the query's last token merges with a label and
    is scored with it.
    """

    opening: list[str]
    pieces: list[str]
    num_context: int
    labels: list[list[str]]
    is_resplit: bool


def prompt_tokens(text: PromptText, tokenizer: Tokenizer) -> PromptTokens:
    """The tokens of one prompt, cut as they are for scoring."""
    prompt = text.context + text.query
    encode = _Encoder(tokenizer, prompt if text.messages else None)
    joints = encode([prompt + continuation for continuation in text.continuations])
    split = _split(len(prompt), joints)
    named = tokenizer.convert_ids_to_tokens
    return PromptTokens(
        opening=named(encode.opening.tolist()),
        pieces=named([*encode.start.tolist(), *split.prompt.ids.tolist()]),
        num_context=len(encode.start) + joints[0].cut(len(text.context)),
        labels=[named(ids.tolist()) for ids in split.continuations],
        is_resplit=split.is_resplit,
    )


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
    *context, query = cell
    texts = _Texts(design, task, examples, scoring, chat)
    demonstrations = texts.of_rows(design.demonstrations(*context))
    return PromptText(
        context=texts.context(demonstrations),
        query=texts.queries[query],
        continuations=texts.continuations,
        gold=int(texts.gold[query]),
        answer=texts.answers[query],
        messages=tuple(texts.messages(demonstrations, query)),
    )


def tokenise(
    design: Design,
    task: Task,
    examples: Mapping[str, Examples],
    tokenizer: Tokenizer,
    seed: int,
    *,
    scoring: Scoring = "loglikelihood",
    chat: Mode = "none",
) -> Prompts:
    """The prompts of a design as ids, with the seams checked (`DESIGN.md`, Tokenisation).

    Every distinct pair of adjoining words is tokenised across its seam (of more than 2,048 pairs a sample, and all
    where one of it fails), and a keyed sample of whole prompts is compared with its product. A failing seam sends its
    cells to the general path; a failing whole prompt sends all of them.
    ``scoring: first_token`` cuts every label to its first token, ``generate`` leaves the labels out. With ``chat`` the
    tokenizer's template stands around the text (see `iclperm.chat`), and a keyed sample of conversations is compared
    with what it renders. Raises `TokenizationError` for special tokens in the data, labels with no, equal or (cut)
    equally beginning ids, and a tokenizer without offsets; for a chat what `chat_format` raises too. O(tokens of
    demonstrations and queries + seams).
    """
    format_ = chat_format(chat, task, tokenizer)
    texts = _Texts(design, task, examples, scoring, format_)
    encoder = _Encoder(tokenizer, format_.opening + texts.queries[0] if format_ else None)
    if format_:
        encoder.refuse_control(texts.contents(), format_)
    if any(asked.split == CONTENT_FREE for asked in design.asked):
        _refuse_special_inputs(encoder.refuse_special)
    parts = _Parts(texts, encoder)
    contexts = _contexts(texts, parts, encoder)
    if format_:
        _check_chats(texts, contexts, format_, seed)
    outside = parts.cells_outside(contexts.members)
    failed, checked = _failed_prompts(texts, parts, contexts, outside, encoder, seed)
    if failed:
        outside = set(product(range(len(contexts.distinct)), range(len(texts.queries))))
    general = [_cell(texts, encoder, contexts.members[context], context, query) for context, query in sorted(outside)]
    continuations = texts.scored(parts.continuations)
    return Prompts(
        start=encoder.opening,
        contexts=contexts.distinct,
        context_ids=contexts.ids,
        context_of=contexts.of_cell,
        rows=contexts.rows,
        marks=contexts.marks,
        marked=contexts.marked,
        queries=parts.queries,
        continuations=continuations,
        gold=texts.gold,
        general=general,
        counts=PromptCounts(
            num_seams=parts.num_seams,
            num_failed_seams=len(parts.failed_seams),
            num_checked_prompts=checked,
            num_failed_prompts=failed,
            num_general_cells=len(general),
            num_resplit_queries=parts.num_resplit,
        ),
    )


def _refuse_special_inputs(refuse_special: Callable[[Sequence[str]], None]) -> None:
    for text in CONTENT_FREE_INPUTS:
        try:
            refuse_special([text])
        except TokenizationError:
            raise TokenizationError(
                f"calibration is 'contextual', but its content-free input {text!r} is a special token of this "
                "tokenizer; set calibration to none"
            ) from None


class _Texts:
    """The rendered parts of a design; ``orderings`` [S, P, K] index ``demonstrations``, each with its separator.

    In a chat the template's text around the turns is part of them; ``said`` and ``asked`` are demonstrations and
    queries without it.
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
        self._rows = np.unique(np.concatenate([group.sets.ravel() for group in design.orderings]))
        self.orderings = [(self.of_rows(group.rows), group.shots) for group in design.orderings]
        self.shots = design.shots
        self._chat = chat
        self._is_cut = scoring == "first_token"
        asked = [(examples[asked.split], asked.rows) for asked in design.asked]
        self.gold = np.concatenate([split.labels[rows] for split, rows in asked])
        self.answers = [split.answers[row] for split, rows in asked for row in rows]
        self.asked = [task.render_query(split.fields[row]) for split, rows in asked for row in rows]
        render = _turns if chat and chat.mode == "multiturn" else _whole
        self.said = [render(task, train.fields[row], int(train.labels[row])) for row in self._rows]
        continuations = [""] if scoring == "generate" else task.continuations()
        self.is_open = continuations == [""]
        if chat:
            self.asked = [text.strip() if chat.mode == "multiturn" else text.rstrip() for text in self.asked]
            continuations = list(map(str.strip, continuations))
        after = (chat.generation if self.is_open else chat.reply) if chat else ""
        self.opening = chat.opening if chat else task.opening()
        self.demonstrations = [chat.demonstration(said) if chat else said[0] for said in self.said]
        self.queries = [text + after for text in self.asked]
        self.continuations = continuations

    def messages(self, demonstrations: Sequence[int] | NDArray[np.int64], query: int) -> list[Message]:
        """The messages of one prompt; none without a chat."""
        said = [self.said[demonstration] for demonstration in demonstrations]
        return self._chat.messages(said, self.asked[query]) if self._chat else []

    def contents(self) -> list[str]:
        """All that comes from task and data, without the chat's template."""
        told = [self._chat.system, self._chat.preface] if self._chat else [self.opening]
        return [*told, *(text for said in self.said for text in said), *self.asked, *self.continuations]

    def of_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in ``demonstrations`` of rows of train."""
        return np.searchsorted(self._rows, rows)

    def scored(self, continuations: Sequence[Ids]) -> list[Ids]:
        """What of the labels' ids is scored, [L]; raises `TokenizationError` where that cannot tell them apart."""
        scored = [ids[:1] for ids in continuations] if self._is_cut else list(continuations)
        seen: dict[bytes, str] = {}
        for text, ids in zip(self.continuations, scored, strict=True):
            if text and not len(ids):
                raise TokenizationError(f"the tokenizer makes no token of the label {text!r}; change its word")
            if (other := seen.setdefault(ids.tobytes(), text)) != text:
                raise TokenizationError(
                    f"the labels {other!r} and {text!r} begin with the same token; set scoring to loglikelihood"
                    if self._is_cut
                    else f"the labels {other!r} and {text!r} have the same tokens; change one label's word"
                )
        return scored

    def context(self, demonstrations: Sequence[int] | NDArray[np.int64]) -> str:
        return self.opening + "".join(self.demonstrations[demonstration] for demonstration in demonstrations)


def _whole(task: Task, fields: Mapping[str, Any], label: int) -> tuple[str, ...]:
    """A demonstration and the separator after it."""
    return (task.render_demonstration(fields, label) + task.separator,)


def _turns(task: Task, fields: Mapping[str, Any], label: int) -> tuple[str, ...]:
    """What user and assistant say in a demonstration: its query, and what follows it."""
    query = task.render_query(fields).strip()
    continuations = task.continuations()
    if continuations != [""]:
        return query, continuations[label].strip()
    demonstration = task.render_demonstration(fields, label).strip()
    if not demonstration.startswith(query):
        raise ConfigError(
            f"task {task.name!r}: with chat multiturn the template 'demonstration' must begin as 'query' does; let it "
            "or set chat to single"
        )
    return query, demonstration[len(query) :].strip()


@dataclass(frozen=True)
class _Encoded:
    ids: Ids
    ends: NDArray[np.int64]  # where each token ends in the text, never decreasing

    def cut(self, place: int) -> int:
        """The number of tokens that end at or before ``place``; one that straddles it belongs to what follows."""
        return int(np.searchsorted(self.ends, place, side="right"))


class _Encoder:
    """Joint tokenisation with offsets, without the special tokens; ``start`` is what the tokenizer puts in front.

    Special tokens in a text are refused; in a ``chat``, one of whose prompts that is, the template may write them.
    Where the template writes BOS, ``start`` is empty. ``opening`` is BOS, whoever puts it there.
    """

    def __init__(self, tokenizer: Tokenizer, chat: str | None = None) -> None:
        if not tokenizer.is_fast:
            raise TokenizationError("the tokenizer has no offsets; use the fast version of it (tokenizer.json)")
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer)
        self._is_chat = chat is not None
        self.start = self.opening = self._start()
        if chat is not None and len(written := self._written(chat)):
            self.start, self.opening = written[:0], written

    def __call__(self, texts: Sequence[str]) -> list[_Encoded]:
        encoded = self._encoded(texts)
        if not self._is_chat:
            self._refuse(self._special, texts, encoded)
        return encoded

    def refuse_special(self, texts: Sequence[str]) -> None:
        """Raises `TokenizationError` where a text holds a special token."""
        self._refuse(self._special, texts, self._encoded(texts))

    def refuse_control(self, texts: Sequence[str], chat: ChatFormat) -> None:
        """Raises `TokenizationError` where a text holds a special token, or an added one that the chat writes."""
        added = [number for token, number in self._tokenizer.get_added_vocab().items() if chat.writes(token)]
        self._refuse(np.union1d(self._special, added).astype(np.int32), texts, self._encoded(texts))

    def _encoded(self, texts: Sequence[str]) -> list[_Encoded]:
        if not texts:
            return []
        encoded = self._tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [
            _Encoded(
                np.array(ids, dtype=np.int32),
                np.maximum.accumulate(np.array(offsets, dtype=np.int64).reshape(-1, 2)[:, 1]),
            )
            for ids, offsets in pairs
        ]

    def _refuse(self, refused: Ids, texts: Sequence[str], encoded: Sequence[_Encoded]) -> None:
        for text, joint in zip(texts, encoded, strict=True):
            if np.isin(joint.ids, refused).any():
                raise TokenizationError(
                    f"the text {text[:60]!r}... holds a special token of this tokenizer; remove it from data or "
                    "template"
                )

    def _written(self, chat: str) -> Ids:
        """BOS, where the chat's template writes it; raises `TokenizationError` where it does so twice."""
        (joint,) = self._encoded([chat])
        bos = self._tokenizer.bos_token_id
        if len(joint.ids) > 1 and joint.ids[0] == joint.ids[1] == bos:
            raise TokenizationError(f"the chat template begins with BOS (id {bos}) twice; repair it")
        return joint.ids[:1] if len(joint.ids) and joint.ids[0] == bos else joint.ids[:0]

    def _start(self) -> Ids:
        plain = self._tokenizer(["a"], add_special_tokens=False)["input_ids"][0]
        whole = self._tokenizer(["a"])["input_ids"][0]
        for begin in range(len(whole)):
            if whole[begin : begin + len(plain)] == plain:
                return np.array(whole[:begin], dtype=np.int32)
        raise TokenizationError("the tokenizer changes text when it adds special tokens; use another tokenizer")


def _special_ids(tokenizer: Tokenizer) -> Ids:
    ordinary = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    return np.array(sorted(set(tokenizer.all_special_ids) - ordinary), dtype=np.int32)


class _Parts:
    """The ids of every part, cut from joint texts, and the seams where cutting apart does not hold.

    ``lead`` is a demonstration of the commonest ending (or the opening) that stands before a part while it is cut; a
    query stands after it.
    """

    def __init__(self, texts: _Texts, encoder: _Encoder) -> None:
        self._texts = texts
        self._encode = encoder
        self._tails = _classes(list(map(_tail, texts.demonstrations)))
        self._lead = texts.demonstrations[_most_common(self._tails)] if texts.demonstrations else texts.opening
        self._follower = texts.queries[0]
        self.opening = self._cut_opening()
        self.first = self._cut_demonstrations(texts.opening)
        self.inner = self._cut_demonstrations(self._lead)
        self.queries, self.continuations, self._odd_queries, self.num_resplit = self._cut_queries()
        self._demonstration_heads = _classes(list(map(_head, texts.demonstrations)))
        self._query_heads = _classes(list(map(_head, texts.queries)))
        self.failed_seams, self.num_seams = self._check_seams()
        self._opening_breaks = self._check_opening()

    def holds(self, ordering: NDArray[np.int64]) -> bool:
        """Whether a context is the concatenation of its parts."""
        if not len(ordering):
            return True
        seams = zip(self._tails[ordering[:-1]], self._demonstration_heads[ordering[1:]], strict=True)
        inside = any(("demonstration", int(tail), int(head)) in self.failed_seams for tail, head in seams)
        return not inside and int(ordering[0]) not in self._opening_breaks

    def cells_outside(self, members: list[NDArray[np.int64]]) -> set[tuple[int, int]]:
        """The (context, query) pairs whose query ids are not the shared ones."""
        num_queries = len(self.queries)
        outside = set(product(range(len(members)), self._odd_queries))
        for context, ordering in enumerate(members):
            if not len(ordering):
                outside |= {(context, query) for query in self._queries_at_the_start()}
            elif self.failed_seams:
                tail = int(self._tails[ordering[-1]])
                seams = (("query", tail, int(head)) for head in self._query_heads)
                failed = [seam in self.failed_seams for seam in seams]
                outside |= {(context, query) for query in range(num_queries) if failed[query]}
        return outside

    def _cut_opening(self) -> Ids:
        (joint,) = self._encode([self._texts.opening + self._follower])
        return joint.ids[: joint.cut(len(self._texts.opening))]

    def _cut_demonstrations(self, lead: str) -> list[Ids]:
        joints = self._encode([lead + text + self._follower for text in self._texts.demonstrations])
        return [
            joint.ids[joint.cut(len(lead)) : joint.cut(len(lead) + len(text))]
            for joint, text in zip(joints, self._texts.demonstrations, strict=True)
        ]

    def _cut_queries(self) -> tuple[list[Ids], list[Ids], list[int], int]:
        splits = _split_labels(self._encode, [self._lead + query for query in self._texts.queries], self._texts)
        shared = Counter(split.key for split in splits).most_common(1)[0][0]
        continuations = next(split.continuations for split in splits if split.key == shared)
        queries = [split.prompt.ids[split.prompt.cut(len(self._lead)) :] for split in splits]
        # A product needs a token a query; an empty one is a prompt all the same.
        odd = [query for query, split in enumerate(splits) if split.key != shared or not len(queries[query])]
        return queries, continuations, odd, sum(split.is_resplit for split in splits)

    def _check_seams(self) -> tuple[set[_Seam], int]:
        every = self._demonstration_seams() | self._query_seams()
        some = _sampled(every)
        failed = self._failing(some)
        is_sample = len(some) < len(every)
        return (self._failing(every), len(every)) if failed and is_sample else (failed, len(some))

    def _failing(self, seams: Mapping[_Seam, tuple[int, int]]) -> set[_Seam]:
        texts = [
            self._lead + self._texts.demonstrations[left] + self._right_text(seam, right)
            for seam, (left, right) in seams.items()
        ]
        (lead,) = self._encode([self._lead + self._follower])
        before = lead.ids[: lead.cut(len(self._lead))]
        failed = set()
        for (seam, (left, right)), joint in zip(seams.items(), self._encode(texts), strict=True):
            expected = np.concatenate([before, self.inner[left], self._right_ids(seam, right)])
            if not np.array_equal(joint.ids[: len(expected)], expected):
                failed.add(seam)
        return failed

    def _right_text(self, seam: _Seam, right: int) -> str:
        if seam[0] == "query":
            return self._texts.queries[right] + self._texts.continuations[0]
        return self._texts.demonstrations[right] + self._follower

    def _right_ids(self, seam: _Seam, right: int) -> Ids:
        return self.queries[right] if seam[0] == "query" else self.inner[right]

    def _demonstration_seams(self) -> dict[_Seam, tuple[int, int]]:
        """Each distinct seam of two demonstrations that adjoin somewhere, with one pair that shows it."""
        adjoining = [
            np.stack([rows[..., :-1].ravel(), rows[..., 1:].ravel()], axis=1) for rows, _ in self._texts.orderings
        ]
        pairs = np.unique(np.concatenate(adjoining), axis=0)
        tails, heads = self._tails, self._demonstration_heads
        return {
            ("demonstration", int(tails[left]), int(heads[right])): (int(left), int(right)) for left, right in pairs
        }

    def _query_seams(self) -> dict[_Seam, tuple[int, int]]:
        lefts = {int(tail): demonstration for demonstration, tail in enumerate(self._tails)}
        rights = {int(head): query for query, head in enumerate(self._query_heads)}
        return {("query", tail, head): (lefts[tail], rights[head]) for tail, head in product(lefts, rights)}

    def _check_opening(self) -> set[int]:
        """The demonstrations before which the opening is not tokenised as it is before a query."""
        texts = self._texts
        joints = self._encode([texts.opening + text + self._follower for text in texts.demonstrations])
        return {
            demonstration
            for demonstration, joint in enumerate(joints)
            if not np.array_equal(joint.ids[: joint.cut(len(texts.opening))], self.opening)
        }

    def _queries_at_the_start(self) -> list[int]:
        """The queries that, right after the opening, are not tokenised as they are after demonstrations."""
        texts = self._texts
        joints = self._encode([texts.opening + query + texts.continuations[0] for query in texts.queries])
        return [
            query
            for query, joint in enumerate(joints)
            if not np.array_equal(joint.ids, np.concatenate([self.opening, self.queries[query], self.continuations[0]]))
        ]


def _sampled(seams: Mapping[_Seam, tuple[int, int]]) -> Mapping[_Seam, tuple[int, int]]:
    """All seams, or of too many a keyed sample in which each side of a seam occurs."""
    if len(seams) <= MAX_CHECKED_SEAMS:
        return seams
    every = list(seams)
    drawn = keyed_sample(len(every), MAX_CHECKED_SEAMS, 0, "checked seams")
    of_left = {(kind, left): (kind, left, right) for kind, left, right in every}
    of_right = {(kind, right): (kind, left, right) for kind, left, right in every}
    chosen = {*(every[number] for number in drawn), *of_left.values(), *of_right.values()}
    return {seam: seams[seam] for seam in every if seam in chosen}


@dataclass(frozen=True)
class _Split:
    """A prompt and its labels, cut at the last token that is the same for all labels."""

    prompt: _Encoded
    continuations: list[Ids]
    is_resplit: bool

    @property
    def key(self) -> tuple[bytes, ...]:
        return tuple(continuation.tobytes() for continuation in self.continuations)


def _split_labels(encode: _Encoder, prompts: Sequence[str], texts: _Texts) -> list[_Split]:
    joints = encode([prompt + continuation for prompt in prompts for continuation in texts.continuations])
    num_labels = len(texts.continuations)
    return [
        _split(len(prompt), joints[number * num_labels : (number + 1) * num_labels])
        for number, prompt in enumerate(prompts)
    ]


def _split(place: int, joints: Sequence[_Encoded]) -> _Split:
    cuts = [joint.cut(place) for joint in joints]
    stable = _common_prefix([joint.ids[:cut] for joint, cut in zip(joints, cuts, strict=True)])
    return _Split(
        prompt=_Encoded(joints[0].ids[:stable], joints[0].ends[:stable]),
        continuations=[joint.ids[stable:] for joint in joints],
        is_resplit=any(
            len(joint.ids) > stable and (stable == 0 or joint.ends[stable - 1] != place) for joint in joints
        ),
    )


def _common_prefix(rows: Sequence[Ids]) -> int:
    length = min(map(len, rows))
    same = np.all([row[:length] == rows[0][:length] for row in rows], axis=0)
    return length if same.all() else int(np.argmin(same))


@dataclass(frozen=True)
class _Contexts:
    """The contexts of all cells, see `Prompts`; ``members`` are each distinct context's demonstrations."""

    distinct: list[Ids]
    ids: NDArray[np.int64]
    of_cell: NDArray[np.int64]
    members: list[NDArray[np.int64]]
    rows: list[Ids]
    marks: list[Ids]
    marked: list[NDArray[np.int64]]


def _contexts(texts: _Texts, parts: _Parts, encoder: _Encoder) -> _Contexts:
    rows: list[Ids] = []
    marks: list[Ids] = []
    marked: list[NDArray[np.int64]] = []
    numbers: dict[bytes, int] = {}
    distinct: list[Ids] = []
    members: list[NDArray[np.int64]] = []
    by_group = []
    for orderings, shots in texts.orderings:
        of_cell = np.empty((*orderings.shape[:2], len(shots)), dtype=np.int64)
        for cell in np.ndindex(*orderings.shape[:2]):
            own_rows, own_marks = _rows(orderings[cell], shots, texts, parts, encoder)
            contexts = [row[:mark] for row, lengths in zip(own_rows, own_marks, strict=True) for mark in lengths]
            for place, ids in enumerate(contexts):
                key = hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=16).digest()
                number = of_cell[(*cell, place)] = numbers.setdefault(key, len(distinct))
                if number == len(distinct):
                    distinct.append(ids)
                    members.append(orderings[cell][: shots[place]])
            rows += own_rows
            marks += own_marks
            marked += np.split(of_cell[cell], np.cumsum([len(lengths) for lengths in own_marks])[:-1])
        by_group.append(of_cell)
    names = np.array([int.from_bytes(key[:8], "little", signed=True) for key in numbers], dtype=np.int64)
    return _Contexts(distinct, names, np.concatenate(by_group, axis=2), members, rows, marks, marked)


def _rows(
    ordering: NDArray[np.int64], shots: Sequence[int], texts: _Texts, parts: _Parts, encoder: _Encoder
) -> tuple[list[Ids], list[Ids]]:
    """An ordering's contexts at each number of shots: one row where the parts simply join, else a row for each."""
    if not parts.holds(ordering):
        joint = [_joint_context(ordering[:count], texts, encoder) for count in shots]
        return joint, [np.array([len(ids)], dtype=np.int32) for ids in joint]
    pieces = [encoder.start, parts.opening]
    pieces += [parts.first[demonstration] for demonstration in ordering[:1]]
    pieces += [parts.inner[demonstration] for demonstration in ordering[1:]]
    lengths = np.cumsum([len(piece) for piece in pieces], dtype=np.int32)
    return [np.concatenate(pieces)], [lengths[1 + np.array(shots)]]


def _joint_context(ordering: NDArray[np.int64], texts: _Texts, encoder: _Encoder) -> Ids:
    text = texts.context(ordering)
    (joint,) = encoder([text + texts.queries[0]])
    return np.concatenate([encoder.start, joint.ids[: joint.cut(len(text))]])


def _cell(texts: _Texts, encoder: _Encoder, ordering: NDArray[np.int64], context: int, query: int) -> Cell:
    (split,) = _split_labels(encoder, [texts.context(ordering) + texts.queries[query]], texts)
    return Cell(context, query, np.concatenate([encoder.start, split.prompt.ids]), texts.scored(split.continuations))


def _failed_prompts(
    texts: _Texts,
    parts: _Parts,
    contexts: _Contexts,
    outside: set[tuple[int, int]],
    encoder: _Encoder,
    seed: int,
) -> tuple[int, int]:
    """How many of a keyed sample of whole prompts differ from their product, and the size of the sample."""
    shape = (*contexts.of_cell.shape, len(texts.queries), len(texts.continuations))
    total = int(np.prod(shape))
    sample = keyed_sample(total, NUM_CHECKED_PROMPTS, seed, "checked prompts")
    failed = checked = 0
    for *cell, query, label in zip(*np.unravel_index(sample, shape), strict=True):
        context = int(contexts.of_cell[tuple(cell)])
        if (context, int(query)) in outside:
            continue
        text = texts.context(contexts.members[context])
        (joint,) = encoder([text + texts.queries[query] + texts.continuations[label]])
        whole = np.concatenate([encoder.start, joint.ids])
        joined = np.concatenate([contexts.distinct[context], parts.queries[query], parts.continuations[label]])
        checked += 1
        failed += not np.array_equal(whole, joined)
    return failed, checked


def _check_chats(texts: _Texts, contexts: _Contexts, chat: ChatFormat, seed: int) -> None:
    """Raises `ModelError` where the template renders a conversation otherwise than it was put together: a keyed sample
    of them, and those with the fewest and the most demonstrations."""
    sizes = list(map(len, contexts.members))
    shape = (len(sizes), len(texts.queries), len(texts.continuations))
    sample = keyed_sample(int(np.prod(shape)), NUM_CHECKED_CHATS, seed, "checked chats")
    cells = list(zip(*(axis.tolist() for axis in np.unravel_index(sample, shape)), strict=True))
    cells += [(int(place), 0, 0) for place in (np.argmin(sizes), np.argmax(sizes))]
    chats, expected = [], []
    for context, query, label in cells:
        members, answer = contexts.members[context], texts.continuations[label]
        answered = [] if texts.is_open else [assistant(answer)]
        chats.append(Chat([*texts.messages(members, query), *answered], texts.is_open))
        expected.append(texts.context(members) + texts.queries[query] + answer)
    for rendered, text, (context, query, _) in zip(chat.template.render(chats), expected, cells, strict=True):
        if rendered != text if texts.is_open else not rendered.startswith(text):
            raise ModelError(
                f"the chat template changes what is said (query {query} after {sizes[context]} demonstrations); begin "
                "demonstrations and queries without white space, or set chat to none"
            )


def _tail(text: str) -> str:
    """The last two words with the white space around them: no merge of any tokenizer in use reaches farther."""
    words = text.rsplit(None, 2)
    return text if len(words) < 3 else text[len(words[0]) :]


def _head(text: str) -> str:
    words = text.split(None, 2)
    return text if len(words) < 3 else text[: len(text) - len(words[2])]


def _most_common(classes: NDArray[np.int64]) -> int:
    """The first member of the largest class."""
    return int(np.argmax(np.bincount(classes)[classes]))


def _classes(texts: Sequence[str]) -> NDArray[np.int64]:
    """Equal texts get equal numbers, int64 [N]."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int64)
