"""What a folder holds: the run of a study, the runs of a study of several, or something else."""

from __future__ import annotations

from pathlib import Path

from iclperm.errors import RunError

FORMAT = "iclperm-run 1"
SEVERAL_FORMAT = "iclperm-runs 1"
"""Of a folder that holds the run folders of a study of several runs."""


def check_format(path: Path) -> None:
    """Raises `RunError` where a folder is not that of one run in the format of this version."""
    found = (path / "FORMAT").read_text(encoding="utf-8", errors="replace").strip()
    if found != FORMAT:
        if found.startswith("iclperm-runs"):
            raise RunError(f"{path} holds a study of several runs; give one of its folders, or another folder")
        raise RunError(f"{path} has the format {found[:40]!r}; this version reads {FORMAT!r}")


def is_several(path: str | Path) -> bool:
    """Whether a folder holds the runs of a study of several."""
    try:
        return (Path(path) / "FORMAT").read_text(encoding="utf-8").strip() == SEVERAL_FORMAT
    except (OSError, UnicodeDecodeError):
        return False


def beside(path: Path) -> list[Path]:
    """The folders of other runs of the same study that have paid for replies, and so share a run's budget.

    Empty where the run stands alone.
    """
    place = path.resolve()
    paid = place.parent.glob("*/api") if is_several(place.parent) else ()
    return sorted(folder.parent for folder in paid if folder.parent != place)


def has_begun(path: Path) -> bool:
    """Whether there is a run in this folder."""
    return (path / "FORMAT").is_file()
