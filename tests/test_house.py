"""The walls of the house, read from the imports themselves, and what a package owes its users."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import iclperm

PACKAGE = Path(iclperm.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(PACKAGE.rglob("*.py"))

# What may be imported where; anywhere else it is a breach.
WALLS = {
    "torch": ("engine/", "reference/", "bench/"),
    "triton": ("engine/kernels/",),
    "numba": ("stats/",),
    "click": ("cli.py",),
}
# What the slow oracles may know of us: data and errors, nothing of the fast path.
REFERENCE_MAY_IMPORT = ("iclperm.errors", "iclperm.reference")
DANGEROUS = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module imported by a file, at any depth, with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield node.module or "", node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def places(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize(("module", "homes"), WALLS.items())
def test_heavy_modules_stay_behind_their_walls(module, homes):
    breaches = {
        f"{places(path)}:{line}"
        for path in SOURCES
        for name, line in imports(path)
        if name.split(".")[0] == module and not places(path).startswith(homes)
    }
    assert not breaches
    assert module == "triton" or any(name.split(".")[0] == module for path in SOURCES for name, _ in imports(path))


def test_tree_and_plan_see_integers_only():
    for name in ("engine/tree.py", "engine/plan.py"):
        roots = {module.split(".")[0] for module, _ in imports(PACKAGE / name)}
        assert not roots & {"torch", "transformers"}


def test_the_reference_imports_nothing_of_the_fast_path():
    breaches = {
        f"{places(path)}:{line} {name}"
        for path in SOURCES
        if places(path).startswith("reference/")
        for name, line in imports(path)
        if name.split(".")[0] == "iclperm" and not name.startswith(REFERENCE_MAY_IMPORT)
    }
    assert not breaches


def test_nothing_unpickles_or_evaluates():
    for path in SOURCES:
        assert not DANGEROUS & {name.split(".")[0] for name, _ in imports(path)}, path
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert not {"eval", "exec", "compile"} & {call.id for call in calls if isinstance(call, ast.Name)}, path
        attributes = {
            (call.value.id, call.attr)
            for call in calls
            if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name)
        }
        assert not {("torch", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load")} & attributes, path


def test_there_is_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert iclperm.__version__ == version("iclperm") == project["version"]
    assert not [path for path in SOURCES if "__version__ =" in path.read_text()]


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "_core.pyi").is_file()


def test_importing_the_package_loads_nothing_heavy():
    script = "import sys, iclperm; dir(iclperm); print({'torch', 'numba', 'pydantic', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_every_public_name_is_there():
    for name in iclperm.__all__:
        assert getattr(iclperm, name) is not None
    with pytest.raises(AttributeError, match="module 'iclperm' has no attribute 'nothing'"):
        _ = iclperm.nothing


def test_sources_are_free_of_markers_and_private_paths():
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for marker in ("TODO", "FIXME", "XXX", "/work/", "/home/"):
            assert marker not in text, f"{path} holds {marker}"
