"""What faults happen to: tiny studies of every kind, their folders whole and half, and all that must not change."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from faults.child import KILL_BEFORE, NONE, READ, Fault, Outcome, run
from iclperm.report.bundle import problem as page_problem

KEY_VARIABLE = "ICLPERM_FAULTS_KEY"
SENTINEL = "sentinel-5b1d0c77ae"
UNIT_TOKENS = 20
SIZES: dict[str, Any] = {"model": "model", "sets": 2, "permutations": 2, "queries": 6}
DEV = {"dev_queries": 6}
STUDIES: dict[str, dict[str, Any]] = {
    "sensitivity": {**SIZES, "task": "colours.yaml", "shots": [0, 3]},
    "search": {**SIZES, **DEV, "kind": "search", "task": "colours.yaml", "permutations": 4, "shots": 3},
    "transfer": {
        **SIZES, **DEV, "kind": "transfer", "tasks": ["colours.yaml", "hues.yaml"], "permutations": 3, "shots": 3,
    },
    "curve": {**SIZES, "kind": "curve", "task": "colours.yaml", "shots": 3},
    "selection": {
        **SIZES, **DEV, "kind": "selection", "task": "colours.yaml", "sets": 3, "shots": 3, "select": 2,
    },
    "convergence": {**SIZES, "kind": "convergence", "task": "colours.yaml", "permutations": 4, "shots": 3},
    "generated": {**SIZES, "task": "colours.yaml", "shots": [0, 3], "scoring": "generate", "max_new_tokens": 3},
    "calibrated": {**SIZES, **DEV, "task": "colours.yaml", "shots": [0, 3], "calibration": "contextual"},
    "grown": {**SIZES, "task": "colours.yaml", "shots": [0, 3]},
}  # fmt: skip
GROWN = {"sets": 3, "queries": 9}
GROWTH = ("--sets", "3", "--queries", "9", "--extend")
"""What lets the study ``grown`` grow, after it was run without."""

Work = Callable[[], int]
"""What a process does, and its exit code."""


class World:
    """One folder with tasks, data, a model, studies and a canary; runs go beside it, each into a place of its own."""

    def __init__(self, folder: Path, warm: int | None = None) -> None:
        """``warm`` is the number of studies that are run beforehand, so that later ones find everything loaded."""
        self.home = folder.resolve()
        self.inputs = self.home / "inputs"
        self.canary = self.home / "outside"
        self._digests: dict[str, str] = {}
        self._templates: dict[tuple[str, str], Path] = {}
        self._extents: dict[str, list[tuple[int, int]]] = {}
        self._told: dict[str, tuple[str, bytes]] = {}
        self._kept: dict[str, str] = {}
        self._next = 0
        os.environ[KEY_VARIABLE] = SENTINEL
        state = self.home / "state/iclperm/keys"  # where it is kept which key may go to which host: not in a folder
        state.mkdir(parents=True)
        os.environ["XDG_STATE_HOME"] = str(self.home / "state")
        os.environ["XDG_CACHE_HOME"] = str(self.home / "cache")
        page_problem()  # made here once: the limit of what comes after leaves no room for it
        self._make()
        _load_everything([self.study(name) for name in list(STUDIES)[:warm]], self.home / "warm")

    def _make(self) -> None:
        from tiny import byte_level_tokenizer, make_model, make_task
        from transformers.utils import logging

        logging.disable_progress_bar()  # its thread would be lost by a fork
        self.inputs.mkdir(parents=True)
        make_task(self.inputs, data={"train": "train.jsonl", "test": "test.jsonl", "dev": 0.3})
        task = yaml.safe_load((self.inputs / "colours.yaml").read_text())
        task |= {"name": "hues", "query": "Object: {{ text }}\nHue:"}
        task |= {"demonstration": "Object: {{ text }}\nHue: {{ label }}"}
        (self.inputs / "hues.yaml").write_text(yaml.safe_dump(task))
        make_model(self.inputs / "model", byte_level_tokenizer())
        for name, choices in STUDIES.items():
            (self.inputs / f"{name}.yaml").write_text(yaml.safe_dump(choices))
        self.canary.mkdir()
        (self.canary / "file").write_text("nobody's\n")
        (self.canary / "folder").mkdir()
        (self.canary / "folder/file").write_text("nobody's, either\n")
        about = self.canary.stat()
        self.canary_times = (about.st_atime_ns, about.st_mtime_ns)
        os.chdir(self.home)

    def place(self) -> Path:
        """A new folder for one case: what is in ``run`` there may change, nothing else."""
        self._next += 1
        place = self.home / "cases" / f"{os.getpid()}-{self._next}"
        place.mkdir(parents=True)
        return place

    def study(self, name: str) -> Path:
        """The file of a study."""
        return self.inputs / f"{name}.yaml"

    def sessions(self, name: str, folder: Path, *, drawn: bool = False) -> list[Work]:
        """What makes a study's run: one command, and of one that grows a second; without figures unless ``drawn``."""
        plain = ["run", str(self.study(name)), "--out", str(folder), "--json"]
        flags = [[], [*GROWTH]] if name == "grown" else [[]]
        if drawn:
            return [partial(command_line, [*plain, *more]) for more in flags]
        return [partial(run_alone, self.study(name), folder, grows=bool(more)) for more in flags]

    def digest(self, name: str) -> str:
        """What `iclperm verify` says of the run of a study that nothing disturbed."""
        if name not in self._digests:
            self._digests[name] = self.found_digest(self.template(name) / "run")
        return self._digests[name]

    def found_digest(self, folder: Path) -> str:
        """The digests of a folder's runs as `iclperm verify` tells them; empty where it finds no whole run."""
        done = self.call(["verify", str(folder), "--json"], folder)
        if done.code != 0:
            return ""
        content = json.loads(done.out)
        found = content if isinstance(content, list) else [content]
        return " ".join(f"{Path(one['folder']).name if len(found) > 1 else 'run'}:{one['digest']}" for one in found)

    def template(self, name: str, state: str = "finished") -> Path:
        """A place with a run that is ``finished``, or ``half`` finished; to be copied, not used."""
        if (name, state) not in self._templates:
            place = self.home / "templates" / f"{name}-{state}"
            place.mkdir(parents=True)
            fault = NONE
            if state == "half":  # killed before the commit of the part in the middle
                commits = [at for at, line in enumerate(self.operations(name)) if _is_commit(line)]
                fault = Fault(at=commits[len(commits) // 2], how=KILL_BEFORE)
            for session in self.sessions(name, place / "run", drawn=state == "finished"):
                done = run(session, place / "run", self.scratch, fault)
                if done.code != (None if fault.how else 0):
                    raise RuntimeError(f"the undisturbed {name} ended with {done.code}: {done.err}{done.out[:500]}")
                if fault.how:
                    break
            self._templates[name, state] = place
        return self._templates[name, state]

    def operations(self, name: str) -> list[str]:
        """What the first command of a study does below its run folder, in order."""
        folder = self.place() / "run"
        return run(self.sessions(name, folder)[0], folder, self.scratch).operations

    def extent(self, name: str) -> list[tuple[int, int]]:
        """Of each session of a study the number of its operations below the run folder, and of function calls."""
        if name not in self._extents:
            folder, found = self.place() / "run", []
            for work in self.sessions(name, folder):
                done = run(work, folder, self.scratch, Fault(calls=-1))
                found.append((len(done.operations), done.calls))
            self._extents[name] = found
        return self._extents[name]

    def num_reads(self, name: str, state: str, look: str) -> int:
        """How often a command opens a file of such a run folder to read it."""
        folder = self.copy(name, state) / "run"
        work = self.sessions(name, folder)[-1] if look == "run" else self.look(look, folder)
        root = folder if look == "run" else folder.parent
        return len(run(work, root, self.scratch, Fault(READ)).operations)

    def look(self, name: str, folder: Path, *, drawn: bool = False) -> Work:
        """A command that looks at a run; its files go beside the run folder. A report has figures where ``drawn``."""
        if name == "report" and not drawn:
            return partial(report_alone, folder)
        files = {"report": ["--out", str(folder.with_name("report")), "--json"]}
        files["export"] = ["--out", str(folder.with_name("all.csv"))]
        return partial(command_line, [name, str(folder), *files.get(name, [])])

    def told(self, name: str) -> tuple[str, bytes]:
        """The digest in the report of an undisturbed run, and the bytes of its exported answers."""
        if name not in self._told:
            folder = self.copy(name) / "run"
            digest = digest_in(run(self.look("report", folder), folder, self.scratch).out)
            run(self.look("export", folder), folder.parent, self.scratch)
            exported = folder.with_name("all.csv")
            self._told[name] = (digest, exported.read_bytes() if exported.exists() else b"")
        return self._told[name]

    def copy(self, name: str, state: str = "finished") -> Path:
        """A place of its own with such a run."""
        place = self.place()
        shutil.copytree(self.template(name, state) / "run", place / "run", symlinks=True)
        return place

    def call(self, command: Sequence[str], folder: Path, fault: Fault = NONE, *, limit_s: float = 60.0) -> Outcome:
        """A command of ``iclperm`` in a process of its own, which may write into ``folder`` only."""
        return run(partial(command_line, command), folder, self.scratch, fault, limit_s=limit_s)

    @property
    def scratch(self) -> Path:
        """Where processes say what they say."""
        folder = self.home / "said"
        folder.mkdir(exist_ok=True)
        return folder

    def kept(self, name: str, make: Callable[[], str]) -> str:
        """What is made once for all cases."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def clean(self) -> None:
        """Removes the places of cases."""
        shutil.rmtree(self.home / "cases", ignore_errors=True)

    def snapshot(self) -> dict[str, tuple[Any, ...]]:
        """All that no run may change: names, kinds, sizes, times and contents of the inputs and of the canary."""
        return {**fingerprints(self.inputs), **fingerprints(self.canary)}


def _is_commit(line: str) -> bool:
    _number, name, path = line.split(" ", 2)
    return name.startswith(("link", "rename")) and Path(path).parent.name == "items"


def fingerprints(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Everything in a folder, itself included, by its path."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        about = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(about.st_mode) else ""
        found[str(path)] = (about.st_mode, about.st_nlink, about.st_size, about.st_mtime_ns, content)
    return found


def command_line(arguments: Sequence[str]) -> int:
    """``iclperm`` with these arguments, in this process."""
    from iclperm.cli.main import main

    main(list(arguments), limits=work_limits())
    return 0  # main exits


def run_alone(study: Path, out: Path, *, grows: bool = False, **more: Any) -> int:
    """As ``iclperm run``, but without figures, which take ten times as long as such a run."""
    from iclperm import Study, api

    choices = GROWN if grows else {}

    def work() -> None:
        api.run(Study.from_file(study).model_copy(update=choices), out, extend=grows, limits=work_limits(), **more)

    return _as_command(work)


def report_alone(folder: Path) -> int:
    """As ``iclperm report --json``, but without figures."""
    from iclperm import api
    from iclperm.studies.told import growth_note

    def work() -> None:
        found = api.open_run(folder)
        requests = getattr(found.report, "num_requests", None)
        print(json.dumps({**found.report_content(), "digest": found.digest, "requests": requests}, allow_nan=False))
        print(*growth_note(found.report), sep="\n", file=sys.stderr)

    return _as_command(work)


def _as_command(work: Callable[[], None]) -> int:
    from iclperm.cli.failures import exit_code, one_line

    try:
        work()
    except Exception as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return exit_code(error)
    return 0


def digest_in(report: str) -> str:
    """The digest in what ``iclperm report --json`` printed."""
    return str(json.loads(report)["digest"])


def work_limits() -> Any:
    """Units so small that every run has several parts."""
    from iclperm.runs.limits import WorkLimits

    return WorkLimits(unit_tokens=(UNIT_TOKENS, UNIT_TOKENS), unit_prompts=8)


def _load_everything(studies: Sequence[Path], folder: Path) -> None:
    """What every process needs, loaded once: libraries, and each model that is asked for by the same choices."""
    import matplotlib.figure  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torch

    import iclperm.api
    import iclperm.cli.commands
    import iclperm.engine.engine
    import iclperm.stats

    torch.set_num_threads(1)
    load, loaded = iclperm.engine.engine.Engine.from_pretrained, {}

    def from_pretrained(name: Any, **choices: Any) -> Any:
        if (key := (str(name), *choices.values())) not in loaded:
            loaded[key] = load(name, **choices)
        return loaded[key]

    iclperm.engine.engine.Engine.from_pretrained = from_pretrained  # type: ignore[method-assign,assignment]
    for study in studies:
        iclperm.api.run(iclperm.Study.from_file(study), folder / study.stem, limits=work_limits()).report_content()
        iclperm.api.verify(folder / study.stem)
