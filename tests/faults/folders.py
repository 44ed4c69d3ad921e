"""Every file and folder of a run replaced by each thing that a stranger, a copy or a disk could leave in its place."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from faults.child import run
from faults.judge import FaultClass, Verdict, judged, keys_in
from faults.kills import same_digest
from faults.system import LOOKS
from faults.world import World, digest_in

KINDS = (("sensitivity", "finished"), ("sensitivity", "half"), ("grown", "finished"), ("search", "half"),
         ("generated", "finished"), ("transfer", "finished"), ("transfer", "half"))  # fmt: skip
OTHERS = {"sensitivity": "curve", "grown": "sensitivity", "search": "convergence", "generated": "sensitivity",
          "transfer": "selection"}  # fmt: skip
LIMIT_S = 10.0
GROWING = "the run is growing, which is not finished"  # what is said beside the results of an earlier extent
_HUGE = 1 << 36
_STRANGE = "-0123456789abcdef.parquet"


class Damage(NamedTuple):
    study: str
    state: str
    how: str
    place: str  # relative to the run folder; of a file that is named by a session or a digest a pattern


def _cut(part: float) -> Callable[[Path, World, Random], None]:
    def cut(path: Path, _world: World, _random: Random) -> None:
        path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])

    return cut


def _flip(path: Path, _world: World, random: Random) -> None:
    raw = bytearray(path.read_bytes() or b"\0")
    raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
    path.write_bytes(raw)


def _scribble(path: Path, _world: World, random: Random) -> None:
    raw = bytearray(path.read_bytes())
    begin = random.randrange(len(raw) + 1)
    raw[begin : begin + 16] = random.randbytes(16)
    path.write_bytes(raw)


def _append(path: Path, _world: World, random: Random) -> None:
    path.write_bytes(path.read_bytes() + random.randbytes(40))


def _huge(path: Path, _world: World, _random: Random) -> None:
    os.truncate(path, _HUGE)


def _instead(make: Callable[[Path, World], object]) -> Callable[[Path, World, Random], None]:
    def replace(path: Path, world: World, _random: Random) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        make(path, world)

    return replace


def _moved_out(path: Path, world: World) -> Path:
    """A thing as it was, outside the run folder, where it must not change."""
    target = world.canary / f"moved-{path.name}"
    shutil.move(path, target)
    return target


def _link_to_itself_outside(path: Path, world: World, _random: Random) -> None:
    path.symlink_to(_moved_out(path, world))


def _hard_link_outside(path: Path, world: World, _random: Random) -> None:
    os.link(_moved_out(path, world), path)


def _link_inside(path: Path, _world: World, _random: Random) -> None:
    shutil.move(path, kept := path.with_name(f"kept-{path.name}"))
    path.symlink_to(kept.name)


def _socket(path: Path, _world: World) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def _of_another_run(path: Path, world: World, random: Random) -> None:
    """The file of the same name, or else of the same folder, of a run of another study."""
    inside = path.relative_to(next(parent for parent in path.parents if parent.name == "run"))
    there = world.template(OTHERS[_study_of(path)]) / "run"
    found = sorted(there.glob(str(inside))) or sorted(there.glob(str(inside.parent / f"*{path.suffix}")))
    if found and found[0].is_file():
        shutil.copy(random.choice(found), path)


def _another_version(path: Path, _world: World, _random: Random) -> None:
    """Whole, but as a later version might write it: digests are right, names and numbers are not ours."""
    from iclperm.base.sealed import canonical, sealed

    if path.name == "FORMAT":
        path.write_text(path.read_text().strip()[:-1] + "2\n")
        return
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        path.write_bytes(path.read_bytes().replace(b"PAR1", b"PAR2"))
        return
    rest = {key: value for key, value in content.items() if key != "digest"}
    path.write_bytes(canonical(sealed(_later(rest))))


def _emptied(path: Path, _world: World, random: Random) -> None:
    """JSON that is whole and sealed, but lacks a key, or has a value of another kind."""
    from iclperm.base.sealed import canonical, sealed

    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return
    rest = {key: value for key, value in content.items() if key != "digest"}
    key = random.choice(sorted(rest))
    if random.random() < 0.5:
        del rest[key]
    else:
        rest[key] = random.choice([None, [], {}, -1, 10**30, "x", [[[]]], True, "\x1b[31m"])
    path.write_bytes(canonical(sealed(rest)))


def _later(content: Any) -> Any:
    return {**content, "version": 2, "labels": {"a": 1}, "work": {"pieces": 3}}


FILES: dict[str, Callable[[Path, World, Random], None]] = {
    "empty": _cut(0),
    "a tenth": _cut(0.1),
    "half": _cut(0.5),
    "all but the end": _cut(0.98),
    "a flipped bit": _flip,
    "scribbled on": _scribble,
    "longer": _append,
    "missing": _instead(lambda path, world: None),
    "a link to its copy outside": _link_to_itself_outside,
    "a hard link from outside": _hard_link_outside,
    "a link to its copy inside": _link_inside,
    "a link to a stranger's file": _instead(lambda path, world: path.symlink_to(world.canary / "file")),
    "a dangling link outside": _instead(lambda path, world: path.symlink_to(world.canary / "new")),
    "a dangling link inside": _instead(lambda path, world: path.symlink_to("nothing")),
    "a link to itself": _instead(lambda path, world: path.symlink_to(path.name)),
    "a link to /dev/zero": _instead(lambda path, world: path.symlink_to("/dev/zero")),
    "a FIFO": _instead(lambda path, world: os.mkfifo(path)),
    "a socket": _instead(_socket),
    "a folder": _instead(lambda path, world: path.mkdir()),
    "a folder with a file": _instead(lambda path, world: (path / "deep").mkdir(parents=True)),
    "huge": _huge,
    "another run's": _of_another_run,
    "another version's": _another_version,
    "another content, sealed": _emptied,
}
FOLDERS: dict[str, Callable[[Path, World, Random], None]] = {
    "missing": FILES["missing"],
    "a file": _instead(lambda path, world: path.write_text("x")),
    "a link to its copy outside": _link_to_itself_outside,
    "a link to a stranger's folder": _instead(lambda path, world: path.symlink_to(world.canary / "folder")),
    "a dangling link outside": FILES["a dangling link outside"],
    "a link to its copy inside": _link_inside,
    "a link to the run": _instead(lambda path, world: path.symlink_to(".")),
    "a FIFO": FILES["a FIFO"],
    "a stranger in it": lambda path, world, random: (path / "\x1b[2Jx\n-000000.parquet").write_text("x"),
    "a link in it": lambda path, world, random: (path / f"000000{_STRANGE}").symlink_to(world.canary / "file"),
    "a FIFO in it": lambda path, world, random: os.mkfifo(path / f"999999{_STRANGE}"),
    "a FIFO of JSON in it": lambda path, world, random: os.mkfifo(path / "a.json"),
    "a folder in it": lambda path, world, random: (path / f"999999{_STRANGE}").mkdir(),
}


def steps(world: World) -> Sequence[Damage]:
    """Every file and folder of every kind of run folder, by everything that can be in its place."""
    found = []
    for study, state in KINDS:
        run_folder = world.template(study, state) / "run"
        for path in sorted(run_folder.rglob("*")):
            if path.suffix in (".svg", ".png"):
                continue
            name = str(path.relative_to(run_folder))
            found += [Damage(study, state, how, name) for how in (FOLDERS if path.is_dir() else FILES)]
    return found


def check(world: World, step: Damage, random: Random) -> Verdict:
    """One thing is damaged; then every look at the folder, the same command, and the checks again."""
    place = world.copy(step.study, step.state)
    (place / "study").write_text(step.study)
    folder, verdict = place / "run", Verdict()
    victim = next(folder.glob(step.place))
    (FOLDERS if victim.is_dir() else FILES)[step.how](victim, world, random)
    before = world.snapshot()
    for look in LOOKS:
        done = run(world.look(look, folder, drawn=random.random() < 0.1), folder.parent, world.scratch, limit_s=LIMIT_S)
        verdict.add(look, judged(done, is_check=look in LOOKS[:2]))
        if done.code == 0 and GROWING not in done.err:  # which is an earlier extent, and told
            verdict.add(look, _other_words(world, step.study, look, done.out, folder))
        if _changes(before, world.snapshot()):
            verdict.findings.append(f"{look}: changed what is outside")
            before = world.snapshot()
        if done.is_overtime:
            break  # the others would take as long
    work = world.sessions(step.study, folder)[-1]
    done = run(work, folder, world.scratch, limit_s=LIMIT_S)
    verdict.add("run", judged(done))
    if _changes(before, world.snapshot()):
        verdict.findings.append("run: changed what is outside")
    if done.code == 0:
        verdict.findings += same_digest(world, step.study, folder)
    else:
        verdict.ended = f"refused with exit code {done.code}"
        _as_told(world, step, victim, folder, verdict)
    verdict.findings += keys_in(place)
    _back(world)
    return verdict


def _as_told(world: World, step: Damage, victim: Path, folder: Path, verdict: Verdict) -> None:
    """What was refused is moved elsewhere, as the error says; then the same command must mend the run."""
    added = [path for path in folder.rglob("*") if _STRANGE in path.name or path.name.startswith("\x1b")]
    for path in added or [victim]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    done = run(world.sessions(step.study, folder)[-1], folder, world.scratch, limit_s=LIMIT_S)
    verdict.add("run once the damaged was moved away", judged(done))
    if done.code == 0:
        verdict.findings += same_digest(world, step.study, folder)
        verdict.ended += ", moved away, then the same digest"
    else:
        words = done.err.strip().replace(str(folder), "RUN")
        verdict.ended += f", and once it was moved away: {re.sub('[0-9a-f]{16}', '...', words)[:100]}"


def _changes(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether something outside is another; not that a run folder has given up its own name of a file there."""
    return before.keys() != after.keys() or any(
        (mode, *rest) != (mode_now, *rest_now) or names_now > names
        for (mode, names, *rest), (mode_now, names_now, *rest_now) in zip(
            before.values(), (after[path] for path in before), strict=True
        )
    )


