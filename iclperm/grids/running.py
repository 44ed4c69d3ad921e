"""Runs a grid: its cost first, then cell after cell; one that fails says why, and the rest goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from iclperm.base.files import Folder
from iclperm.errors import IclpermError, is_out_of_memory
from iclperm.grids.costs import CellCost, GridPlan, cost_of, in_order
from iclperm.grids.folder import GridFolder
from iclperm.grids.grid import GridCell
from iclperm.runs.execute import refuse_other_folder
from iclperm.runs.folder import RunFolder
from iclperm.runs.formats import has_begun, is_several
from iclperm.runs.plan import StudyPlan
from iclperm.runs.presence import num_at_work
from iclperm.runs.run_texts import has_other_data
from iclperm.runs.setting import with_whole_paths
from iclperm.studies import several
from iclperm.studies.report import Run
from iclperm.studies.several import StudyRuns
from iclperm.study import kinds
from iclperm.study.study import STATISTICS, Study

_NAMED = ("model", "revision", "adapter", "task", "data", "dtype")
Ran = Run | StudyRuns
Plans = StudyPlan | dict[str, StudyPlan]


@dataclass(frozen=True)
class GridRuns:
    """A grid that was run: ``cells`` by name, those ``finished``, and why others ``failed``.

    Cells are opened one at a time, as all of them need not fit into memory.
    """

    folder: Path
    cells: Mapping[str, GridCell]
    finished: tuple[str, ...]
    failed: Mapping[str, str]
    opened: Callable[[Path], Ran] = field(repr=False)

    @property
    def missing(self) -> list[str]:
        """The cells that are neither finished nor failed."""
        return [name for name in self.cells if name not in self.finished and name not in self.failed]

    def __getitem__(self, name: str) -> Ran:
        """A finished cell; raises what opening it raises, and KeyError for another."""
        if name not in self.finished:
            raise KeyError(name)
        return self.opened(self.place(name))

    def runs(self, kind: str | None = None) -> Iterator[tuple[str, Ran]]:
        """The finished cells one after the other; those of a ``kind`` alone where one is named."""
        for name in self.finished:
            if kind in (None, self.cells[name].kind):
                yield name, self[name]

    @property
    def at_work(self) -> list[str]:
        """The cells that processes are at work on now, as far as locks tell: of another machine they often do not."""
        return [name for name in self.cells if name not in self.finished and _is_at_work(self.place(name))]

    def without(self, name: str, words: str) -> GridRuns:
        """The grid with a cell that turned out to be unreadable as failed, which its folder keeps: it is run again."""
        GridFolder(self.folder).keep_failure(name, words)
        rest = tuple(other for other in self.finished if other != name)
        return replace(self, finished=rest, failed={**self.failed, name: words})

    def by_kind(self) -> dict[str, list[str]]:
        """The finished cells of each kind."""
        found: dict[str, list[str]] = {}
        for name in self.finished:
            found.setdefault(self.cells[name].kind, []).append(name)
        return found

    def place(self, name: str) -> Path:
        """The folder of a cell."""
        return GridFolder(self.folder).place(name)


def planned(
    cells: Mapping[str, GridCell],
    folder: GridFolder | None,
    plan: Callable[[Study], Plans],
    told: Callable[[str], None],
) -> GridPlan:
    """What the cells cost that are not finished, in the order in which to run them; each is ``told`` of by its name.

    A cell that failed, and one whose task or data are others now, is not finished however many answers it has: running
    it says what is wrong, or mends it.
    """
    costs: list[CellCost] = []
    done: list[str] = []
    if folder is not None:
        failed = folder.failures()
        there = [name for name in cells if name not in failed and is_finished(folder.place(name), cells[name].study)]
        done = [name for name in there if not _is_of_other_data(folder.place(name), cells[name].study)]
    for name, cell in cells.items():
        if name in done:
            continue
        told(name)
        found: Plans | IclpermError
        try:
            found = plan(cell.study)
        except IclpermError as error:
            found = error
        costs.append(cost_of(cell, found))
    return GridPlan(tuple(in_order(cells, costs)), tuple(done))


def is_finished(place: Path, study: Study) -> bool:
    """Whether a cell's folder has all answers of its study, as far as names and records tell: no data are read, and no
    model is hashed. A folder of another study, which running it will name, is not."""
    try:
        if kinds.named(study.kind).stages is not None:
            return several.is_finished(place, study)
        if not has_begun(place):
            return False
        refuse_other_folder(place, study, extend=True)
        there, here = with_whole_paths(RunFolder.open(place).study()), with_whole_paths(study)
        if any(getattr(there, key) != getattr(here, key) for key in (*_NAMED, *STATISTICS)):
            return False
        folder = RunFolder.open(place).at_extent(study.extent)
        return folder is not None and folder.parts.are_there()
    except IclpermError:
        return False


def _is_of_other_data(place: Path, study: Study) -> bool:
    """Whether a finished cell was run with other wording or other data than its task has now.

    Reads the data. False where they cannot be read any more: the answers are there, and need none.
    """
    several_there = kinds.named(study.kind).stages is not None
    try:
        runs = several.begun(place, may_read=False)[0].values() if several_there else [place]
        return any(has_other_data(folder) for folder in runs)
    except IclpermError:
        return False


def _is_at_work(place: Path) -> bool:
    try:
        folders = several.begun(place, may_read=False)[0].values() if is_several(place) else [place]
        return any(num_at_work(Folder(folder)) for folder in folders if has_begun(folder))
    except IclpermError:  # a damaged folder, which says so where it is opened
        return False


def run_cells(
    folder: GridFolder,
    cells: Mapping[str, GridCell],
    plan: GridPlan,
    run: Callable[[Study, Path], Ran],
    told: Callable[[str, str | None], None],
) -> dict[str, str]:
    """Runs the cells of a plan; returns why some failed, which the folder keeps, too.

    ``told`` hears of each cell when it is begun, and then, where it failed, why. An interrupt ends the grid.
    """
    for cost in plan.cells:
        told(cost.name, None)
        words: str | None = None
        try:
            run(cells[cost.name].study, folder.place(cost.name))
        except Exception as error:
            if not isinstance(error, IclpermError) and not is_out_of_memory(error):
                raise
            words = " ".join(str(error).split()) or type(error).__name__
            told(cost.name, words)
        folder.keep_failure(cost.name, words)
    return {name: words for name, words in folder.failures().items() if name in cells}
