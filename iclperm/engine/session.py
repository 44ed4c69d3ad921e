"""A session: keys and values that stay from call to call, for work that is not known beforehand.

A search, a bandit, a reranker asks as it goes along. Its session holds a tree that only grows, and a pool of keys and
values; every call forwards what is new of it and nothing else. Where rows are invariant (`Engine.row_invariant`),
answers have the bits that `Engine.score` gives, whatever was asked before and whatever was evicted since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from iclperm.engine.encoding import Encoder, split_at_labels
from iclperm.engine.executor import Report
from iclperm.engine.forward import KvPool, TreeForward
from iclperm.engine.growing_tree import ROOT, GrowingTree
from iclperm.engine.plan import Pack
from iclperm.engine.scores import INVALID, OK, Scores, by_query
from iclperm.engine.shared_text import SpannedText
from iclperm.engine.tree import Ids, IntArray, Rows, TokenArray
from iclperm.errors import RequestError

if TYPE_CHECKING:
    from iclperm.engine.model import TreeModel

Text = str | Ids
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Node:
    """A point in a session's tree: what comes after some tokens. Equal tokens are one node.

    ``text`` is what it was made of, None of token ids.
    """

    path: IntArray = field(repr=False, compare=False)
    number: int
    text: str | None = field(default=None, repr=False)
    spans: SpannedText | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        """Tokens from the beginning, BOS included."""
        return self.path.size


@dataclass(frozen=True)
class NextTokens:
    """The likeliest next tokens of N nodes: ids int32 [N, top], log-probabilities in nats float32 [N, top], falling."""

    ids: npt.NDArray[np.int32]
    logprob: npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Wanted:
    """What is asked of one path: the log-probabilities of ``ids`` int32 [X], each after the token of the path at
    ``places`` int64 [X], rising."""

    path: IntArray
    places: IntArray
    ids: TokenArray


class Session:
    """Made by `Engine.session`; a context manager, whose end gives its memory back.

    ``num_slots`` tokens have room for their keys and values. A session is for one thread at a time.
    """

    def __init__(
        self,
        model: TreeModel,
        encoder: Encoder,
        call: Callable[[], AbstractContextManager[Report]],
        *,
        num_slots: int,
        pack_tokens: int,
        max_tokens: int,
    ) -> None:
        self._model, self._encoder, self._call = model, encoder, call
        self._tree = GrowingTree(num_slots)
        self._pool: KvPool | None = model.pool(num_slots)
        self._pack_tokens, self._max_tokens = pack_tokens, max_tokens
        self._shared = encoder.sharing(is_strict=True)
        self.totals = Report()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back; a session that is closed answers no more."""
        self._pool = None

    @property
    def num_tokens(self) -> int:
        """Distinct tokens that were ever asked about."""
        return len(self._tree)

    @property
    def num_resident(self) -> int:
        """Tokens whose keys and values are there now."""
        return self._tree.num_resident

    @property
    def num_evicted(self) -> int:
        """Tokens whose keys and values had to make place for others; asked for again, they are computed again."""
        return self._tree.num_evicted

    @property
    def num_whole_texts(self) -> int:
        """Texts that were tokenised from their beginning, though a node's text was, since no seam could be trusted."""
        return 0 if self._shared is None else self._shared.num_whole

    def extend(self, parent: Node | None, more: Text) -> Node:
        """The node after ``more``, text or token ids, behind ``parent`` (None: at the beginning, where text gets BOS).

        Text is joined with the parent's and has the ids of the whole: where its first characters merge with the
        parent's last token, the new node hangs beside the parent, not beneath it. Forwards nothing. Cost: the new text,
        and some words before it.
        """
        if isinstance(more, str):
            if parent is not None and parent.text is None:
                raise RequestError("a node of token ids is extended by token ids; give those of the text")
            return self._of_text(parent, ("" if parent is None or parent.text is None else parent.text) + more)
        if parent is not None and parent.text is not None:
            raise RequestError("a node of text is extended by text; give the text of these token ids")
        ids = Rows.of([more], "extension").tokens
        return self._node(np.empty(0, np.int64) if parent is None else parent.path, ids)

    def score(self, nodes: Sequence[Node], queries: Sequence[Text], continuations: Sequence[Any]) -> FloatArray:
        """Log-likelihoods [N, Q, L] in nats of every continuation after every node + query, as `Engine.score`.

        Continuations are L for all queries, or L a query. Text is joined with the node's. NaN marks logits that are not
        finite. Cost: tokens that no call has asked about before, those that were evicted, and the last of each query.
        """
        labels = by_query(continuations, len(queries))
        cells = [(node, query, row) for node in nodes for query, row in zip(queries, labels, strict=True)]
        requests = [request for node, query, row in cells for request in self._requests(node, query, row)]
        scores = self._scored(requests)
        return scores.logprob.reshape(len(nodes), len(queries), len(labels[0]) if labels else 0)

    def loglikelihood(self, requests: Sequence[tuple[Node, Text]]) -> Scores:
        """Log-likelihood of each continuation right after its node, as `Engine.loglikelihood`."""
        made = [self._requests(node, None, [continuation])[0] for node, continuation in requests]
        return self._scored(made)

    def next_token(self, nodes: Sequence[Node], top: int = 10) -> NextTokens:
        """The ``top`` likeliest next tokens of each node. Cost: as of ``score``, one token a node that is known."""
        vocab_size = self._model.vocab_size
        if not 1 <= top <= vocab_size:
            raise RequestError(f"top is {top}; give 1 to {vocab_size}, the model's token ids")
        none = np.zeros(1, np.int32)
        wanted = [_Wanted(node.path, np.array([len(node) - 1]), none) for node in nodes]
        ids, logprob = np.empty((len(nodes), top), np.int32), np.empty((len(nodes), top), np.float32)
        with self._call() as report:
            for hidden, _, pairs in self._passes(wanted, report):
                best = torch.topk(self._model.log_probabilities(hidden), top, dim=-1)
                ids[pairs.number] = best.indices.cpu().numpy()[pairs.row]
                logprob[pairs.number] = best.values.cpu().numpy()[pairs.row]
        return NextTokens(ids, logprob)

    def release(self, node: Node) -> None:
        """Give up the keys and values of a node, as far as no other node that is kept lies beneath them."""
        self._tree.release(node.path)

    # What is asked, as paths

    def _of_text(self, parent: Node | None, text: str) -> Node:
        known = {} if parent is None or parent.text is None or parent.spans is None else {parent.text: parent.spans}
        spans = self._spans([text], known)[0]
        node = self._node(np.empty(0, np.int64), np.concatenate([self._encoder.added, spans.ids]))
        return replace(node, text=text, spans=spans)

    def _spans(self, texts: Sequence[str], known: Mapping[str, SpannedText]) -> list[SpannedText]:
        if self._shared is None:
            raise RequestError("a session reads text with a fast tokenizer alone (tokenizer.json); give token ids")
        return self._shared(texts, known)

    def _node(self, path: IntArray, ids: TokenArray) -> Node:
        if path.size + ids.size > self._max_tokens:
            raise RequestError(
                f"a node of {path.size + ids.size} tokens is over the model's context window of {self._max_tokens}; "
                "shorten it"
            )
        if ids.size and int(ids.max()) >= self._model.vocab_size:
            raise RequestError(
                f"token id {int(ids.max())} is out of range: the model has {self._model.vocab_size} token ids; "
                "is this the model's own tokenizer?"
            )
        whole = self._tree.insert(path, ids)
        return Node(whole, int(whole[-1]) if whole.size else ROOT)

    def _requests(self, node: Node, query: Text | None, continuations: Sequence[Text]) -> list[_Wanted]:
        """One path for each continuation after node + query."""
        if isinstance(continuations[0], str):
            if node.text is None or not (query is None or isinstance(query, str)):
                raise RequestError("text is scored after nodes of text; give token ids after nodes of token ids")
            assert node.spans is not None
            prompt = node.text + (query or "")
            alone, *joint = self._spans(
                [prompt, *(prompt + str(each) for each in continuations)], {node.text: node.spans}
            )
            begin, rows = split_at_labels([alone.ids, *(each.ids for each in joint)])
            added = self._encoder.added
            return [self._after(np.concatenate([added, begin, row]), len(added) + begin.size) for row in rows]
        before = self._tree.ids_of(node.path)
        if query is not None:
            before = np.concatenate([before, _ids(query, "query")])
        labels = [_ids(each, "continuation") for each in continuations]
        return [self._after(np.concatenate([before, label]), before.size) for label in labels]

    def _after(self, ids: TokenArray, begin: int) -> _Wanted:
        """The log-probabilities of ids from ``begin`` on."""
        if begin == ids.size:
            raise RequestError("a continuation has no tokens of its own; give at least one token to score")
        if not begin:
            raise RequestError("a continuation needs a token before it; extend the root by BOS first")
        node = self._node(np.empty(0, np.int64), ids[:-1])
        if int(ids[-1]) >= self._model.vocab_size:
            self._node(node.path, ids[-1:])  # which refuses
        return _Wanted(node.path, np.arange(begin - 1, ids.size - 1), ids[begin:])

    # What is forwarded

    def _scored(self, wanted: Sequence[_Wanted]) -> Scores:
        sizes = np.array([one.ids.size for one in wanted], np.int64)
        begins = np.concatenate([[0], np.cumsum(sizes)])[:-1]
        logprob, greedy, finite = np.zeros(sizes.sum()), np.ones(sizes.sum(), bool), np.ones(sizes.sum(), bool)
        with self._call() as report:
            for hidden, tree, pairs in self._passes(wanted, report):
                reading = self._model.read(hidden, tree)()
                places = begins[pairs.number] + pairs.place
                logprob[places], greedy[places] = reading.logprob, reading.is_greedy
                finite[places] = reading.is_finite
        is_finite = np.logical_and.reduceat(finite, begins)
        return Scores(
            np.add.reduceat(logprob, begins).astype(np.float32),
            sizes.astype(np.int32),
            np.logical_and.reduceat(greedy, begins),
            np.where(is_finite, OK, INVALID).astype(np.uint8),
        )

    def _passes(self, wanted: Sequence[_Wanted], report: Report) -> Iterator[tuple[torch.Tensor, TreeForward, _Pairs]]:
        """Forward what is missing, in as few packs as may be; each with the pairs that are read of its scored rows."""
        if self._pool is None:
            raise RequestError("the session is closed; open another")
        report.tokens_naive += sum(one.path.size for one in wanted)
        packer = _Packer(self._tree, self._pack_tokens)
        with self._model.attached():
            for number, one in enumerate(wanted):
                read = packer.add(number, one, 0)
                while read < one.places.size:
                    yield from self._forwarded(packer, report)
                    packer = _Packer(self._tree, self._pack_tokens)
                    read = packer.add(number, one, read)
            if len(packer):
                yield from self._forwarded(packer, report)

    def _forwarded(self, packer: _Packer, report: Report) -> Iterator[tuple[torch.Tensor, TreeForward, _Pairs]]:
        """Run a pack; nothing where nothing is read of it."""
        assert self._pool is not None
        pack, pairs = packer.pack()
        started = time.perf_counter()
        try:
            tree = self._model.stage(pack, self._pool)
            hidden = self._model.run(tree)
        except BaseException:
            self._tree.release(packer.new)  # which have slots, and nothing in them
            raise
        report.seconds["forward"] += time.perf_counter() - started
        report.count(pack, tree)
        if pairs.number.size:
            yield hidden, tree, pairs


