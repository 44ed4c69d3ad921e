"""The folder of a grid: its file, a folder for each cell, and why cells failed.

grid/
  FORMAT         "iclperm-grid 1"
  grid.yaml      the grid, canonical
  failures.json  by cell, why it failed when it was last run
  cells/<name>/  an ordinary run, or the runs of a study of several
  compare/<kind>/  the comparison of the finished cells of a kind
"""

from __future__ import annotations

import json
from pathlib import Path

from iclperm.base.files import Folder, writable
from iclperm.base.outputs import output
from iclperm.errors import ConfigError, RunError
from iclperm.grids.grid import Grid, GridCell, canonical, cells
from iclperm.runs.formats import GRID_FORMAT, VERSION, format_of, has_begun, is_grid
from iclperm.runs.setting import whole_paths
from iclperm.study.choices import MAX_YAML_BYTES

_MOST_FAILURES = 1 << 24


class GridFolder:
    """What lies where. Raises `RunError` for a folder that is no grid's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = Folder(path)

    @classmethod
    def open(cls, path: Path) -> GridFolder:
        """The folder of a grid that was begun."""
        if not is_grid(path):
            raise RunError(f"{path} is not a grid's folder; give one that `iclperm grid` has written")
        return cls(path)

    @classmethod
    def claim(cls, path: Path, grid: Grid) -> GridFolder:
        """Makes the folder, or continues it; a grid in it may have had other cells. Raises `RunError` for one that
        holds something else."""
        folder = cls(output(path, is_folder=True))
        with writable(path):
            path.mkdir(parents=True, exist_ok=True)
            folder._files.refuse_unfetched()
            if not is_grid(path):
                others = [name for name in folder._files.names() if not name.startswith((".FORMAT.", ".grid.yaml."))]
                if others and not folder._is_damaged():
                    what = "a run" if has_begun(path) else "other files"
                    raise RunError(f"{path} holds {what}; give another folder")
                folder._files.write_whole(path / "FORMAT", f"{GRID_FORMAT}\n".encode())
            folder._files.write_whole(path / "grid.yaml", canonical(grid, whole_paths).to_yaml().encode())
        return folder

    def grid(self) -> Grid:
        """The grid as it was last run; raises `RunError` where its file is damaged."""
        path = self.path / "grid.yaml"
        try:
            return Grid.from_file(path, self._files.read(path, MAX_YAML_BYTES))
        except (ConfigError, OSError) as error:
            raise RunError(
                f"{path} is damaged ({error}); run the grid from its own file with --out {self.path}, which mends it"
            ) from None

    def cells(self) -> dict[str, GridCell]:
        """Those of its grid, by name."""
        return cells(self.grid())

    def place(self, name: str) -> Path:
        """The folder of a cell."""
        return self.path / "cells" / name

    def failures(self) -> dict[str, str]:
        """By cell, why it failed when it was last run; none where the file is not whole, as it is made anew."""
        path = self.path / "failures.json"
        if not self._files.has(path):
            return {}
        try:
            said = json.loads(self._files.read(path, _MOST_FAILURES))
        except ValueError:
            return {}
        is_whole = isinstance(said, dict) and all(isinstance(words, str) for words in said.values())
        return said if is_whole else {}

    def keep_failure(self, name: str, words: str | None) -> None:
        """Records why a cell failed, or with None that it did not; what another process recorded of others stays."""
        before = self.failures()
        failures = {other: said for other, said in before.items() if other != name}
        if words is not None:
            failures[name] = words
        if failures == before:
            return
        with writable(self.path):
            text = json.dumps(failures, indent=1, ensure_ascii=False)
            self._files.write_whole(self.path / "failures.json", f"{text}\n".encode(errors="replace"))

    def _is_damaged(self) -> bool:
        """Whether it is that of a grid but for its FORMAT."""
        if not self._files.has(self.path / "grid.yaml"):
            return False
        return not self._files.has(self.path / "FORMAT") or not VERSION.fullmatch(format_of(self.path))
