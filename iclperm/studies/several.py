"""Studies made of several runs, stage by stage: what a stage chooses decides about the runs of those after it.

Each run has a folder of its own within the study's, and resumes, grows and is verified as any run is:

study/
  FORMAT        "iclperm-runs 1"
  study.yaml    the study, canonical
  choices.json  what stages chose, with its digest (`iclperm.studies.kept`)
  <name>/       a run folder; <name>-<hash>/ for runs of what was chosen
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from iclperm.base.files import Folder, writable
from iclperm.base.outputs import output
from iclperm.errors import ConfigError, RunError, UnknownKind
from iclperm.report import write_report
from iclperm.report.notebook import summary_html, three_lines
from iclperm.report.parts import Findings
from iclperm.report.wording import Reworded
from iclperm.runs.finish import open_one
from iclperm.runs.folder import RunFolder
from iclperm.runs.formats import FORMAT, SEVERAL_FORMAT, VERSION, format_of, has_begun, is_several
from iclperm.runs.plan import StudyPlan
from iclperm.runs.prompt import RunPrompt
from iclperm.runs.run import RunReport
from iclperm.runs.setting import resolved, with_whole_paths
from iclperm.studies import made_by
from iclperm.studies.kept import as_kept, keep_choice, kept_choice, made_from
from iclperm.studies.report import Run
from iclperm.studies.stages import stages_of
from iclperm.studies.taking import WantedPrompt, recommended_by, take
from iclperm.study import kinds
from iclperm.study.choices import MAX_YAML_BYTES
from iclperm.study.metrics import Metric, common_metric
from iclperm.study.study import PMI, STATISTICS, WAYS, Study, is_cut_off
from iclperm.tasks.task import Task

_NAMED = re.compile(r".+-[0-9a-f]{8}")  # as `_mark` names the folders of what was chosen
Runner = Callable[[Study, Path | None], Run]
"""Runs one of the studies, or what is missing of it in a folder."""


@dataclass(frozen=True, repr=False, eq=False)
class StudyRuns:
    """The finished runs of one study, by name, and what they say together."""

    study: Study
    runs: dict[str, Run]
    folder: Path | None
    choice: Any = None
    """What the last stage that chooses chose, as an object of its kind: `Chosen` of a selection."""
    choices: Mapping[str, Any] = field(default_factory=dict)
    """What stages chose, by their names, as it is kept in the folder."""

    def __repr__(self) -> str:
        """Three lines: what was studied, which runs there are, and where they are."""
        return three_lines(
            f"StudyRuns of the kind {self.study.kind}: {self.title}",
            f"{len(self.runs)} runs: {', '.join(self.runs)}",
            self.folder,
            "runs[NAME], findings(), prompt() and write_report()",
        )

    def _repr_html_(self) -> str:
        """The same with the brief tables and the conclusion, for a notebook."""
        alerts = [f"{name}: {line}" for name, run in self.runs.items() if (line := run.missing.first_line())]
        return summary_html([*repr(self).split("\n"), *alerts], self.findings(), self.warnings)

    @property
    def metric(self) -> Metric | None:
        """What answers are graded by in all runs; None where they are right or wrong."""
        return common_metric([run.metric for run in self.runs.values()])

    @property
    def report(self) -> RunReport:
        """What all runs cost and met together."""
        reports = [run.report for run in self.runs.values()]
        total: dict[str, Any] = {
            field.name: sum(getattr(report, field.name) for report in reports) for field in fields(RunReport)
        }
        total["num_numerics"] = len(
            {
                json.dumps(numerics, sort_keys=True)
                for run in self.runs.values()
                for numerics in ([{}] if run.folder is None else run.numerics)
            }
        )
        total["is_token_count_complete"] = all(report.is_token_count_complete for report in reports)
        total["is_growing"] = any(report.is_growing for report in reports)
        return RunReport(**total)

    @property
    def digest(self) -> str:
        """SHA-256 of the runs' digests, by name."""
        return hashlib.sha256(json.dumps([[name, run.digest] for name, run in self.runs.items()]).encode()).hexdigest()

    @property
    def title(self) -> str:
        """Tasks and models, for the head of a figure."""
        return "; ".join(dict.fromkeys(run.title for run in self.runs.values()))

    @property
    def warnings(self) -> list[str]:
        """What should be known of each run before the numbers are believed."""
        return [f"{name}: {warning}" for name, run in self.runs.items() for warning in run.warnings]

    @property
    def asides(self) -> dict[str, dict[str, Findings]]:
        """What is reported beside the findings, by run (`Run.asides`)."""
        wanted = getattr(self._findings, "asides_of", self.runs)  # findings may tell which runs it matters of
        return {name: run.asides for name, run in self.runs.items() if run.asides and name in wanted}

    def findings(self, kind: str | None = None) -> Findings:
        """What the runs say together; raises `ConfigError` for another ``kind`` than the study's."""
        if kind not in (None, self.study.kind):
            raise ConfigError(f"this is a study of the kind {self.study.kind}; ask one of its runs for {kind!r}")
        found = self._findings
        return found if self.metric is None else Reworded(found, self.metric.said)

    @cached_property
    def _findings(self) -> Findings:
        return made_by(kinds.named(self.study.kind), self.runs, self.choices)

    def prompt(self, run: str | None = None, **choices: Any) -> RunPrompt:
        """One prompt of one of these runs; ``choices`` are those of `Run.prompt`.

        By default the one that the findings recommend: of a selection the demonstrations that it chose. Otherwise
        ``run`` names the run; raises `ConfigError` where it must, and does not.
        """
        if run is None:
            recommended = recommended_by(self.findings()) if choices.keys() <= {"query"} else None
            if recommended is None:
                names = ", ".join(self.runs)
                raise ConfigError(
                    f"this study has several runs ({names}); name one with --run (in Python run=), and what of it"
                )
            return take(self.runs[recommended.run or ""], WantedPrompt(**choices), recommended)
        if run not in self.runs:
            raise ConfigError(f"there is no run {run!r} in this study; it has {', '.join(self.runs)}")
        return self.runs[run].prompt(**choices)

    def report_content(self, kind: str | None = None) -> dict[str, Any]:
        """What report.json holds, JSON-safe."""
        found = self.findings(kind)
        content = {"kind": self.study.kind, **found.to_dict(), "normalize": self.study.normalize}
        if self.metric is not None:
            content["metric"] = self.metric.to_dict()
        content["calibration"] = self.study.calibration
        if self.asides:
            content["runs"] = {
                name: {key: about.to_dict() for key, about in asides.items()} for name, asides in self.asides.items()
            }
        return {**content, "warnings": [*found.warnings, *self.warnings]}

    def write_report(self, folder: str | Path | None = None, kind: str | None = None) -> list[Path]:
        """Writes figures and report.json into ``folder``, by default the study's own; returns their paths."""
        target = folder or self.folder
        if target is None:
            raise RunError("these runs are in memory only; name a folder for their report")
        with writable(Path(target)):
            beside = {
                f"{stem}-{name}": plot
                for name, asides in self.asides.items()
                for about in asides.values()
                for stem, plot in about.plots().items()
            }
            return write_report(target, self.findings(kind), self.report_content(kind), beside, self.folder)


