"""Writes down what users see, or compares two such recordings.

    python tests/record_behaviour.py --out FILE       all of it, exactly: to compare two commits on one machine
    python tests/record_behaviour.py --compare A B    one line a difference; exit code 1 where there is one
    python tests/record_behaviour.py --kept           anew: tests/fixtures/behaviour/kept.json, held by a test
    python tests/record_behaviour.py --folders        the kept run folders that are not there yet (after a new format)

Recordings are of one thread, so that they do not depend on the number of cores.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
os.environ.pop("COLUMNS", None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"))
    parser.add_argument("--kept", action="store_true")
    parser.add_argument("--folders", action="store_true")
    chosen = parser.parse_args()
    if chosen.compare:
        return compare(*chosen.compare)
    import torch

    torch.set_num_threads(1)
    import iclperm

    print(f"recording {iclperm.__file__}", file=sys.stderr)
    begun = time.monotonic()
    from behaviour import folders, recording

    if chosen.out:
        chosen.out.write_text(json.dumps(recording.record(portable=False), indent=1) + "\n")
    if chosen.kept:
        recording.write_kept()
    if chosen.folders:
        folders.make()
    print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
    return 0


def compare(first: Path, second: Path) -> int:
    from behaviour.compare import differences

    lines = list(differences(*(json.loads(path.read_text()) for path in (first, second))))
    print(*lines, f"{len(lines)} differences", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
