"""From a study to its results: one loop over the missing parts of a plan, resumable whenever it stops."""

from __future__ import annotations

import platform
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from iclperm.base.outputs import output
from iclperm.endpoint.keys import KeyHosts
from iclperm.errors import DamagedItem, RunError, RunInterrupted, RunStopped
from iclperm.runs.deciding import Deciding
from iclperm.runs.finish import finish, finished
from iclperm.runs.folder import CutOtherwise, RunFolder, mend_format, refuse_other_choices
from iclperm.runs.growing import Growing
from iclperm.runs.layout import lay_out, with_wave
from iclperm.runs.limits import WorkLimits
from iclperm.runs.parts import other_numerics
from iclperm.runs.plan import races_of
from iclperm.runs.presence import at_work
from iclperm.runs.progress import DECIDING, FINISHING, LOADING, TOKENISING, Progress, RunWatch, Watcher
from iclperm.runs.read import ContextAnswers, Layout, reading_of
from iclperm.runs.reading import open_reader
from iclperm.runs.recorded import recorded_decisions, recorded_extents, recorded_limits
from iclperm.runs.run import FinishedRun
from iclperm.runs.run_texts import drop_texts, keep_texts
from iclperm.runs.scorers import Scorer, scorer_of
from iclperm.runs.setting import ResolvedStudy, identifying_choices, limits_here, resolved, with_whole_paths
from iclperm.runs.tables import tables
from iclperm.runs.waves import Decision, Waves, basis_of
from iclperm.runs.work import Work
from iclperm.study.study import PMI, Study
from iclperm.tasks.task import Task

Local = Callable[[Work], Scorer]
"""Makes what answers for a model of this machine, or of others that are ours."""
_SECONDS_BETWEEN_LOOKS = 0.2
_MOST_SHARE_OF_RECORDS = 0.05
_REMEDIES = {
    "threads": "set OMP_NUM_THREADS={there}",
    "dtype": "set dtype to {there}",
    "device": "choose that device",
    "torch": "install torch=={there}",
    "transformers": "install transformers=={there}",
    "memory_budget": "set memory_budget to {there} (null for none)",
    "probe": "run with the variables that it had (ONEDNN_MAX_CPU_ISA, MKL_CBWR, ATEN_CPU_CAPABILITY, "
    "NVIDIA_TF32_OVERRIDE and such)",
    "gpu_cublas_workspace": "set CUBLAS_WORKSPACE_CONFIG to {there} (None: leave it unset)",
}


def run_one(
    study: Study,
    out: str | Path | None,
    extend: bool,
    mixed: bool,
    progress: Progress | Watcher | None,
    limits: WorkLimits | None = None,
    keys: KeyHosts | None = None,
    with_text: bool | None = None,
    local: Local | None = None,
) -> FinishedRun:
    """See `iclperm.api.run`; ``keys`` are the hosts that keys may go to, ``with_text`` as `iclperm.api.run` has it,
    and ``local`` makes what answers for a model that is behind no API: this process unless given."""
    with RunWatch(progress, Path(study.model_name).name, Path(study.task).stem) as watch, ExitStack() as present:
        try:
            for cut in _cuts(study, out or study.out, limits):
                try:
                    return _run(study, out, extend, mixed, watch, cut, keys, with_text, local, present)
                except CutOtherwise as error:
                    refusal = RunError(str(error))
            raise refusal
        except KeyboardInterrupt:
            raise RunInterrupted(_after_stop(out or study.out, watch)) from None


def _cuts(study: Study, path: str | Path | None, limits: WorkLimits | None) -> Iterator[WorkLimits | None]:
    """How to cut a run, and if its folder turns out to be cut otherwise, how else: another process may have begun it
    meanwhile, or the plan that says so is lost."""
    yield limits or (None if path is None else recorded_limits(path))
    if limits is None and path is not None and study.endpoint is None:
        yield recorded_limits(path) or limits_here(study, elsewhere=True)


