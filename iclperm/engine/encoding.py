"""Strings into token ids for the engine, as lm-evaluation-harness encodes a context and its continuation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm.base.tokenizer_file import told_where_it_gives_up
from iclperm.engine.given import listed, refuse_halves, shortly
from iclperm.engine.plan import ContextPaths
from iclperm.engine.shared_text import SharedTexts, added_tokens
from iclperm.engine.tree import Ids, IntArray, Rows, TokenArray
from iclperm.errors import RequestError

Text = str | Ids
_CHECKED = 16  # prompts of a product that are tokenised whole besides


@dataclass(frozen=True)
class TextProduct:
    """Ids of contexts [C], queries [Q] and labels [Q][L]; ``holds`` [C]: a context's prompts are its and their ids."""

    contexts: list[TokenArray]
    queries: list[TokenArray]
    labels: list[list[TokenArray]]
    holds: npt.NDArray[np.bool_]


class Encoder:
    """Encodes requests with a tokenizer; token ids pass through, and need none.

    ``prefix_id`` stands before an empty context: the tokenizer's BOS, else its EOS, else those of the model's
    configuration.
    """

    def __init__(self, tokenizer: Any, config: Any) -> None:
        self._tokenizer = tokenizer
        candidates = [
            getattr(source, name, None) for source in (tokenizer, config) for name in ("bos_token_id", "eos_token_id")
        ]
        given = [c[0] if isinstance(c, list) else c for c in candidates if c is not None and c != []]
        self.prefix_id: int | None = int(given[0]) if given else None

    def requests(self, requests: Sequence[tuple[Text, Text]]) -> tuple[Rows, IntArray]:
        """Rows context + continuation, and where each continuation begins (>= 1), int64 [R]."""
        for number, request in enumerate(requests):
            if isinstance(request, str) or not hasattr(request, "__len__"):
                raise RequestError(f"request {number} is {shortly(request)}; give (context, continuation)")
            if len(request) != 2:
                raise RequestError(f"request {number} has {len(request)} parts; give (context, continuation)")
            if isinstance(request[0], str) != isinstance(request[1], str):
                raise RequestError(f"request {number} mixes text and token ids; give both as text or both as ids")
        pairs = self.pairs(requests)
        rows = Rows.of([np.concatenate(pair) for pair in pairs], "request")
        return rows, np.array([len(context) for context, _ in pairs], np.int64)

    def prompts(self, prompts: Sequence[Text]) -> Rows:
        """A row of each prompt; an empty one becomes the prefix token."""
        prompts = listed(prompts, "prompts")
        for number, prompt in enumerate(prompts):
            if not isinstance(prompt, str | Sequence | np.ndarray):
                raise RequestError(f"request {number} is {prompt!r}; give text or token ids")
        texts = [(number, prompt) for number, prompt in enumerate(prompts) if isinstance(prompt, str)]
        encoded = dict(
            zip((number for number, _ in texts), self._encode_all([text for _, text in texts]), strict=True)
            if texts
            else ()
        )
        rows = []
        for number, prompt in enumerate(prompts):
            ids = encoded[number] if isinstance(prompt, str) else prompt
            rows.append(ids if len(ids) else self._instead_of_nothing(number))
        return Rows.of(rows, "request")

    def windows(self, number: int, text: Text, most: int) -> list[tuple[TokenArray, TokenArray]]:
        """Text ``number`` as (context, continuation) pairs of at most ``most`` fed tokens that predict each token once.

        As lm-evaluation-harness cuts it: the first window begins with the prefix token, each other one with the last
        token of the one before, and a last one that is shorter reads as much before it as there is room for.
        """
        if isinstance(text, str):
            ids = self._encode_all([text])[0][self.added.size :]
        else:
            ids = Rows.of([text], f"text {number}").tokens
        if not ids.size:
            raise RequestError(f"text {number} has no tokens; give at least one")
        before = np.concatenate([self._instead_of_nothing(number), ids])
        ends = ((begin, min(begin + most, ids.size)) for begin in range(0, ids.size, most))
        return [(before[max(0, end - most) : begin + 1], before[begin + 1 : end + 1]) for begin, end in ends]

    def factors(
        self, contexts: Any, queries: Any, labels: list[Sequence[Any]]
    ) -> tuple[tuple[Any, Any, Sequence[Any]] | None, npt.NDArray[np.bool_]]:
        """Token ids of a product's factors, and which contexts [C] are none of them; None if there are none."""
        parts = [*([] if isinstance(contexts, ContextPaths) else contexts), *queries, *labels[0]]
        as_text = [isinstance(part, str) for part in parts]
        none, every = np.zeros(len(contexts), bool), np.ones(len(contexts), bool)
        if any(as_text) and (isinstance(contexts, ContextPaths) or not all(as_text)):
            raise RequestError(
                "contexts, queries and continuations mix text and token ids; give all as one or the other"
            )
        if any(as_text):
            found = self.product(contexts, queries, labels)
            held = [ids for ids, holds in zip(found.contexts, found.holds, strict=True) if holds]
            return ((held, found.queries, found.labels) if held else None), ~found.holds
        if any(len(query) == 0 for query in queries):
            return None, every
        is_shared = all(row is labels[0] for row in labels)
        return (contexts, queries, labels[0] if is_shared else labels), none

    def general_requests(self, contexts: Any, queries: Any, labels: list[Sequence[Any]]) -> list[tuple[Text, Text]]:
        """Every prompt on its own path [C * Q * L]: what a product cannot hold."""
        if isinstance(contexts, ContextPaths):
            raise RequestError("an empty query cannot follow ContextPaths; give at least one token a query")
        cells = [(context, query, row) for context in contexts for query, row in zip(queries, labels, strict=True)]
        split: list[tuple[Any, list[Any]]]
        if isinstance(queries[0], str):
            prompts = [context + query for context, query, _ in cells]
            split = [*self.prompts_before(prompts, [row for *_, row in cells])]
        else:
            split = [([*context, *query], list(row)) for context, query, row in cells]
        return [(prompt, each) for prompt, row in split for each in row]

    def product(self, contexts: Sequence[str], queries: Sequence[str], labels: Sequence[Sequence[str]]) -> TextProduct:
        """Ids of the factors, for the contexts after which every jointly tokenised prompt is their concatenation.

        Parts are cut out of whole prompts. That they join is looked at for each ending of a context before each
        beginning of a query, two words of either: no merge of any tokenizer in use reaches farther. Some whole prompts
        are held against that; if one differs, no context is said to hold. Cost: about the characters of the tree of
        contexts, of the queries, of those prompts, and some dozens for each ending with each beginning.
        """
        ends, heads = _classes([tail(context) for context in contexts]), _classes([_head(query) for query in queries])
        lead = min(np.flatnonzero(ends == np.argmax(np.bincount(ends))).tolist(), key=lambda each: len(contexts[each]))
        context_ids = self._cut(contexts, queries[0] + labels[0][0])
        parts = self._after(contexts[lead], context_ids[lead], queries, labels)
        if parts is None:
            return TextProduct(context_ids, [], [], np.zeros(len(contexts), bool))
        query_ids, label_ids = parts
        first = {(int(end), int(head)): (c, q) for c, end in reversed([*enumerate(ends)])
                 for q, head in reversed([*enumerate(heads)])}  # fmt: skip
        drawn = np.random.default_rng(0).integers(len(contexts) * len(queries), size=_CHECKED)
        cells = {divmod(cell, len(queries)) for cell in drawn.tolist()}
        checked = sorted(cells - set(first.values()))
        pairs = [*first.values(), *checked]
        texts = [contexts[c] + queries[q] + labels[q][0] for c, q in pairs]
        whole = self._encode_all(texts[: len(first)]) + (self._encode_whole(texts[len(first) :]) if checked else [])
        differ = {
            (c, q)
            for (c, q), ids in zip(pairs, whole, strict=True)
            if not np.array_equal(ids, np.concatenate([context_ids[c], query_ids[q], label_ids[q][0]]))
        }
        failed = {int(ends[c]) for c, _ in differ}
        if any(cell in differ and first[int(ends[cell[0]]), int(heads[cell[1]])] not in differ for cell in checked):
            failed = set(ends.tolist())  # what one prompt shows is not true of all that join at the same words
        return TextProduct(context_ids, query_ids, label_ids, ~np.isin(ends, list(failed)))

    def _cut(self, contexts: Sequence[str], follower: str) -> list[TokenArray]:
        """The ids of each context before ``follower``, up to the last token that ends within it."""
        if self._shared is None:
            return self._encode_all(list(contexts))
        joints = self._shared([context + follower for context in contexts])
        return [
            np.concatenate([self._added, joint.ids[: joint.cut(len(context))]])
            for context, joint in zip(contexts, joints, strict=True)
        ]

    def _after(
        self, lead: str, lead_ids: TokenArray, queries: Sequence[str], labels: Sequence[Sequence[str]]
    ) -> tuple[list[TokenArray], list[list[TokenArray]]] | None:
        """The ids of each query after a context, and of its labels; None where a query has none of its own."""
        query_ids: list[TokenArray] = []
        label_ids: list[list[TokenArray]] = []
        for prompt, continuations in self.prompts_before([lead + query for query in queries], labels):
            if prompt.size <= lead_ids.size or not np.array_equal(prompt[: lead_ids.size], lead_ids):
                return None
            query_ids.append(prompt[lead_ids.size :])
            label_ids.append(continuations)
        return query_ids, label_ids

    def prompts_before(
        self, texts: Sequence[str], labels: Sequence[Sequence[str]]
    ) -> list[tuple[TokenArray, list[TokenArray]]]:
        """Ids of each prompt and of each of its labels after it, from their joint texts.

        Where a prompt's end merges with a label, the prompt ends at the last token that all its labels leave alone.
        """
        joint = [part for text, row in zip(texts, labels, strict=True) for part in (text, *(text + x for x in row))]
        encoded = iter(self._encode_all(joint))
        return [split_at_labels([next(encoded) for _ in range(1 + len(row))]) for row in labels]

    def pairs(self, requests: Sequence[tuple[Text, Text]]) -> list[tuple[TokenArray, TokenArray]]:
        """Ids of each context and of its continuation, the empty context as the prefix token."""
        texts = [_at_a_word(str(context), str(more)) for context, more in requests if isinstance(context, str)]
        encoded = iter(self._encode_all([part for context, whole in texts for part in (context, whole)]))
        pairs = []
        for number, (context, continuation) in enumerate(requests):
            if isinstance(context, str):
                context_ids, whole = next(encoded), next(encoded)
                continuation_ids = whole[len(context_ids) :]
            else:
                context_ids = Rows.of([context], f"request {number} context").tokens
                assert not isinstance(continuation, str)
                continuation_ids = Rows.of([continuation], f"request {number} continuation").tokens
            if not continuation_ids.size:
                raise RequestError(
                    f"the continuation of request {number} ({str(continuation)[:40]!r}) has no tokens of its "
                    "own; give at least one token to score"
                )
            pairs.append((context_ids if context_ids.size else self._instead_of_nothing(number), continuation_ids))
        return pairs

    def _instead_of_nothing(self, number: int) -> TokenArray:
        if self.prefix_id is None:
            raise RequestError(
                f"request {number} has an empty context, and neither tokenizer nor model names a BOS "
                "or EOS token to stand for it; give a context"
            )
        return np.array([self.prefix_id], np.int32)

    def _encode_all(self, texts: list[str]) -> list[TokenArray]:
        """Ids with BOS where the tokenizer adds it, and never a trailing EOS."""
        if not texts:
            return []
        if self._tokenizer is None:
            raise RequestError(
                "the engine has no tokenizer, so requests must be token ids; pass Engine(model, tokenizer) for text"
            )
        if self._shared is None:
            return self._encode_whole(texts)
        return [np.concatenate([self._added, text.ids]) for text in self._shared(texts)]

    def _encode_whole(self, texts: list[str]) -> list[TokenArray]:
        """As ``_encode_all``, each text by itself."""
        eos, bos = self._tokenizer.eos_token_id, self._tokenizer.bos_token_id
        refuse_halves(texts)
        with told_where_it_gives_up():
            encoded = self._tokenizer(texts, return_attention_mask=False)["input_ids"]
        rows = [np.asarray(ids, np.int32) for ids in encoded]
        return [
            ids[:-1]
            if ids.size and ids[-1] == eos and eos != bos and not text.endswith(self._tokenizer.eos_token)
            else ids
            for ids, text in zip(rows, texts, strict=True)
        ]

    @cached_property
    def _added(self) -> TokenArray | None:
        """What the tokenizer puts before a text; None where texts are tokenised one by one."""
        return (
            None
            if self._tokenizer is None
            else added_tokens(self._tokenizer, lambda text: self._encode_whole([text])[0])
        )

    @cached_property
    def _shared(self) -> SharedTexts | None:
        return self.sharing()

    def sharing(self, *, is_strict: bool = False) -> SharedTexts | None:
        """What tokenises texts that begin alike; None where each is tokenised by itself."""
        return None if self._added is None else SharedTexts(self._tokenizer, is_strict=is_strict)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def added(self) -> TokenArray:
        """What the tokenizer puts before a text, int32."""
        return np.empty(0, np.int32) if self._added is None else self._added


