"""What the stages of a study chose, kept in its folder: ``choices.json``, which carries its own digest.

A choice is kept by its stage and by the runs that it was made from, as far as they had grown. So it is made once; a run
that has grown since chooses anew, and the folder still knows what was chosen before. Nothing is lost with the file: a
choice that is not in it is made again from the finished runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from iclperm.base.files import Folder, writable
from iclperm.base.sealed import canonical, sealed, unsealed
from iclperm.errors import DamagedItem, RunError
from iclperm.runs.folder import RunFolder
from iclperm.study.study import WAYS, Study

NAME = "choices.json"
_MOST_BYTES = 256 << 20
_NO_MATTER = frozenset({"device", "memory_budget", *WAYS, "out", "endpoint"})  # to what is chosen from finished runs


def made_from(study: Study, runs: Mapping[str, tuple[Path, Study]]) -> str:
    """SHA-256 of what a choice depends on: the study, and the files of the runs at its extent, by name.

    Reads plans and names of files, no answers; a file's name holds the hash of its content.
    """
    files = {}
    for name, (path, part) in runs.items():
        folder = RunFolder.open(path).at_extent(part.extent)
        assert folder is not None, f"{path} is not finished"
        files[name] = [folder.run_id, sorted(file.name for file in folder.parts.finished().values())]
    choices = study.model_dump(mode="json", exclude=set(_NO_MATTER))
    return hashlib.sha256(canonical({"study": choices, "files": files})).hexdigest()


def kept_choice(path: Path, stage: str, origin: str) -> Any:
    """What a stage chose from the runs of this ``origin`` (`made_from`), as JSON; None where that is not kept."""
    try:
        entries = _entries(path)
    except DamagedItem:
        return None
    return next((entry["choice"] for entry in entries if (entry["stage"], entry["from"]) == (stage, origin)), None)


def keep_choice(path: Path, stage: str, origin: str, choice: Any) -> None:
    """Adds a choice to those of the folder; a damaged file is moved to ``quarantine`` first."""
    with writable(path):
        try:
            entries = _entries(path)
        except DamagedItem:
            Folder(path).move(path / NAME, path / "quarantine")
            entries = []
        entry = {"stage": stage, "from": origin, "choice": choice}
        content = {"choices": [*entries, entry]}
        content |= {"digest": sealed(content)["digest"]}  # and keys in the order of the choice, which may matter to it
        Folder(path).write_whole(path / NAME, json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")


def damage(path: Path) -> list[str]:
    """What is wrong with the choices that are kept in a folder, in lines; it is no damage that none are."""
    try:
        _entries(path)
    except DamagedItem as error:
        return [str(error)]
    return []


def as_kept(choice: Any) -> Any:
    """A choice as it is read back: lists for tuples, text for keys; raises what JSON raises for anything else."""
    return json.loads(json.dumps(choice, allow_nan=False))


def _entries(path: Path) -> list[dict[str, Any]]:
    """All that is kept, oldest first; raises `DamagedItem` where the file is not what its digest says."""
    try:
        content = unsealed(Folder(path).read(path / NAME, _MOST_BYTES))
    except FileNotFoundError:
        return []
    except (OSError, RunError):  # a folder or a link in its place, too
        content = None
    if content is None or not isinstance(entries := content.get("choices"), list):
        raise DamagedItem(f"{path / NAME} is damaged: its content is not what its digest says; run the study again")
    return entries