def _after_stop(path: str | Path | None, watch: RunWatch) -> str:
    """What an interrupted run leaves, for whoever interrupted it."""
    if path is None:
        return "stopped; without a run folder nothing is kept: name one, and a stopped run can be continued"
    done, total = watch.parts_told
    parts = f"{done:,} of {total:,} parts are finished and kept in {path}" if total else "before the first part"
    return f"stopped, {parts}; the same call continues"


def _run(
    study: Study,
    out: str | Path | None,
    extend: bool,
    mixed: bool,
    watch: RunWatch,
    limits: WorkLimits | None,
    keys: KeyHosts | None,
    with_text: bool | None,
    local: Local | None,
    present: ExitStack,
) -> FinishedRun:
    started = time.perf_counter()
    path = None if (out or study.out) is None else Path(out or study.out or "")
    if path is not None:
        refuse_other_folder(path, study, extend)
    setting = ResolvedStudy.of(study, limits=limits)
    study = setting.study
    mended = int(path is not None and mend_format(path, setting.identity))
    if path is not None and (whole := finished(path, setting)) is not None:
        with suppress(RunStopped):  # a folder that cannot be written is read all the same
            _settle_texts(RunFolder.open(path), setting, with_text)
        return replace(whole, report=replace(whole.report, num_quarantined=mended))
    if study.endpoint is not None:
        keys = keys or KeyHosts()
        keys.refuse_unnamed(study.endpoint, _id_there(path, setting))
    is_ours = path is not None and bool(recorded_extents(path, setting.identity))
    is_seen = is_ours and present.enter_context(at_work(output(path or "", is_folder=True)))
    watch.begin(TOKENISING)
    work = lay_out(setting, _grown_from(path, setting, extend))
    answers = _AnswersSoFar(path, setting, mixed, watch, keys, with_text, local, present, is_seen)
    there = [] if path is None else recorded_decisions(path, setting.identity)
    decided = list(map(Decision.from_dict, there))
    if (waves := _waves_of(work, decided)) is not None:
        for decision in decided or [waves.first()]:
            work = with_wave(work, decision)
    while True:
        answers.complete(work)
        decisions = [growth.decision for growth in work.growths if growth.decision is not None]
        if waves is None or decisions[-1].is_last:
            return answers.finished(work, mended, started)
        watch.begin(DECIDING)
        work = with_wave(work, waves.next(answers.scores, decisions, answers.basis))


def _waves_of(work: Work, decided: Sequence[Decision]) -> Waves | None:
    """What decides about the waves of a study; None where everything is asked at once."""
    study = work.setting.study
    if study.is_adaptive:
        return races_of(work, decided)
    if study.wanted is None:
        return None
    return Deciding.of(work, decided) if study.wanted.is_of_verdicts else Growing.of(work)


