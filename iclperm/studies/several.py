"""Studies made of several runs: one for each task and model of a transfer, or a curve and what was selected by it.

Each run has a folder of its own within the study's, and resumes, grows and is verified as any run is. Nothing is stored
beside them that does not follow from them:

study/
  FORMAT        "iclperm-runs 1"
  study.yaml    the study, canonical
  <name>/       a run folder
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from iclperm.errors import ConfigError, RunError
from iclperm.results import Run, RunReport, open_run
from iclperm.store import RunFolder, writable, write_whole
from iclperm.studies.findings import Findings
from iclperm.study import COMPOUND, STATISTICS, Study
from iclperm.tasks import Task, builtin_tasks
from iclperm.work import Demonstrations, StudyPlan, resolved

if TYPE_CHECKING:
    from iclperm.studies.selection import Chosen

FORMAT = "iclperm-runs 1"
Runner = Callable[[Study, Path | None], Run]
"""Runs one of the studies, or what is missing of it in a folder."""


@dataclass(frozen=True)
class StudyRuns:
    """The finished runs of one study, by name, and what they say together."""

    study: Study
    runs: dict[str, Run]
    folder: Path | None
    choice: Chosen | None = None
    """What a selection chose, and by which scores."""

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
                for numerics in ([{}] if run.folder is None else RunFolder.open(run.folder).numerics())
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
        """Tasks and models."""
        return "; ".join(dict.fromkeys(run.title for run in self.runs.values()))

    @property
    def warnings(self) -> list[str]:
        """What should be known of each run before the numbers are believed."""
        return [f"{name}: {warning}" for name, run in self.runs.items() for warning in run.warnings]

    @property
    def asides(self) -> dict[str, dict[str, Findings]]:
        """What is reported beside the findings, by run (`Run.asides`)."""
        return {name: run.asides for name, run in self.runs.items() if run.asides}

    def findings(self, kind: str | None = None) -> Findings:
        """What the runs say together; raises `ConfigError` for another ``kind`` than the study's."""
        if kind not in (None, self.study.kind):
            raise ConfigError(f"this is a study of the kind {self.study.kind}; ask one of its runs for {kind!r}")
        return self._findings

    @cached_property
    def _findings(self) -> Findings:
        if self.study.kind == "transfer":
            from iclperm.studies import transfer

            return transfer.findings(self.runs)
        from iclperm.studies import selection

        return selection.findings(self.runs["source"], self.runs["chosen"], self.choice)

    def report_content(self, kind: str | None = None) -> dict[str, Any]:
        """What report.json holds, JSON-safe."""
        found = self.findings(kind)
        content = {"kind": self.study.kind, **found.to_dict(), "normalize": self.study.normalize}
        content["calibration"] = self.study.calibration
        if self.asides:
            content["runs"] = {
                name: {key: about.to_dict() for key, about in asides.items()} for name, asides in self.asides.items()
            }
        return {**content, "warnings": [*found.warnings, *self.warnings]}

    def write_report(self, folder: str | Path | None = None, kind: str | None = None) -> list[Path]:
        """Writes figures and report.json into ``folder``, by default the study's own; returns their paths."""
        from iclperm.report import write_report

        target = folder or self.folder
        if target is None:
            raise RunError("these runs are in memory only; name a folder for their report")
        with writable(Path(target)):
            Path(target).mkdir(parents=True, exist_ok=True)
            return write_report(target, self.findings(kind), self.report_content(kind))


def run_all(study: Study, out: Path | None, run: Runner) -> StudyRuns:
    """Runs the studies that a compound one is made of, one after the other; see `iclperm.run`.

    The folder says what it did before until all runs have grown: a growth that is refused or killed hides nothing.
    Raises `ConfigError` for an endpoint with a budget and no folder, where all runs would see what each has spent.
    """
    check(study)
    given = [key for key in _BUDGETS if getattr(study.endpoint, key, None) is not None]
    if out is None and given:
        raise ConfigError(f"the endpoint's {given[0]} is for all runs of a {study.kind} together; give a run folder")
    if out is not None:
        _claim(out, study)
    runs, choice = {}, None
    for name, part in _first(study).items():
        runs[name] = run(part, None if out is None else out / name)
    if study.kind == "selection":
        choice, part = _chosen(study, runs["source"])
        runs["chosen"] = run(part, None if out is None else out / _name_of_chosen(part))
    if out is not None:
        with writable(out):
            write_whole(out / "study.yaml", _canonical(study).to_yaml().encode())
    return StudyRuns(study, runs, out, choice)


