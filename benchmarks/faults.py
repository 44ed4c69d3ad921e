"""The fault machine: kills, full disks, damaged folders, lying servers and hostile files against what is promised.

`tests/faults/machine.py` tells its options; docs/reliability.md what it checks, and its figures.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from faults.child import with_shim

if __name__ == "__main__":
    if "--table" not in sys.argv:
        with_shim(sys.argv)
    from faults.machine import main

    sys.exit(main())