@dataclass(frozen=True)
class _Known:
    """The runs of a study as far as finished ones decide which there are."""

    parts: dict[str, tuple[Path, Study]]
    """Folder and study of each, by name."""
    choices: dict[str, Any]
    is_all: bool
    """Whether no choice is missing that decides about further runs."""


def run_all(study: Study, out: Path | None, run: Runner) -> StudyRuns:
    """Runs the studies that one of several runs is made of, one after the other; see `iclperm.run`.

    The folder says what it did before until all runs have grown: a growth that is refused or killed hides nothing.
    Raises `ConfigError` for an endpoint with a budget and no folder, where all runs would see what each has spent.
    """
    check(study)
    given = [key for key in _BUDGETS if getattr(study.endpoint, key, None) is not None]
    if out is None and given:
        raise ConfigError(f"the endpoint's {given[0]} is for all runs of a {study.kind} together; give a run folder")
    is_mended = out is not None and _claim(out, study)
    runs: dict[str, Run] = {}
    choices: dict[str, Any] = {}
    for name, stage in stages_of(study).items():
        parts = stage.parts(study, choices, runs)
        if out is None:
            done = {part_name: run(part, None) for part_name, part in parts.items()}
            if stage.choose is not None:
                choices[name] = _chosen(study, stage.choose, done)
        else:
            places = _places(out, parts, choices)
            done = {part_name: run(part, place) for part_name, (place, part) in places.items()}
            if stage.choose is not None:
                origin = made_from(_canonical(study), places)
                choices[name] = kept_choice(out, name, origin)
                if choices[name] is None:
                    choices[name] = _chosen(study, stage.choose, done)
                    keep_choice(out, name, origin, choices[name])
        runs |= done
    if is_mended:
        name = next(iter(runs))
        report = replace(runs[name].report, num_quarantined=runs[name].report.num_quarantined + 1)
        runs[name] = replace(runs[name], report=report)
    if out is not None:
        with writable(out):
            Folder(out).write_whole(out / "study.yaml", _canonical(study).to_yaml().encode())
    return StudyRuns(study, runs, out, _last_choice(study, choices), choices)


