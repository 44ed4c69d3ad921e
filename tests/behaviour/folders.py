"""Run folders as this package wrote them once: they must open, verify and report for ever.

They are never made anew. A new kind, another format, or another bundled model adds one: extend `_writers`, then
`python tests/record_behaviour.py --folders` makes what is not there yet and adds what it says to ``folders.json``.
Only a folder of the model that is bundled now can be continued; `OF_OTHER_MODELS` are refused, in words.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from faulty_server import faulty_server

import iclperm
from behaviour import kept
from iclperm import Study, demo

FOLDERS = kept.FIXTURES / "folders"
SAID = kept.FIXTURES / "folders.json"
STOPPED = "asked_in_part"
"""The folder of a run that stopped; what is said of it is what a copy says that was continued."""
_NEWS = {"task": "mini_news", "sets": 2, "permutations": 2, "queries": 4, "seed": 5, "device": "cpu"}
STUDIES: dict[str, dict[str, Any]] = {
    "selection": {"kind": "selection", **_NEWS, "shots": 3, "select": 2, "dev_queries": 4},
    "convergence": {"kind": "convergence", **_NEWS, "shots": 3, "scoring": "generate", "max_new_tokens": 2},
}
BEFORE_GROWTH = {**_NEWS, "permutations": 3, "shots": [0, 3], "calibration": "contextual"}
GROWTH = {"sets": 3, "queries": 8}
OF_OTHER_MODELS = ("convergence", "grown")
"""Of models that were bundled before; those that continue are the same studies of the model after them."""
CONVERGENCE, GROWN = "convergence_2", "grown_2"
ASKED = {**_NEWS, "shots": [0, 2], "scoring": "generate", "max_new_tokens": 3}
_FAULTS = ["ok"] * 7 + ["401"]


def asked(server: Any) -> Study:
    """The study of the folders of an API; its answers are the server's, the same on every machine."""
    endpoint = {"base_url": server.url, "model": server.model, "api": "chat", "concurrency": 1}
    return Study(**{key: value for key, value in ASKED.items() if key != "device"}, endpoint=endpoint)


def grown() -> Study:
    """The study that the folder of the interrupted growth is to become."""
    return Study(**{**BEFORE_GROWTH, **GROWTH})


def make() -> None:
    """Makes the folders that are not there, and writes down what they say."""
    said = json.loads(SAID.read_text()) if SAID.exists() else {}
    for name, write in _writers().items():
        if not (FOLDERS / name).exists():
            write(FOLDERS / name)
            for path in [path for path in (FOLDERS / name).rglob("*") if path.is_dir()]:
                with suppress(OSError):  # empty folders are in no repository
                    path.rmdir()
            said[name] = _continued(name)
    kept.write(said, SAID)


def _writers() -> dict[str, Callable[[Path], Any]]:
    return {
        **{name: lambda at, choices=choices: iclperm.run(Study(**choices), at) for name, choices in STUDIES.items()},
        "transfer": _write_transfer,
        "grown": _write_grown,
        CONVERGENCE: lambda at: iclperm.run(Study(**STUDIES["convergence"]), at),
        GROWN: _write_grown,
        STOPPED: _write_asked_in_part,
    }


def _write_transfer(at: Path) -> None:
    """Between the bundled model and a copy of it, whose path is taken out of the folder."""
    with tempfile.TemporaryDirectory() as place:
        copy = shutil.copytree(demo.model_path(), Path(place).resolve() / "other")
        choices = {"kind": "transfer", **_NEWS, "permutations": 4, "shots": 3, "dev_queries": 4}
        iclperm.run(Study(**choices, models=["demo", str(copy)]), at)
    for path in at.rglob("study.yaml"):
        path.write_text(path.read_text().replace(str(copy), "there/other"))


def _write_grown(at: Path) -> None:
    iclperm.run(Study(**BEFORE_GROWTH), at)
    iclperm.run(grown(), at, extend=True)


def _write_asked_in_part(at: Path) -> None:
    with faulty_server(_FAULTS) as server, suppress(iclperm.IclpermError):
        iclperm.run(asked(server), at)


def _continued(name: str) -> dict[str, Any]:
    """What a folder says; of one that stopped, what a copy says that was continued."""
    if name != STOPPED:
        return said_by(FOLDERS / name)
    with tempfile.TemporaryDirectory() as place:
        copy = shutil.copytree(FOLDERS / name, Path(place) / name)
        go_on(copy)
        return said_by(copy)


def go_on(at: Path) -> int:
    """Continues the folder that stopped; the number of requests that this took."""
    with faulty_server() as server:
        iclperm.run(asked(server), at)
        return len(server.seen)


def said_by(folder: Path) -> dict[str, Any]:
    """Digests of a finished run, or of several in one folder, the accuracy of each, and what is concluded."""
    run = iclperm.open_run(folder)
    runs = {"": run} if hasattr(run, "correct") else run.runs
    return {
        "digests": {"whole": run.digest, **{name: found.digest for name, found in runs.items()}},
        "correct": {name: "".join(map(str, found.correct.ravel())) for name, found in runs.items()},
        "conclusion": run.findings().conclusion(),
        "keys of the report": sorted(run.report_content()),
    }