@dataclass
class _AnswersSoFar:
    """The answers of a run and the folder that keeps them, growth by growth."""

    _path: Path | None
    _setting: ResolvedStudy
    _mixed: bool
    _watch: RunWatch
    _keys: KeyHosts | None
    _with_text: bool | None
    _local: Local | None
    _present: ExitStack
    _is_seen: bool
    _folder: RunFolder | None = None
    _scores: ContextAnswers | None = None
    _replies: Mapping[str, int] = field(default_factory=dict)
    _forwarded: int = 0
    _num_computed: int = 0
    _quarantined: int = 0

    @property
    def scores(self) -> ContextAnswers:
        """All answers so far."""
        assert self._scores is not None
        return self._scores

    @property
    def basis(self) -> str | None:
        """A digest of the files of all answers so far, whose names are digests themselves; None in memory."""
        return None if self._folder is None else basis_of(self._folder.parts.finished())

    def complete(self, work: Work) -> None:
        """Has every part of ``work`` answered that is not there yet, and written where there is a folder."""
        setting, path, study = self._setting, self._path, self._setting.study
        by_growth = [tables(work, number) for number in range(len(work.growths))]
        model = scorer_of(work, path, self._keys, self._local)
        self._present.callback(model.close)  # where something stops it before it computes
        if path is not None:
            _refuse_bad_growth(path, work, by_growth, model, self._mixed)
        if path is not None:
            self._folder = RunFolder.create(path, work.identities(), _canonical_study(setting), by_growth)
        folder = self._folder
        if folder is not None and not self._is_seen:
            self._present.enter_context(at_work(folder.path))
            self._is_seen = True
        if folder is not None and self._scores is None:
            _settle_texts(folder, setting, self._with_text, work)
        if folder is not None and self._keys is not None and study.endpoint is not None:
            self._keys.record(study.endpoint, folder.run_id)
        identities = work.identities()
        self._layout = Layout.of_tables(by_growth[-1]["demonstrations"], by_growth[-1]["queries"], identities)
        if self._scores is None:
            plan = identities[0]
            self._scores = ContextAnswers(
                self._layout,
                self._layout.scale(plan, study),
                None if folder is None else folder.parts,
                limits=self._setting.limits,
                **reading_of(plan, study),
            )
            self._quarantined = 0 if folder is None else _recover(folder, self._scores)
        else:
            if folder is not None:
                self._scores.keep_in(folder.parts)
            if work.growths[-1].extent != work.growths[-2].extent:
                self._scores = self._scores.relaid(self._layout, self._layout.scale(identities[0], study))
        missing = [part for part in range(len(work.parts)) if part not in self._scores.parts]
        if missing:
            self._forwarded += _compute(work, missing, self._scores, folder, model, self._mixed, self._watch)
        self._num_computed += len(missing)
        self._replies = {name: self._replies.get(name, 0) + count for name, count in model.replies.items()}

    def finished(self, work: Work, mended: int, started: float) -> FinishedRun:
        """The run of these answers; raises `RunError` where one of the plan's is in no part."""
        self._watch.begin(FINISHING)
        decisions = tuple(growth.decision.to_dict() for growth in work.growths if growth.decision is not None)
        if decisions and "extent" not in decisions[-1]:
            self.scores.give_up_unasked()
        self.scores.refuse_gaps()
        counts = {
            **self._layout.counts,
            "num_parts": len(work.parts),
            "num_parts_resumed": len(work.parts) - self._num_computed,
            "num_quarantined": mended + self._quarantined,
        }
        near = {} if self._folder is not None else self._setting.near
        return finish(
            work.identities()[0],
            self._setting.study.model_copy(update=work.growths[-1].extent),
            self.scores,
            counts | near,
            self._folder,
            started,
            self._forwarded,
            self._replies,
            limits=self._setting.limits,
            decisions=decisions,
        )


def _settle_texts(folder: RunFolder, setting: ResolvedStudy, with_text: bool | None, work: Work | None = None) -> None:
    """Has a folder keep the texts of its prompts, or removes them where that was asked for by False; None keeps them
    unless the task's data may not be handed on. Raises `RunStopped` where the folder cannot be written."""
    if with_text is False:
        drop_texts(folder)
    elif with_text or not setting.task.restricted:
        keep_texts(folder, setting.study, lambda: work or lay_out(setting, folder.extents[:-1]))


def _id_there(path: Path | None, setting: ResolvedStudy) -> str | None:
    """The id of the run in a folder, where it is that of this study; its plan is what its digest says."""
    is_there = path is not None and recorded_extents(path, setting.identity)
    return RunFolder.open(path).run_id if path is not None and is_there else None


