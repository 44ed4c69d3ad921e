"""The house as its imports draw it: which file knows which, at the top, inside functions and for type hints.

``python tests/house.py [FOLDER]`` prints what there is to count: rooms (the folders of the package and the files beside
them), arrows between rooms, those that run back up, circles of files, and imports of our own inside functions.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

OURS = "iclperm"
Levels = tuple[tuple[str, ...], ...]
"""Rooms by floor, from the top down: `test_house.LEVELS`."""


@dataclass(frozen=True)
class Import:
    """One imported module of ours: who imports what, where, and whether ``inside`` a function, for ``hints`` only, or
    ``named`` in a string, from which something else may load it."""

    importer: str
    imported: str
    line: int
    inside: bool = False
    hints: bool = False
    named: bool = False


LOADERS = frozenset(
    {"__import__", "import_module", "load_module", "loaded", "modules", "resolve_name", "run_module", "run_path"}
)
"""What loads a module, or finds a loaded one, by a name that no import statement shows; ``modules`` of ``sys`` and
``loaded`` of our kinds."""
_NAMES_A_MODULE = re.compile(r"iclperm(\.\w+)*(:[\w.]+)?")


def modules(package: Path) -> dict[str, Path]:
    """Every module of a package by its dotted name."""
    names = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def texts(package: Path) -> dict[str, str]:
    """The source of every module of a package by its dotted name: what the other functions take."""
    return {name: path.read_text(encoding="utf-8") for name, path in modules(package).items()}


def imports(sources: Mapping[str, str]) -> list[Import]:
    """Every import of one module of ours by another, at any depth; relative ones raise `AssertionError`.

    ``import iclperm.x`` is an import of ``iclperm``, too, as that is the name which it binds. A string that is the name
    of a module, or ``module:object``, is an import of the module.
    """
    return [
        replace(each, importer=importer, imported=imported)
        for importer, text in sources.items()
        for each in _imports_in(text)
        if each.imported.split(".")[0] == OURS and (imported := _module(each.imported, sources)) != importer
    ]


def outside_imports(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The top-level names of other packages that each module loads when it is imported."""
    return {
        importer: {
            each.imported.split(".")[0] for each in _imports_in(text) if not (each.inside or each.hints or each.named)
        }
        - {OURS}
        for importer, text in sources.items()
    }


@lru_cache(maxsize=1024)
def loaders(text: str) -> frozenset[str]:
    """Which `LOADERS` a source uses or imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            found.add(node.id if node.id in {"__import__", "import_module", "resolve_name"} else "")
        elif isinstance(node, ast.Attribute):
            whose = node.value.id if isinstance(node.value, ast.Name) else ""
            owner = {"modules": "sys", "loaded": "kinds"}.get(node.attr, whose)
            found.add(node.attr if whose == owner else "")
        elif isinstance(node, ast.ImportFrom):
            home = {"modules": "sys", "loaded": f"{OURS}.study.kinds"}
            found |= {alias.name for alias in node.names if home.get(alias.name, node.module) == node.module}
    return frozenset(found & LOADERS)


@lru_cache(maxsize=1024)
def _imports_in(text: str) -> tuple[Import, ...]:
    """What a source imports by full name: ``from a import b`` names a.b, which may be a module or something in a."""

    def walk(node: ast.AST, inside: bool, hints: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import("", alias.name, child.lineno, inside, hints)
                    if "." in alias.name and alias.asname is None:
                        yield Import("", alias.name.split(".")[0], child.lineno, inside, hints)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"line {child.lineno} imports relatively"
                yield from (Import("", f"{child.module}.{a.name}", child.lineno, inside, hints) for a in child.names)
            elif isinstance(child, ast.Constant):
                value = child.value
                if isinstance(value, str) and value != OURS and _NAMES_A_MODULE.fullmatch(value):
                    yield Import("", value.partition(":")[0], child.lineno, named=True)
            else:
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                is_hint = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                yield from walk(child, inside or is_function, hints or is_hint)

    return tuple(walk(ast.parse(text), False, False))


def _module(name: str, known: Collection[str]) -> str:
    """The module that a full name lies in; the compiled core is one, too."""
    if name == f"{OURS}._core" or name.startswith(f"{OURS}._core."):
        return f"{OURS}._core"
    while name not in known and "." in name:
        name = name.rpartition(".")[0]
    return name


def room(module: str) -> str:
    """The folder of a module, or the module itself where it lies beside the folders."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def upward(found: Iterable[Import], levels: Levels) -> list[Import]:
    """Imports of a room on the same floor or a higher one; `KeyError` for a room that has no floor."""
    floor = {name: number for number, level in enumerate(levels) for name in level}
    pairs = ((each, room(each.importer), room(each.imported)) for each in found)
    return [each for each, above, below in pairs if above != below and floor[above] >= floor[below]]


def circles(found: Iterable[Import]) -> list[list[str]]:
    """Groups of modules that each import all others of their group, directly or not (Tarjan 1972); [] for a good
    house."""
    graph: dict[str, list[str]] = {}
    for each in found:
        graph.setdefault(each.importer, []).append(each.imported)
        graph.setdefault(each.imported, [])
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            place = stack.index(node)
            group, stack[place:] = stack[place:], []
            if len(group) > 1:
                groups.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return groups


def loads(module: str, found: Iterable[Import], outside: Mapping[str, set[str]]) -> set[str]:
    """The other packages that importing a module loads, through everything that it imports at its top."""
    graph: dict[str, set[str]] = {}
    for each in found:
        if not (each.inside or each.hints or each.named):
            graph.setdefault(each.importer, set()).add(each.imported)
    seen, waiting = set(), [module]
    while waiting:
        here = waiting.pop()
        if here not in seen:
            seen.add(here)
            parents = (".".join(here.split(".")[:depth]) for depth in range(1, here.count(".") + 1))
            waiting += [*graph.get(here, ()), *parents]  # a module's packages are loaded before it
    return set().union(*(outside.get(here, set()) for here in seen))


def main() -> None:
    """Prints the counts, and every import that should not be."""
    from test_house import LEVELS

    package = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "iclperm"
    sources = texts(package)
    found = [each for each in imports(sources) if not each.named]
    rooms = {room(module) for module in sources} - {OURS}
    arrows = {(each.importer, room(each.imported)) for each in found if room(each.importer) != room(each.imported)}
    inside = {(each.importer, each.line) for each in found if each.inside}
    sizes = {module: text.count("\n") for module, text in sources.items()}
    print(f"rooms {len(rooms)}, files {len(sizes)}, lines {sum(sizes.values())}, largest {max(sizes.values())}")
    print(f"imports between rooms (a file and a room count once) {len(arrows)}")
    try:
        back = upward(found, LEVELS)
    except KeyError as error:
        print(f"the room {error} has no floor in LEVELS: upward imports are not counted")
    else:
        print(f"of these upward {len({(each.importer, room(each.imported)) for each in back})}")
        for line in sorted({f"  {each.importer}:{each.line} -> {each.imported}" for each in back}):
            print(line)
    print(f"circles of files {len(circles(found))}")
    for group in circles(found):
        print(f"  {', '.join(group)}")
    print(f"imports of our own inside functions {len(inside)}")
    for module, count in sorted(sizes.items(), key=lambda pair: -pair[1]):
        if count > 600:
            print(f"  {module}: {count} lines")


if __name__ == "__main__":
    main()
