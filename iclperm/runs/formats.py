"""What a folder holds: the run of a study, the runs of a study of several, or something else."""

from __future__ import annotations

import re
from pathlib import Path

from iclperm.base.files import Folder
from iclperm.errors import DamagedItem, RunError

FORMAT = "iclperm-run 1"
SEVERAL_FORMAT = "iclperm-runs 1"
"""Of a folder that holds the run folders of a study of several runs."""
GRID_FORMAT = "iclperm-grid 1"
"""Of a folder that holds the cells of a grid."""
VERSION = re.compile(r"iclperm-(runs?|grid) [1-9][0-9]*")
"""What FORMAT says in any version."""
_MOST_BYTES = 1 << 10


def check_format(path: Path) -> None:
    """Raises `RunError` where a folder is not that of one run in the format of this version, `DamagedItem` where its
    FORMAT is damaged."""
    if path.is_symlink() and is_several(path.parent):
        raise RunError(f"{path} is a symbolic link, and none is followed in a run folder; name what it points to")
    found = format_of(path)
    if found == FORMAT:
        return
    if found == SEVERAL_FORMAT:
        raise RunError(f"{path} holds a study of several runs; give one of its folders, or another folder")
    if found == GRID_FORMAT:
        raise RunError(f"{path} holds a grid of studies; give one of its folders, or another folder")
    if not VERSION.fullmatch(found):
        raise DamagedItem(f"{path / 'FORMAT'} is damaged: it says {found[:40]!r}; run the study again, which mends it")
    raise RunError(
        f"{path} has the format {found[:40]!r}, this version reads {FORMAT!r}; install a newer iclperm, or, where "
        "FORMAT is damaged, run the study again, which mends it if the run's records say so"
    )


def is_several(path: str | Path) -> bool:
    """Whether a folder holds the runs of a study of several."""
    try:
        return format_of(Path(path)) == SEVERAL_FORMAT
    except OSError:
        return False


def is_grid(path: str | Path) -> bool:
    """Whether a folder holds the cells of a grid."""
    try:
        return format_of(Path(path)) == GRID_FORMAT
    except OSError:
        return False


def beside(path: Path) -> list[Path]:
    """The folders of other runs of the same study that have paid for replies, and so share a run's budget.

    Empty where the run stands alone.
    """
    place = path.resolve()
    names = Folder(place.parent).names() if is_several(place.parent) else []
    others = (place.parent / name for name in names if name != place.name)
    return [other for other in others if other.is_dir() and not other.is_symlink() and (other / "api").is_dir()]


def has_begun(path: Path) -> bool:
    """Whether there is a run in this folder."""
    try:
        return Folder(path).has(path / "FORMAT")
    except NotADirectoryError:
        return False


def format_of(path: Path) -> str:
    """What the file FORMAT of a folder says; raises `OSError` and `RunError` as `Folder.read` does."""
    return Folder(path).read(path / "FORMAT", _MOST_BYTES).decode(errors="replace").strip()
