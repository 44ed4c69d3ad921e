"""Generated answers: the texts that were written, what was read from them, and the tables that keep both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy.typing import NDArray

from iclperm.base.arrays import large_array
from iclperm.study.metrics import Metric
from iclperm.study.states import OK, UNPARSED
from iclperm.tasks.answers import GIVEN_UP, Judgement

FINISHES = ("stop", "eos", "length", "invalid", "refused")
"""Why a text ended: a stop string, the model's own end, no tokens left, logits that are no numbers, or a refusal."""
NO_ANSWER = 0
"""Code of an unparsed answer that counts as wrong."""
KEPT = ("text", "answer", "rule", "finish", "num_tokens", "logprob")
"""The columns of the canonical table that only generated answers have."""
DRAWS_GIVEN_UP = "draws_given_up"
"""How many of a prompt's further texts took too long to read; parts in which none did have no such column."""
READ_BACK = ("context", "split", "query", "state", "prediction", "answer", "rule", "finish", "num_tokens")
_MAX_CODE = (1 << 31) - 2


class Text(NamedTuple):
    """What was generated for one prompt: the text, why it ended (`FINISHES`), its number of tokens, their summed
    log-likelihood in nats (NaN where it is not known), and its state before it is read."""

    text: str
    finish: str
    num_tokens: int
    logprob: float
    state: int


@dataclass(frozen=True)
class GeneratedAnswers:
    """Generated answers by distinct context and query, [C, Q] each.

    ``state`` uint8 is as it was read: unparsed stays unparsed, whatever it counts as. ``correct`` is bool, or float32
    grades in 0..1 where a ``metric`` grades, and ``error`` float64 absolute errors of a metric that has them; ``rule``
    int16 indexes ``rules`` (-1: none); ``finish`` int8 indexes `FINISHES` (-1: none); ``num_tokens`` int32.
    ``num_right`` int16 of the ``num_draws`` texts of a prompt are right, or float32 the sum of their grades, beside
    ``num_squares``, that of the squares; it is not filled where there is one text. ``num_given_up`` int16 of those
    beside the first took too long to read. ``table`` reads the columns `KEPT` of contexts int64 [N] from the files, a
    row for each context and query.
    """

    state: NDArray[np.uint8]
    correct: NDArray[np.bool_] | NDArray[np.float32]
    rule: NDArray[np.int16]
    finish: NDArray[np.int8]
    num_tokens: NDArray[np.int32]
    num_right: NDArray[np.int16] | NDArray[np.float32]
    num_given_up: NDArray[np.int16]
    num_draws: int
    rules: tuple[str, ...]
    table: Callable[[NDArray[np.int64]], pa.Table]
    metric: Metric | None = None
    error: NDArray[np.float64] | None = None
    num_squares: NDArray[np.float32] | None = None

    @classmethod
    def empty(
        cls, state: NDArray[np.uint8], num_draws: int, bytes_in_memory: int, metric: Metric | None = None
    ) -> GeneratedAnswers:
        """Without answers yet; shares the array of states [C, Q], and has large arrays (`large_array`) beside it."""

        def filled(kind: npt.DTypeLike, value: int, shape: tuple[int, ...] = state.shape) -> NDArray[Any]:
            array = large_array(shape, kind, most_held=bytes_in_memory)
            array[:] = value
            return array

        several, kind = num_draws > 1, np.bool_ if metric is None else np.float32
        return cls(
            state=state,
            correct=filled(kind, 0),
            rule=filled(np.int16, -1),
            finish=filled(np.int8, -1),
            num_tokens=filled(np.int32, 0),
            num_right=filled(np.int16 if metric is None else np.float32, 0)
            if several
            else np.broadcast_to(np.int16(0), state.shape),
            num_given_up=np.broadcast_to(np.int16(0), state.shape),
            num_draws=num_draws,
            rules=(),
            table=lambda _: pa.table({}),
            metric=metric,
            error=filled(np.float64, 0) if metric is not None and metric.has_errors else None,
            num_squares=filled(np.float32, 0) if several and metric is not None else None,
        )

    def filled(self, contexts: NDArray[np.int64], queries: NDArray[np.int64], table: pa.Table) -> GeneratedAnswers:
        """These answers and those of a part: the rows of ``table`` are at contexts and queries int64 [N].

        Changes its own arrays in place.
        """
        rule = table["rule"].cast(pa.string()).to_pylist()
        rules = (*self.rules, *sorted({name for name in rule if name is not None} - {*self.rules}))
        codes = dict(zip((None, *rules), range(-1, len(rules)), strict=True))
        finishes = dict(zip((None, *FINISHES), range(-1, len(FINISHES)), strict=True))
        self.correct[contexts, queries] = self._verdicts(table)
        if self.error is not None:
            self.error[contexts, queries] = _within(table["error"], np.finfo(np.float64).max)
        self.rule[contexts, queries] = [codes[name] for name in rule]
        self.finish[contexts, queries] = [finishes[name] for name in table["finish"].cast(pa.string()).to_pylist()]
        self.num_tokens[contexts, queries] = table["num_tokens"].fill_null(0).to_numpy()
        if self.num_draws > 1 and self.num_squares is not None:
            draws = [[grade or 0.0 for grade in row] for row in table["draw_grade"].to_pylist()]
            self.num_right[contexts, queries] = list(map(sum, draws))
            self.num_squares[contexts, queries] = [sum(grade**2 for grade in row) for row in draws]
        elif self.num_draws > 1:
            self.num_right[contexts, queries] = [sum(map(bool, draws)) for draws in table["draw_correct"].to_pylist()]
        return replace(self, rules=rules, num_given_up=self._given_up(contexts, queries, table))

    def _verdicts(self, table: pa.Table) -> NDArray[Any]:
        """[N] right or wrong, or a grade."""
        if self.metric is not None:
            return _within(table["grade"], 1)
        return np.array(table["correct"].fill_null(False).to_numpy(), dtype=np.bool_)

    def _given_up(self, contexts: NDArray[np.int64], queries: NDArray[np.int64], table: pa.Table) -> NDArray[np.int16]:
        """Seldom are there any: an array is made when the first part has some."""
        counts = self.num_given_up
        if self.num_draws > 1 and DRAWS_GIVEN_UP in table.column_names:
            counts = counts if counts.flags.writeable else counts.copy()
            counts[contexts, queries] = table[DRAWS_GIVEN_UP].fill_null(0).to_numpy()
        return counts

    def of_queries(self, queries: slice, table: Callable[[NDArray[np.int64]], pa.Table]) -> GeneratedAnswers:
        """The answers to some queries, whose texts ``table`` reads; the arrays are views."""
        names: tuple[str, ...] = ("state", "correct", "rule", "finish", "num_tokens", "num_right", "num_given_up")
        names += tuple(name for name in ("error", "num_squares") if getattr(self, name) is not None)
        parts = {name: getattr(self, name)[:, queries] for name in names}
        return replace(self, **parts, table=table)

    def update(self, digest: Any, contexts: NDArray[np.int64]) -> None:
        """Adds to a hash what the canonical table says of these contexts."""
        table = self.table(contexts)
        digest.update(self.state[contexts].tobytes() + self.correct[contexts].tobytes())
        for name in ("text", "answer"):
            digest.update(json.dumps(table[name].to_pylist(), ensure_ascii=False).encode())


