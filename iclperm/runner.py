"""From a study to its results: one loop over the missing parts of a plan, resumable whenever it stops."""

from __future__ import annotations

import platform
import re
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from iclperm.errors import ConfigError, RunError
from iclperm.prompts import Cell
from iclperm.results import Run, RunReport, Scores, finished, forwarded_tokens, item_rows, open_run, tables
from iclperm.store import DamagedItem, RunFolder, RunStopped
from iclperm.study import Study
from iclperm.tasks import builtin_tasks
from iclperm.work import Product, Setting, StudyPlan, Work, lay_out, plan, sample_prompt

if TYPE_CHECKING:
    from iclperm.engine import Engine
    from iclperm.engine.engine import UnitResult

__all__ = ["Progress", "Run", "RunReport", "StudyPlan", "open_run", "plan", "run", "sample_prompt"]

Progress = Callable[[int, int], None]
"""Told the number of finished parts and of all parts, at the start and after each."""

_OUT_OF_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)
_REMEDIES = {
    "threads": "set OMP_NUM_THREADS={there}",
    "dtype": "set dtype to {there}",
    "device": "choose that device",
    "torch": "install torch=={there}",
    "transformers": "install transformers=={there}",
}


def run(study: Study, out: str | Path | None = None, *, progress: Progress | None = None) -> Run:
    """Runs a study, or what is missing of it in the run folder ``out``; without ``out`` results are kept in memory.

    Raises `ConfigError`, `DataError`, `TokenizationError` or `ModelError` for what does not fit, `RunError` for a
    folder of another run, `RunStopped` where the folder cannot be written or memory does not suffice. Cost: the plan's
    distinct tokens, each once.
    """
    started = time.perf_counter()
    setting = Setting.of(study)
    if out is not None and (whole := finished(Path(out), setting)) is not None:
        return whole
    work = lay_out(setting)
    folder = None if out is None else RunFolder.create(out, work.identity(), _canonical_study(study), tables(work))
    scores = Scores.of(work)
    quarantined = 0 if folder is None else _recover(folder, scores)
    missing = [part for part in range(work.num_parts) if part not in scores.parts]
    forwarded = _compute(work, missing, scores, folder, progress) if missing else 0
    is_complete = True
    if folder is not None:
        forwarded, is_complete = forwarded_tokens(folder)
    scores.refuse_gaps()
    report = RunReport(
        tokens_naive=work.tokens.naive,
        tokens_unique=work.tokens.unique,
        tokens_forwarded=forwarded,
        num_parts=work.num_parts,
        num_parts_resumed=work.num_parts - len(missing),
        num_quarantined=quarantined,
        num_general_cells=len(work.general),
        num_excluded=setting.design.num_excluded,
        num_duplicates=setting.num_duplicates,
        num_conflicting=setting.num_conflicting,
        is_token_count_complete=is_complete,
        seconds=time.perf_counter() - started,
    )
    return Run(
        study=study,
        task=setting.task.name,
        labels=setting.task.words,
        shots=setting.design.shots,
        gold=work.prompts.gold,
        context_of=work.prompts.context_of,
        context_logprob=scores.logprob,
        context_state=scores.state,
        report=report,
        folder=None if folder is None else folder.path,
    )


def _recover(folder: RunFolder, scores: Scores) -> int:
    """Reads back what is done; damaged files are set aside, the number of those with results is returned."""
    folder.set_unreadable_sessions_aside()
    quarantined = 0
    for part, file in folder.parts().items():
        try:
            scores.fill(part, folder.read(file))
        except DamagedItem:
            folder.set_aside(file)
            quarantined += 1
    return quarantined


def _compute(
    work: Work, missing: Sequence[int], scores: Scores, folder: RunFolder | None, progress: Progress | None
) -> int:
    """Scores the missing parts, one file each; returns the tokens forwarded."""
    from iclperm.engine import Engine

    study = work.setting.study
    with _enough_memory(work):
        engine = Engine.from_pretrained(
            work.setting.model, device=study.device, dtype=study.dtype, memory_budget=study.memory_budget
        )
    environment, before = _environment(engine), engine.totals.tokens_forwarded
    if folder is not None:
        _refuse_other_numerics(folder, environment["numerics"])
    session = _Session(folder, environment)
    done = work.num_parts - len(missing)
    tell = progress or (lambda _done, _total: None)
    session.write(tokens=0)
    try:
        tell(done, work.num_parts)
        with _enough_memory(work), closing(_tables(work, missing, engine)) as scored:
            for part, table in scored:
                # Units come from one call, which is still open here; its tokens are not among the totals yet.
                open_call = engine.report.tokens_forwarded if part < work.num_product_parts else 0
                session.num_parts += 1
                session.write(tokens=engine.totals.tokens_forwarded - before + open_call)
                if folder is not None:
                    folder.write(part, table)
                scores.fill(part, table)
                done += 1
                tell(done, work.num_parts)
    finally:
        session.write(tokens=engine.totals.tokens_forwarded - before, closed=True)
    return engine.totals.tokens_forwarded - before


