"""What answers a study: a model on this machine or one behind an API. Parts in, tables of answers out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iclperm.endpoint import Endpoint
from iclperm.endpoint.bill import Prompt
from iclperm.endpoint.keys import KeyHosts
from iclperm.endpoint.ledger import Ledger
from iclperm.endpoint.replies import Reply, Scored
from iclperm.errors import ConfigError, OutOfMemory, RunStopped, is_out_of_memory
from iclperm.prompts.chat import TextTokenizer
from iclperm.runs.answering import Answering, Asked, Engines, ModelUse
from iclperm.runs.checks import halved_peaks, refuse_normalized_lists
from iclperm.runs.formats import beside
from iclperm.runs.generated import Text
from iclperm.runs.layout import api_prompt, plans_of
from iclperm.runs.run import as_counts
from iclperm.runs.tables import alone_rows, generated_rows, item_rows
from iclperm.runs.work import Part, Work
from iclperm.study.states import API_MISSING, INVALID, OK, OVERLONG, UNPARSED
from iclperm.tasks.answers import Checker

_CHECKING = ("math-verify", "latex2sympy2-extended", "sympy")
_STATE_OF_REPLY = {
    "ok": OK, "invalid": INVALID, "overlong": OVERLONG, "unparsed": UNPARSED, "refused": API_MISSING,
}  # fmt: skip


class Claims(Protocol):
    """Which parts this process may work at, where several share a folder."""

    def take(self, part: int) -> bool:
        """Whether the part is this process' to answer: no other one works at it, or has finished it."""
        ...

    def release(self, part: int) -> None:
        """Gives back a part that was taken."""
        ...

    def each(self, parts: Sequence[int]) -> Generator[int]:
        """Those of some parts that can be taken, one after the other: each is given back where the next begins."""
        ...


class Answered(NamedTuple):
    """The rows of a part, and what their last bits depend on."""

    part: int
    rows: pa.Table
    numerics: dict[str, Any]


class Scorer(Protocol):
    """What answers the prompts of a run.

    ``numerics`` are what the last bits of an answer depend on, JSON-safe. ``libraries`` are the packages whose versions
    are recorded. ``tokens`` have been forwarded or paid for so far, and ``replies`` are counts of an API's replies
    (`iclperm.runs.run.REPLIES`). ``workers`` say for each process that answers beside this one its name, host, pid,
    parts and seconds.
    """

    @property
    def numerics(self) -> dict[str, Any]: ...
    @property
    def libraries(self) -> tuple[str, ...]: ...
    @property
    def tokens(self) -> int: ...
    @property
    def replies(self) -> dict[str, int]: ...
    @property
    def workers(self) -> list[dict[str, Any]]: ...
    def expect(self, numerics: Mapping[str, Any]) -> None:
        """What parts of the run were computed with: of several workers, those that agree go on."""
        ...

    def tables(self, parts: Sequence[int], claims: Claims, checker: Checker | None) -> Generator[Answered]:
        """The rows of those of some parts that can be claimed and answered now.

        With a ``checker`` answers are generated, and read by it. Raises `RunStopped` where it cannot go on.
        """
        ...

    def close(self) -> None:
        """Ends what it has begun; may be called again."""
        ...


def scorer_of(
    work: Work, folder: Path | None, keys: KeyHosts | None = None, local: Callable[[Work], Scorer] | None = None
) -> Scorer:
    """The scorer of a study; nothing is loaded or asked before the first part. ``folder`` keeps an API's replies,
    ``keys`` are the hosts that its key may go to, ``local`` makes what runs a model that is behind none."""
    return (local or LocalModel)(work) if work.setting.study.endpoint is None else RemoteModel(work, folder, keys)


class LocalModel:
    """A model in this process, through the tree."""

    def __init__(self, work: Work, engines: Engines | None = None) -> None:
        self.libraries = libraries_of(work)
        self.replies: dict[str, int] = {}
        self.workers: list[dict[str, Any]] = []
        self._work = work
        plans = [product.plan for product in work.products]
        self._answering = Answering(ModelUse.of(work.setting), plans, engines)

    @property
    def numerics(self) -> dict[str, Any]:
        """See `Answering.numerics`; loads the model."""
        with enough_memory(self._work):
            return self._answering.numerics

    @property
    def tokens(self) -> int:
        """See `Answering.tokens`."""
        return self._answering.tokens

    def expect(self, numerics: Mapping[str, Any]) -> None:
        """Nothing to do: there is one way to answer."""

    def close(self) -> None:
        """Nothing to do."""

    def tables(self, parts: Sequence[int], claims: Claims, checker: Checker | None) -> Generator[Answered]:
        """See `Scorer`."""
        work = self._work
        # Both are closed here: the traceback of an error would keep them, and the claim on a part, alive.
        with enough_memory(work), closing(claims.each(parts)) as claimed:
            asked = (Asked.of(work, part) for part in claimed)
            with closing(self._answering.answers(asked)) as answers:
                for part, said in answers:
                    yield Answered(part, rows_of(work, part, said, checker), self.numerics)


