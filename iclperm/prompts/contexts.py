"""The contexts of a design as ids, each once, and samples of whole prompts and chats compared with their parts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iclperm.errors import ModelError
from iclperm.prompts.chat import Chat, ChatFormat, assistant
from iclperm.prompts.design import keyed_sample
from iclperm.prompts.encode import EncodedText, Ids, JointEncoder
from iclperm.prompts.render import DesignTexts
from iclperm.prompts.seams import CHECKS, PromptParts


@dataclass(frozen=True)
class DesignContexts:
    """The contexts of all cells: the distinct ones, and which each cell has.

    ``distinct`` [C] are their ids, ``ids`` int64 [C] name them by content, ``of_cell`` int64 [S, P, K] are their
    numbers, and ``members`` [C] the places of each one's demonstrations. ``rows``, ``marks`` and ``marked`` hold the
    same contexts as prefixes of fewer rows, as `Prompts` says. ``joint`` has, by their numbers, the contexts that are
    not their parts joined: all their tokens with the places in the context's text where they end.
    """

    distinct: list[Ids]
    ids: NDArray[np.int64]
    of_cell: NDArray[np.int64]
    members: list[NDArray[np.int64]]
    rows: list[Ids]
    marks: list[Ids]
    marked: list[NDArray[np.int64]]
    joint: dict[int, EncodedText]


def lay_contexts(texts: DesignTexts, parts: PromptParts, encoder: JointEncoder) -> DesignContexts:
    """The contexts of every set, permutation and number of shots, joined of their parts where these join. O(tokens)."""
    rows: list[Ids] = []
    marks: list[Ids] = []
    marked: list[NDArray[np.int64]] = []
    numbers: dict[bytes, int] = {}
    distinct: list[Ids] = []
    members: list[NDArray[np.int64]] = []
    joint: dict[int, EncodedText] = {}
    by_group = []
    for orderings, shots in texts.orderings:
        of_cell = np.empty((*orderings.shape[:2], len(shots)), dtype=np.int64)
        for cell in np.ndindex(*orderings.shape[:2]):
            apart = _apart(orderings[cell], shots, texts, parts, encoder)
            laid = _joined(orderings[cell], shots, parts, encoder) if apart is None else _each_a_row(apart)
            own_rows, own_marks = laid
            contexts = [row[:mark] for row, lengths in zip(own_rows, own_marks, strict=True) for mark in lengths]
            for place, ids in enumerate(contexts):
                key = _content(ids)
                number = of_cell[(*cell, place)] = numbers.setdefault(key, len(distinct))
                if number == len(distinct):
                    distinct.append(ids)
                    members.append(orderings[cell][: shots[place]])
                    joint |= {} if apart is None else {number: apart[place]}
            rows += own_rows
            marks += own_marks
            marked += np.split(of_cell[cell], np.cumsum([len(lengths) for lengths in own_marks])[:-1])
        by_group.append(of_cell)
    names = np.array([context_id(ids) for ids in distinct], dtype=np.int64)
    return DesignContexts(distinct, names, np.concatenate(by_group, axis=2), members, rows, marks, marked, joint)


def _apart(
    ordering: NDArray[np.int64], shots: Sequence[int], texts: DesignTexts, parts: PromptParts, encoder: JointEncoder
) -> list[EncodedText] | None:
    """An ordering's contexts at each number of shots, each tokenised as a whole; None where the parts simply join."""
    if parts.holds(ordering):
        return None
    return [joint_context(texts.context(ordering[:count]), texts.queries[0], encoder) for count in shots]


def _each_a_row(contexts: Sequence[EncodedText]) -> tuple[list[Ids], list[Ids]]:
    return [context.ids for context in contexts], [np.array([len(one.ids)], dtype=np.int32) for one in contexts]


def _joined(
    ordering: NDArray[np.int64], shots: Sequence[int], parts: PromptParts, encoder: JointEncoder
) -> tuple[list[Ids], list[Ids]]:
    """An ordering's contexts as prefixes of one row, which is the parts joined."""
    pieces = [encoder.start, parts.opening]
    pieces += [parts.first[demonstration] for demonstration in ordering[:1]]
    pieces += [parts.inner[demonstration] for demonstration in ordering[1:]]
    lengths = np.cumsum([len(piece) for piece in pieces], dtype=np.int32)
    return [np.concatenate(pieces)], [lengths[1 + np.array(shots)]]


def joint_context(text: str, query: str, encoder: JointEncoder) -> EncodedText:
    """The tokens of a context, tokenised with a query after it; those that the tokenizer puts in front end at 0."""
    (joint,) = encoder([text + query])
    return encoder.begun(joint.until(len(text)))


def context_id(ids: Ids) -> int:
    """What a run's tables call the context of these ids."""
    return int.from_bytes(_content(ids)[:8], "little", signed=True)


def _content(ids: Ids) -> bytes:
    return hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=16).digest()


def failed_prompts(
    texts: DesignTexts,
    parts: PromptParts,
    contexts: DesignContexts,
    outside: set[tuple[int, int]],
    encoder: JointEncoder,
    seed: int,
    count: int = CHECKS.prompts,
) -> tuple[int, int]:
    """How many of ``count`` whole prompts, a keyed sample, differ from the parts that stand for them, and how many were
    looked at: those in ``outside`` are not."""
    shape = (*contexts.of_cell.shape, len(texts.queries), len(texts.continuations))
    total = int(np.prod(shape))
    sample = keyed_sample(total, count, seed, "checked prompts")
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


def check_chats(
    texts: DesignTexts, contexts: DesignContexts, chat: ChatFormat, seed: int, count: int = CHECKS.chats
) -> None:
    """Raises `ModelError` where the template renders a conversation otherwise than it was put together: one of
    ``count``, a keyed sample, or one of those with the fewest and the most demonstrations."""
    sizes = list(map(len, contexts.members))
    shape = (len(sizes), len(texts.queries), len(texts.continuations))
    sample = keyed_sample(int(np.prod(shape)), count, seed, "checked chats")
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