class _Session:
    """The record of one session, written before each part is: a killed session leaves what it cost until then.

    ``num_parts`` counts the parts that it wrote or was about to write.
    """

    def __init__(self, folder: RunFolder | None, environment: Mapping[str, Any]) -> None:
        self.num_parts = 0
        self._name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"
        self._folder = folder
        self._environment = environment

    def write(self, *, tokens: int, closed: bool = False) -> None:
        if self._folder is not None:
            counts = {"tokens_forwarded": tokens, "parts": self.num_parts, "closed": closed}
            self._folder.write_session(self._name, {**self._environment, **counts})


def _tables(work: Work, missing: Sequence[int], engine: Engine) -> Generator[tuple[int, pa.Table]]:
    product_parts = [part for part in missing if part < work.num_product_parts]
    if work.product is not None and product_parts:
        wanted = [unit for part in product_parts for unit in work.part_units(part)]
        # Closed even when the run is interrupted here: only then does the engine count what it forwarded.
        with closing(cast("Generator[UnitResult]", engine.execute(work.product.plan, wanted))) as results:
            for part in product_parts:
                units = islice(results, len(work.part_units(part)))
                yield part, pa.concat_tables(_product_rows(work, work.product, units))
    for part in missing[len(product_parts) :]:
        yield part, _general_rows(work, work.part_cells(part), engine)


def _product_rows(work: Work, product: Product, results: Iterable[UnitResult]) -> Iterator[pa.Table]:
    num_queries = len(work.prompts.queries)
    general = np.array([cell.context * num_queries + cell.query for cell in work.general], dtype=np.int64)
    for result in results:
        contexts = np.repeat(product.contexts[result.contexts], len(result.queries))
        queries = np.tile(product.queries[result.queries], len(result.contexts))
        inside = ~np.isin(contexts * num_queries + queries, general)
        logprob = result.logprob.reshape(len(contexts), -1)
        yield item_rows(work, contexts[inside], queries[inside], logprob[inside], result.state.ravel()[inside])


def _general_rows(work: Work, cells: Sequence[Cell], engine: Engine) -> pa.Table:
    scores = engine.loglikelihood([(cell.prompt, ids) for cell in cells for ids in cell.continuations])
    return item_rows(
        work,
        np.array([cell.context for cell in cells], dtype=np.int64),
        np.array([cell.query for cell in cells], dtype=np.int64),
        scores.logprob.reshape(len(cells), -1),
        scores.state.reshape(len(cells), -1).max(axis=1),
    )


@contextmanager
def _enough_memory(work: Work) -> Iterator[None]:
    """Memory that runs out inside stops the run, with a remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch is the engine's alone; its error of this kind is known by its name, or by its words on a CPU.
        is_named = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
        if not (is_named or isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error))):
            raise
        raise RunStopped(f"out of memory; {_smaller(work)}, or use a smaller model") from None


def _smaller(work: Work) -> str:
    try:
        needed = work.tokens.kv_peak * work.setting.kv_token_bytes
    except ConfigError:
        return "lower 'shots'"
    return f"keys and values take up to {needed} bytes: set memory_budget to {max(needed // 2, 1)} to continue"


def _environment(engine: Engine) -> dict[str, Any]:
    """Versions and what decides about the last bits of a result; never a setting that could hold a secret."""
    numerics = {**engine.numerics, "processor": _processor()}
    versions = {name: _version(name) for name in ("iclperm", "numpy", "pyarrow", "tokenizers")}
    return {
        "numerics": numerics,
        "versions": {**versions, "python": platform.python_version()},
        "platform": platform.platform(),
    }


def _refuse_other_numerics(folder: RunFolder, numerics: Mapping[str, Any]) -> None:
    """A folder's parts come from equal numerics; a session that wrote none binds nobody."""
    binding = [session for session in folder.sessions() if session.get("parts")] if folder.parts() else []
    for session in binding:
        for key, here in numerics.items():
            there = session["numerics"].get(key)
            if there != here:
                remedy = _REMEDIES.get(key, "continue where it began").format(there=there)
                raise RunError(
                    f"{folder.path} was computed with {key} {there}, here it is {here}, and results could differ in "
                    f"the last bits; {remedy} or give another folder"
                )


def _canonical_study(study: Study) -> str:
    """The study with paths that hold from any working directory."""
    named = {"demo", *builtin_tasks()}
    paths = {key: value for key, value in (("task", study.task), ("model", study.model)) if value not in named}
    absolute = {key: str(Path(value).resolve()) for key, value in paths.items() if Path(value).exists()}
    return study.model_copy(update=absolute).to_yaml()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()
