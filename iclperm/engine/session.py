"""A session: keys and values that stay from call to call, for work that is not known beforehand.

A search, a bandit, a reranker asks as it goes along. Its session holds a tree that only grows, and a pool of keys and
values; every call forwards what is new of it and nothing else. Where rows are invariant (`Engine.row_invariant`),
answers have the bits that `Engine.score` gives, whatever was asked before and whatever was evicted since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from iclperm.engine.encoding import Encoder, split_at_labels, token_ids
from iclperm.engine.executor import Progress, Report
from iclperm.engine.forward import KvPool
from iclperm.engine.given import listed, pieces, shortly
from iclperm.engine.growing_text import GrowingText
from iclperm.engine.growing_tree import ROOT, GrowingTree, HeldPaths
from iclperm.engine.in_use import InUse, alone
from iclperm.engine.pack_rows import PackRows, running
from iclperm.engine.packer import Packer, PackPairs, WantedPath, filled, tokens_naive
from iclperm.engine.sampling import Sampling
from iclperm.engine.scores import INVALID, OK, Scores, by_query
from iclperm.engine.seams import Seams
from iclperm.engine.shared_text import SpannedText
from iclperm.engine.texts import DEFAULT_MAX_NEW_TOKENS, LENGTH, Ending, Generations
from iclperm.engine.tree import Ids, IntArray, Rows, TokenArray
from iclperm.errors import RequestError

if TYPE_CHECKING:
    from iclperm.engine.model import TreeModel

Text = str | Ids
_MOST_SLOTS = 1 << 24  # more tokens than any plan has had
_MOST_AGAIN = 4  # times that a request begins again because the model was changed meanwhile
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Node:
    """A point in a session's tree: what comes after some tokens. Equal tokens are one node; it is of one session.

    ``text`` is what it was made of, None of token ids; `Session.ids_of` gives the ids.
    """

    path: IntArray = field(compare=False)
    """Numbers of its tokens in the session's tree; no ids."""
    number: int
    owner: object
    text: str | None = None
    spans: SpannedText | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"Node({len(self)} tokens{'' if self.text is None else f', {self.text[-40:]!r}'})"

    def __len__(self) -> int:
        """Tokens from the beginning, BOS included."""
        return self.path.size


@dataclass(frozen=True)
class NextTokens:
    """The likeliest next tokens of N nodes: ids int32 [N, top], log-probabilities in nats float32 [N, top], falling;
    -1 and NaN where ``state`` is invalid."""

    ids: npt.NDArray[np.int32]
    logprob: npt.NDArray[np.float32]
    state: npt.NDArray[np.uint8]  # 0 ok, 1 invalid: the row of logits was not finite