def _grown_from(path: Path | None, setting: ResolvedStudy, extend: bool) -> list[dict[str, int]]:
    """The extents that the run in a folder had before the study's, in order.

    Raises `RunError` where the study is smaller than the run, or larger without ``extend``.
    """
    there = [] if path is None or setting.study.precision is not None else recorded_extents(path, setting.identity)
    grown = _growths(path, there, setting.study.extent, extend)
    if setting.study.cells != "crossed" and there and there[-1] != setting.study.extent:
        raise RunError(
            f"{path} asked each ordering queries that were dealt for its size, so it cannot grow; give another folder"
        )
    if setting.study.is_adaptive and there and there[-1] != setting.study.extent:
        raise RunError(
            f"{path} holds a search that decides as it goes, which cannot grow: what was asked followed from its size; "
            "give another folder"
        )
    return [] if setting.study.is_in_waves else grown


def refuse_other_folder(path: Path, study: Study, extend: bool) -> None:
    """Raises `RunError` where the run in a folder is another by its choices, or of another size, before data is read or
    a model is loaded."""
    task = Task.load(study.task, study.data)
    study = resolved(study, task)
    is_pmi = True if study.normalize == PMI else None  # as plans have it
    refuse_other_choices(path, {"task": task.name, PMI: is_pmi, "study": identifying_choices(study, task)})
    if study.precision is None:
        _growths(path, recorded_extents(path, {}), study.extent, extend)
    elif (most := _most_there(path)) not in (None, study.extent):
        raise RunError(
            f"{path} holds another run: {_changes(most, study.extent, 'most.')}. A run that stops by itself does not "
            "grow; give another folder, or put that back"
        )


def _most_there(path: Path) -> Any:
    """The most that the run in a folder may ask before it stops by itself; None where there is none, or no such one."""
    try:
        return RunFolder.open(path).plan.get("most")
    except (RunError, DamagedItem):
        return None


def _changes(there: Mapping[str, int], here: Mapping[str, int], of: str = "") -> str:
    """In which sizes ``of`` something a run that is there and a study differ."""
    sizes = (f"{of}{key} is {there[key]} there and {size} here" for key, size in here.items() if size != there[key])
    return "; ".join(sizes)


def _growths(
    path: Path | None, there: list[dict[str, int]], here: Mapping[str, int], extend: bool
) -> list[dict[str, int]]:
    """See `_grown_from`; of the extents that are ``there``."""
    last = (there or [{}])[-1]
    if not there or last == here:
        return there[:-1]
    changes = _changes(last, here)
    if any(size < last[key] for key, size in here.items()):
        raise RunError(f"{path} holds a larger run: {changes}; ask for at least that, or give another folder")
    if not extend:
        raise RunError(
            f"{path} holds a smaller run: {changes}; add --extend to let it grow (in Python extend=True), or give "
            "another folder"
        )
    return there


def _admit(model: Scorer, work: Work, folder: RunFolder, mixed: bool) -> None:
    """Raises `RunStopped` where the disk is too small and, unless ``mixed``, `RunError` where parts that are there were
    computed with other numerics."""
    _refuse_small_disk(work, folder)
    recorded = [] if mixed else folder.parts.numerics()
    if recorded:
        model.expect(recorded[0])
    numerics = model.numerics
    for other in recorded:
        _refuse_other_numerics(folder, other, numerics)


def _refuse_bad_growth(
    path: Path, work: Work, by_growth: Sequence[Mapping[str, pa.Table]], model: Scorer, mixed: bool
) -> None:
    """Raises what forbids a run to grow, before its folder says that it is larger and so no longer finished."""
    try:
        folder = RunFolder.open(path)
    except RunError:
        return  # there is none yet, or it is to be mended first
    num_growths = len(folder.plans)
    if not any(growth.num_cells for growth in work.growths[num_growths:]):
        return
    with suppress(DamagedItem):  # a damaged table says nothing; it will be mended
        states = folder.table("queries")["state"], by_growth[num_growths - 1]["queries"]["state"]
        if num_overlong := np.sum(np.not_equal(*(state.to_numpy() for state in states))):
            raise RunError(
                f"{path} cannot grow: with the new demonstrations {num_overlong} of its queries no longer fit the "
                "context window and would be dropped from what is there; give another folder"
            )
        _admit(model, work, folder, mixed)


