"""Which ids queries and continuations have after the endings of texts, so that each is tokenised once for all alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from iclperm.engine.encoding import tail
from iclperm.engine.shared_text import is_checked
from iclperm.engine.tree import TokenArray


class Joined(NamedTuple):
    """The ids of a query after a text, and of each continuation after both."""

    query: TokenArray
    continuations: list[TokenArray]


class Seams:
    """The ids that followed texts, by how these end: by their last two words, over which no merge of any tokenizer in
    use reaches (`iclperm.engine.encoding`), or, where that ``is_known`` of no bound, by the whole text.

    The first uses, and some of those after them, are made again from the whole text; if one differs, no ending is
    trusted from then on.
    """

    def __init__(self, *, is_known: bool) -> None:
        self._is_known = is_known
        self._joined: dict[tuple[Any, ...], Joined] = {}
        self._num_used = 0

    def get(self, text: str, query: str | None, continuations: Sequence[str]) -> Joined | None:
        """What is known to follow a text; None where that is to be tokenised, and then to be told (``see``)."""
        known = self._joined.get(self._key(text, query, continuations))
        if known is None:
            return None
        self._num_used += 1
        return None if self._is_known and is_checked(self._num_used - 1) else known

    def see(
        self,
        text: str,
        query: str | None,
        continuations: Sequence[str],
        ids: TokenArray,
        prompt: TokenArray,
        rows: list[TokenArray],
    ) -> None:
        """A text of ``ids`` and the query after it have the ids ``prompt``, and ``rows`` are those of continuations."""
        key, found = self._key(text, query, continuations), None
        if np.array_equal(prompt[: ids.size], ids):  # else the query merges with the text's last token
            found = Joined(prompt[ids.size :].copy(), [row.copy() for row in rows])
        before = self._joined.get(key)
        if before is None and found is not None:
            self._joined[key] = found
        elif before is not None and (found is None or not _is_same(before, found)):
            self._is_known = False
            self._joined.clear()

    def _key(self, text: str, query: str | None, continuations: Sequence[str]) -> tuple[Any, ...]:
        return (tail(text) if self._is_known else text, query, *continuations)


def _is_same(one: Joined, other: Joined) -> bool:
    pairs = zip([one.query, *one.continuations], [other.query, *other.continuations], strict=True)
    return all(np.array_equal(*pair) for pair in pairs)
