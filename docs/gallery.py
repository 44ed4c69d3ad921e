"""The figures of the gallery, from two small studies on the bundled model: python docs/gallery.py

MkDocs calls this where they are missing. They lie in build/gallery, which git ignores; delete it to draw them anew.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

PLACE = Path(__file__).resolve().parents[1] / "build" / "gallery"
KINDS = ("sensitivity", "curve", "search", "convergence", "features")


def make(place: Path = PLACE) -> list[Path]:
    """Runs the studies and writes every figure of theirs as ``place/KIND/NAME.svg``; returns the paths."""
    import iclperm
    from iclperm.report.figures import save

    with tempfile.TemporaryDirectory() as scratch:
        study = iclperm.Study(kind="curve", sets=3, permutations=5, shots=6, queries=24, dev_queries=24)
        run = iclperm.run(study, Path(scratch, "run"))
        other = iclperm.run(study.model_copy(update={"seed": 1, "dev_queries": 0}), Path(scratch, "other"))
        figures = {kind: run.write_report(Path(scratch, kind), kind) for kind in KINDS}
        plots = iclperm.compare([run, other]).plots()
        figures["compare"] = [path for stem, plot in plots.items() for path in save(plot, Path(scratch, stem))]
        made = []
        for kind, files in figures.items():
            (place / kind).mkdir(parents=True, exist_ok=True)
            made += [shutil.move(file, place / kind / file.name) for file in files if file.suffix == ".svg"]
    return made


def on_files(files: Any, config: Any) -> Any:
    """MkDocs: the figures become files of the site."""
    from mkdocs.structure.files import File

    for path in sorted(PLACE.glob("*/*.svg")) or sorted(make()):
        name = path.relative_to(PLACE.parent).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


if __name__ == "__main__":
    sys.stdout.write("".join(f"{path}\n" for path in make()))
