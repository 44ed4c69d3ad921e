"""The contexts of a design as ids, each once, and samples of whole prompts and chats compared with their parts."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from iclperm.errors import ModelError
from iclperm.prompts.chat import Chat, ChatFormat, assistant
from iclperm.prompts.design import keyed_sample
from iclperm.prompts.encode import EncodedText, Ids, JointEncoder
from iclperm.prompts.render import DesignTexts
from iclperm.prompts.seams import CHECKS, PromptParts


class RowBeginnings:
    """Beginnings of rows of integers, each made when it is asked for: as arrays of their own they take 200 bytes each,
    so 8.

    Beginning i are the first ``lengths[i]`` numbers of row ``row_of[i]``.
    """

    def __init__(self, rows: Sequence[NDArray[Any]], row_of: Iterable[int], lengths: Iterable[int]) -> None:
        self._rows = rows
        self._row_of, self._lengths = (np.array(numbers, dtype=np.int32) for numbers in (row_of, lengths))

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, number: int) -> NDArray[Any]:
        row = self._rows[int(self._row_of[number])]
        return row[: int(self._lengths[number])]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        for row, length in zip(self._row_of.tolist(), self._lengths.tolist(), strict=True):
            yield self._rows[row][:length]


class Laid(Protocol):
    """What stands before the queries of a design: the demonstrations of each (context, query), and how many each
    context has, [C]; ``of_cell`` int64 [S, P, K] are numbers of contexts."""

    @property
    def of_cell(self) -> NDArray[np.int64]: ...
    @property
    def sizes(self) -> list[int]: ...
    def members(self, context: int, query: int) -> NDArray[Any]:
        """Places of demonstrations, in order."""
        ...

    def beginning(self, context: int, query: int) -> Ids:
        """The ids before the query."""
        ...


@dataclass(frozen=True)
class DesignContexts:
    """The contexts of all cells: the distinct ones, and which each cell has.

    ``distinct`` [C] are their ids, ``ids`` int64 [C] name them by content, ``of_cell`` int64 [S, P, K] are their
    numbers, and ``orders`` [C] the places of each one's demonstrations. ``rows``, ``marks`` and ``marked`` hold the
    same contexts as prefixes of fewer rows, as `Prompts` says. ``joint`` has, by their numbers, the contexts that are
    not their parts joined: all their tokens with the places in the context's text where they end.
    """

    distinct: RowBeginnings
    ids: NDArray[np.int64]
    of_cell: NDArray[np.int64]
    orders: RowBeginnings
    rows: list[Ids]
    marks: list[Ids]
    marked: list[NDArray[np.int64]]
    joint: dict[int, EncodedText]

    @property
    def sizes(self) -> list[int]:
        """See `Laid`."""
        return list(map(len, self.orders))

    def members(self, context: int, query: int = 0) -> NDArray[Any]:
        """See `Laid`; the same for all queries."""
        return self.orders[context]

    def beginning(self, context: int, query: int = 0) -> Ids:
        """See `Laid`, likewise."""
        return self.distinct[context]


def lay_contexts(texts: DesignTexts, parts: PromptParts, encoder: JointEncoder) -> DesignContexts:
    """The contexts of every set, permutation and number of shots, joined of their parts where these join. O(tokens)."""
    rows: list[Ids] = []
    marks: list[Ids] = []
    ordered: list[NDArray[np.int64]] = []
    contents = bytearray()  # 16 bytes a context of each cell, one after the other; a dict of them takes 200 each
    row_of, lengths, ordering_of, counts = (array("i") for _ in range(4))  # of each
    joint: dict[int, EncodedText] = {}
    for orderings, shots in texts.orderings:
        for cell in np.ndindex(*orderings.shape[:2]):
            apart = _apart(orderings[cell], shots, texts, parts, encoder)
            laid = _joined(orderings[cell], shots, parts, encoder) if apart is None else _each_a_row(apart)
            joint |= enumerate(apart or (), start=len(lengths))
            for row, own in zip(*laid, strict=True):
                contents += b"".join(_contents(row, own))
                row_of.extend([len(rows)] * len(own))
                lengths.extend(own.tolist())
                rows.append(row)
                marks.append(own)
            ordering_of.extend([len(ordered)] * len(shots))
            counts.extend(shots)
            ordered.append(orderings[cell])
    keys = np.frombuffer(contents, dtype="<i8").reshape(-1, 2)
    number_of, first = _numbered(keys)
    sizes = [(*orderings.shape[:2], len(shots)) for orderings, shots in texts.orderings]
    groups = np.split(number_of, np.cumsum([np.prod(size, dtype=np.int64) for size in sizes])[:-1])
    return DesignContexts(
        distinct=RowBeginnings(rows, *(np.asarray(each)[first] for each in (row_of, lengths))),
        ids=keys[first, 0].astype(np.int64),
        of_cell=np.concatenate([group.reshape(size) for group, size in zip(groups, sizes, strict=True)], axis=2),
        orders=RowBeginnings(ordered, *(np.asarray(each)[first] for each in (ordering_of, counts))),
        rows=rows,
        marks=marks,
        marked=np.split(number_of, np.cumsum([len(own) for own in marks])[:-1]),
        joint={int(number_of[place]): joint[place] for place in first.tolist() if place in joint},
    )


def _numbered(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows [N, 2] numbered from 0 on, equal ones alike, in the order in which they first come; and where that is."""
    pairs = np.ascontiguousarray(keys).view([("high", np.int64), ("low", np.int64)]).ravel()
    _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
    order = np.argsort(first)
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return places[inverse], first[order]


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
    return context_ids(ids, np.array([len(ids)]))[0]