def plans(study: Study, plan: Callable[[Study], StudyPlan]) -> dict[str, StudyPlan]:
    """The plans of the runs by name. What a selection will choose is not known before: any demonstrations stand in."""
    check(study)
    parts = _first(study)
    if study.kind == "selection":
        from iclperm.stats.demonstrations import STRATEGIES

        sets = Demonstrations.of(parts["source"]).sets
        stand_in = np.concatenate([np.roll(sets, turn, axis=1)[:, : study.select] for turn in range(len(STRATEGIES))])
        parts["chosen"] = _given(study, stand_in)
    return {name: plan(part) for name, part in parts.items()}


def open_all(path: Path, **statistics: Any) -> StudyRuns:
    """The finished runs of a study from its folder, as far as the study says that they go; ``statistics`` replace the
    study's (`results.open_run`). Raises `RunError` where one is not finished."""
    study = _recorded(path)
    parts, choice = _parts(path, study)
    for name, (folder, part) in parts.items():
        if not _is_finished(folder, part):
            state = "unfinished" if has_begun(folder) else "not begun"
            raise RunError(f"{path} is not finished: {name} is {state}; run the same study into it to continue")
    changes = {key: getattr(study, key) for key in STATISTICS} | {
        key: value for key, value in statistics.items() if value is not None
    }
    runs = {name: open_run(folder, extent=part.extent, **changes) for name, (folder, part) in parts.items()}
    return StudyRuns(study.model_copy(update=changes), runs, path, choice)


def is_compound(path: str | Path) -> bool:
    """Whether a folder holds the runs of a compound study."""
    try:
        return (Path(path) / "FORMAT").read_text(encoding="utf-8").strip() == FORMAT
    except (OSError, UnicodeDecodeError):
        return False


def folders(path: Path) -> dict[str, Path]:
    """The run folders of a compound study by name, begun or not; what a selection chose, once it is known."""
    return {name: folder for name, (folder, _) in _parts(path, _recorded(path))[0].items()}


def beside(path: Path) -> list[Path]:
    """The folders of other runs of the compound study that a run folder is in which paid for replies: they share its
    budget. None where it stands alone."""
    place = path.resolve()
    paid = place.parent.glob("*/api") if is_compound(place.parent) else ()
    return sorted(folder.parent for folder in paid if folder.parent != place)


def has_begun(path: Path) -> bool:
    """Whether there is a run in this folder."""
    return (path / "FORMAT").is_file()


def check(study: Study) -> None:
    """Raises `ConfigError` for what would not fit once some of the runs are done."""
    for name, part in _first(study).items():
        task = Task.load(part.task, part.data)
        try:
            resolved(part, task)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    if study.kind == "transfer":
        counts = {name: study.shot_list(Task.load(name, study.data).shots)[-1] for name in _tasks(study)}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise ConfigError(
                f"an order carries over between equal numbers of shots, but there are {told}; set 'shots'"
            )
        return
    shots = study.shot_list(Task.load(study.task, study.data).shots)
    if study.resample != "none":
        raise ConfigError(f"a selection's key 'resample' is {study.resample!r}; its scores need 'none'")
    if shots != tuple(range(len(shots))):
        raise ConfigError("a selection scores demonstrations by every k from 0 on; give 'shots' as one number")
    if not 2 <= study.select <= shots[-1]:
        raise ConfigError(f"a study's key 'select' is {study.select}; give 2 to {shots[-1]}, which is its 'shots'")
    if study.permutations < 2:
        raise ConfigError(f"a study's key 'permutations' is {study.permutations}, but a selection compares orders")


def _parts(path: Path, study: Study) -> tuple[dict[str, tuple[Path, Study]], Chosen | None]:
    """Folder and study of every run by name, as far as they are known, and what a selection chose."""
    found, choice = {name: (path / name, part) for name, part in _first(study).items()}, None
    if study.kind == "selection" and _is_finished(*found["source"]):
        folder, part = found["source"]
        statistics = {"normalize": study.normalize, "unparsed": study.unparsed}
        choice, given = _chosen(study, open_run(folder, extent=part.extent, **statistics))
        found["chosen"] = (path / _name_of_chosen(given), given)
    return found, choice


def _is_finished(path: Path, part: Study) -> bool:
    """Whether a run has all parts of a study's extent; raises what reading a damaged folder raises."""
    if not has_begun(path):
        return False
    folder = RunFolder.open(path).at_extent(part.extent)
    return folder is not None and set(folder.parts()).issuperset(range(folder.num_parts))


