"""The table of the fast tier says nothing of tests that are gone, and a module that it leaves out is seen."""

import ast
import sys
from pathlib import Path

import pytest
from fast_tier import FAST, PACKAGE, SLOW, UNTOUCHED, FastTier, modules

TESTS = Path(__file__).parent


def names_in(file: Path) -> set[str]:
    body = ast.parse(file.read_text(encoding="utf-8")).body
    classes = {f"{node.name}::": node.body for node in body if isinstance(node, ast.ClassDef)}
    return {
        prefix + node.name
        for prefix, nodes in ({"": body} | classes).items()
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    }


@pytest.mark.parametrize("stem", FAST)
def test_every_entry_of_the_table_has_its_tests(stem: str, request: pytest.FixtureRequest) -> None:
    names, starts = names_in(TESTS / f"{stem}.py"), FAST[stem]
    not_of_it = [start.partition("[")[0] for start in SLOW.get(stem, ())]  # which may be of another part of all tests
    assert [start for start in not_of_it if not any(name.startswith(start) for name in names)] == []
    if request.config.pluginmanager.get_plugin("fast tier").has_all_tests:  # with their parameters
        names = {item.nodeid.partition("::")[2] for item in request.session.items if item.path.stem == stem}
    else:
        starts = tuple(start.partition("[")[0] for start in starts)
    assert [start for start in starts if not any(name.startswith(start) for name in names)] == []
    assert set(SLOW) <= set(FAST)


def test_every_module_with_a_function_is_asked_for() -> None:
    asked = modules()
    assert {"api.py", "cli/main.py", "engine/kernels/attention.py", "reference/trie.py"} < asked
    assert "engine/kernels/rule.py" not in asked
    for start in UNTOUCHED:
        assert list(PACKAGE.glob(f"{start}*"))


def test_a_function_is_seen_and_an_import_is_not(request: pytest.FixtureRequest) -> None:
    tier = FastTier(request.config)
    source = "class Body:\n    squares = [x * x for x in range(3)]\n\n\ndef called():\n    return Body()\n"
    names: dict[str, object] = {}
    sys.setprofile(tier.note)
    exec(compile(source, "imported.py", "exec"), names)
    exec(compile(source + "\n\ncalled()\n", "used.py", "exec"), names)
    sys.setprofile(None)
    assert {"imported.py", "used.py"} & tier.ran == {"used.py"}
