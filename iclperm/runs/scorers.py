"""What answers a study: a model on this machine or one behind an API. Parts in, tables of answers out."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

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
from iclperm.runs.checks import halved_peaks, refuse_normalized_lists
from iclperm.runs.formats import beside
from iclperm.runs.generated import Text
from iclperm.runs.layout import api_prompt
from iclperm.runs.run import as_counts
from iclperm.runs.tables import generated_rows, item_rows
from iclperm.runs.work import Part, Product, Work
from iclperm.study.states import API_MISSING, INVALID, OK, OVERLONG, UNPARSED
from iclperm.tasks.answers import Checker

if TYPE_CHECKING:
    from iclperm.engine.engine import Engine, UnitResult
    from iclperm.engine.texts import GeneratedUnit, Generations

Claim = Callable[[Sequence[int]], Iterator[int]]
"""Gives those of some parts that this process may work at, one after the other."""
_CHECKING = ("math-verify", "latex2sympy2-extended", "sympy")
_STATE_OF_REPLY = {
    "ok": OK, "invalid": INVALID, "overlong": OVERLONG, "unparsed": UNPARSED, "refused": API_MISSING,
}  # fmt: skip


class Scorer(Protocol):
    """What answers the prompts of a run.

    ``numerics`` are what the last bits of an answer depend on, JSON-safe. ``libraries`` are the packages whose versions
    are recorded. ``tokens`` have been forwarded or paid for so far, and ``replies`` are counts of an API's replies
    (`iclperm.runs.run.REPLIES`).
    """

    @property
    def numerics(self) -> dict[str, Any]: ...
    @property
    def libraries(self) -> tuple[str, ...]: ...
    @property
    def tokens(self) -> int: ...
    @property
    def replies(self) -> dict[str, int]: ...
    def tables(self, parts: Sequence[int], claim: Claim, checker: Checker | None) -> Generator[tuple[int, pa.Table]]:
        """The rows of those of some parts that can be claimed and answered now, each with its number.

        With a ``checker`` answers are generated, and read by it. Raises `RunStopped` where it cannot go on.
        """
        ...

    def close(self) -> None:
        """Ends what it has begun; called once a run."""
        ...


def scorer_of(work: Work, folder: Path | None, keys: KeyHosts | None = None) -> Scorer:
    """The scorer of a study; nothing is loaded or asked before the first part. ``folder`` keeps an API's replies,
    ``keys`` are the hosts that its key may go to."""
    return LocalModel(work) if work.setting.study.endpoint is None else RemoteModel(work, folder, keys)


class LocalModel:
    """A model on this machine, through the tree."""

    def __init__(self, work: Work) -> None:
        self.libraries = ("iclperm", "numpy", "pyarrow", "tokenizers", *_checking(work))
        self.replies: dict[str, int] = {}
        self._work = work
        self._is_in_a_call = False

    @cached_property
    def engine(self) -> Engine:
        """Loaded at the first use."""
        from iclperm.engine.engine import Engine

        setting = self._work.setting
        study = setting.study
        assert setting.model is not None
        with enough_memory(self._work):
            return Engine.from_pretrained(
                setting.model,
                device=study.device,
                dtype=study.dtype,
                memory_budget=study.memory_budget,
                plain=study.plain,
            )

    @cached_property
    def numerics(self) -> dict[str, Any]:
        """The engine's, and the processor's name."""
        with enough_memory(self._work):
            return {**self.engine.numerics, "processor": _processor()}

    @property
    def tokens(self) -> int:
        """Forwarded through the first layer, those of a call of the engine that is still open among them."""
        open_call = self.engine.report.tokens_so_far if self._is_in_a_call else 0
        return self.engine.totals.tokens_forwarded + open_call

    def close(self) -> None:
        """Nothing to do."""

    def tables(self, parts: Sequence[int], claim: Claim, checker: Checker | None) -> Generator[tuple[int, pa.Table]]:
        """See `Scorer`; the units of a product are one call of the engine."""
        work = self._work
        with enough_memory(work):
            for _, group in groupby(parts, key=lambda part: id(work.parts[part].product)):
                offered = list(group)
                if (product := work.parts[offered[0]].product) is not None:
                    yield from self._of_product(product, claim(offered), checker)
                else:
                    for part in claim(offered):
                        yield part, self._of_cells(work.parts[part], checker)

    def _of_product(
        self, product: Product, parts: Iterator[int], checker: Checker | None
    ) -> Generator[tuple[int, pa.Table]]:
        part_of: dict[int, int] = {}

        def units() -> Iterator[int]:
            for part in parts:
                part_of.update(dict.fromkeys(self._work.parts[part].units, part))
                yield from self._work.parts[part].units

        rows: list[pa.Table] = []
        self._is_in_a_call = True
        try:
            # Closed even when the run is interrupted here: only then does the engine count what it forwarded.
            with closing(self._answered(product, units(), generated=checker is not None)) as results:
                for result in results:
                    part = part_of[result.unit]
                    rows.append(self._of_unit(product, self._work.parts[part], result, checker))
                    if len(rows) == len(self._work.parts[part].units):
                        yield part, pa.concat_tables(rows)
                        rows = []
        finally:
            self._is_in_a_call = False

    def _answered(
        self, product: Product, units: Iterable[int], *, generated: bool
    ) -> Generator[UnitResult | GeneratedUnit]:
        setting = self._work.setting
        found: Iterator[UnitResult | GeneratedUnit] = (
            self.engine.generate_units(product.plan, units, max_new_tokens=setting.max_new_tokens, stop=setting.stop)
            if generated
            else self.engine.execute(product.plan, units)
        )
        return cast("Generator[UnitResult | GeneratedUnit]", found)

    def _of_unit(
        self, product: Product, part: Part, result: UnitResult | GeneratedUnit, checker: Checker | None
    ) -> pa.Table:
        work = self._work
        contexts = np.repeat(product.contexts[result.contexts], len(result.queries))
        queries = np.tile(product.queries[result.queries], len(result.contexts))
        inside = ~np.isin(contexts * len(work.prompts.queries) + queries, work.general_cells)
        if checker is not None:
            texts = _texts(cast("GeneratedUnit", result).outputs)
            written = [text for text, is_inside in zip(texts, inside, strict=True) if is_inside]
            return _read_rows(work, part, contexts[inside], queries[inside], written, checker)
        scored = cast("UnitResult", result)
        logprob = scored.logprob.reshape(len(contexts), -1)
        return item_rows(work, part, contexts[inside], queries[inside], logprob[inside], scored.state.ravel()[inside])

    def _of_cells(self, part: Part, checker: Checker | None) -> pa.Table:
        work, cells = self._work, part.cells
        contexts = np.array([cell.context for cell in cells], dtype=np.int64)
        queries = np.array([cell.query for cell in cells], dtype=np.int64)
        if checker is not None:
            prompts = [cell.prompt for cell in cells]
            outputs = self.engine.generate(prompts, work.setting.max_new_tokens, work.setting.stop)
            return _read_rows(work, part, contexts, queries, _texts(outputs), checker)
        scores = self.engine.loglikelihood([(cell.prompt, ids) for cell in cells for ids in cell.continuations])
        state = scores.state.reshape(len(cells), -1).max(axis=1)
        return item_rows(work, part, contexts, queries, scores.logprob.reshape(len(cells), -1), state)


class RemoteModel:
    """A model behind an API.

    Replies are kept in the run folder before they are used. A part that lacks some of them is not written; a later
    session asks for these replies alone.
    """

    def __init__(self, work: Work, folder: Path | None, keys: KeyHosts | None = None) -> None:
        choices = work.setting.study.endpoint
        assert choices is not None
        self.libraries = ("iclperm", "numpy", "pyarrow", "openai", *_checking(work))
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

    def tables(self, parts: Sequence[int], claim: Claim, checker: Checker | None) -> Generator[tuple[int, pa.Table]]:
        """See `Scorer`; the prompts of a context are sent as a group, so that the provider can cache it."""
        missing, problem = 0, ""
        for part in claim(parts):
            table, num_missing, why = self._of_part(self._work.parts[part], checker)
            if table is not None:
                yield part, table
            missing, problem = missing + num_missing, why or problem
        if missing:
            raise RunStopped(
                f"{missing} prompts have no reply yet ({problem}); what was paid for is kept: run the same command to "
                "continue"
            )

    def _of_part(self, part: Part, checker: Checker | None) -> tuple[pa.Table | None, int, str]:
        """A part's rows, None where replies are missing; how many are missing, and why the last of them is."""
        contexts, queries = self._cells(part)
        prompts = self._work.prompts
        groups = [
            [api_prompt(prompts, context, query) for _, query in cells]
            for context, cells in groupby(
                zip(contexts.tolist(), queries.tolist(), strict=True), key=lambda cell: cell[0]
            )
        ]
        return (
            self._scored(part, contexts, queries, groups)
            if checker is None
            else self._written(part, contexts, queries, groups, checker)
        )

    def _cells(self, part: Part) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Contexts and queries [N] of a part, context by context."""
        product = part.product
        assert product is not None  # text has no seams that could fail
        units = [(product.plan.unit_contexts(unit), product.plan.unit_queries(unit)) for unit in part.units]
        contexts = [np.repeat(product.contexts[rows], len(columns)) for rows, columns in units]
        queries = [np.tile(product.queries[columns], len(rows)) for rows, columns in units]
        return np.concatenate(contexts), np.concatenate(queries)

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


def _checking(work: Work) -> tuple[str, ...]:
    """The packages that decide whether an answer is right, where the task uses some."""
    answer = work.setting.task.answer
    return _CHECKING if answer is not None and answer.check == "math" else ()


def _text_of(reply: Reply) -> Text:
    finish = "refused" if reply.state == "refused" else {"length": "length"}.get(reply.finish, "stop")
    logprob = float("nan") if reply.logprob is None else reply.logprob
    return Text(reply.text, finish, reply.completion_tokens, logprob, _STATE_OF_REPLY[reply.state])


def _texts(outputs: Generations) -> list[Text]:
    numbers = (outputs.num_tokens.tolist(), outputs.logprob.tolist(), outputs.state.tolist())
    assert outputs.text is not None  # a study has a tokenizer
    return [Text(*each) for each in zip(outputs.text, outputs.finish, *numbers, strict=True)]


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
    needed, less = halved_peaks(work)
    remedy = f"set memory_budget to {less} to continue" if less < needed else "lower 'shots'"
    return f"{needed} bytes are foretold, weights among them: {remedy}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()
