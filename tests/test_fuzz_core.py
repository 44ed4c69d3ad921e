"""The C++ core under arguments that nobody would write; longer by hand, see `fuzz_core.py`."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fuzz_core
import pytest

from iclperm import _core

CASES = 3000


def test_every_binding_has_a_recipe() -> None:
    names = set(fuzz_core.bindings())
    assert {"tree_attention", "Plan.__init__", "Plan.held_after", "PrefixTree.tokens"} <= names
    assert names >= set(fuzz_core.RECIPES)
    for name in names:
        fuzz_core.recipe(name)


def test_a_new_binding_without_a_recipe_is_found() -> None:
    assert "brand_new" in fuzz_core.bindings(SimpleNamespace(**vars(_core), brand_new=len))
    with pytest.raises(KeyError, match="brand_new has no recipe"):
        fuzz_core.recipe("brand_new")


def test_no_argument_ends_the_process_or_is_refused_unclearly(tmp_path: Path) -> None:
    # In a process of its own: a crash is a finding, not the end of all tests.
    trace = tmp_path / "case"
    script = Path(__file__).with_name("fuzz_core.py")  # by its path: the sources beside it hide no installed core
    command = [sys.executable, script, "--cases", str(CASES), "--seed", "1", "--trace", str(trace)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, f"{trace.read_text()}{run.stdout[-2000:]}{run.stderr[-2000:]}"
    assert f"{CASES} cases, 0 findings" in run.stdout
    served = dict(re.findall(r"^(\S+):.* served (\d+)$", run.stdout, re.MULTILINE))
    refused = dict(re.findall(r"^(\S+):.*RequestError (\d+)", run.stdout, re.MULTILINE))
    in_tiles = set() if _core.has_tile_products() else {"tile_product", "lay_out_tiles"}
    assert served.keys() == fuzz_core.bindings().keys() - in_tiles  # each ran with right arguments, too
    asks_nothing = {"isa", "available_isas", "has_fused_products", "has_tile_products", "thread_backend"}
    assert refused.keys() >= served.keys() - asks_nothing