class RemoteModel:
    """A model behind an API.

    Replies are kept in the run folder before they are used. A part that lacks some of them is not written; a later
    session asks for these replies alone.
    """

    def __init__(self, work: Work, folder: Path | None, keys: KeyHosts | None = None) -> None:
        choices = work.setting.study.endpoint
        assert choices is not None
        self.libraries = ("iclperm", "numpy", "pyarrow", "openai", *_checking(work))
        self.workers: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter()
        self._choices = choices
        self._work = work
        self._folder = folder
        self._keys = keys
        self._ledger: Ledger | None = None

    @cached_property
    def endpoint(self) -> Endpoint:
        """Made at the first use; sends nothing by itself."""
        self._ledger = None if self._folder is None else Ledger(self._folder, partial(beside, self._folder))
        return Endpoint.of(self._choices, self._ledger, self._keys)

    def expect(self, numerics: Mapping[str, Any]) -> None:
        """Nothing to do: there is one way to answer."""

    def close(self) -> None:
        """Closes the file of replies."""
        if self._ledger is not None:
            self._ledger.close()

    @property
    def numerics(self) -> dict[str, Any]:
        """The names of the model and the API; what computes the answers there is not known."""
        return {"endpoint": self._choices.model, "api": self._choices.api}

    @property
    def tokens(self) -> int:
        """Paid for by this process: those of prompts, cached by the provider or not, and of replies."""
        return self.endpoint.paid.tokens

    @property
    def replies(self) -> dict[str, int]:
        """Counts of the parts that this process has answered."""
        damaged = {} if self._ledger is None else {"num_damaged_replies": self._ledger.num_damaged}
        return {**self._counts, **damaged, **as_counts(self.endpoint.paid, self.endpoint.lost)}

    def tables(self, parts: Sequence[int], claims: Claims, checker: Checker | None) -> Generator[Answered]:
        """See `Scorer`; the prompts of a context are sent as a group, so that the provider can cache it."""
        missing, problem = 0, ""
        with closing(claims.each(parts)) as claimed:
            for part in claimed:
                table, num_missing, why = self._of_part(self._work.parts[part], checker)
                if table is not None:
                    yield Answered(part, table, self.numerics)
                missing, problem = missing + num_missing, why or problem
        if missing:
            raise RunStopped(
                f"{missing} prompts have no reply yet ({problem}); what was paid for is kept: run the same command to "
                "continue"
            )

    def _of_part(self, part: Part, checker: Checker | None) -> tuple[pa.Table | None, int, str]:
        """A part's rows, None where replies are missing; how many are missing, and why the last of them is."""
        contexts, queries = _cells(part)  # general ones only of demonstrations of their own: text has no seams to fail
        prompts = self._work.prompts
        groups = [[api_prompt(cell.prompt)] for cell in part.cells] or [
            [api_prompt(np.concatenate([prompts.contexts[context], prompts.queries[query]])) for _, query in cells]
            for context, cells in groupby(
                zip(contexts.tolist(), queries.tolist(), strict=True), key=lambda cell: cell[0]
            )
        ]
        return (
            self._scored(part, contexts, queries, groups)
            if checker is None
            else self._written(part, contexts, queries, groups, checker)
        )

    def _scored(
        self, part: Part, contexts: NDArray[np.int64], queries: NDArray[np.int64], groups: Sequence[Sequence[Prompt]]
    ) -> tuple[pa.Table | None, int, str]:
        labels = [TextTokenizer().ids_to_text(ids) for ids in self._work.prompts.continuations]
        is_first = self._work.setting.study.scoring == "first_token"
        is_listed = not self.endpoint.capabilities.prompt_logprobs
        if is_listed:
            refuse_normalized_lists(self._work.setting.study)
        found = self.endpoint.score_groups(groups, labels, first_token_only=is_first)
        scored = [each for group in found for each in group]
        self._refuse_overlong(scored)
        if missing := [each.problem for each in scored if each.state == "api_missing"]:
            return None, len(missing), missing[-1]
        if is_listed:
            self._count_listed([each for each in scored if each.state == "ok"])
        logprob = np.array([each.logprob for each in scored], dtype=np.float32)
        state = np.array([_STATE_OF_REPLY[each.state] for each in scored], dtype=np.uint8)
        return item_rows(self._work, part, contexts, queries, logprob, state), 0, ""

    def _written(
        self,
        part: Part,
        contexts: NDArray[np.int64],
        queries: NDArray[np.int64],
        groups: Sequence[Sequence[Prompt]],
        checker: Checker,
    ) -> tuple[pa.Table | None, int, str]:
        setting = self._work.setting
        found = self.endpoint.generate_groups(groups, max_new_tokens=setting.max_new_tokens, stop=setting.stop)
        replies = [reply for group in found for reply in group]
        self._refuse_overlong(replies)
        if missing := [reply.problem for reply in replies if reply.state == "api_missing"]:
            return None, len(missing), missing[-1]
        if self._choices.temperature != 0 or not self.endpoint.takes_temperature:
            self._counts["num_drawn"] += sum(reply.state == "ok" for reply in replies)
        draws = [list(map(_text_of, replies[draw :: setting.draws])) for draw in range(setting.draws)]
        return _read_rows(self._work, part, contexts, queries, draws[0], checker, draws[1:]), 0, ""

    def _refuse_overlong(self, answers: Sequence[Reply | Scored]) -> None:
        """Raises `RunStopped` where a prompt does not fit, unless the study drops those that do not."""
        problems = [answer.problem for answer in answers if answer.state == "overlong"]
        if problems and self._work.setting.study.on_overlong == "error":
            raise RunStopped(
                f"{len(problems)} prompts are too long for {self._choices.model} ({problems[0]}); start another run "
                "with fewer 'shots' or with on_overlong: drop"
            )

    def _count_listed(self, scored: Sequence[Scored]) -> None:
        """Counts log-likelihoods of first tokens, and bounds among them.

        Raises `ConfigError` where there are bounds and the study is calibrated, which needs values.
        """
        num_bounds = sum(sum(each.is_bound) for each in scored)
        if num_bounds and self._work.setting.study.calibration != "none":
            raise ConfigError(
                f"{self._choices.model} does not list every label's first token, and calibration needs all of them; "
                "set it to none"
            )
        self._counts["num_listed"] += sum(len(each.is_bound) for each in scored)
        self._counts["num_bounds"] += num_bounds


