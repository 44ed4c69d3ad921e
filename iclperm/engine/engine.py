"""The engine's surface: log-likelihoods of arbitrary requests and of products, at one forward pass a distinct token."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from iclperm.engine import decode, long_paths, memory, selfcheck
from iclperm.engine.admission import Admission
from iclperm.engine.aio import AsyncEngine
from iclperm.engine.calls import Calls
from iclperm.engine.decode import Bounds
from iclperm.engine.device import fixed_precision
from iclperm.engine.encoding import Encoder
from iclperm.engine.executor import Progress, Report, UnitValues, execute, execute_plain
from iclperm.engine.folder import model_folder
from iclperm.engine.footprint import Footprint, Sizes, most_pack
from iclperm.engine.given import given_contexts, listed, pieces
from iclperm.engine.load import load, load_shapes
from iclperm.engine.long_paths import Rates
from iclperm.engine.model import TreeModel
from iclperm.engine.numerics import numerics_of
from iclperm.engine.pack_rows import PackRows, checking, rows_now
from iclperm.engine.plain_model import PlainModel
from iclperm.engine.plan import (
    DEFAULT_PACK_TOKENS,
    DEFAULT_UNIT_TOKENS,
    ContextPaths,
    Plan,
    plan_product,
    plan_requests,
)
from iclperm.engine.sampling import Sampling
from iclperm.engine.scores import ScoreBlock, Scores, UnitResult, by_query, states_of, sum_rows
from iclperm.engine.session import Session
from iclperm.engine.texts import DEFAULT_MAX_NEW_TOKENS, Ending, Generated, GeneratedUnit, Generations, eos_ids
from iclperm.engine.tree import Ids, IntArray, Rows
from iclperm.errors import RequestError
from iclperm.study.sizes import Budget


class Engine:
    """Scores prompts through a shared-prefix tree, exactly.

    Wraps a transformers causal LM already in memory; token-id requests need no tokenizer. The model stays bit for bit
    as it is and may be used by anyone meanwhile (unless somebody put forwards of their own into it, as accelerate
    does). Calls of one engine from several threads take turns, unit by unit. A context manager, whose end frees what is
    the engine's. ``progress`` of a verb is called after each forward pass with the tokens forwarded so far and those
    expected in all (of texts at most), and at the end with both equal; what it raises ends the call, and leaves engine
    and sessions usable. ``pack_tokens`` is the size of a forward pass at most: by default 4,096 on a CPU (in
    transformers' own layers never more than 1,024), 8,192 to 32,768 on one GPU, by its memory. ``memory_budget``
    (bytes, or a share of what is free) bounds weights, keys and values, activations and logits as ``footprint``
    predicts them: packs are made small enough, and keys and values of a path that does not fit are offloaded or
    computed again, whichever is expected to be faster (``fitted``). Where memory runs out even so, packs are halved for
    the rest of the engine's life if that cannot change a bit (``row_invariant``), else OutOfMemory names a size to
    start anew with. Decoder layers of our own stand in for those of the architectures they know;
    ``layers="transformers"`` forgoes that. ``plain=True`` serves any architecture, each prompt by itself.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        attention: str = "auto",
        layers: str = "auto",
        plain: bool = False,
        pack_tokens: int | None = None,
        unit_tokens: int = DEFAULT_UNIT_TOKENS,
        memory_budget: Budget | None = None,
        self_check: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self._calls = Calls()
        self.row_invariant: bool | None = None  # found out on first use, by a call or by ``numerics``
        self._first_use_lock = threading.RLock()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._unchecked = self_check
        self._given_up: tuple[str, ...] = ()  # of ours, by the first-use check
        self._measured_rate: float | None = None
        self._served: PlainModel | None = PlainModel(model) if plain else TreeModel(model, attention, layers)
        self._checks = self_check and not plain
        self._pack_limit = memory.PackLimit(lambda plan, size: self._sizes.peak(plan, size), self._model.device)
        self._row_limit = decode.RowLimit()
        self._memory_budget: int | None = None
        if memory_budget is not None:
            memory.refuse_budget(len(self._model.devices), plain=plain)
            self._memory_budget = memory.resolve_budget(memory_budget, self._model.device, held=self._sizes.weights)
        if pack_tokens is None:
            on_gpu = isinstance(self._model, TreeModel) and self._model.device.type != "cpu"
            room = memory.device_bytes(self._model.devices[:1])
            pack_tokens = self._sizes.usual_pack(room) if on_gpu else DEFAULT_PACK_TOKENS
        elif not plain:
            self._sizes.warn_of_smaller_packs(pack_tokens)
        if self._memory_budget is not None:
            pack_tokens = min(pack_tokens, self._sizes.most_pack_tokens(self._memory_budget))
        self._limits = {"pack_tokens": pack_tokens, "unit_tokens": unit_tokens}
        self._model.copied.is_on = 0 < self._sizes.copied <= memory.free_bytes(self._model.device) // 4
        self._encoder = Encoder(tokenizer, self._model.config)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        revision: str | None = None,
        adapter: str | Path | None = None,
        **options: Any,
    ) -> Engine:
        """Load a folder or hub id, and merge a PEFT adapter's folder into it: safetensors only, no remote code; raises
        ModelError in one line otherwise."""
        folder = model_folder(name, revision)
        if (budget := options.get("memory_budget")) is not None:
            memory.refuse_budget(1, plain=options.get("plain", False))  # as far as is known before the weights are read
            shapes, place = load_shapes(folder, device=device, dtype=dtype)
            options["memory_budget"] = memory.resolve_budget(budget, place)
            ways = {key: options[key] for key in ("attention", "layers") if key in options}
            Sizes.of(PlainModel(shapes), place, **ways).most_pack_tokens(options["memory_budget"])  # may refuse
        model, tokenizer = load(folder, device=device, dtype=dtype, adapter=adapter)
        return cls(model, tokenizer, **options)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free what is the engine's: sessions, worker, and the model if nobody else holds it; it answers no more."""
        if "aio" in vars(self):
            self.aio.close()
        for session in list(self._sessions):
            session.close()
        self._served = None

    @property
    def _model(self) -> PlainModel:
        if self._served is None:
            raise RequestError("the engine is closed; make another")
        return self._served

    @property
    def report(self) -> Report:
        """What the last call cost: of calls within others, or in several threads, that which began or ended last."""
        return self._calls.last

    @property
    def totals(self) -> Report:
        """What all calls that ended have cost, each once."""
        return self._calls.totals

    @cached_property
    def aio(self) -> AsyncEngine:
        """The verbs for asyncio: ``await engine.aio.score(...)``."""
        return AsyncEngine(self)

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model that is served, unchanged."""
        return self._model.model

    @property
    def attention(self) -> str:
        """The attention path taken: ``native`` (the C++ kernel), ``triton``, ``torch``, or ``plain``."""
        return self._model.attention

    @property
    def layers(self) -> str:
        """Whose decoder layers run: ``fused`` (ours), ``transformers``, or ``plain``."""
        return self._model.layers

    @property
    def max_tokens(self) -> int:
        """Longest prompt that can be scored, in tokens."""
        return self._model.max_positions

    @property
    def pack_tokens(self) -> int:
        """Most tokens of a forward pass: as given, or fewer for the layers that run or once memory has run out."""
        wanted = int(self._limits["pack_tokens"])
        most = most_pack(self._model.device, is_fused=self.layers == "fused")
        return min(wanted, most or wanted, self._pack_limit.pack_tokens or wanted)

    @property
    def numerics(self) -> dict[str, Any]:
        """What the last bits of a result depend on besides model and prompt; with it equal, results are equal.

        Sizes of packs are None where they cannot matter: prompt by prompt, and where rows are invariant. To know that,
        this runs the first-use check if no call has yet (and raises as it does).
        """
        if self._unchecked:
            with self._call() as report:
                self._first_use(report)
        # Of two sizes each was probed against eight rows a thread, so equal bits within one are equal bits across.
        packs_matter = isinstance(self._model, TreeModel) and not self.row_invariant
        sizes = (self.pack_tokens, self._memory_budget) if packs_matter else (None, None)
        return numerics_of(self._model, *sizes) | ({"given_up": list(self._given_up)} if self._given_up else {})

    def footprint(self, plan: Plan) -> Footprint:
        """The memory that a plan is predicted to take at its peak, by part, in the packs that it would run in."""
        fitted = self.fitted(plan)
        return self._sizes.footprint(replace(plan, long_path=fitted.long_path), fitted.pack_tokens)

    def loglikelihood(
        self, requests: Sequence[tuple[str | Ids, str | Ids]], *, progress: Progress | None = None
    ) -> Scores:
        """Log-likelihood of each continuation after its context: the general path.

        Requests are pairs of strings, encoded as lm-evaluation-harness does, or of token ids; an empty context becomes
        the prefix token (BOS, else EOS). Raises RequestError naming the request for ids out of range, an empty
        continuation or a prompt over the context window. Cost: distinct non-empty proper prefixes, in tokens.
        """
        requests = listed(requests, "requests")
        with self._call(progress) as report:
            return self._answered(self._asked(requests, report), report)

    def loglikelihood_rolling(self, texts: Sequence[str | Ids], *, progress: Progress | None = None) -> Scores:
        """Log-likelihood of whole texts, every token of them, the first after the prefix token (BOS, else EOS).

        Text is tokenised without BOS. A text over the context window is cut as lm-evaluation-harness cuts it: into
        windows that follow each other, each token predicted once, after all that its window holds before it. Raises
        RequestError as ``loglikelihood`` does.
        """
        texts = listed(texts, "texts")
        with self._call(progress) as report:
            windows = [self._encoder.windows(number, text, self.max_tokens) for number, text in enumerate(texts)]
            scores = self._answered(self._asked([window for row in windows for window in row], report), report)
            return scores.joined(np.array([len(row) for row in windows], np.int64)) if windows else scores

    @property
    def rows(self) -> PackRows:
        """Within a forward pass, for hooks on the model's modules: which of their rows are of which request.

        Raises RequestError outside of one.
        """
        return rows_now()

    def score(
        self,
        contexts: Sequence[str | Ids] | ContextPaths,
        queries: Sequence[str | Ids],
        continuations: Sequence[Any],
        *,
        progress: Progress | None = None,
    ) -> npt.NDArray[np.float32]:
        """Log-likelihoods [C, Q, L] in nats of every continuation after every context + query: the product path.

        Continuations are L rows for all queries, or L rows a query. Of token ids, a context may be empty, a query not.
        Strings are tokenised jointly; where a query's ids depend on its context, the general path serves the call. NaN
        marks invalid (non-finite logits). Cost: context tree + distinct contexts x query tree, in tokens. What an
        interrupt leaves is lost: `stream` gives results as they come.
        """
        contexts, queries = given_contexts(contexts), pieces(queries, "queries", "query")
        with self._call(progress) as report:
            labels = by_query(continuations, len(queries))
            scores = np.empty((len(contexts), len(queries), len(labels[0]) if labels else 0), np.float32)
            for block in self._blocks(contexts, queries, labels, report) if scores.size else ():
                scores[np.ix_(block.contexts, block.queries)] = block.logprob
            return scores

    def stream(
        self,
        contexts: Sequence[str | Ids] | ContextPaths,
        queries: Sequence[str | Ids],
        continuations: Sequence[Any],
        *,
        progress: Progress | None = None,
    ) -> Generator[ScoreBlock]:
        """As `score`, block by block as units of work finish, each pair of a context and a query in one block.

        Nothing runs while the caller has a block; closing the iterator ends the call. Contexts on which their queries'
        ids depend come last, in one block.
        """
        contexts, queries = given_contexts(contexts), pieces(queries, "queries", "query")
        with self._call(progress) as report:
            labels = by_query(continuations, len(queries))
            if len(contexts) and labels and len(labels[0]):
                yield from self._blocks(contexts, queries, labels, report)

    def session(self, memory_budget: Budget | None = None) -> Session:
        """A session, whose keys and values stay from call to call: see `Session`.

        ``memory_budget`` (bytes, or a share of what is free) is what they take at most, by default half of what is free
        now. Raises RequestError where the engine runs prompt by prompt or on several devices, or has not so much.
        """
        if not isinstance(self._model, TreeModel) or len(self._model.devices) > 1:
            raise RequestError(
                "a session needs the prefix tree on one device; leave out plain=True and device='balanced'"
            )
        room = memory.session_budget(memory_budget, self._model.device)
        with self._call() as report:
            self._first_use(report)
        session = Session(
            self._model,
            self._encoder,
            self._call,
            self._ending,
            room=room,
            pack_tokens=self.pack_tokens,
            max_tokens=self.max_tokens,
        )
        self._sessions.add(session)
        return session

    def execute(self, plan: Plan, units: Iterable[int] | None = None) -> Iterator[UnitResult]:
        """Run units of a product plan (all by default), one result each, in the order given.

        ``units`` may be lazy: the next one is taken only when the caller, who has a result, wants another.
        A unit's result is the same, bit for bit, whichever units run before it (see ``row_invariant``). The report
        counts the units that were run, also if the caller stops early and closes the iterator.
        """
        with self._call() as report:
            yield from self._execute(plan, range(plan.num_units) if units is None else units, report)

    def generate(
        self,
        contexts: Sequence[str | Ids],
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
        """What the model says after each context: by default greedily, always the likeliest token, whatever its file
        says; by chance at a ``temperature`` over 0 (`iclperm.engine.sampling`), ``num_samples`` texts of a context, one
        after the other.

        Contexts are strings, with BOS as the tokenizer adds it, or token ids; an empty one becomes the prefix token. A
        text ends before an EOS (of the generation configuration, else of the configuration or the tokenizer), where a
        stop string is complete, or after ``max_new_tokens``. Equal contexts are generated once. A text is the same, bit
        for bit, in any company (see ``row_invariant``): what chance says follows from ``seed``, prompt, the sample's
        number and the token's alone. Raises RequestError as ``loglikelihood`` does, and for a prompt that with all new
        tokens is over the context window. Cost: distinct non-empty prefixes of the contexts, and each generated token
        that another follows.
        """
        sampling = Sampling(temperature, top_p, top_k, seed, num_samples)
        rows = self._encoder.prompts(contexts)
        self._admission.prompts(rows, max_new_tokens)
        if not sampling.is_greedy:
            return self._sampled(rows, max_new_tokens, stop, sampling, progress)
        with self._call(progress) as report:
            ending = self._ending(max_new_tokens, stop)
            texts: list[Generated] = []
            if isinstance(self._model, TreeModel) and len(rows):
                self._first_use(report)
                limits = self._generation_limits(int(rows.lengths.max()) + max_new_tokens, int(rows.offsets[-1]))
                texts = decode.generate_rows(self._model, rows, ending, limits, self._row_limit, report)
            elif len(rows):
                self._first_use(report)
                prompts = [rows[number] for number in range(len(rows))]
                distinct = {prompt.tobytes(): prompt.size for prompt in prompts}
                report.tokens_expected = sum(distinct.values()) + len(distinct) * (max_new_tokens - 1)
                texts = decode.generate_plainly(self._model, prompts, ending, report)
            return Generations.of(texts, has_text=ending.has_text)

    def _sampled(
        self,
        rows: Rows,
        max_new_tokens: int,
        stop: str | Sequence[str],
        sampling: Sampling,
        progress: Progress | None,
    ) -> Generations:
        """Texts by chance, in a session of their own."""
        if not isinstance(self._model, TreeModel):
            raise RequestError("texts by chance are drawn from the prefix tree; leave out plain=True")
        if not len(rows):
            return Generations.of([], has_text=self.tokenizer is not None)
        wanted = int(rows.lengths.sum()) + len(rows) * sampling.num_samples * max_new_tokens
        free = self._memory_budget or memory.resolve_budget("50%", self._model.device)
        with self.session(min(wanted * self._model.facts.session_token_bytes, free)) as session:
            nodes = [session.extend(None, rows[number]) for number in range(len(rows))]
            return session.generate(nodes, max_new_tokens, stop, progress=progress, **vars(sampling))

    def generate_units(
        self,
        plan: Plan,
        units: Iterable[int] | None = None,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        stop: str | Sequence[str] = (),
    ) -> Iterator[GeneratedUnit]:
        """As ``generate``, of units of a product plan (all by default), one result each, in the order given.

        The plan's one continuation is a placeholder of one token, which is never fed: plan_product(contexts, queries,
        [[0]]). ``units`` may be lazy, and a unit's result does not depend on the others, as in ``execute``. The plan
        bounds the cost (`generation_bounds`); the report says what it was, also if the caller stops early.
        """
        with self._call() as report:
            ending = self._ending(max_new_tokens, stop)
            self._admission.plan(plan, max_new_tokens - 1)
            done: list[int] = []
            try:
                for unit, texts in self._generated(plan, units, ending, report):
                    done.append(unit)
                    yield GeneratedUnit(
                        unit=unit,
                        contexts=plan.unit_contexts(unit),
                        queries=plan.unit_queries(unit),
                        outputs=Generations.of(texts, has_text=ending.has_text),
                    )
            finally:
                naive, unique = plan.share(done)
                report.tokens_naive += naive
                report.tokens_unique += unique

    def generation_bounds(self, plan: Plan, max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS) -> Bounds:
        """The most tokens that ``generate_units`` forwards over all units of a plan, and has alive at once."""
        limits = self._row_limit.fit(self._generation_limits(plan.max_tokens + max_new_tokens, plan.tokens))
        return decode.generation_bounds(plan, max_new_tokens, limits)

    def _call(self, progress: Progress | None = None) -> AbstractContextManager[Report]:
        return self._calls.call(self._model, self._gemm_rate, progress)

    def _gemm_rate(self) -> float:
        self._measured_rate = self._measured_rate or self._model.gemm_rate(self.pack_tokens)
        return self._measured_rate

    def _plan(self, make: Callable[..., Plan], *parts: Any) -> Plan:
        return make(*parts, **{**self._limits, "pack_tokens": self.pack_tokens})

    @property
    def _sizes(self) -> Sizes:
        """Read anew, since the first use may take other layers."""
        of = partial(Sizes.of, self._model, self._model.device, checks=self._checks)
        return of(has_tokenizer=self.tokenizer is not None, has_budget=self._memory_budget is not None)

    def fitted(self, plan: Plan) -> Plan:
        """The plan as it runs: in packs that the layers take and the memory budget holds, and with the way in which a
        path is run that does not fit (``long_path``); itself if it is.
        """
        if not isinstance(self._model, TreeModel):
            return plan
        # Before the first use as it is expected to turn out.
        is_invariant = self._model.device.type == "cpu" if self.row_invariant is None else self.row_invariant
        return long_paths.fitted(
            self._sizes,
            self._model.facts,
            plan,
            self._memory_budget,
            may_recompute=self.layers == "fused" and is_invariant,
            rates=self._rates if is_invariant else lambda _: Rates.assumed(self._model.device),
        )

    def _rates(self, plan: Plan) -> Rates:
        return Rates.measured(self._model.facts, self._gemm_rate(), self._model.device, plan)

    def _blocks(self, contexts: Any, queries: Any, labels: list[Sequence[Any]], report: Report) -> Iterator[ScoreBlock]:
        started = time.perf_counter()
        factors, outside = self._encoder.factors(contexts, queries, labels)
        plan = None if factors is None else self._plan(plan_product, *factors)
        report.seconds["plan"] += time.perf_counter() - started
        report.tokens_expected = 0 if plan is None else self._expected(plan)
        held, rest = np.flatnonzero(~outside), np.flatnonzero(outside)
        asked = None
        if rest.size:
            others = [contexts[number] for number in rest] if held.size else contexts
            asked = self._asked(self._encoder.general_requests(others, queries, labels), report)
        pairs = np.arange(len(queries) * len(labels[0]))  # of requests of a context, for `rows`
        if plan is not None:
            numbers = (held[:, None] * pairs.size + pairs).ravel() if rest.size else None
            for result in self._execute(plan, range(plan.num_units), report, numbers):
                some = plan.given_contexts(result.contexts)
                rows = plan.context_index[some] - result.contexts[0]
                yield ScoreBlock(held[some], result.queries, result.logprob[rows])
        if asked is not None:
            numbers = (rest[:, None] * pairs.size + pairs).ravel()
            logprob = self._answered(asked, report, numbers).logprob
            yield ScoreBlock(rest, np.arange(len(queries)), logprob.reshape(rest.size, len(queries), -1))

    def _execute(
        self, plan: Plan, units: Iterable[int], report: Report, numbers: IntArray | None = None
    ) -> Iterator[UnitResult]:
        for values in self._run(plan, units, report, numbers):
            block = plan.blocks[plan.core.unit_block[values.unit]]
            contexts, queries = plan.unit_contexts(values.unit), plan.unit_queries(values.unit)
            rows = sum_rows(block, [values], num_contexts=len(contexts))
            shape = (len(contexts), len(queries), plan.num_labels)
            yield UnitResult(
                unit=values.unit,
                contexts=contexts,
                queries=queries,
                logprob=rows.logprob.reshape(shape),
                is_greedy=rows.is_greedy.reshape(shape),
                state=states_of(np.logical_and.reduce(rows.is_finite.reshape(shape), axis=-1)),
            )

    def _run(
        self, plan: Plan, units: Iterable[int], report: Report, numbers: IntArray | None = None
    ) -> Iterator[UnitValues]:
        self._admission.plan(plan)
        self._first_use(report)
        plan = self.fitted(plan)
        done: list[int] = []
        try:
            for values in self._values(plan, units, report, numbers):
                done.append(values.unit)
                yield values
        finally:
            naive, unique = plan.share(done)
            report.tokens_naive += naive
            report.tokens_unique += unique

    def _values(
        self, plan: Plan, units: Iterable[int], report: Report, numbers: IntArray | None
    ) -> Iterator[UnitValues]:
        if not isinstance(self._model, TreeModel):
            return execute_plain(self._model, plan, units, report)
        self._pack_limit.may_shrink = bool(self.row_invariant)
        return execute(self._model, plan, units, report, self._pack_limit, numbers)

    def _expected(self, plan: Plan) -> int:
        """Tokens that an unbroken run of a plan forwards."""
        return plan.tokens if isinstance(self._model, TreeModel) else plan.scored_pairs  # each scored row's whole path

    def _asked(self, requests: Sequence[tuple[str | Ids, str | Ids]], report: Report) -> tuple[Plan, IntArray] | None:
        """What requests take, and how many tokens the continuation of each has; None if there are none."""
        started = time.perf_counter()
        rows, begins = self._encoder.requests(requests)
        if not len(rows):
            return None
        self._admission.requests(rows)
        plan = self._plan(plan_requests, rows, begins)
        report.seconds["plan"] += time.perf_counter() - started
        report.tokens_expected += self._expected(plan)
        return plan, rows.lengths - begins

    def _answered(self, asked: tuple[Plan, IntArray] | None, report: Report, numbers: IntArray | None = None) -> Scores:
        if asked is None:
            return Scores.of(np.empty(0, np.float32), np.empty(0, bool), np.empty(0, bool), np.empty(0, np.int64))
        plan, sizes = asked
        units = list(self._run(plan, range(plan.num_units), report, numbers))

        def by_token(name: str) -> Any:
            return np.concatenate([getattr(unit, name) for unit in units])[plan.contexts.row_items]

        return Scores.of(by_token("logprob"), by_token("is_greedy"), by_token("is_finite"), sizes)

    def _generated(
        self, plan: Plan, units: Iterable[int] | None, ending: Ending, report: Report
    ) -> Iterator[tuple[int, list[Generated]]]:
        chosen = range(plan.num_units) if units is None else units
        if isinstance(self._model, TreeModel):
            self._first_use(report)
            limits = self._generation_limits(plan.max_tokens + ending.max_new_tokens, plan.tokens)
            yield from decode.generate_units(self._model, plan, chosen, ending, limits, self._row_limit, report)
            return
        self._first_use(report)
        for unit in chosen:
            yield unit, decode.generate_plainly(self._model, decode.plain_unit_rows(plan, unit), ending, report)

    def _ending(self, max_new_tokens: int, stop: str | Sequence[str]) -> Ending:
        return Ending(
            max_new_tokens, stop, eos_ids(self._model.model, self._model.config, self.tokenizer), self.tokenizer
        )

    def _generation_limits(self, longest: int, prompt_tokens: int) -> decode.GenerationLimits:
        """Rows, packs and slots to generate texts of at most ``longest`` tokens, prompts included."""
        limits = decode.GenerationLimits.on(self._model.device, self.pack_tokens)
        if room := memory.room_to_generate(self._memory_budget, self._model.devices):
            limits = self._sizes.generation_limits(limits, room, longest, prompt_tokens)
        self._row_limit.may_shrink = bool(self.row_invariant)
        return limits

    @property
    def _admission(self) -> Admission:
        return Admission(self._model.vocab_size, self.max_tokens)

    def _first_use(self, report: Report) -> None:
        if not self._unchecked:
            return
        with self._first_use_lock:
            if not self._unchecked:  # another thread's call was first
                return
            started = time.perf_counter()
            with torch.device("cpu"), fixed_precision(), checking():  # references are made where torch does by itself
                found = selfcheck.first_use(self._model, self.pack_tokens)
            self.row_invariant, self._given_up, self._unchecked = found.row_invariant, found.given_up, False
            for line in found.said:
                warnings.warn(line, stacklevel=2)
            report.seconds["self_check"] += time.perf_counter() - started
