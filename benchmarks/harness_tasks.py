"""Which task files of the installed lm-evaluation-harness load, and are rendered byte for byte as it renders them.

    python benchmarks/harness_tasks.py [--compare N] [--table FILE] [--json FILE]

Counts the leaf tasks that `Task.load` takes, by family (the folder under the
harness's own tasks). With --compare, N files of each family are rendered both ways on rows that are made up. Nothing is
downloaded, and no `!function` is run.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _machine import options, publish

from iclperm.errors import ConfigError, DataError
from iclperm.tasks.harness import Function, HarnessTask, read_harness
from iclperm.tasks.task import Task


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
    """Empty where a file loads as a task, else why it does not, without the names that differ from file to file.

    Of several filter pipelines the first is taken, as whoever runs the file has to name one.
    """
    try:
        pipelines = HarnessTask.from_keys(keys, path.stem).pipelines
        Task.load(f"{path}:{pipelines[0].name}" if len(pipelines) > 1 else path)
    except ConfigError as error:
        words = str(error).removeprefix(f"{path}: ")
        return re.sub(r"'[^']*/[^']*'|!function \S+;|from-harness \S+", "…", words)
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


def families(root: Path, every: Mapping[Path, Mapping[str, Any]], said: Mapping[Path, str]) -> list[dict[str, Any]]:
    """A row a family, the folder under the harness's own tasks: its leaf tasks, those that load, those that name no
    `!function` and how many of these load, of those that do not load how many name one, and what most of the rest ask
    for."""
    parts: dict[str, list[Path]] = defaultdict(list)
    for path in every:
        parts[path.relative_to(root).parts[0]].append(path)
    rows = []
    for name, paths in sorted(parts.items()):
        failed = [path for path in paths if said[path]]
        rest = [re.sub(r";.*", "", said[path]) for path in failed if not has_function(every[path])]
        most = Counter(rest).most_common(1)
        rows.append({
            "family": name.removesuffix(".yaml"),
            "tasks": len(paths),
            "load": len(paths) - len(failed),
            "without a function": sum(not has_function(every[path]) for path in paths),
            "of these load": sum(not has_function(every[path]) and not said[path] for path in paths),
            "name a function": len(failed) - len(rest),
            "others": most[0][0] if most else "",
        })  # fmt: skip
    return rows


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of the documentation."""
    lines = ["| family | tasks | load | name a `!function` | most others |", "|---|---|---|---|---|"]
    for row in rows:
        others = str(row["others"]).replace("|", "/").replace("<", "&lt;")
        counts = [f"{row['tasks']:,}", f"{row['load']:,}", f"{row['name a function'] or ''}"]
        lines.append(f"| {' | '.join([row['family'], *counts, others])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--compare", type=int, default=0, help="files of each family to render both ways")
    parser.add_argument("--table", type=Path, help="write the table by family as Markdown")
    given = parser.parse_args()
    root = folder()
    every = leaves(root)
    plain = {path: keys for path, keys in every.items() if not has_function(keys)}
    said = {path: outcome(path, keys) for path, keys in every.items()}
    loaded = [path for path in plain if not said[path]]
    for why, count in Counter(said[path] for path in plain if said[path]).most_common():
        print(f"  {count:5}  {why}")
    rows = families(root, every, said)
    publish("harness_tasks", rows, given.json)
    print(f"lm_eval {version('lm_eval')}: {len(every):,} leaf tasks, of which {len(plain):,} are without a !function; "
          f"{len(loaded):,} of these load, and {sum(row['load'] for row in rows) - len(loaded):,} of the others "
          "without theirs")  # fmt: skip
    if given.table:
        given.table.write_text(markdown(rows), encoding="utf-8")
    if given.compare:
        by_family = defaultdict(list)
        for path in loaded:
            by_family[path.relative_to(root).parts[0]].append(path)
        some = [path for paths in by_family.values() for path in paths[: given.compare]]
        num_different = compare(root, some)
        print(f"{len(some):,} files of {len(by_family)} families rendered both ways; {num_different} differ")
        sys.exit(num_different > 0)


if __name__ == "__main__":
    main()