def _first(study: Study) -> dict[str, Study]:
    """The studies that can begin at once, by the names of their folders."""
    plain = {"tasks": None, "models": None, "out": None}
    if study.kind == "selection":
        return {"source": _changed(study, kind="curve", select=Study.model_fields["select"].default, out=None)}
    pairs = [(task, model) for task in _tasks(study) for model in _models(study)]
    if len(pairs) < 2:
        raise ConfigError("a transfer needs two tasks or two models at least; name them under 'tasks' or 'models'")
    names = [_name(task, model, len(_tasks(study)), len(_models(study))) for task, model in pairs]
    if len(set(names)) < len(names):
        raise ConfigError(f"two of the tasks or models have one name: {', '.join(names)}; give each once")
    return {
        name: _changed(study, kind="search", task=task, model=model, **plain)
        for name, (task, model) in zip(names, pairs, strict=True)
    }


def _tasks(study: Study) -> list[str]:
    return study.tasks or [study.task]


def _models(study: Study) -> list[str]:
    return study.models or [study.model]


def _name(task: str, model: str, num_tasks: int, num_models: int) -> str:
    parts = ([Path(task).stem] if num_tasks > 1 else []) + ([Path(model).name] if num_models > 1 else [])
    return re.sub(r"[^\w.-]", "_", "-".join(parts))


def _chosen(study: Study, source: Run) -> tuple[Chosen, Study]:
    """What the source's scores choose, and the study of it."""
    from iclperm.studies import selection

    choice = selection.choose(source, study.select)
    return choice, _given(study, choice.rows)


def _given(study: Study, rows: np.ndarray[Any, Any]) -> Study:
    """A curve over demonstrations that are given, in random orders, on test queries."""
    return _changed(
        study,
        kind="curve",
        sets=len(rows),
        permutations=min(study.permutations, math.factorial(min(rows.shape[1], 20))),
        demonstrations=rows.tolist(),
        shots=int(rows.shape[1]),
        dev_queries=0,
        select=Study.model_fields["select"].default,
        out=None,
    )


def _name_of_chosen(study: Study) -> str:
    """Another choice is another run: the source may have grown since."""
    return f"chosen-{hashlib.sha256(json.dumps(study.demonstrations).encode()).hexdigest()[:8]}"


def _changed(study: Study, **changes: Any) -> Study:
    return Study(**{**study.model_dump(), **changes})


def _claim(path: Path, study: Study) -> None:
    """Makes the folder, or refuses one that holds something else; a damaged study in it is set aside."""
    recorded = path / "study.yaml"
    with writable(path):
        path.mkdir(parents=True, exist_ok=True)
        if not is_compound(path):
            # Another process may be doing the same, or was killed at it.
            others = [file for file in path.iterdir() if not file.name.startswith((".FORMAT.", ".study.yaml."))]
            if others and not is_compound(path):
                what = "a run of another study" if has_begun(path) else "other files"
                raise RunError(f"{path} holds {what}; give another folder")
            write_whole(path / "FORMAT", f"{FORMAT}\n".encode())
        try:
            there = _recorded(path) if recorded.exists() else None
        except RunError:
            recorded.replace(path / f"damaged-{secrets.token_hex(4)}.yaml")
            there = None
        if there is None:
            write_whole(recorded, _canonical(study).to_yaml().encode())
        else:
            _refuse_other(path, there, study)


def _recorded(path: Path) -> Study:
    """The study in a folder; raises `RunError` where that is damaged."""
    try:
        study = Study.from_file(path / "study.yaml")
    except ConfigError:
        study = None
    if study is None or study.kind not in COMPOUND:
        raise RunError(
            f"{path / 'study.yaml'} is damaged; run the study from its own file with --out {path}, which mends it"
        )
    return study


_FREE = (
    "sets",
    "permutations",
    "queries",
    "dev_queries",
    "select",
    "device",
    "memory_budget",
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
        **study.model_dump(exclude={*_FREE, "endpoint"}),
        **{f"the endpoint's {key}": value for key, value in endpoint.items()},
    }


def _canonical(study: Study) -> Study:
    """With paths that hold from any working directory."""

    def whole(name: str) -> str:
        is_path = name not in {"demo", *builtin_tasks()} and Path(name).exists()
        return str(Path(name).resolve()) if is_path else name

    changes: dict[str, Any] = {key: whole(value) for key in ("task", "model", "data") if (value := getattr(study, key))}
    for key in ("tasks", "models"):
        if names := getattr(study, key):
            changes[key] = [whole(name) for name in names]
    return study.model_copy(update={**changes, "out": None})
