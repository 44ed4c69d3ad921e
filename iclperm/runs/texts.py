"""The texts of a run's prompts, kept beside its results: every prompt from its folder alone, without data or tokenizer.

``texts.parquet`` has a row for each distinct piece that prompts are put together of, and ``texts.parquet.sha256`` its
checksum, which is written last: without it the file is not there yet. Neither is part of what identifies a run, and no
result rests on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iclperm.prompts.chat import Message, conversation
from iclperm.prompts.design import Design
from iclperm.prompts.encode import EncodedText
from iclperm.prompts.tokenise import Pieces, Prompts
from iclperm.tasks.task import Examples, Task

_ABOUT = b"iclperm"
_MOST_OWN_IDS = 1 << 20
"""Token ids of contexts and prompts that are not their pieces joined; where there are more, none are kept at all."""
MOST_OWN = 1 << 16
"""Such contexts and prompts, likewise."""
_KINDS = ("start", "opening", "demonstration", "first", "query", "label", "choice", "context", "cell")


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind))


_SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("split", pa.string()),
        ("number", pa.int64()),
        ("context", pa.int64()),
        ("shared", pa.int32()),
        ("text", pa.string()),
        ("worded", pa.string()),
        ("turns", _list_of(pa.string())),
        ("ids", _list_of(pa.int32())),
        ("ends", _list_of(pa.int32())),
    ]
)


@dataclass(frozen=True)
class Piece:
    """A text, how the task words it (where it is a demonstration's), what is said in it turn by turn (of a chat), and
    its tokens (none where they are not known)."""

    text: str
    worded: str
    turns: tuple[str, ...]
    tokens: EncodedText


@dataclass(frozen=True)
class PromptTexts:
    """The pieces of a run's prompts.

    Of a chat the texts are what the template renders. Tokens of a piece are those that it has where pieces simply join;
    ``first`` are those of demonstrations right after the opening, where these differ. ``contexts`` and ``cells`` are
    the tokens of what is not its pieces joined: of whole contexts by their names, and by (context, split, query) how
    many of the context's tokens are kept, and those after them.
    """

    start: Piece
    """The special tokens in front of every prompt that its text does not show; their names are its turns."""
    opening: Piece
    demonstrations: Mapping[int, Piece]
    """By row of train, each with the separator after it."""
    queries: Mapping[str, Sequence[Piece]]
    """Up to where the label begins, by split."""
    labels: tuple[str, ...]
    """What the labels append to a prompt; none where answers are generated."""
    choices: Mapping[tuple[str, int], tuple[str, ...]]
    """What the choices of a query's own append to a prompt that ends in it."""
    first: Mapping[int, EncodedText]
    contexts: Mapping[int, EncodedText]
    cells: Mapping[tuple[int, str, int], tuple[int, EncodedText]]
    has_tokens: bool
    is_restricted: bool
    """Whether the task says that its data may not be handed on."""
    chat: Mapping[str, str] | None
    """Of a chat its mode, the system message, and what the user's first turn begins with."""

    @classmethod
    def of_table(cls, table: pa.Table) -> PromptTexts:
        """Raises `ValueError`, or what a lookup does, for a table that is none of texts."""
        if not table.schema.equals(_SCHEMA):
            raise ValueError("its columns are not those of texts")
        about = json.loads((table.schema.metadata or {})[_ABOUT])
        of_kind: dict[str, list[_TextsRow]] = {kind: [] for kind in _KINDS}
        for row in _rows(table):
            of_kind[row.kind].append(row)
        (start,), (opening,) = of_kind["start"], of_kind["opening"]
        queries: dict[str, list[Piece]] = {}
        for row in of_kind["query"]:
            found = queries.setdefault(row.split, [])
            if row.number != len(found):
                raise ValueError("its queries are not in order")
            found.append(row.piece)
        return cls(
            start=start.piece,
            opening=opening.piece,
            demonstrations={row.number: row.worded_piece(about["separator"]) for row in of_kind["demonstration"]},
            queries=queries,
            labels=tuple(row.piece.text for row in of_kind["label"]),
            choices=_choices(of_kind["choice"]),
            first={row.number: row.tokens for row in of_kind["first"]},
            contexts={row.context: row.tokens for row in of_kind["context"]},
            cells={(row.context, row.split, row.number): (row.shared, row.tokens) for row in of_kind["cell"]},
            has_tokens=about["has_tokens"] is True,
            is_restricted=about["restricted"] is True,
            chat=_chat(about["chat"]),
        )

    def after(self, query: tuple[str, int] | None) -> tuple[str, ...]:
        """What may follow a query: its own choices, else the labels of all."""
        return self.labels if query is None else self.choices.get(query, self.labels)

    def text(self, rows: Sequence[int], query: tuple[str, int] | None = None) -> str:
        """The prompt of these demonstrations, up to the label; without a query up to where that would begin."""
        context = self.opening.text + "".join(self.demonstrations[row].text for row in rows)
        return context if query is None else context + self.queries[query[0]][query[1]].text

    def messages(self, rows: Sequence[int], query: tuple[str, int]) -> list[Message]:
        """The messages of a chat; none of other prompts."""
        if self.chat is None:
            return []
        turns = [self.demonstrations[row].turns for row in rows]
        (asked,) = self.queries[query[0]][query[1]].turns
        is_single = self.chat["mode"] == "single"
        return conversation(turns, asked, self.chat["system"], self.chat["preface"], is_single=is_single)

    def context_lengths(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """The numbers of tokens of contexts of 0, 1, ... all of these demonstrations, without tokens of their own."""
        opening = len(self.start.tokens.ids) + len(self.opening.tokens.ids)
        pieces = [
            self.demonstrations[row].tokens if place else self.first.get(row, self.demonstrations[row].tokens)
            for place, row in enumerate(rows)
        ]
        return np.cumsum([opening, *(len(piece.ids) for piece in pieces)], dtype=np.int64)

    def tokens(
        self, rows: Sequence[int], context: int | None, query: tuple[str, int] | None = None
    ) -> EncodedText | None:
        """All tokens of such a prompt as they were scored, with the places in its text where they end; None where they
        are not known. ``context`` is what the run calls the context, None of none that has tokens of its own."""
        if not self.has_tokens:
            return None
        found = None if context is None else self.contexts.get(context)
        if found is None:
            pieces = [(0, self.start.tokens), (len(self.opening.text), self.opening.tokens)]
            for place, row in enumerate(rows):
                piece = self.demonstrations[row]
                own = piece.tokens if place else self.first.get(row, piece.tokens)
                pieces.append((len(piece.text), own))
            found = _joined(pieces)
        if query is None:
            return found
        if context is not None and (context, *query) in self.cells:
            shared, rest = self.cells[(context, *query)]
            pairs = zip(_both(found), _both(rest), strict=True)
            return EncodedText(*(np.concatenate([before[:shared], after]) for before, after in pairs))
        asked = self.queries[query[0]][query[1]]
        return _joined([(len(self.text(rows)), found), (len(asked.text), asked.tokens)])


def texts_table(
    task: Task, design: Design, train: Examples, pieces: Pieces, prompts: Prompts | None, start: Sequence[str]
) -> pa.Table:
    """The pieces of a design's prompts as a table; ``prompts`` are their tokens, None where these are not known, and
    ``start`` names the tokens in front of every prompt."""
    rows: list[dict[str, Any]] = []
    texts, chat, encoded = pieces.texts, pieces.chat, pieces.encoded
    if prompts is None or encoded is None or _has_too_many(pieces, prompts):
        prompts = encoded = None

    def add(kind: str, tokens: EncodedText | None = None, **columns: Any) -> None:
        ids = {} if tokens is None else {"ids": tokens.ids.tolist(), "ends": tokens.ends.tolist()}
        rows.append({**dict.fromkeys(_SCHEMA.names), "kind": kind, **columns, **ids})

    def turns(said: Sequence[str]) -> dict[str, Any]:
        return {"turns": list(said)} if chat else {}

    before = EncodedText(pieces.before, np.zeros(len(pieces.before), dtype=np.int64))
    add("start", before, text="", turns=list(start) if len(pieces.before) else [])
    add("opening", None if encoded is None else encoded.opening, text=texts.opening)
    drawn = texts.rows.tolist()
    worded = task.render_demonstrations([train.fields[row] for row in drawn], [train.answers[row] for row in drawn])
    for place, row in enumerate(drawn):
        text, said = texts.demonstrations[place], turns(texts.bare_demonstrations[place])
        said |= {} if text.startswith(worded[place]) else {"worded": worded[place]}
        inner = None if encoded is None else encoded.inner[place]
        add("demonstration", inner, number=row, text=text, **said)
        if encoded is not None and not np.array_equal(encoded.first[place].ids, encoded.inner[place].ids):
            add("first", encoded.first[place], number=row)
    queries = [(split.split, number) for split in design.queries for number in range(len(split.rows))]
    for place, (split, number) in enumerate(queries):
        said = turns([texts.bare_queries[place]])
        asked = None if encoded is None else encoded.queries[place]
        add("query", asked, split=split, number=number, text=texts.queries[place], **said)
    for place, text in enumerate([] if texts.is_open else texts.continuations):
        add("label", number=place, text=text)
    for (split, number), own in zip(queries, texts.choices or [], strict=bool(texts.choices)):
        for place, text in enumerate(own):
            add("choice", split=split, number=number, shared=place, text=text)
    if prompts is not None:
        for place, tokens in pieces.contexts.items():
            add("context", tokens, context=int(prompts.context_ids[place]))
        for cell in prompts.apart:
            split, number = queries[cell.query]
            shared = _num_shared(cell.tokens.ids, prompts.contexts[cell.context])
            rest = EncodedText(*(numbers[shared:] for numbers in _both(cell.tokens)))
            named = {"context": int(prompts.context_ids[cell.context]), "split": split, "number": number}
            add("cell", rest, **named, shared=shared)
    about = {
        "restricted": task.restricted,
        "separator": len(task.separator),
        "has_tokens": prompts is not None,
        "chat": None if chat is None else {"mode": chat.mode, "system": chat.system, "preface": chat.preface},
    }
    return pa.Table.from_pylist(rows, schema=_SCHEMA.with_metadata({_ABOUT: json.dumps(about).encode()}))


@dataclass(frozen=True)
class _TextsRow:
    """A row of the table; numbers that it lacks are -1, texts "", and its tokens none."""

    kind: str
    split: str
    number: int
    context: int
    shared: int
    text: str
    worded: str
    turns: tuple[str, ...]
    tokens: EncodedText

    @property
    def piece(self) -> Piece:
        return Piece(self.text, self.worded, self.turns, self.tokens)

    def worded_piece(self, separator: int) -> Piece:
        """A demonstration's, whose text ends in a separator of that length unless its words are told apart."""
        return replace(self.piece, worded=self.worded or self.text[: len(self.text) - separator])


def _rows(table: pa.Table) -> Iterator[_TextsRow]:
    (lengths, ids), (other, ends) = _lists(table["ids"]), _lists(table["ends"])
    if not np.array_equal(lengths, other) or (ids < 0).any():
        raise ValueError("its tokens do not fit their places")
    begins = np.concatenate([[0], np.cumsum(lengths)])
    most = pc.utf8_length(table["text"]).fill_null(np.iinfo(np.int32).max).to_numpy()
    goes_back = np.diff(ends, prepend=0) < 0
    goes_back[begins[:-1][lengths > 0]] = False
    if goes_back.any() or (ends < 0).any() or (ends > np.repeat(most, lengths)).any():
        raise ValueError("its tokens do not fit their texts")
    plain = table.drop_columns(["ids", "ends"]).to_pylist()
    for begin, end, row in zip(begins[:-1], begins[1:], plain, strict=True):
        tokens = EncodedText(ids[begin:end], ends[begin:end].astype(np.int64))
        given: dict[str, Any] = {
            **{name: row[name] or "" for name in ("kind", "split", "text", "worded")},
            **{name: -1 if row[name] is None else row[name] for name in ("number", "context", "shared")},
        }
        yield _TextsRow(**given, turns=tuple(turn or "" for turn in row["turns"] or ()), tokens=tokens)


def _choices(rows: Sequence[_TextsRow]) -> dict[tuple[str, int], tuple[str, ...]]:
    found: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        own = found.setdefault((row.split, row.number), [])
        if row.shared != len(own):
            raise ValueError("its choices are not in order")
        own.append(row.text)
    return {query: tuple(own) for query, own in found.items()}


def _lists(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The lengths of lists, 0 of null, and all that is in them."""
    whole = column.combine_chunks()
    lengths = whole.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64), whole.flatten().fill_null(-1).to_numpy(zero_copy_only=False)


def _chat(about: Any) -> Mapping[str, str] | None:
    if about is None:
        return None
    if about["mode"] not in ("single", "multiturn") or not all(isinstance(text, str) for text in about.values()):
        raise ValueError("it tells of no chat that there is")
    return {key: about[key] for key in ("mode", "system", "preface")}


def _both(tokens: EncodedText) -> tuple[NDArray[Any], NDArray[Any]]:
    return tokens.ids, tokens.ends


def _joined(parts: Sequence[tuple[int, EncodedText]]) -> EncodedText:
    """The tokens of texts of these lengths, one after the other."""
    begins = np.cumsum([0, *(length for length, _ in parts[:-1])])
    ends = [tokens.ends + begin for begin, (_, tokens) in zip(begins, parts, strict=True)]
    return EncodedText(np.concatenate([tokens.ids for _, tokens in parts]), np.concatenate(ends))


def _has_too_many(pieces: Pieces, prompts: Prompts) -> bool:
    own = [*pieces.contexts.values(), *(cell.tokens for cell in prompts.apart)]
    return len(own) > MOST_OWN or sum(len(tokens.ids) for tokens in own) > _MOST_OWN_IDS


def _num_shared(ids: NDArray[np.int32], others: NDArray[np.int32]) -> int:
    length = min(len(ids), len(others))
    differ = np.flatnonzero(ids[:length] != others[:length])
    return int(differ[0]) if len(differ) else length
