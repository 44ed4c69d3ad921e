"""The calls of an engine, each with a report of its own, also one within another or in another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from iclperm.engine.executor import Progress, Report
from iclperm.engine.kernels.launching import device_failure
from iclperm.engine.plain_model import PlainModel
from iclperm.errors import RequestError, is_of_a_device, is_out_of_memory


class Calls:
    """``last`` is the report of the call that began or ended last, ``totals`` of all that ended, each once."""

    def __init__(self) -> None:
        self.last, self.totals = Report(), Report()
        self._lock = threading.Lock()

    @contextmanager
    def call(self, model: PlainModel, gemm_rate: Callable[[], float], progress: Progress | None) -> Iterator[Report]:
        """The report of one call; what it cost is added to the totals even if it is abandoned.

        ``progress`` is told once more at the end, done and expected being equal.
        """
        if progress is not None and not callable(progress):
            raise RequestError(f"progress is {progress!r}; give a function of tokens done and expected, or None")
        report = self.last = Report(gemm_rate=gemm_rate, progress=progress)
        started = time.perf_counter()
        try:
            yield report
            report.tokens_expected = report.tokens_forwarded
            report.tell()
        except Exception as error:
            if not is_of_a_device(error) or is_out_of_memory(error):
                raise
            raise device_failure(model.device_name, error, is_plain=model.attention == "plain") from error
        finally:
            report.seconds["total"] += time.perf_counter() - started
            report.flops = model.facts.flops(
                report.tokens_forwarded,
                report.scored_rows,
                report.attention_pairs,
                report.skipped_tokens,
                report.skipped_pairs,
                report.looked_up_tokens,
            )
            report.progress, self.last = None, report
            with self._lock:
                self.totals.add(report)
