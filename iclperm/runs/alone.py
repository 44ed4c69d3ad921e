"""Labels and choices by themselves, after no text at all: what ``normalize: pmi`` takes off their log-likelihoods."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iclperm.engine.encoding import Encoder
from iclperm.errors import ConfigError
from iclperm.prompts.cells import Cell
from iclperm.prompts.encode import Ids
from iclperm.prompts.tokenise import Prompts
from iclperm.runs.setting import ResolvedStudy


@dataclass(frozen=True)
class Alone:
    """What is asked without a context, as lm-evaluation-harness' ``acc_mutual_info`` asks it: after ``nothing``, the
    token that stands for no text, each of ``rows`` of ids: of every query its choices, [Q][L] filled up as
    `Prompts.choices`, or [1][L] the labels of all."""

    nothing: Ids
    rows: list[list[Ids]]
    is_by_query: bool

    @classmethod
    def of(cls, setting: ResolvedStudy, prompts: Prompts, tokenizer: Any) -> Alone:
        """Raises `ConfigError` where neither tokenizer nor model has a token to begin with."""
        texts = prompts.pieces.texts
        config = SimpleNamespace(bos_token_id=list(setting.facts.bos_ids if setting.facts else ()), eos_token_id=None)
        encoder, is_by_query = Encoder(tokenizer, config), prompts.choices is not None
        if encoder.prefix_id is None and not encoder.added.size:
            raise ConfigError(
                "normalize is 'pmi', but neither tokenizer nor model names a BOS or EOS token to stand for an empty "
                "context; set it to sum"
            )
        most = len(prompts.after(0))
        rows, first = [], np.empty(0, np.int32)
        for query in range(len(prompts.queries) if is_by_query else 1):
            pairs = encoder.pairs([("", text) for text in texts.after(query)])
            first, ids = pairs[0][0], [after for _, after in pairs]
            rows.append([*ids, *ids[:1] * (most - len(ids))])
        return cls(first, rows, is_by_query)

    def wanted(self, queries: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which rows some queries, bool [Q], need."""
        return queries if self.is_by_query else np.array([queries.any()])

    def cells(self, wanted: NDArray[np.bool_]) -> list[Cell]:
        """The prompts of some rows; in the place of a query they have the row's number, and no context."""
        return [Cell(-1, row, self.nothing, self.rows[row]) for row in np.flatnonzero(wanted).tolist()]