def _recover(folder: RunFolder, scores: ContextAnswers) -> int:
    """Reads the finished parts and sets damaged files aside; returns how many parts were damaged."""
    for record in folder.unreadable_sessions():
        folder.set_aside(record)
    quarantined = 0
    for part, file in folder.parts.finished().items():
        try:
            scores.fill(part, folder.parts.read(file, scores.columns))
        except DamagedItem:
            folder.set_aside(file)
            quarantined += 1
    return quarantined


def _compute(
    work: Work,
    missing: Sequence[int],
    scores: ContextAnswers,
    folder: RunFolder | None,
    model: Scorer,
    mixed: bool,
    watch: RunWatch,
) -> int:
    """Has the missing parts answered and committed, as far as no other process does it, and fills all into ``scores``.

    Returns the tokens that this process forwarded or paid for.
    """
    watch.begin(LOADING)
    if folder is not None:
        _admit(model, work, folder, mixed)
    before = model.tokens
    session = _Session(folder, _environment(model), model, work.setting.near)
    num_parts = len(work.parts)
    session.write(tokens=0)
    wave = len(work.growths) if work.setting.study.is_in_waves else 0
    try:
        watch.answer(lambda: model.tokens, _tokens_wanted(work, missing), len(scores.parts), num_parts, wave)
        with open_reader(work.setting) as checker:
            while missing:
                with closing(model.tables(missing, _FolderClaims(folder), checker)) as answered:
                    for part, table, numerics in answered:
                        session.num_parts += 1
                        session.write(tokens=model.tokens - before)
                        committed = table if folder is None else folder.parts.write(part, table, numerics)
                        scores.fill(part, committed)
                        watch.parts(len(scores.parts), num_parts)
                missing = [part for part in missing if part not in scores.parts]
                if folder is not None and missing:
                    _read_others(folder, missing, scores)
                    watch.parts(len(scores.parts), num_parts)
                    missing = [part for part in missing if part not in scores.parts]
    finally:
        session.write(tokens=model.tokens - before, closed=True)
        model.close()
    return model.tokens - before


def _tokens_wanted(work: Work, missing: Sequence[int]) -> int | None:
    """About how many tokens these parts take; None where answers are generated, whose lengths nobody knows."""
    if work.setting.is_generated:
        return None
    if work.growths[-1].decision is None:
        tokens = work.plain_tokens if work.setting.study.plain else work.tokens.unique
        return round(tokens * len(missing) / len(work.parts))
    there = Counter(part.growth for part in work.parts)
    wanted = Counter(work.parts[number].growth for number in missing)
    return round(sum(work.growths[wave].tokens.unique * wanted[wave] / there[wave] for wave in wanted))


def _read_others(folder: RunFolder, missing: Sequence[int], scores: ContextAnswers) -> None:
    """Reads those of the missing parts that other processes finished meanwhile; where there are none, waits a
    moment."""
    there = folder.parts.finished()
    if not any(part in there for part in missing):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    for part in missing:
        if part in there:
            scores.fill(part, folder.parts.read(there[part], scores.columns))


class _Session:
    """The record of one session. It is written before each part is, so that a killed session leaves what it had cost.

    With many workers, all of which it names, that takes long: it is left out where it would take more than a share of
    the time, and a killed session then leaves what it had cost a moment before.

    ``num_parts`` counts the parts that it wrote or was about to write. Without a folder nothing is recorded.
    """

    def __init__(
        self, folder: RunFolder | None, environment: Mapping[str, Any], model: Scorer, near: Mapping[str, int]
    ) -> None:
        self.num_parts = 0
        self._started = time.time()
        self._not_before = 0.0
        self._name = _session_name(self._started)
        self._folder = folder
        self._environment = environment
        self._model = model
        self._near = {name: number for name, number in near.items() if number}

    def write(self, *, tokens: int, closed: bool = False) -> None:
        """Replaces the record; ``tokens`` are those of the session so far, ``closed`` that it has ended."""
        began = time.monotonic()
        if self._folder is not None and (closed or began >= self._not_before):
            seconds = round(time.time() - self._started, 3)
            counts = {"tokens_forwarded": tokens, "parts": self.num_parts, "seconds": seconds, "closed": closed}
            told = {"replies": self._model.replies, "workers": self._model.workers, "near": self._near}
            about = {**self._environment, **{name: said for name, said in told.items() if said}}
            # After a kill the record is there to the last part; after a power loss it may be an earlier one.
            self._folder.write_session(self._name, {**about, **counts}, durable=closed)
            if self._model.workers:
                took = time.monotonic() - began
                self._not_before = began + took / _MOST_SHARE_OF_RECORDS