class Session:
    """Made by `Engine.session`; a context manager, whose end gives its memory back.

    Keys and values are of the model as it was: where anything of it is another now, all are given up and computed again
    (`iclperm.engine.condition`; ``forget`` does so for the rest). A second call while one runs raises RequestError.
    ``progress`` of a verb is as of `Engine`; a call that is ended early leaves the session right, and what it computed
    is kept (an interrupt from the keyboard, which may come at any time, loses all keys and values).
    """

    def __init__(
        self,
        model: TreeModel,
        encoder: Encoder,
        call: Callable[[Progress | None], AbstractContextManager[Report]],
        ending: Callable[[int, str | Sequence[str]], Ending],
        *,
        room: int,
        pack_tokens: int,
        max_tokens: int,
    ) -> None:
        self._model, self._encoder, self._engine_call, self._ending = model, encoder, call, ending
        self._owner, self._in_use = object(), InUse()
        self._condition: object | None = model.condition  # None: to be asked for anew
        self._held = HeldPaths[Node]()  # of the caller's nodes that are not released
        num_slots = max(1, min(room // model.facts.session_token_bytes, _MOST_SLOTS))
        self._tree = GrowingTree(num_slots)
        self._pool: KvPool | None = model.pool(num_slots)
        self._kept: torch.Tensor | None = None  # by slot, what comes out of the model after a token that was read after
        self._pack_tokens, self._max_tokens = pack_tokens, max_tokens
        self._shared = encoder.sharing(is_strict=True)
        self._seams = Seams(is_known=self._shared is not None and self._shared.are_bounded)
        self._totals = Report()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back; a session that is closed answers no more."""
        self._pool = self._kept = None

    @property
    def totals(self) -> Report:
        """What all calls of the session took together."""
        return self._totals

    @property
    def num_tokens(self) -> int:
        """Distinct tokens of all nodes and of all that was asked, forwarded or not."""
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

    @alone
    def extend(self, parent: Node | None, more: Text) -> Node:
        """The node after ``more``, text or token ids, behind ``parent`` (None: at the beginning, where text gets BOS).

        Text is joined with the parent's and has the ids of the whole: where its first characters merge with the
        parent's last token, the new node hangs beside the parent, not beneath it. Token ids after text make a node of
        token ids, whatever a tokenizer would have made of the whole. Forwards nothing. Cost: the new text,
        and some words before it.
        """
        above = None if parent is None else self._own(parent)
        if isinstance(more, str):
            if above is not None and above.text is None:
                raise RequestError("a node of token ids is extended by token ids; give those of the text")
            return self._own(self._of_text(above, ("" if above is None or above.text is None else above.text) + more))
        ids = Rows.of([listed(more, "token ids")], "extension").tokens
        return self._own(self._node(np.empty(0, np.int64) if above is None else above.path, ids))

    def ids_of(self, node: Node) -> TokenArray:
        """The token ids of a node, int32 [N], BOS included."""
        return self._tree.ids_of(self._own(node).path)

    @alone
    def score(
        self,
        nodes: Sequence[Node],
        queries: Sequence[Text],
        continuations: Sequence[Any],
        *,
        progress: Progress | None = None,
    ) -> FloatArray:
        """Log-likelihoods [N, Q, L] in nats of every continuation after every node + query, as `Engine.score`.

        Continuations are L for all queries, or L a query. Text is joined with the node's. NaN marks logits that are not
        finite. Cost: tokens that no call has asked about before, those that were evicted, and once more each after
        which something is read that was forwarded without it.
        """
        nodes, queries = self._nodes(nodes), pieces(queries, "queries", "query")
        labels = by_query(continuations, len(queries))
        if not labels or not len(labels[0]):
            return np.empty((len(nodes), len(queries), 0), np.float32)
        cells = [(node, query, row) for node in nodes for query, row in zip(queries, labels, strict=True)]
        requests = [request for node, query, row in cells for request in self._requests(node, query, row)]
        scores = self._scored(requests, progress)
        return scores.logprob.reshape(len(nodes), len(queries), len(labels[0]) if labels else 0)

    @alone
    def loglikelihood(self, requests: Sequence[tuple[Node, Text]], *, progress: Progress | None = None) -> Scores:
        """Log-likelihood of each continuation right after its node, in the order given.

        Text is joined with the node's as in ``score``, white space at the node's end included, which
        `Engine.loglikelihood` moves to the continuation, as lm-evaluation-harness does. Cost: as of ``score``.
        """
        made = []
        for number, request in enumerate(listed(requests, "requests")):
            if isinstance(request, str | Node) or not hasattr(request, "__len__") or len(request) != 2:
                raise RequestError(f"request {number} is {shortly(request)}; give (node, continuation)")
            if not len(pieces([request[1]], "continuations", f"of request {number} continuation")[0]):
                raise RequestError(f"the continuation of request {number} is empty; give at least one token to score")
            made += self._requests(self._own(request[0]), None, [request[1]])
        return self._scored(made, progress)

    @alone
    def loglikelihood_rolling(self, nodes: Sequence[Node], *, progress: Progress | None = None) -> Scores:
        """Log-likelihood of all that a node is made of, one entry a node: of every token after its first, which is BOS
        where the tokenizer adds one. Cost: as of ``score``.
        """
        wanted = []
        for node in self._nodes(nodes):
            if len(node) < 2:
                raise RequestError(f"{node} has no token that is predicted; extend it to 2 tokens at least")
            ids = self._tree.ids_of(node.path)
            wanted.append(WantedPath(node.path[:-1], np.arange(len(node) - 1), ids[1:]))
        return self._scored(wanted, progress)

    @alone
    def next_token(self, nodes: Sequence[Node], top: int = 10, *, progress: Progress | None = None) -> NextTokens:
        """The ``top`` likeliest next tokens of each node. Cost: as of ``score``."""
        vocab_size = self._model.vocab_size
        if not isinstance(top, int | np.integer) or not 1 <= top <= vocab_size:
            raise RequestError(f"top is {top}; give 1 to {vocab_size}, the model's token ids")
        nodes = self._nodes(nodes)
        ids, logprob = np.full((len(nodes), top), -1, np.int32), np.full((len(nodes), top), np.nan, np.float32)
        state = np.full(len(nodes), INVALID, np.uint8)
        with self._call(progress) as report:
            for logprobs, number, row in self._distributions(nodes, report):
                best = torch.topk(logprobs, top, dim=-1)
                is_finite = logprobs.isfinite().all(dim=1).cpu().numpy()[row]
                number, row = number[is_finite], row[is_finite]
                ids[number] = best.indices.cpu().numpy()[row]
                logprob[number] = best.values.cpu().numpy()[row]
                state[number] = OK
        return NextTokens(ids, logprob, state)

    @alone
    def next_token_logprobs(self, nodes: Sequence[Node], *, progress: Progress | None = None) -> torch.Tensor:
        """Of each node the log-probability in nats of every token id: float32 [N, V], on the model's device.

        On a CPU ``.numpy()`` is the same memory, elsewhere ``torch.utils.dlpack`` hands it on without a copy. Cost: as
        of ``next_token``.
        """
        model, nodes = self._model, self._nodes(nodes)
        found = torch.empty(len(nodes), model.vocab_size, dtype=torch.float32, device=model.device)
        with self._call(progress) as report:
            for logprobs, number, row in self._distributions(nodes, report):
                found[torch.from_numpy(number)] = logprobs[torch.from_numpy(row)]
        return found

    @alone
    def hidden_states(
        self, nodes: Sequence[Node], layers: Sequence[int] | None = None, *, progress: Progress | None = None
    ) -> torch.Tensor:
        """What the model makes of each node's last token: [N, layers, H] in its dtype, on its device.

        Numbered as transformers' ``output_hidden_states``: 0 is the embedding, n comes out of layer n, and the last,
        which -1 is, has gone through the final norm; all by default. Raises RequestError for a layer that is not there,
        ModelError where the decoder's layers are not to be found. Cost: as of ``score``, each node's last token always.
        """
        model, nodes = self._model, self._nodes(nodes)
        count = model.num_layers + 1
        numbers = list(range(count)) if layers is None else list(listed(layers, "layers"))
        if others := [one for one in numbers if not isinstance(one, int | np.integer) or not -count <= one < count]:
            raise RequestError(f"layer {others[0]} is not there: the model's are 0 (the embedding) to {count - 1}")
        seen: dict[int, torch.Tensor] = {}
        found: torch.Tensor | None = None
        with self._call(progress) as report:
            for hidden, pairs in self._passes(self._ends(nodes), report, seen):
                states = {**seen, count - 1: hidden}
                if found is None:
                    with torch.inference_mode(False):  # for whoever goes on with it under autograd
                        found = hidden.new_empty(len(nodes), len(numbers), hidden.shape[-1])
                which, rows = torch.from_numpy(pairs.number), torch.from_numpy(pairs.row)
                for place, number in enumerate(numbers):
                    found[which, place] = states[number % count][rows]
        if found is None:
            return torch.empty(0, len(numbers), model.facts.hidden_size, dtype=model.dtype, device=model.device)
        return found

    @alone
    def generate(
        self,
        nodes: Sequence[Node],
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        stop: str | Sequence[str] = (),
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        num_samples: int = 1,
        progress: Progress | None = None,
    ) -> Generations:
        """What the model says after each node, as `Engine.generate`, with its very texts; ``num_samples`` of each node,
        one after the other.

        What is generated stays like all else, and what is known of it is not forwarded again. Cost: as of ``score``,
        and each generated token that another follows.
        """
        ending = self._ending(max_new_tokens, stop)
        sampling = Sampling(temperature, top_p, top_k, seed, num_samples)
        nodes = self._nodes(nodes)
        texts = [GrowingText(node.path, sampling, draw, self._tree) for node in nodes for draw in range(num_samples)]
        for node in nodes:
            if not len(node):
                raise RequestError("a text needs a token before it; extend the root by BOS first")
            if len(node) + max_new_tokens - 1 > self._max_tokens:
                raise RequestError(
                    f"{node} with {max_new_tokens} new ones is over the model's context window of {self._max_tokens}; "
                    "shorten it or lower max_new_tokens"
                )
        with self._call(progress) as report:
            report.tokens_naive += sum({node.number: len(node) for node in nodes}.values())
            if progress is not None:
                report.tokens_expected = self._num_missing(self._ends(nodes)) + len(texts) * (max_new_tokens - 1)
            live = texts
            while live:
                self._go_on(live, sampling, ending, report)
                live = [text for text in live if text.finish is None]
            report.tokens_naive += sum({(text.start, text.draw): text.num_fed for text in texts}.values())
            report.tokens_generated += sum(text.num_tokens for text in texts)
        results = [ending.result(text.ids, text.finish or LENGTH, text.logprob, text.num_tokens) for text in texts]
        return Generations.of(results, has_text=ending.has_text)

    def _go_on(self, live: Sequence[GrowingText], sampling: Sampling, ending: Ending, report: Report) -> None:
        """One more token of each text."""
        none = np.zeros(1, np.int32)
        wanted = [WantedPath(text.path, np.array([text.path.size - 1]), none) for text in live]
        for hidden, pairs in self._passes(wanted, report, is_counted=False):
            started = time.perf_counter()
            if sampling.is_greedy:
                choice = self._model.choose_rows(hidden)
                rows = pairs.row
            else:
                chances = np.array([live[number].chance(ending.max_new_tokens) for number in pairs.number])
                choice = self._model.draw(hidden, sampling, pairs.row, chances)
                rows = np.arange(pairs.row.size)
            for number, row in zip(pairs.number.tolist(), rows.tolist(), strict=True):
                token = int(choice.token[row]) if choice.is_finite[row] else -1
                live[number].take(token, float(choice.logprob[row]), ending, self._tree)
            report.seconds["head"] += time.perf_counter() - started

    @alone
    def release(self, node: Node) -> None:
        """Give up the keys and values of a node with all that was asked or made beneath it, longer nodes included.

        Of its own beginning stays what a node that you hold and have not released, or something asked since, has in
        common with it. Whatever is asked for again is computed again.
        """
        own = self._own(node)
        self._tree.release(self._tree.beneath(own.number))
        self._tree.release(own.path[self._held.release(own.path) :])

    @alone
    def forget(self) -> None:
        """Give up all keys and values: for a model that was changed in a way that cannot be noticed (numbers written
        one by one through ``.data``, a hook that now does something else). Nodes stay."""
        self._give_up()

    def _give_up(self) -> None:
        self._tree.forget()
        if self._pool is not None:
            self._pool.forget_token_rows()

    @contextmanager
    def _call(self, progress: Progress | None) -> Iterator[Report]:
        report: Report | None = None
        try:
            with self._engine_call(progress) as report:
                yield report
        finally:
            if report is not None:
                self._totals.add(report)

    def _opened(self) -> KvPool:
        if self._pool is None:
            raise RequestError("the session, or its engine, is closed; open another")
        return self._pool

    def _own(self, node: object) -> Node:
        """A node of this session; raises RequestError for all else, and when the session is closed."""
        self._opened()
        if not isinstance(node, Node):
            raise RequestError(f"a node is needed, not {shortly(node)}; make one with session.extend")
        if node.owner is not self._owner:
            raise RequestError(f"{node} is of another session; extend it in this one")
        return self._held.add((node.number, node.text), node, node.path)

    def _nodes(self, nodes: Iterable[Node]) -> list[Node]:
        if isinstance(nodes, Node):
            raise RequestError(f"a list of nodes is needed, not {nodes}; put it in brackets")
        return [self._own(node) for node in listed(nodes, "nodes")]

    # What is asked, as paths

    def _of_text(self, parent: Node | None, text: str) -> Node:
        known = {} if parent is None or parent.text is None or parent.spans is None else {parent.text: parent.spans}
        spans = self._spans([text], known)[0]
        node = self._going_on(parent, np.concatenate([self._encoder.added, spans.ids]))
        return replace(node, text=text, spans=spans)

    def _spans(self, texts: Sequence[str], known: Mapping[str, SpannedText]) -> list[SpannedText]:
        if self._shared is None:
            raise RequestError(
                "a session reads text with a fast tokenizer (tokenizer.json), and the engine has "
                f"{'another' if self._encoder.has_tokenizer else 'none'}; give token ids"
            )
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
        return Node(whole, int(whole[-1]) if whole.size else ROOT, self._owner)

    def _going_on(self, node: Node | None, ids: TokenArray) -> Node:
        """The node of whole ``ids``, most of which may be those of another."""
        path = np.empty(0, np.int64) if node is None else node.path[: ids.size]
        differs = np.flatnonzero(self._tree.ids_of(path) != ids[: path.size])
        kept = int(differs[0]) if differs.size else path.size
        return self._node(path[:kept], ids[kept:])

    def _requests(self, node: Node, query: Text | None, continuations: Sequence[Text]) -> list[WantedPath]:
        """One path for each continuation after node + query."""
        if len({isinstance(each, str) for each in continuations}) > 1:
            raise RequestError("continuations mix text and token ids; give all as one or the other")
        if isinstance(continuations[0], str):
            labels = [str(each) for each in continuations]
            if node.text is None or not (query is None or isinstance(query, str)):
                raise RequestError("text is scored after nodes of text; give token ids after nodes of token ids")
            assert node.spans is not None
            if (known := self._seams.get(node.text, query, labels)) is not None:
                asked = self._node(node.path, known.query)
                return [self._after(asked, row) for row in known.continuations]
            prompt = node.text + (query or "")
            alone, *joint = self._spans([prompt, *(prompt + each for each in labels)], {node.text: node.spans})
            begin, rows = split_at_labels([alone.ids, *(each.ids for each in joint)])
            self._seams.see(node.text, query, labels, node.spans.ids, begin, rows)
            asked = self._going_on(node, np.concatenate([self._encoder.added, begin]))
            return [self._after(asked, row) for row in rows]
        asked = node if query is None else self._node(node.path, token_ids(query, "query"))
        return [self._after(asked, token_ids(each, "continuation")) for each in continuations]

    def _after(self, prompt: Node, ids: TokenArray) -> WantedPath:
        """The log-probabilities of ids right after a prompt."""
        if not ids.size:
            raise RequestError("a continuation has no tokens of its own; give at least one token to score")
        if not len(prompt):
            raise RequestError("a continuation needs a token before it; extend the root by BOS first")
        node = prompt if ids.size == 1 else self._node(prompt.path, ids[:-1])
        if int(ids[-1]) >= self._model.vocab_size:
            self._node(node.path, ids[-1:])  # which refuses
        return WantedPath(node.path, np.arange(len(prompt) - 1, len(node)), ids)

    # What is forwarded

    def _scored(self, wanted: Sequence[WantedPath], progress: Progress | None) -> Scores:
        sizes = np.array([one.ids.size for one in wanted], np.int64)
        begins = np.cumsum(sizes) - sizes
        logprob = np.zeros(sizes.sum(), np.float32)
        greedy, finite = np.ones(logprob.size, bool), np.ones(logprob.size, bool)
        with self._call(progress) as report:
            for hidden, pairs in self._passes(wanted, report):
                reading = self._model.read_rows(hidden, pairs.row.astype(np.int32), pairs.ids)
                places = begins[pairs.number] + pairs.place
                logprob[places], greedy[places] = reading.logprob, reading.is_greedy
                finite[places] = reading.is_finite
        return Scores.of(logprob, greedy, finite, sizes)

    def _ends(self, nodes: Sequence[Node]) -> list[WantedPath]:
        """What is after the last token of each node is wanted, and no id of it."""
        if not all(map(len, nodes)):
            raise RequestError("the root has no token to read after; extend it by BOS first")
        none = np.zeros(1, np.int32)
        return [WantedPath(node.path, np.array([len(node) - 1]), none) for node in nodes]

    def _distributions(
        self, nodes: Sequence[Node], report: Report
    ) -> Iterator[tuple[torch.Tensor, IntArray, IntArray]]:
        """Log-probabilities [R, V], and which nodes [X] they are of, and their rows [X]; some rows at a time."""
        step = self._model.limits.logit_rows(self._model.vocab_size, self._model.device)
        for hidden, pairs in self._passes(self._ends(nodes), report):
            for begin in range(0, hidden.shape[0], step):
                some = slice(*np.searchsorted(pairs.row, [begin, begin + step]))
                logprobs = self._model.log_probabilities(hidden[begin : begin + step])
                yield logprobs, pairs.number[some], pairs.row[some] - begin

    def _passes(
        self,
        wanted: Sequence[WantedPath],
        report: Report,
        seen: dict[int, torch.Tensor] | None = None,
        *,
        is_counted: bool = True,
    ) -> Iterator[tuple[torch.Tensor, PackPairs]]:
        """Forward what is missing, in as few packs as may be; after each what may be read: hidden states [U, H] of
        tokens, and the pairs that are read of them.

        Into ``seen`` comes what went into each layer, of the same tokens [U, H], all of which are forwarded then.
        """
        if is_counted:
            report.tokens_naive += tokens_naive(wanted)
        number = read = 0  # the request that comes next, and how many of its ids are done
        num_again = 0  # times that the model was found changed since a request was done
        try:
            while number < len(wanted):
                with self._model.attached(see=None if seen is None else seen.__setitem__) as condition:
                    num_again += self._renew(condition) if num_again < _MOST_AGAIN else 0
                    if is_counted and report.progress is not None and not report.tokens_expected:
                        report.tokens_expected = self._num_missing(wanted)
                    is_current = True
                    while is_current and number < len(wanted):
                        if num_again == _MOST_AGAIN:
                            self._condition = None  # it changes all the time: go on, and keep nothing
                        packer, begun = Packer(self._tree, self._pack_tokens, is_anew=seen is not None), (number, read)
                        with self._released_unless_run(packer):
                            number, read = filled(packer, wanted, number, read)
                            pairs = packer.pairs()
                            self._run(packer, pairs, report, seen)
                        if not packer.has_run:
                            (number, read), num_again = begun, num_again + 1
                            break
                        num_again = num_again if number == begun[0] else 0
                        if pairs.number.size:
                            self._opened()
                            assert self._kept is not None
                            yield self._kept[torch.from_numpy(self._tree.slots_of(pairs.tokens))], pairs
                        is_current = number < len(wanted) and self._model.runs_as(self._condition)
        except BaseException as error:
            if not isinstance(error, Exception | GeneratorExit):  # it may have come between any two steps
                self._give_up()
            raise

    def _renew(self, condition: object) -> bool:
        """Give up what was computed of a model that is another now; whether it is."""
        if condition is self._condition:
            return False
        self._give_up()
        self._condition = condition
        return True

    @contextmanager
    def _released_unless_run(self, packer: Packer) -> Iterator[None]:
        """After it, a pack that has not run has no slots: there is nothing in them."""
        try:
            yield
        finally:
            if not packer.has_run:
                self._tree.release(packer.new)
                if self._pool is not None:
                    self._pool.forget_token_rows()  # some may have a place, and nothing there

    def _num_missing(self, wanted: Sequence[WantedPath]) -> int:
        """Tokens that will be forwarded at least: without keys and values, or of which nothing was kept to read."""
        paths = [*(one.path for one in wanted), np.empty(0, np.int64)]
        asked = [*(one.path[one.places] for one in wanted), np.empty(0, np.int64)]
        tokens = np.unique(np.concatenate(paths))
        is_fed = (self._tree.slots_of(tokens) < 0) | (
            np.isin(tokens, np.concatenate(asked)) & ~self._tree.is_read(tokens)
        )
        return int(np.count_nonzero(is_fed))

    def _run(self, packer: Packer, pairs: PackPairs, report: Report, seen: dict[int, torch.Tensor] | None) -> None:
        """Forward a pack, if there is anything in it, and keep what comes out after the tokens that are read after. It
        has not run if the model was changed meanwhile."""
        if not len(packer):
            packer.has_run = True
            return
        pack, tokens, mine = packer.pack(pairs)
        if seen is not None:
            seen.clear()  # of the pack before
        started = time.perf_counter()
        with running(pack, lambda _: PackRows.of(pack, np.arange(mine.size), pairs.number[mine], pairs.place[mine])):
            tree = self._model.stage(pack, self._opened())
            hidden = self._model.run(tree)
        if self._condition is None or self._model.ran_as(self._condition):
            if self._kept is None:
                self._kept = hidden.new_empty(self._tree.num_slots, hidden.shape[1])
            self._kept[torch.from_numpy(self._tree.slots_of(tokens))] = hidden
            self._tree.mark_read(tokens)
            if seen is not None:
                order = torch.from_numpy(np.argsort(tokens))  # as those of the pairs
                seen.update({layer: states[order] for layer, states in seen.items()})
            packer.has_run = True
        report.seconds["forward"] += time.perf_counter() - started
        report.count(pack, tree)  # whose progress may raise
