"""Ctrl-C at every step of a call: no lock, mark or switch is left, and answers are as before."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import torch
from test_session import CONTEXTS, LABELS, QUERIES
from zoo import ZOO

from iclperm.engine import Engine, device

_FILES = ("in_use.py", "model.py", "session.py", "device.py", "contextlib.py")


class Interrupt:
    """Raises KeyboardInterrupt at the place ``number`` of a call, and counts them: CPython looks for signals where a
    function of Python's begins and where one of C's has done its work, as a profiler is told."""

    def __init__(self, number: int = 0) -> None:
        self.count, self._number = 0, number

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(_FILES):
            self.count += 1
            if self.count == self._number:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def during(self, call: Callable[[], Any]) -> int:
        """How many places there were until it came."""
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(before)
        return self.count


def test_an_interrupt_at_any_step_leaves_nothing_held() -> None:
    engine = Engine(ZOO["llama"].build())
    model: Any = engine._model
    expected = engine.score(CONTEXTS[:1], QUERIES, LABELS)
    with engine.session() as session:
        node = session.extend(None, CONTEXTS[0])

        def attach() -> None:
            with model.attached():
                pass

        for call in (session.forget, attach):
            last = Interrupt().during(call)
            assert last > 3
            for number in range(1, last + 1):
                assert Interrupt(number).during(call) == number
                assert not session._in_use.held
                assert not device._users
                assert not torch.is_inference_mode_enabled()
                assert (model._is_fused, model._ran) == (False, None)
                free: list[bool] = []
                other = threading.Thread(target=lambda free=free: free.append(model.lock.acquire(timeout=0)))
                other.start()
                other.join()
                assert free == [True], number
                model.lock = threading.RLock()  # that thread has it
        assert np.array_equal(session.score([node], QUERIES, LABELS), expected)