def _at_a_word(context: str, continuation: str) -> tuple[str, str]:
    """The context without the white space at its end, and both joined."""
    return context.rstrip(), context + continuation


def token_ids(given: Text, what: str) -> TokenArray:
    """Given token ids, int32; raises `RequestError` for text, which is not taken beside ids."""
    if isinstance(given, str):
        raise RequestError(f"{what} {given[:40]!r} is text beside token ids; give all as one or the other")
    return Rows.of([given], what).tokens


def split_at_labels(ids: list[TokenArray]) -> tuple[TokenArray, list[TokenArray]]:
    """A prompt and its labels, cut at the last token that all agree on; given are its ids and the joint ones."""
    alone, *joint = ids
    stable = min([alone.size, *(_common(alone, each) for each in joint)])
    return alone[:stable], [each[stable:] for each in joint]


def _common(a: TokenArray, b: TokenArray) -> int:
    n = min(a.size, b.size)
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n


def tail(text: str) -> str:
    """The last two words with the white space around them."""
    words = text.rsplit(None, 2)
    return text if len(words) < 3 else text[len(words[0]) :]


def _head(text: str) -> str:
    """The first two words, likewise."""
    words = text.split(None, 2)
    return text if len(words) < 3 else text[: len(text) - len(words[2])]


def _classes(texts: Sequence[str]) -> IntArray:
    """Equal texts get equal numbers, int64 [N]."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int64)