def libraries_of(work: Work) -> tuple[str, ...]:
    """The packages that decide about the answers of a model on a machine of ours, but those of the engine."""
    return ("iclperm", "numpy", "pyarrow", "tokenizers", *_checking(work))


def _checking(work: Work) -> tuple[str, ...]:
    """The packages that decide whether an answer is right, where the task uses some."""
    answer = work.setting.task.answer
    return _CHECKING if answer is not None and answer.check == "math" else ()


def _text_of(reply: Reply) -> Text:
    finish = "refused" if reply.state == "refused" else {"length": "length"}.get(reply.finish, "stop")
    logprob = float("nan") if reply.logprob is None else reply.logprob
    return Text(reply.text, finish, reply.completion_tokens, logprob, _STATE_OF_REPLY[reply.state])


def rows_of(work: Work, number: int, said: pa.Table, checker: Checker | None) -> pa.Table:
    """The rows of a part from what the model said (`Answering.answers`); generated texts are read by the checker."""
    part = work.parts[number]
    contexts, queries = _cells(part)
    if part.is_alone:
        return alone_rows(work, queries, _logprobs(said), said["state"].to_numpy())
    if part.product is not None:  # cells outside the products are computed with them, too, and not used there
        inside = ~np.isin(contexts * len(work.prompts.queries) + queries, work.general_cells)
        contexts, queries, said = contexts[inside], queries[inside], said.filter(pa.array(inside))
    if checker is not None:
        columns = [said[name].to_pylist() for name in Text._fields]
        return _read_rows(work, part, contexts, queries, [Text(*each) for each in zip(*columns, strict=True)], checker)
    return item_rows(work, part, contexts, queries, _logprobs(said), said["state"].to_numpy())


def _logprobs(said: pa.Table) -> NDArray[np.float32]:
    """Log-likelihoods [N, L]."""
    lists = said["logprob"].combine_chunks()
    values: NDArray[np.float32] = lists.flatten().to_numpy(zero_copy_only=False)
    return values.reshape(len(said), lists.type.list_size)


def _cells(part: Part) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Contexts and queries [N] of a part, in the order of its answers."""
    product = part.product
    if product is None:
        pairs = np.array([(cell.context, cell.query) for cell in part.cells], dtype=np.int64)
        return pairs[:, 0], pairs[:, 1]
    units = [(product.plan.unit_contexts(unit), product.plan.unit_queries(unit)) for unit in part.units]
    contexts = [np.repeat(product.contexts[rows], len(columns)) for rows, columns in units]
    queries = [np.tile(product.queries[columns], len(rows)) for rows, columns in units]
    return np.concatenate(contexts), np.concatenate(queries)


def _read_rows(
    work: Work,
    part: Part,
    contexts: NDArray[np.int64],
    queries: NDArray[np.int64],
    texts: Sequence[Text],
    checker: Checker,
    draws: Sequence[Sequence[Text]] = (),
) -> pa.Table:
    """The table of generated texts, read and judged by the checker; ``draws`` are further texts of the same prompts."""
    published = [work.published_answers[query] for query in queries.tolist()]
    judged = [checker.judge([text.text for text in drawn], published) for drawn in (texts, *draws)]
    return generated_rows(work, part, contexts, queries, [texts, *draws], judged)


@contextmanager
def enough_memory(work: Work) -> Iterator[None]:
    """What runs out of memory inside becomes a `RunStopped` that says what to change."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        remedy = str(error) if isinstance(error, OutOfMemory) else f"{_smaller(work)}, or use a smaller model"
        raise RunStopped(f"out of memory; {remedy}") from None


def _smaller(work: Work) -> str:
    needed, less = halved_peaks(work, plans_of(work))
    remedy = f"set memory_budget to {less} to continue" if less < needed else "lower 'shots'"
    return f"{needed} bytes are foretold, weights among them: {remedy}"