def plans(study: Study, plan: Callable[[Study], StudyPlan]) -> dict[str, StudyPlan]:
    """The plans of the runs by name. What a stage will choose is not known before: its stand-in is planned with."""
    return {name: plan(part) for name, part in check(study).items()}


def open_all(path: Path, **statistics: Any) -> StudyRuns:
    """The finished runs of a study from its folder, at the extent that its study.yaml has; ``statistics`` replace the
    study's (`iclperm.open_run`). Raises `RunError` where one is not finished."""
    study = _recorded(path)
    known = _known(path, study)
    for name, (folder, part) in known.parts.items():
        if not _is_finished(folder, part):
            state = "unfinished" if has_begun(folder) else "not begun"
            raise RunError(
                f"{path} is not finished: {name} is {state}; run the same study into it to continue "
                f"(iclperm run {shlex.quote(str(path))})"
            )
    changes = {key: getattr(study, key) for key in STATISTICS} | {
        key: value for key, value in statistics.items() if value is not None
    }
    runs = {name: _opened(folder, part, changes) for name, (folder, part) in known.parts.items()}
    choice = _last_choice(study, known.choices)
    return StudyRuns(study.model_copy(update=changes), runs, path, choice, known.choices)


def is_finished(path: Path, study: Study) -> bool:
    """Whether a folder has all runs of a study, of its extent and whatever its stages chose; reads no answers.

    Raises `RunError` for a folder of another study, or a damaged one.
    """
    if not is_several(path):
        return False
    there = _recorded(path)
    _refuse_other(path, there, study)
    if any(getattr(there, key) != getattr(study, key) for key in STATISTICS):
        return False
    known = _known(path, study, may_read=False)
    return known.is_all and all(_is_finished(*place) for place in known.parts.values())


def folders(path: Path) -> dict[str, Path]:
    """The run folders of a study by name, begun or not; those of what was chosen, once that is known."""
    return {name: folder for name, (folder, _) in _known(path, _recorded(path)).parts.items()}


def begun(path: Path, *, may_read: bool) -> tuple[dict[str, Path], list[str]]:
    """The run folders of a study that have begun, by name, and in words what has not.

    With ``may_read`` a choice that is not kept, as in folders of earlier versions, is made again from the answers that
    it was made from. Otherwise no answers are read: the names of the folders tell what they can.
    """
    known = _known(path, _recorded(path), may_read=may_read)
    places = {name: folder for name, (folder, _) in known.parts.items()}
    missing = [name for name, folder in places.items() if not has_begun(folder)]
    if not known.is_all:
        missing.append("what it chooses")
    return {name: folder for name, folder in places.items() if name not in missing}, missing


def check(study: Study) -> dict[str, Study]:
    """The studies of all stages by the names of their runs, made with the stand-ins of what stages will choose.

    Raises `ConfigError` for what would not fit once some of the runs are done.
    """
    kind, stages = kinds.named(study.kind), stages_of(study)
    first = next(iter(stages.values())).parts(study, {})
    _refuse_unfit(first)
    for stage in stages.values():
        if stage.check is not None:
            with kinds.calling(kind, "check"):
                stage.check(study)
    parts: dict[str, Study] = {}
    choices: dict[str, Any] = {}
    for name, stage in stages.items():
        parts |= stage.parts(study, choices, parts)
        if stage.choose is not None and stage.stand_in is not None:
            with kinds.calling(kind, "stand_in"):
                choice = stage.stand_in(study)
            choices[name] = _as_choice(kind, "stand_in", choice)
    if not parts:
        raise ConfigError(f"{kinds.origin(kind)} makes no runs of this study; repair the 'studies' of its stages")
    _refuse_unfit({name: part for name, part in parts.items() if name not in first})
    return parts