def verdict_names(metric: Metric | None, num_draws: int = 1) -> list[str]:
    """The columns that say how right answers are; they are read back, too."""
    if metric is None:
        return ["correct", *(["draw_correct", DRAWS_GIVEN_UP] if num_draws > 1 else [])]
    errors = ["error"] if metric.has_errors else []
    return ["grade", *errors, *(["draw_grade", DRAWS_GIVEN_UP] if num_draws > 1 else [])]


def item_columns(
    draws: Sequence[Sequence[Text]],
    judged: Sequence[Sequence[Judgement]],
    labels: Sequence[str],
    metric: Metric | None = None,
) -> dict[str, Any]:
    """The columns of generated answers, a row a prompt.

    ``draws`` are the texts, ``judged`` what was read from them, [draws, N] both: the first draw is the answer, and
    where there are several all are kept beside it. ``labels`` are the words that an answer may be, none where it may be
    anything. A ``metric`` has grades stand in place of what is right, and errors where it has some.
    """
    texts, readings = draws[0], judged[0]
    state = np.array([_state(text, reading) for text, reading in zip(texts, readings, strict=True)], dtype=np.uint8)
    is_missing = state != OK
    numbers = {word: number for number, word in enumerate(labels)}
    answers = [None if missing else reading.answer for missing, reading in zip(is_missing, readings, strict=True)]
    logprob = np.array([text.logprob for text in texts], dtype=np.float32)
    return {
        "prediction": pa.array([None if answer is None else numbers.get(answer) for answer in answers], pa.int16()),
        "answer": pa.array(answers, pa.string()),
        **_verdict_columns(readings, is_missing, metric),
        "rule": pa.array([reading.rule for reading in readings], pa.string()).dictionary_encode(),
        "text": pa.array([text.text for text in texts], pa.string()),
        "finish": pa.array([text.finish for text in texts], pa.string()).dictionary_encode(),
        "num_tokens": pa.array([text.num_tokens for text in texts], pa.int32()),
        "logprob": pa.array(logprob, pa.float32(), mask=np.isnan(logprob)),
        "state": state,
        **(_draw_columns(draws, judged, metric) if len(draws) > 1 else {}),
    }


