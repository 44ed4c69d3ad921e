"""Which task files of the installed lm-evaluation-harness load, and are rendered byte for byte as it renders them.

    python benchmarks/harness_tasks.py [--compare N] [--table FILE]

Counts the leaf tasks without a `!function` that `HarnessTask.from_yaml` loads, by family (the folder under the
harness's own tasks). With --compare, N files of each family are rendered both ways on rows that are made up. Nothing is
downloaded, and no `!function` is run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _machine import machine

from iclperm.errors import ConfigError, DataError
from iclperm.tasks.harness import Function, HarnessTask, read_harness


def folder() -> Path:
    """Where the installed harness has its task files."""
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise SystemExit("lm_eval is not installed; pip install 'iclperm[lm-eval]'")
    return Path(spec.origin).parent / "tasks"


def has_function(value: Any) -> bool:
    """Whether a `!function` stands anywhere in a value."""
    parts: Iterable[Any] = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, Function) or any(map(has_function, parts))


def leaves(root: Path) -> dict[Path, dict[str, Any]]:
    """The files that are one task each, and their keys; groups and classes of Python are none."""
    found = {path: read_harness(path) for path in sorted(root.rglob("*.yaml"))}
    return {path: keys for path, keys in found.items() if "task" in keys and not {"class", "group"} & keys.keys()}


def outcome(path: Path, keys: Mapping[str, Any]) -> str:
    """Empty where a file loads, else why it does not, without the names that differ from file to file."""
    try:
        HarnessTask.from_keys(keys, path.stem)
    except ConfigError as error:
        return re.sub(r"'[^']*/[^']*'|!function \S+;|from-harness \S+", "…", str(error))
    return ""


def compare(root: Path, paths: list[Path]) -> int:
    """Prints what is rendered otherwise than the harness does; the number of files that differ."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from harness_oracle import differences  # type: ignore[import-not-found]

    num_different = 0
    for path in paths:
        try:
            found = list(differences(path))
        except DataError as error:
            found = [str(error)]
        num_different += bool(found)
        for said in found[:1]:
            print(f"{path.relative_to(root)}: {said}")
    return num_different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compare", type=int, default=0, help="files of each family to render both ways")
    parser.add_argument("--table", type=Path, help="write the table by family as Markdown")
    given = parser.parse_args()
    root = folder()
    every = leaves(root)
    plain = {path: keys for path, keys in every.items() if not has_function(keys)}
    said = {path: outcome(path, keys) for path, keys in every.items()}
    loaded = [path for path in plain if not said[path]]
    print(f"{machine()}; lm_eval {version('lm_eval')}")
    print(f"leaf tasks: {len(every):,}; without a !function: {len(plain):,}, of which {len(loaded):,} load")
    num_without = sum(not said[path] for path in every.keys() - plain.keys())
    print(f"of the {len(every) - len(plain):,} with one, {num_without:,} "
          "load without it")  # fmt: skip
    for why, count in Counter(said[path] for path in plain if said[path]).most_common():
        print(f"  {count:5}  {why}")
    if given.table:
        write_table(given.table, root, every, said)
    if given.compare:
        families = defaultdict(list)
        for path in loaded:
            families[path.relative_to(root).parts[0]].append(path)
        some = [path for paths in families.values() for path in paths[: given.compare]]
        num_different = compare(root, some)
        print(f"{len(some):,} files of {len(families)} families rendered both ways; {num_different} differ")
        sys.exit(num_different > 0)


def write_table(out: Path, root: Path, every: Mapping[Path, Any], said: Mapping[Path, str]) -> None:
    """A line a family: how many of its tasks load, and what most of the others ask for."""
    families: dict[str, list[str]] = defaultdict(list)
    for path in every:
        families[path.relative_to(root).parts[0]].append(said[path])
    lines = ["| family | tasks | load | most others |", "|---|---|---|---|"]
    for name, outcomes in sorted(families.items()):
        others = Counter(re.sub(r";.*", "", why) for why in outcomes if why).most_common(1)
        lines.append(f"| {name} | {len(outcomes)} | {outcomes.count('')} | {others[0][0] if others else ''} |")
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
