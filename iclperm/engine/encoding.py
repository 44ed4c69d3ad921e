"""Strings into token ids for the engine, as lm-evaluation-harness encodes a context and its continuation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from iclperm.base.tokenizer_file import told_where_it_gives_up
from iclperm.engine.tree import Ids, IntArray, Rows, TokenArray
from iclperm.errors import RequestError

Text = str | Ids


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
            if len(request) != 2:
                raise RequestError(f"request {number} has {len(request)} parts; give (context, continuation)")
        pairs = [self._pair(number, *request) for number, request in enumerate(requests)]
        rows = Rows.of([np.concatenate(pair) for pair in pairs], "request")
        return rows, np.array([len(context) for context, _ in pairs], np.int64)

    def prompts(self, prompts: Sequence[Text]) -> Rows:
        """A row of each prompt; an empty one becomes the prefix token."""
        if isinstance(prompts, str):
            raise RequestError(f"a list of prompts is needed, not the text {prompts[:40]!r}; put it in brackets")
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

    def product(
        self, contexts: Sequence[str], queries: Sequence[str], labels: Sequence[Sequence[str]]
    ) -> tuple[list[TokenArray], list[TokenArray], list[list[TokenArray]]] | None:
        """Ids of the factors if every jointly tokenised prompt is their concatenation, else None.

        Every context + query + continuation is tokenised whole: exact, and C x Q x L prompts of tokeniser work.
        """
        context_ids = [self._encode(context) for context in contexts]
        query_ids: list[TokenArray] = []
        label_ids: list[list[TokenArray]] = []
        for query, row in zip(queries, labels, strict=True):
            prompt, continuations = self.prompt(contexts[0] + query, row)
            if prompt.size <= context_ids[0].size:
                return None
            query_ids.append(prompt[context_ids[0].size :])
            label_ids.append(continuations)
        for context, ids in zip(contexts, context_ids, strict=True):
            texts = [context + query + label for query, row in zip(queries, labels, strict=True) for label in row]
            parts = [
                np.concatenate([ids, query, label])
                for query, row in zip(query_ids, label_ids, strict=True)
                for label in row
            ]
            whole = self._encode_all(texts)
            if not all(np.array_equal(a, b) for a, b in zip(whole, parts, strict=True)):
                return None
        return context_ids, query_ids, label_ids

    def prompt(self, text: str, labels: Sequence[str]) -> tuple[TokenArray, list[TokenArray]]:
        """Ids of a prompt and of each label after it, from their joint texts.

        Where the prompt's end merges with a label, the prompt ends at the last token that all labels leave alone.
        """
        alone, *joint = self._encode_all([text, *(text + label for label in labels)])
        stable = min([alone.size, *(_common(alone, ids) for ids in joint)])
        return alone[:stable], [ids[stable:] for ids in joint]

    def _pair(self, number: int, context: Text, continuation: Text) -> tuple[TokenArray, TokenArray]:
        if isinstance(context, str) and isinstance(continuation, str):
            context_ids, continuation_ids = self._encode_pair(context, continuation)
        elif isinstance(context, str) or isinstance(continuation, str):
            raise RequestError(f"request {number} mixes text and token ids; give both as text or both as ids")
        else:
            context_ids = Rows.of([context], f"request {number} context").tokens
            continuation_ids = Rows.of([continuation], f"request {number} continuation").tokens
        if not continuation_ids.size:
            raise RequestError(
                f"the continuation of request {number} ({str(continuation)[:40]!r}) has no tokens of its "
                "own; give at least one token to score"
            )
        return context_ids if context_ids.size else self._instead_of_nothing(number), continuation_ids

    def _instead_of_nothing(self, number: int) -> TokenArray:
        if self.prefix_id is None:
            raise RequestError(
                f"request {number} has an empty context, and neither tokenizer nor model names a BOS "
                "or EOS token to stand for it; give a context"
            )
        return np.array([self.prefix_id], np.int32)

    def _encode_pair(self, context: str, continuation: str) -> tuple[TokenArray, TokenArray]:
        trailing = len(context) - len(context.rstrip())
        if trailing:
            continuation = context[-trailing:] + continuation
            context = context[:-trailing]
        context_ids, whole = self._encode(context), self._encode(context + continuation)
        return context_ids, whole[len(context_ids) :]

    def _encode(self, text: str) -> TokenArray:
        return self._encode_all([text])[0]

    def _encode_all(self, texts: list[str]) -> list[TokenArray]:
        """Ids with BOS where the tokenizer adds it, and never a trailing EOS."""
        if self._tokenizer is None:
            raise RequestError(
                "the engine has no tokenizer, so requests must be token ids; pass Engine(model, tokenizer) for text"
            )
        eos = self._tokenizer.eos_token_id
        bos = self._tokenizer.bos_token_id
        with told_where_it_gives_up():
            encoded = self._tokenizer(texts, return_attention_mask=False)["input_ids"]
        rows = [np.asarray(ids, np.int32) for ids in encoded]
        return [
            ids[:-1]
            if ids.size and ids[-1] == eos and eos != bos and not text.endswith(self._tokenizer.eos_token)
            else ids
            for ids, text in zip(rows, texts, strict=True)
        ]


def _common(a: TokenArray, b: TokenArray) -> int:
    n = min(a.size, b.size)
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n