def _ids(given: Text, what: str) -> TokenArray:
    if isinstance(given, str):
        raise RequestError(f"{what} {given[:40]!r} is text after token ids; give all as one or the other")
    return Rows.of([given], what).tokens


class _Pairs(NamedTuple):
    """What is read of a pack [X]: of which request, which of its ids, and after which of the scored rows."""

    number: IntArray
    place: IntArray
    row: IntArray


class _Packer:
    """A pack in the making: what requests lack, and the tokens that something is read after.

    ``new`` are the tokens that have slots since, and will have keys and values when the pack has run.
    """

    def __init__(self, tree: GrowingTree, room: int) -> None:
        self._tree, self._room = tree, room
        self._row = np.full(len(tree) + 1, -1)  # of each token of the tree
        self._visits: list[IntArray] = []  # tokens of each, one after the other
        self._spans: list[IntArray] = []  # of each visit [n, 3]: source, begin, end
        self._new: list[IntArray] = []
        self._pinned: list[IntArray] = []
        self._pairs: list[tuple[int, int, int, int]] = []  # request, which of its ids, row, id
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def new(self) -> IntArray:
        return np.concatenate(self._new) if self._new else np.empty(0, np.int64)

    def add(self, number: int, one: _Wanted, read: int) -> int:
        """Take what request ``number`` lacks, of whose ids ``read`` are done; how many are when the pack has run.

        Fewer than all if its path has no room here: it goes on in the next pack. Raises RequestError where the pool has
        no room for one path.
        """
        path, asked = one.path, one.path[one.places[read:]]
        self._tree.touch(path)
        is_fed = (self._tree.slots_of(path) < 0) & (self._row[path] < 0)
        is_fed[one.places[read:][self._row[asked] < 0]] = True  # there, but nothing was kept to read it from
        fed = path[is_fed][: self._room - self._size]
        new = fed[self._tree.slots_of(fed) < 0]
        if not self._tree.hold(new, np.concatenate([path, *self._pinned])):
            if self._size:
                return read
            raise RequestError(
                f"a path of {path.size} tokens has no room in the session's memory; raise memory_budget, or shorten it"
            )
        self._pinned.append(path)
        self._new.append(new)
        self._visit(path, fed)
        for place in range(read, one.places.size):
            row = int(self._row[path[one.places[place]]])
            if row < 0:
                return place
            self._pairs.append((number, place, row, int(one.ids[place])))
        return one.places.size

    def _visit(self, path: IntArray, fed: IntArray) -> None:
        """Rows for some tokens of a path, in visits of tokens that follow each other."""
        place = np.searchsorted(path, fed)  # a token's number is above those of its ancestors
        for run in np.split(np.arange(fed.size), np.flatnonzero(np.diff(place) != 1) + 1):
            if run.size:
                above = path[: place[run[0]]]
                row = self._row[above]
                self._spans.append(_runs(row >= 0, np.where(row >= 0, row, self._tree.slots_of(above))))
                self._visits.append(fed[run])
                self._row[fed[run]] = self._size + np.arange(run.size)
                self._size += run.size

    def pack(self) -> tuple[Pack, _Pairs]:
        """The pack, and what is to be read of it."""
        tokens, new = np.concatenate(self._visits), self.new
        new = new[np.argsort(self._row[new])]
        kept = _runs(np.zeros(new.size, bool), self._row[new], self._tree.slots_of(new))
        pairs = np.array(sorted(self._pairs, key=lambda pair: pair[2]), np.int64).reshape(-1, 4)
        scored = np.unique(pairs[:, 2])
        begins = np.cumsum([0, *(visit.size for visit in self._visits)])
        spans = np.concatenate(self._spans)
        depth = self._tree.depth_of(tokens)
        pack = Pack.of(
            token_ids=self._tree.ids_of(tokens),
            positions=depth - 1,
            visit_row_offsets=begins,
            visit_pos=depth[begins[:-1]] - 1,
            span_offsets=np.cumsum([0, *(len(each) for each in self._spans)]),
            span_source=spans[:, 0],
            span_begin=spans[:, 1],
            span_end=spans[:, 2],
            retain_begin=kept[:, 1],
            retain_end=kept[:, 2],
            retain_slot=kept[:, 3],
            scored_rows=scored,
            pair_row=np.searchsorted(scored, pairs[:, 2]),
            pair_id=pairs[:, 3],
            pair_out=np.arange(len(pairs)),
            held_tokens=self._tree.num_resident - new.size,
        )
        return pack, _Pairs(pairs[:, 0], pairs[:, 1], np.searchsorted(scored, pairs[:, 2]))


def _runs(in_pack: npt.NDArray[np.bool_], places: IntArray, slots: IntArray | None = None) -> IntArray:
    """Consecutive places as half-open ranges [n, 3]: whether they are rows of the pack, begin, end; of rows that go to
    ``slots`` [n, 4], as long as these follow each other, too, with the first."""
    breaks = (np.diff(in_pack) != 0) | (np.diff(places) != 1)
    if slots is not None:
        breaks |= np.diff(slots) != 1
    first = np.flatnonzero(np.append(True, breaks))[: places.size]
    ends = np.append(first, places.size)[1:] - 1
    columns = [in_pack[first].astype(np.int64), places[first], places[ends] + 1]
    return np.stack(columns if slots is None else [*columns, slots[first]], axis=1)
