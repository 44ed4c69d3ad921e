"""The walls of the house, read from the imports themselves, and what a package owes its users.

``python tests/house.py`` prints the counts behind the first tests.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import house
import pytest

import iclperm

PACKAGE = Path(iclperm.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(PACKAGE.rglob("*.py"))

LEVELS = (
    ("iclperm",),  # the names of the package, each loaded from its home on first use
    ("__main__",),
    ("cli",),
    ("api", "plot"),
    ("progress",),
    ("external", "grids", "bench"),
    ("studies",),
    ("workers",),
    ("runs", "models", "integrations"),
    ("engine",),
    ("prompts",),
    ("tasks", "endpoint", "report"),
    ("stats",),
    ("study", "demo", "reference"),
    ("base",),
    ("errors", "_core"),
)
"""Who may import whom: a room (a folder, or a file beside the folders) knows rooms of lower floors only, and the rooms
of one floor do not know each other. Imports inside functions and for type hints count, too. ``_core`` is compiled."""
LATE = {
    "iclperm.bench": "numpy",
    "iclperm.engine.decode": "torch",
    "iclperm.engine.device": "torch",
    "iclperm.engine.engine": "torch",
    "iclperm.engine.estimate": "torch",
    "iclperm.engine.kernels.triton_attention": "triton",
    "iclperm.engine.kernels.triton_decode": "triton",
    "iclperm.engine.kernels.triton_head": "triton",
    "iclperm.engine.kernels.triton_resources": "triton",
    "iclperm.engine.kernels.triton_layer_norm": "triton",
    "iclperm.engine.kernels.triton_rowwise": "triton",
    "iclperm.engine.load": "torch",
    "iclperm.engine.memory": "torch",
    "iclperm.engine.plain_model": "torch",
    "iclperm.engine.tokenizer": "transformers",
    "iclperm.integrations.lm_eval": "lm_eval",
    "iclperm.integrations.rendered": "lm_eval",
    "iclperm.integrations.serve": "starlette",
    "iclperm.models": "numpy",
    "iclperm.stats._kernels": "numba",
    "iclperm.workers.cluster": "ray",
}
"""Our own modules that are imported inside functions, and the heavy library that this keeps out of ``--help`` and of
commands that do not need it."""
# What may be imported where; anywhere else it is a breach.
WALLS = {
    "torch": ("engine/", "reference/", "bench/", "integrations/"),
    "triton": ("engine/kernels/",),
    "numba": ("stats/",),
    "click": ("cli/",),
}
# What the slow oracles may know of us: data and errors, nothing of the fast path.
REFERENCE_MAY_IMPORT = ("iclperm.errors", "iclperm.reference")
MOST_LINES = 600
DANGEROUS = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}


TEXTS = house.texts(PACKAGE)
NAMED = {
    "iclperm.study.kinds": "a kind is declared by the names of what runs it; who plans, runs or reports it loads them",
}
"""Files that may name modules of rooms above them in strings, and why."""
LOADERS = {
    "iclperm": ({"import_module"}, "each public name is loaded from its home on first use"),
    "iclperm.base.imports": (
        {"import_module", "modules"},
        "a thread loads what its caller names, of a room below that caller",
    ),
    "iclperm.base.lazy": ({"import_module", "modules"}, "the same for the packages below, whose strings are counted"),
    "iclperm.base.worker": ({"import_module"}, "a worker's process loads the target that its caller names"),
    "iclperm.cli": ({"import_module"}, "the commands are loaded on first use, so that --help stays instant"),
    "iclperm.studies": ({"loaded"}, "the findings of a kind, ours or another package's"),
    "iclperm.studies.stages": ({"loaded"}, "the stages of a kind"),
    "iclperm.study.kinds": ({"import_module"}, "`loaded` itself"),
    "iclperm.study.study": ({"loaded"}, "the options of another package's kind"),
    "iclperm.tasks.answers": ({"import_module"}, "libraries of mathematics, which have no type hints"),
}
"""Files that may load modules by name, by which `house.LOADERS`, and why."""


def breaches(sources: Mapping[str, str]) -> list[str]:
    """Every import that runs up or along a floor, every circle of files, and every loader that is not listed."""
    found = [each for each in house.imports(sources) if not (each.named and each.importer in NAMED)]
    up = [f"{each.importer}:{each.line} imports {each.imported}" for each in house.upward(found, LEVELS)]
    used = {module: house.loaders(text) - LOADERS.get(module, (set(), ""))[0] for module, text in sources.items()}
    hidden = [f"{module} loads by {name}" for module, names in used.items() for name in sorted(names)]
    return [*dict.fromkeys(up), *(" <-> ".join(group) for group in house.circles(found)), *hidden]


def test_imports_run_downward_and_in_no_circle():
    assert breaches(TEXTS) == []


def test_what_may_load_or_name_modules_does():
    assert {module: set(names) for module, text in TEXTS.items() if (names := house.loaders(text))} == {
        module: names for module, (names, _) in LOADERS.items()
    }
    named = [each for each in house.imports(TEXTS) if each.named]
    assert {each.importer for each in house.upward(named, LEVELS)} == set(NAMED)


FORBIDDEN = {
    "at the top": "from {0} import {1}\n",
    "in a function": "def climb():\n    from {0} import {1}\n",
    "for a type hint": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {0} import {1}\n",
    "by the package": "import iclperm.errors\nclimbed = iclperm.{1}\n",
    "by the package, in a function": "def climb():\n    import iclperm.errors\n    return iclperm.{1}\n",
    "in a string": "HOMES = {{'{1}': '{0}.{1}'}}\n",
    "in a string of module and object": "def climb(load):\n    return load('{0}:{1}')\n",
}


@pytest.mark.parametrize("form", FORBIDDEN.values(), ids=FORBIDDEN)
@pytest.mark.parametrize(
    ("importer", "home", "name"),
    [
        ("iclperm.study.study", "iclperm.engine.engine", "Engine"),  # from the ground floor to the middle
        ("iclperm.runs.run", "iclperm.studies", "report"),  # one floor up
        ("iclperm.tasks.task", "iclperm.endpoint", "Endpoint"),  # along a floor
        ("iclperm.errors", "iclperm", "api"),  # from the very bottom to the top
        ("iclperm.runs.folder", "iclperm.runs.execute", "run_one"),  # a circle within a room
    ],
)
def test_a_forbidden_import_is_seen(importer, home, name, form):
    added = form.format(home, name)
    seen = breaches(TEXTS | {importer: TEXTS[importer] + added})
    if "import iclperm.errors" in added:  # whatever is reached, it is reached through the top
        assert any(re.fullmatch(rf"{importer}:\d+ imports iclperm", breach) for breach in seen)
    else:
        assert any(importer in breach and (home in breach or name in breach) for breach in seen)


FORBIDDEN_LOADERS = {
    "import_module": "from importlib import import_module\n",
    "import_module of": "import importlib\nclimbed = importlib.import_module('iclperm' + '.api')\n",
    "__import__": "climbed = __import__('iclperm' + '.api')\n",
    "modules": "import sys\nclimbed = sys.modules['iclperm' + '.api']\n",
    "modules of": "from sys import modules\n",
    "resolve_name": "import pkgutil\nclimbed = pkgutil.resolve_name('iclperm' + '.api:run')\n",
    "loaded": "from iclperm.study import kinds\nclimbed = kinds.loaded(kinds.OURS['curve'], 'iclperm' + '.api:run')\n",
    "loaded of": "from iclperm.study.kinds import loaded\n",
}


@pytest.mark.parametrize(("loader", "form"), FORBIDDEN_LOADERS.items(), ids=FORBIDDEN_LOADERS)
def test_a_loader_that_is_not_listed_is_seen(loader, form):
    module = "iclperm.runs.plan"
    assert f"{module} loads by {loader.split()[0]}" in breaches(TEXTS | {module: TEXTS[module] + form})


def test_own_modules_are_imported_late_only_to_keep_heavy_libraries_out():
    found, outside = house.imports(TEXTS), house.outside_imports(TEXTS)
    late = {each.imported for each in found if each.inside}
    assert late == set(LATE)
    for module, library in LATE.items():
        assert library in house.loads(module, found, outside), f"{module} does not load {library}"


def test_every_room_has_a_floor_and_every_floor_a_room():
    rooms = {house.room(module) for module in TEXTS} | {"_core"}
    assert rooms == {name for level in LEVELS for name in level}


def test_files_are_short_or_say_why_not():
    files = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "csrc").iterdir()]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    assert [
        path for path, text in texts.items() if text.count("\n") > MOST_LINES and "lines because" not in text[:600]
    ] == []


def test_class_names_are_used_once():
    homes = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(places(path))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module imported by a file, at any depth, with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
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


def documents() -> Iterator[tuple[str, str]]:
    """Every text that a reader may take for true: Markdown files and sources, by path."""
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "csrc").glob("*.[ch]pp")]:
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for path in SOURCES:  # of the installed package, which may lie elsewhere
        yield f"iclperm/{places(path)}", path.read_text(encoding="utf-8")


def test_documents_name_files_and_modules_that_exist():
    names = {
        module: {name for node in ast.walk(ast.parse(text)) for name in _named_by(node)}
        for module, text in TEXTS.items()
    }
    missing = []
    for place, text in documents():
        for path in re.findall(r"\b(?:iclperm|benchmarks|csrc|docs|tests)/[\w./-]*\w\.(?:py|md|[ch]pp|jsonl?)\b", text):
            is_placeholder = Path(path).stem.isupper()  # of a recipe: NAME.py
            if not is_placeholder and not (ROOT / path).exists():
                missing.append(f"{place}: {path}")
        for dotted in re.findall(r"(?<![\w./-])iclperm(?:\.[A-Za-z_]\w*)+", text):
            module = dotted
            while module not in TEXTS:
                module = module.rpartition(".")[0]
            rest = dotted.removeprefix(module).split(".")[1:]
            if rest and rest[0] not in {*names[module], *NO_NAMES}:
                missing.append(f"{place}: {dotted}")
    assert missing == []


NO_NAMES = {"_core", "kinds"}
"""What follows ``iclperm.`` in a text and is no Python module: the compiled part, the group of entry points."""


def _named_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).split(".")[0]


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


def test_what_a_gpu_runs_has_run_without_one():
    """A test marked ``gpu`` skips nothing for the lack of a GPU unless it says what it needs one for."""
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        tree = ast.parse(path.read_text())
        named = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        assert "pytest.mark.gpu" not in named or not {"pytest.mark.skipif", "pytest.skip"} & set(named), path
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            assert name != "torch.cuda.is_available", path
            if name == "pytest.mark.gpu":
                ((needs, reason),) = ((each.arg, ast.literal_eval(each.value)) for each in call.keywords)
                assert needs == "needs", path
                assert len(reason.split()) > 2, path