def context_ids(ids: Ids, lengths: NDArray[np.int64]) -> list[int]:
    """What they call each of the beginnings of a row, of ascending ``lengths``; O(its tokens)."""
    return [int.from_bytes(content[:8], "little", signed=True) for content in _contents(ids, lengths)]


def _contents(row: Ids, lengths: NDArray[Any]) -> Iterator[bytes]:
    """The digest of each of the beginnings of a row, of ascending lengths; its tokens are read once."""
    raw, digest, begin = row.astype("<i4").tobytes(), hashlib.blake2b(digest_size=16), 0
    for end in (4 * lengths.astype(np.int64)).tolist():
        digest.update(raw[begin:end])
        begin = end
        yield digest.digest()


def failed_prompts(
    texts: DesignTexts,
    parts: PromptParts,
    contexts: Laid,
    outside: Collection[tuple[int, int]],
    encoder: JointEncoder,
    seed: int,
    count: int = CHECKS.prompts,
) -> tuple[int, int]:
    """How many of ``count`` whole prompts, a keyed sample, differ from the parts that stand for them, and how many were
    looked at: those in ``outside`` are not."""
    shape = (*contexts.of_cell.shape, len(texts.queries), _most_after(texts))
    total = int(np.prod(shape))
    sample = keyed_sample(total, count, seed, "checked prompts")
    failed = checked = 0
    for *cell, query, label in zip(*np.unravel_index(sample, shape), strict=True):
        context = int(contexts.of_cell[tuple(cell)])
        if (context, int(query)) in outside:
            continue
        label %= len(texts.after(query))
        text = texts.context(contexts.members(context, int(query)))
        (joint,) = encoder([text + texts.queries[query] + texts.after(query)[label]])
        whole = np.concatenate([encoder.start, joint.ids])
        before = contexts.beginning(context, int(query))
        joined = np.concatenate([before, parts.queries[query], parts.after(query)[label]])
        checked += 1
        failed += not np.array_equal(whole, joined)
    return failed, checked


def _most_after(texts: DesignTexts) -> int:
    """The most texts that may follow a query."""
    return max(map(len, texts.choices)) if texts.choices else len(texts.continuations)


def check_chats(texts: DesignTexts, contexts: Laid, chat: ChatFormat, seed: int, count: int = CHECKS.chats) -> None:
    """Raises `ModelError` where the template renders a conversation otherwise than it was put together: one of
    ``count``, a keyed sample, or one of those with the fewest and the most demonstrations."""
    sizes = contexts.sizes
    shape = (len(sizes), len(texts.queries), _most_after(texts))
    sample = keyed_sample(int(np.prod(shape)), count, seed, "checked chats")
    cells = list(zip(*(axis.tolist() for axis in np.unravel_index(sample, shape)), strict=True))
    cells += [(int(place), 0, 0) for place in (np.argmin(sizes), np.argmax(sizes))]
    chats, expected = [], []
    for context, query, label in cells:
        after = texts.after(query)
        members, answer = contexts.members(context, query), after[label % len(after)]
        answered = [] if texts.is_open else [assistant(answer)]
        chats.append(Chat([*texts.messages(members, query), *answered], texts.is_open))
        expected.append(texts.context(members) + texts.queries[query] + answer)
    for rendered, text, (context, query, _) in zip(chat.template.render(chats), expected, cells, strict=True):
        if rendered != text if texts.is_open else not rendered.startswith(text):
            raise ModelError(
                f"the chat template changes what is said (query {query} after {sizes[context]} demonstrations); begin "
                "demonstrations and queries without white space, or set chat to none"
            )