def _refuse_unfit(parts: Mapping[str, Study]) -> None:
    """Raises `ConfigError` where a run does not fit its task."""
    for name, part in parts.items():
        task = Task.load(part.task, part.data)
        try:
            resolved(part, task)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None


def _known(path: Path, study: Study, *, may_read: bool = True) -> _Known:
    """The runs of a study in its folder. Reads answers only where it ``may_read`` them and a choice is not kept."""
    parts: dict[str, tuple[Path, Study]] = {}
    choices: dict[str, Any] = {}
    stages = stages_of(study)
    for name, stage in stages.items():
        places = _places(path, stage.parts(study, choices, parts), choices)
        parts |= places
        if stage.choose is None:
            continue
        if not all(_is_finished(*place) for place in places.values()):
            return _Known(parts, choices, is_all=name == [*stages][-1])
        choices[name] = kept_choice(path, name, made_from(_canonical(study), places))
        if choices[name] is None and not may_read:
            chosen = _by_names(path, parts)
            return _Known(parts | chosen, {}, is_all=bool(chosen))
        if choices[name] is None:
            given = {key: getattr(study, key) for key in STATISTICS}
            runs = {part_name: _opened(*place, given) for part_name, place in places.items()}
            choices[name] = _chosen(study, stage.choose, runs)
    return _Known(parts, choices, is_all=True)


def _by_names(path: Path, parts: Mapping[str, tuple[Path, Study]]) -> dict[str, tuple[Path, Study]]:
    """The runs beside ``parts`` whose folders are named after a choice; none where a name occurs with two choices."""
    known = {folder for folder, _ in parts.values()}
    named = [path / name for name in Folder(path).names() if _NAMED.fullmatch(name)]
    others = [folder for folder in named if has_begun(folder)]
    found = [(folder.name[: -len("-01234567")], folder) for folder in others if folder not in known]
    if len(dict(found)) < len(found):
        return {}
    return {name: (folder, RunFolder.open(folder).study()) for name, folder in found}


def _chosen(study: Study, choose: Callable[[Study, Mapping[str, Run]], Any], runs: Mapping[str, Run]) -> Any:
    """What is chosen from finished runs, as it is read back from a folder."""
    kind = kinds.named(study.kind)
    with kinds.calling(kind, "choose"):
        choice = choose(study, runs)
    return _as_choice(kind, "choose", choice)


def _as_choice(kind: kinds.Kind, what: str, choice: Any) -> Any:
    """A choice as it is read back from a folder; ``what`` made it. Raises `ConfigError` where it cannot be kept."""
    if choice is None:
        raise ConfigError(f"{kinds.origin(kind)} chose None, as if nothing were chosen yet; repair its {what!r}")
    try:
        return as_kept(choice)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kinds.origin(kind)} chose what JSON cannot hold ({error}); repair its {what!r}") from error


def _last_choice(study: Study, choices: Mapping[str, Any]) -> Any:
    """What `StudyRuns.choice` shows."""
    if not choices:
        return None
    name = [*choices][-1]
    read = stages_of(study)[name].read
    if read is None:
        return choices[name]
    with kinds.calling(kinds.named(study.kind), "read"):
        return read(choices[name])


def _opened(folder: Path, part: Study, statistics: Mapping[str, Any]) -> Run:
    return Run.of(open_one(folder, extent=part.extent, **statistics))


def _is_finished(path: Path, part: Study) -> bool:
    """Whether a run has all parts of a study's extent; raises what reading a damaged folder raises."""
    if not has_begun(path):
        return False
    folder = RunFolder.open(path).at_extent(part.extent)
    return folder is not None and folder.parts.are_there()


def _places(path: Path, parts: Mapping[str, Study], choices: Mapping[str, Any]) -> dict[str, tuple[Path, Study]]:
    """Folder and study of each run by name. Another choice is another folder: the runs before it may have grown."""
    return {name: (path / (name + _mark(part, choices)), part) for name, part in parts.items()}


def _mark(part: Study, choices: Mapping[str, Any]) -> str:
    """How a folder's name ends where its run depends on a choice: a hash of its demonstrations, if they are given.

    So other scores that come to choose the same demonstrations find the run that there is. Otherwise a hash of all that
    was chosen.
    """
    if not choices:
        return ""
    decisive = part.demonstrations or choices
    return f"-{hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:8]}"


