"""Imports that an interrupt cannot cut in half."""

from __future__ import annotations

import sys
from importlib import import_module
from threading import Thread


def import_whole(*names: str) -> None:
    """Imports modules in a thread, which Ctrl-C does not reach, and waits for it; raises what the import raises.

    PyTorch that is interrupted while it is imported can never be imported again in that process, so that a notebook
    would need a new kernel. Whoever is interrupted here stops at once, and the import goes on behind them.
    """
    missing = [name for name in names if name not in sys.modules]
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for name in missing:
                import_module(name)
        except BaseException as error:
            failed.append(error)

    if missing:
        thread = Thread(target=work, name="imports")
        thread.start()
        thread.join()
    if failed:
        raise failed[0]
