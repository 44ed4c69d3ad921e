"""What a grid is: the studies of every model, task, kind and seed, in and out of YAML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import Field, JsonValue

from iclperm.errors import ConfigError
from iclperm.study.choices import Choices, shown
from iclperm.study.kinds import SENSITIVITY, Kind
from iclperm.study.kinds import named as kind_named
from iclperm.study.study import Study, found_beside

Axis = Literal["model", "task", "kind", "seed"]
Text = Annotated[str, Field(min_length=1)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
Bundle: TypeAlias = dict[str, JsonValue]
Entry: TypeAlias = Text | Bundle
AXES: tuple[Axis, ...] = ("model", "task", "kind", "seed")
BUILTIN = Path(__file__).parent / "papers"
_MOST_CELLS = 100_000
_MOST_NAME = 60
GridLike = TypeVar("GridLike", bound="Grid")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._+-]+")


def _sensitivity() -> list[Entry]:
    return [SENSITIVITY.name]


class Exemption(Choices):
    """Cells that are other than the grid says: those ``where`` each axis that is named has one of these names.

    They are left out (``skip``), or have these keys of a ``study``.
    """

    where: Annotated[dict[Axis, Text | int | list[Text | int]], Field(min_length=1)]
    skip: bool = False
    study: Bundle = Field(default_factory=dict)

    def holds(self, names: Mapping[Axis, str]) -> bool:
        """Whether a cell of these names is one of them."""
        return all(names[axis] in self.names(axis) for axis in self.where)

    def names(self, axis: Axis) -> list[str]:
        """Those that are meant of an axis."""
        given = self.where[axis]
        return [str(name) for name in (given if isinstance(given, list) else [given])]


class Grid(Choices):
    """Models x tasks x kinds x seeds: a study for each combination, with ``exceptions``.

    ``models``, ``tasks`` and ``kinds`` list names, or keys of a study that go together, such as ``{model: org/name,
    revision: abc, dtype: bfloat16}``, with a ``name`` for folders and tables if there is to be another than that of
    the model, task or kind. ``study`` has keys for all. What a model's entry says wins over ``study``, a task's over a
    model's, a kind's over a task's, an exception over all. A kind that is about several tasks (transfer) has one cell
    for each model and seed, of all the tasks, unless its entry says of which. ``out`` is the grid's folder.
    """

    models: Annotated[list[Entry], Field(min_length=1)]
    tasks: Annotated[list[Entry], Field(min_length=1)]
    kinds: Annotated[list[Entry], Field(min_length=1)] = Field(default_factory=_sensitivity)
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field(default_factory=lambda: [0])
    study: Bundle = Field(default_factory=dict)
    exceptions: list[Exemption] = Field(default_factory=list)
    out: Text | None = None

    def __init__(self, /, **choices: Any) -> None:
        super().__init__(**choices)
        cells(self)

    @classmethod
    def from_file(cls, path: str | Path, raw: bytes | None = None) -> Self:
        """Reads a grid file; task files, data and models named in it are looked up beside it first. The name of a grid
        that comes with the package stands for its file."""
        if raw is None and str(path) in builtin_grids():
            path = BUILTIN / f"{path}.yaml"
        return canonical(super().from_file(path, raw), lambda choices: found_beside(choices, Path(path).parent))


@dataclass(frozen=True)
class GridCell:
    """One study of a grid, and the names that it has on the axes."""

    model: str
    task: str
    kind: str
    seed: str
    study: Study

    @property
    def name(self) -> str:
        """Of its folder."""
        return "--".join(_in_path(getattr(self, axis)) for axis in AXES)


def canonical(grid: GridLike, paths: Callable[[Bundle], Bundle]) -> GridLike:
    """The grid with every entry written out and named, and with those of its choices that ``paths`` gives anew."""

    def written(axis: Axis) -> list[Bundle]:
        entries = (_bundle(axis, each) for each in getattr(grid, f"{axis}s"))
        return [{"name": _name(axis, entry), **entry, **paths(entry)} for entry in entries]

    exceptions = [each.model_copy(update={"study": {**each.study, **paths(each.study)}}) for each in grid.exceptions]
    changes: dict[str, Any] = {f"{axis}s": written(axis) for axis in AXES if axis != "seed"}
    return grid.model_copy(update={**changes, "study": {**grid.study, **paths(grid.study)}, "exceptions": exceptions})


def builtin_grids() -> list[str]:
    """The names of the grids that come with the package: those of the two papers."""
    return sorted(path.stem for path in BUILTIN.glob("*.yaml"))


def cells(grid: Grid) -> dict[str, GridCell]:
    """The cells of a grid by the names of their folders, without those that are skipped.

    Raises `ConfigError` for choices that make no study, naming the cell, for an exception that names nothing, for two
    entries of one name, and for a grid without any cell.
    """
    axes: dict[Axis, list[Bundle]] = {
        "model": [_bundle("model", each) for each in grid.models],
        "task": [_bundle("task", each) for each in grid.tasks],
        "kind": [_bundle("kind", each) for each in grid.kinds],
        "seed": [{"seed": seed} for seed in grid.seeds],
    }
    named: dict[Axis, dict[str, Bundle]] = {axis: _by_name(axis, entries) for axis, entries in axes.items()}
    _refuse_unowned("study", grid.study, own=None)
    for exemption in grid.exceptions:
        _refuse_unowned("exceptions", exemption.study, own=None)
        for axis in exemption.where:
            if unknown := [name for name in exemption.names(axis) if name not in named[axis]]:
                raise ConfigError(
                    f"a grid's exceptions name the {axis} {unknown[0]!r}, which it does not have; there are "
                    f"{', '.join(named[axis])}"
                )
    if (count := len(axes["model"]) * len(axes["task"]) * len(axes["kind"]) * len(axes["seed"])) > _MOST_CELLS:
        raise ConfigError(f"a grid has {count:,} cells, and at most {_MOST_CELLS:,} are run; part it in several")
    found: dict[str, GridCell] = {}
    for cell in _combined(grid, named):
        if cell.name in found:
            raise ConfigError(f"a grid has two cells for the folder {cell.name}; give one of the entries a 'name'")
        found[cell.name] = cell
    if not found:
        raise ConfigError("a grid has no cells: its exceptions skip all of them; leave some out")
    return found


def _combined(grid: Grid, named: Mapping[Axis, Mapping[str, Bundle]]) -> Iterator[GridCell]:
    """Every combination that is not skipped."""
    whole = {name: _kind_of(entry).keys.keys() >= {"tasks"} for name, entry in named["kind"].items()}
    for (model, of_model), (kind, of_kind), (seed, of_seed) in product(*(named[axis].items() for axis in _OUTER)):
        tasks: Mapping[str, Bundle] = named["task"]
        if whole[kind]:
            tasks = {_joined(of_kind.get("tasks") or [*named["task"]]): _all_tasks(named["task"], of_kind)}
        for task, of_task in tasks.items():
            names: dict[Axis, str] = {"model": model, "task": task, "kind": kind, "seed": seed}
            exempt = [each for each in grid.exceptions if each.holds(names)]
            if any(each.skip for each in exempt):
                continue
            choices = grid.study | of_model | of_task | of_kind | of_seed
            for each in exempt:
                choices = choices | each.study
            choices = {key: value for key, value in choices.items() if key != "name"}
            try:
                yield GridCell(model, task, kind, seed, Study(**choices))
            except ConfigError as error:
                raise ConfigError(f"the cell {model}, {task}, {kind}, seed {seed}: {error}") from None


_OUTER: tuple[Axis, ...] = ("model", "kind", "seed")


def _bundle(axis: Axis, entry: Entry) -> Bundle:
    """An entry as keys of a study; raises `ConfigError` for one that lacks its own, or has those of another axis."""
    bundle: Bundle = {axis: entry} if isinstance(entry, str) else dict(entry)
    own = ("model", "endpoint") if axis == "model" else (axis,)
    if not any(key in bundle for key in own):
        raise ConfigError(f"a grid's {axis}s have {shown(entry)}, which names no {axis}; add the key {axis!r}")
    _refuse_unowned(f"{axis}s", bundle, own=axis)
    return bundle


def _refuse_unowned(where: str, bundle: Bundle, own: Axis | None) -> None:
    """Raises `ConfigError` for keys that an axis decides, or that no study has."""
    for key in bundle:
        if (key in AXES and key != own) or key == "out":
            place = f"'{key}s'" if key in AXES else "'out', of the grid"
            raise ConfigError(f"a grid's {where} have the key {key!r}; that is for {place}")
        if key not in Study.model_fields and not (key == "name" and own):
            raise ConfigError(f"a grid's {where} have the key {key!r}, which no study has; leave it out")


def _by_name(axis: Axis, entries: Sequence[Bundle]) -> dict[str, Bundle]:
    found: dict[str, Bundle] = {}
    for entry in entries:
        if (name := _name(axis, entry)) in found:
            raise ConfigError(f"a grid has two {axis}s called {name}; give one a 'name'")
        found[name] = entry
    return found


def _name(axis: Axis, entry: Bundle) -> str:
    """What an entry is called: its name, or that of its model, task or kind."""
    given = entry.get("name", entry.get(axis))
    if given is None:
        behind = entry.get("endpoint")
        given = behind.get("model", "endpoint") if isinstance(behind, dict) else "endpoint"
    text = str(given)
    if axis in ("model", "task") and "name" not in entry:
        text = Path(text).stem if axis == "task" else Path(text).name
    return text


def _kind_of(entry: Bundle) -> Kind:
    return kind_named(str(entry["kind"]))


def _joined(tasks: Any) -> str:
    return "+".join(Path(str(task)).stem for task in tasks)


def _all_tasks(tasks: Mapping[str, Bundle], kind: Bundle) -> Bundle:
    """The keys of the one cell of all tasks; raises `ConfigError` where they say different things."""
    found: Bundle = {}
    for name, entry in tasks.items():
        for key, value in entry.items():
            if key not in ("task", "name") and found.setdefault(key, value) != value:
                raise ConfigError(
                    f"a grid's task {name} has {key} {shown(value)}, another {shown(found[key])}, and one study is of "
                    "all of them; say it in 'study' or in an exception"
                )
    return found if "tasks" in kind else {**found, "tasks": [entry["task"] for entry in tasks.values()]}


def _in_path(name: str) -> str:
    """A name as a part of a file's."""
    return _NOT_IN_NAMES.sub("-", name).strip("-.")[:_MOST_NAME] or "unnamed"