def _session_name(began: float) -> str:
    """A name no other session has; names sort by when the sessions began, to the microsecond."""
    second, fraction = divmod(round(began * 1e6), 10**6)
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(second))}-{fraction:05x}{secrets.token_hex(4)}"


class _FolderClaims:
    """See `iclperm.runs.scorers.Claims`; without a folder there is nobody else."""

    def __init__(self, folder: RunFolder | None) -> None:
        self._folder = folder

    def take(self, part: int) -> bool:
        if self._folder is None:
            return True
        if not self._folder.parts.claim(part):
            return False
        if is_there := self._folder.parts.has(part):
            self.release(part)
        return not is_there

    def release(self, part: int) -> None:
        if self._folder is not None:
            self._folder.parts.release(part)

    def each(self, parts: Sequence[int]) -> Generator[int]:
        for part in parts:
            if self.take(part):
                try:
                    yield part
                finally:
                    self.release(part)


def _refuse_small_disk(work: Work, folder: RunFolder) -> None:
    """Raises `RunStopped` where the files that are still to come would not fit on the disk."""
    needed = work.disk_bytes - folder.files.num_bytes(folder.path / "items")
    free = shutil.disk_usage(folder.path).free
    if needed > free:
        raise RunStopped(
            f"{folder.path} needs about {needed / 1e6:,.2f} MB more, but its disk has {free / 1e6:,.2f} MB free; make "
            "room, then run the same command to continue, or give another folder"
        )


def _environment(model: Scorer) -> dict[str, Any]:
    """What a session's record says of its machine: versions, and what decides about the last bits of a result.

    Nothing that could hold a secret.
    """
    versions = {name: _version(name) for name in model.libraries}
    return {
        "numerics": model.numerics,
        "versions": {**versions, "python": platform.python_version()},
        "platform": platform.platform(),
    }


def _refuse_other_numerics(folder: RunFolder, recorded: Mapping[str, Any], numerics: Mapping[str, Any]) -> None:
    """Raises `RunError` where the numerics of a part in the folder are not these."""
    if (key := other_numerics(recorded, numerics)) is not None:
        here, there = numerics.get(key), recorded.get(key)
        raise RunError(
            f"{folder.path} was computed with {key} {there}, here it is {here}, and results could differ in "
            f"the last bits; {_remedy(key, there, here)}, accept that with --mixed, or give another folder"
        )


def _remedy(key: str, there: Any, here: Any) -> str:
    """What makes a machine compute as the one that a run began on."""
    if key == "attention":
        return "add --plain" if there == "plain" else "leave out --plain" if here == "plain" else f"add --{key} {there}"
    if key == "layers":
        return f"add --{key} {there}" if there == "transformers" else f"leave out --{key}"
    if key == "pack_tokens" and there is not None:
        return f"add --pack-tokens {there}"
    return _REMEDIES.get(key, "continue where it began").format(there=there)


def _canonical_study(setting: ResolvedStudy) -> Study:
    """The study as its folder has it: with its numbers of shots, and with paths that hold from anywhere."""
    return with_whole_paths(setting.study).model_copy(update={"shots": list(setting.design.shots)})


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