def _back(world: World) -> None:
    """Removes from the canary what was moved there for the case."""
    for path in world.canary.glob("moved-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    times = world.canary_times
    os.utime(world.canary, ns=times)


def _study_of(path: Path) -> str:
    run_folder = next(parent for parent in path.parents if parent.name == "run")
    return (run_folder.parent / "study").read_text()


def _other_words(world: World, study: str, look: str, out: str, folder: Path) -> list[str]:
    """Empty where a look that succeeded says what it says of the undisturbed run."""
    digest, exported = world.told(study)
    if look == "report" and digest_in(out) != digest:
        return [f"tells the digest {digest_in(out)}, undisturbed it is {digest}"]
    if look == "export" and folder.with_name("all.csv").read_bytes() != exported:
        return ["wrote other answers than those of the undisturbed run"]
    return []


_PART = "items/000000-*.parquet"
FIXED = (
    *(Damage("sensitivity", "half", how, _PART) for how in list(FILES)[::4]),
    *(Damage("sensitivity", "finished", how, "plan.json") for how in list(FILES)[1::4]),
    *(Damage("sensitivity", "finished", how, "queries.parquet") for how in list(FILES)[2::4]),
    Damage("sensitivity", "half", "a dangling link outside", "items"),
    Damage("sensitivity", "finished", "a link to its copy outside", "FORMAT"),
)
FOLDERS_CLASS = FaultClass(
    "folders", "each file and folder of a run replaced by what a stranger could leave", steps, check, FIXED
)