def _canonical(study: Study) -> Study:
    """The study as its folder has it."""
    return with_whole_paths(study).model_copy(update={"out": None})


def identifier(study: Study) -> str:
    """What a study is known by beside its folder: SHA-256 of all its choices."""
    return hashlib.sha256(_canonical(study).to_yaml().encode()).hexdigest()


def _claim(path: Path, study: Study) -> bool:
    """Makes the folder, or refuses one that holds something else; a damaged study in it is set aside.

    Returns whether a damaged FORMAT was mended.
    """
    is_mended = False
    recorded, files = output(path, is_folder=True) / "study.yaml", Folder(path)
    with writable(path):
        path.mkdir(parents=True, exist_ok=True)
        files.refuse_unfetched()
        if not is_several(path):
            # Another process may be doing the same, or was killed at it.
            others = [name for name in files.names() if not name.startswith((".FORMAT.", ".study.yaml."))]
            if others and not (is_several(path) or _may_mend_format(path, study)):
                what = "a run of another study" if has_begun(path) else "other files"
                raise RunError(f"{path} holds {what}; give another folder")
            if is_mended := files.has(path / "FORMAT"):
                files.move(path / "FORMAT", path / "quarantine")
            files.write_whole(path / "FORMAT", f"{SEVERAL_FORMAT}\n".encode())
        if files.has(recorded):
            files.read(recorded)  # which refuses what is no damage, but none of ours
        try:
            there = _recorded(path) if files.has(recorded) else None
        except (RunError, UnknownKind):
            recorded.replace(path / f"damaged-{secrets.token_hex(4)}.yaml")
            there = None
        if there is None:
            files.write_whole(recorded, _canonical(study).to_yaml().encode())
        else:
            _refuse_other(path, there, study)
    return is_mended


def _may_mend_format(path: Path, study: Study) -> bool:
    """Whether a folder whose FORMAT is not that of several runs is this study's, and its FORMAT damaged."""
    files = Folder(path)
    if not files.has(path / "FORMAT") or files.has(path / "plan.json"):
        return False
    if (found := format_of(path)) != FORMAT and VERSION.fullmatch(found):  # of a run: a letter was lost
        return False
    try:
        there = _recorded(path)
    except (RunError, UnknownKind):
        return False
    return there.kind == study.kind


def _recorded(path: Path) -> Study:
    """The study in a folder; raises `RunError` where that is damaged, `UnknownKind` where its kind is of a package that
    is not installed."""
    raw, study = b"", None
    try:
        raw = Folder(path).read(path / "study.yaml", MAX_YAML_BYTES)
        study = Study.from_file(path / "study.yaml", raw)
    except UnknownKind:
        if not is_cut_off(raw):
            raise
    except (ConfigError, OSError):
        pass
    if study is None or kinds.named(study.kind).stages is None:
        raise RunError(
            f"{path / 'study.yaml'} is damaged; run the study from its own file with --out {path}, which mends it"
        )
    return study


_FREE = (
    "sets",
    "permutations",
    "queries",
    "dev_queries",
    "device",
    "memory_budget",
    *WAYS,
    "out",
    *STATISTICS,
)
_BUDGETS = ("max_requests", "max_tokens", "max_cost")
_LEFT_OPEN = ("scoring", "chat", "max_new_tokens")  # None is what the task or the endpoint has


def _refuse_other(path: Path, there: Study, here: Study) -> None:
    """Raises `RunError` where the folder's study is another one; its runs refuse what they cannot continue."""
    before, now = (_identity(_canonical(study)) for study in (there, here))
    for key in {**before, **now}:
        was, value = before.get(key), now.get(key)
        if was != value and not (key in _LEFT_OPEN and None in (was, value)):
            raise RunError(f"{path} holds another study: {key} is {was} there and {value} here; give another folder")


def _identity(study: Study) -> dict[str, Any]:
    """What two sessions must agree on, by key: where an endpoint is and what it may cost is not in it."""
    endpoint = {} if study.endpoint is None else study.endpoint.identity
    return {
        **study.model_dump(exclude={*_FREE, *kinds.named(study.kind).free, "endpoint"}),
        "balance": study.balance,  # which a dump leaves out where it is the default
        "normalize": PMI if study.normalize == PMI else f"not {PMI}",  # which asks for more
        **{f"the endpoint's {key}": value for key, value in endpoint.items()},
    }