def _verdict_columns(
    readings: Sequence[Judgement], is_missing: NDArray[np.bool_], metric: Metric | None
) -> dict[str, pa.Array]:
    if metric is None:
        return {"correct": pa.array([reading.is_correct for reading in readings], pa.bool_(), mask=is_missing)}
    errors = [reading.error for reading in readings]
    return {
        "grade": pa.array([reading.grade for reading in readings], pa.float32(), mask=is_missing),
        **({"error": pa.array(errors, pa.float64(), mask=is_missing)} if metric.has_errors else {}),
    }


def _draw_columns(
    draws: Sequence[Sequence[Text]], judged: Sequence[Sequence[Judgement]], metric: Metric | None
) -> dict[str, pa.Array]:
    """All texts of a prompt, and whether each is right, or its grade: null where it gives no answer."""
    verdicts = [
        [reading if _state(text, reading) == OK else None for text, reading in zip(*each, strict=True)]
        for each in zip(draws, judged, strict=True)
    ]
    by_prompt = [*zip(*verdicts, strict=True)]
    rights = [[reading and reading.is_correct for reading in row] for row in by_prompt]
    grades = [[reading and reading.grade for reading in row] for row in by_prompt]
    given_up = [sum(reading.rule == GIVEN_UP for reading in readings) for readings in zip(*judged[1:], strict=True)]
    return {
        "draw_texts": pa.array([[text.text for text in texts] for texts in zip(*draws, strict=True)]),
        **(
            {"draw_correct": pa.array(rights, pa.list_(pa.bool_()))}
            if metric is None
            else {"draw_grade": pa.array(grades, pa.list_(pa.float32()))}
        ),
        **({DRAWS_GIVEN_UP: pa.array(given_up, pa.int16())} if any(given_up) else {}),
    }


def _within(column: pa.ChunkedArray, most: float) -> NDArray[np.float64]:
    """A column of numbers, 0 for null; raises ValueError for one outside 0..``most``."""
    values = np.array(column.fill_null(0).to_numpy(), dtype=np.float64)
    if not ((values >= 0) & (values <= most)).all():
        raise ValueError(f"a number is outside 0..{most:g}")
    return values


def _state(text: Text, reading: Judgement) -> int:
    return text.state if text.state != OK else OK if reading.answer is not None else UNPARSED


def codes(table: pa.Table, num_labels: int) -> NDArray[np.int32]:
    """A number for each row's answer, int32 [N]: equal for equal answers, -1 for none.

    The label's number where there are ``num_labels``, else a hash of the answer from 1 on: no order among answers is
    known, nor which is right.
    """
    if num_labels:
        return np.asarray(table["prediction"].fill_null(-1).to_numpy(), dtype=np.int32)
    return np.array([-1 if answer is None else _hashed(answer) for answer in table["answer"].to_pylist()], np.int32)


def _hashed(answer: str) -> int:
    return 1 + int.from_bytes(hashlib.blake2b(answer.encode(), digest_size=8).digest(), "little") % _MAX_CODE


def dense(codes: NDArray[np.signedinteger[Any]]) -> NDArray[np.int32]:
    """Codes [..., Q] as small numbers from 0 on, query by query; order is kept, int32."""
    flat = codes.reshape(-1, codes.shape[-1])
    small = [np.unique(of_query, return_inverse=True)[1] for of_query in flat.T]
    return np.asarray(np.stack(small, axis=-1).reshape(codes.shape), dtype=np.int32)


def wrong_where_unparsed(
    state: NDArray[np.uint8], prediction: NDArray[np.signedinteger[Any]], num_labels: int, bytes_in_memory: int
) -> tuple[NDArray[np.uint8], NDArray[np.signedinteger[Any]]]:
    """New states and predictions [C, Q] in which an unparsed answer is an answer, one that is never right.

    ``num_labels`` is 0 where any answer may be given. Both are large arrays (`large_array`).
    """
    states = large_array(state.shape, state.dtype, most_held=bytes_in_memory)
    predictions = large_array(prediction.shape, prediction.dtype, most_held=bytes_in_memory)
    for context in range(len(state)):  # a context at a time: little beside the arrays
        is_unparsed = state[context] == UNPARSED
        states[context] = np.where(is_unparsed, OK, state[context])
        predictions[context] = np.where(is_unparsed, num_labels or NO_ANSWER, prediction[context])
    return states, predictions
