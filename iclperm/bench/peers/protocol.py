"""What every contender's process shares: the workload file, and JSON lines on standard input and output.

A request is one line: ``load`` a model, ``warm`` up on a workload, ``score`` a workload into a file. The answer is one
line with the seconds that took, or the error. numpy and the standard library only: it runs in every environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Answers = Logprobs | Ids
Option = TypeVar("Option")


@dataclass(frozen=True)
class BenchWorkload:
    """Contexts as marked prefixes of paths, queries, labels, and the prompts wanted of their product.

    Contexts are numbered path by path, mark by mark. ``cells`` int64 [N, 2] holds the context and the query of each
    prompt. Token ids are int32. With ``new_tokens`` every prompt wants as many likeliest tokens, whatever ends a text,
    and the labels stand for nothing.
    """

    paths: tuple[Ids, ...]
    marks: tuple[Ids, ...]
    queries: tuple[Ids, ...]
    labels: tuple[Ids, ...]
    cells: npt.NDArray[np.int64]
    new_tokens: int = 0

    @cached_property
    def contexts(self) -> list[Ids]:
        return [path[:mark] for path, marks in zip(self.paths, self.marks, strict=True) for mark in marks]

    @property
    def is_whole(self) -> bool:
        """Whether every query is wanted after every context, in order."""
        return len(self.cells) == len(self.contexts) * len(self.queries)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each prompt [N]."""
        contexts = np.array([context.size for context in self.contexts], np.int64)
        queries = np.array([query.size for query in self.queries], np.int64)
        return contexts[self.cells[:, 0]] + queries[self.cells[:, 1]]

    @property
    def num_fed(self) -> int:
        """Tokens of all prompts, one by one, with what is written after them."""
        return int(self.lengths.sum()) + len(self.cells) * max(self.new_tokens - 1, 0)

    @property
    def max_tokens(self) -> int:
        """Longest prompt with its longest label, or with its new tokens."""
        return int(self.lengths.max()) + (self.new_tokens or max(label.size for label in self.labels))

    def prompt(self, context: int, query: int) -> list[int]:
        return [*self.contexts[context].tolist(), *self.queries[query].tolist()]

    def prompts(self) -> list[list[int]]:
        """The token ids of each cell's prompt."""
        return [self.prompt(*cell) for cell in self.cells.tolist()]

    def save(self, file: Path) -> Path:
        ragged = {name: _csr(getattr(self, name)) for name in _RAGGED}
        arrays = {f"{name}_{part}": array for name, parts in ragged.items() for part, array in parts.items()}
        np.savez(file, cells=self.cells, new_tokens=np.array(self.new_tokens), **arrays)  # type: ignore[arg-type]  # its stub takes the names for options
        return file

    @classmethod
    def load(cls, file: Path) -> BenchWorkload:
        with np.load(file, allow_pickle=False) as arrays:
            rows = {name: tuple(_rows(arrays[f"{name}_values"], arrays[f"{name}_offsets"])) for name in _RAGGED}
            return cls(**rows, cells=arrays["cells"], new_tokens=int(arrays["new_tokens"]))


_RAGGED = ("paths", "marks", "queries", "labels")


class ContenderScorer(Protocol):
    """A contender: what it answers with is shown beside its figures."""

    def load(self, model: str, dtype: str, threads: int, device: str) -> dict[str, Any]:
        """Make ready to score; compile and tune what does not depend on the workload."""

    def warm(self, work: BenchWorkload) -> dict[str, Any]:
        """Score a little, and choose what depends on lengths, such as the size of a batch; never timed."""

    def score(self, work: BenchWorkload) -> tuple[Answers, dict[str, Any]]:
        """Log-likelihoods [N, L] in nats of every label after every cell's prompt, and ``tokens``: those forwarded.

        Of a workload with new tokens, their ids [N, new_tokens]; not every contender writes texts.
        """


def serve(scorer: ContenderScorer, cuda: Any = None) -> None:
    """Answer requests until standard input ends. What libraries print goes to standard error.

    ``cuda`` is torch.cuda where the contender runs on torch; others end with their results on the host.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = _answer(scorer, json.loads(line), cuda)
        except Exception as error:  # the parent hears of it and goes on with the others
            traceback.print_exc()
            reason = " ".join(str(error).split())[:300]
            answer = {"error": f"{type(error).__name__}: {reason}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(scorer: ContenderScorer, request: dict[str, Any], cuda: Any) -> dict[str, Any]:
    do = request.pop("do")
    if do == "score":
        work, out = BenchWorkload.load(Path(request["work"])), Path(request["out"])
        prepare: Callable[[], None] = getattr(scorer, "forget", _nothing)
        prepare()
        if _is_used(cuda):
            cuda.reset_peak_memory_stats()
        started = _clock(cuda)
        answers, about = scorer.score(work)
        seconds = _clock(cuda) - started
        np.save(out, answers, allow_pickle=False)
        return {"seconds": seconds, **_memory(cuda), **about}
    started = _clock(cuda)
    about = scorer.warm(BenchWorkload.load(Path(request["work"]))) if do == "warm" else getattr(scorer, do)(**request)
    return {"wall": _clock(cuda) - started, **about}


def _clock(cuda: Any) -> float:
    """Seconds, read when the GPU has finished what torch gave it."""
    if _is_used(cuda):
        cuda.synchronize()
    return time.perf_counter()


def _is_used(cuda: Any) -> bool:
    return cuda is not None and cuda.is_initialized()


def _memory(cuda: Any) -> dict[str, int]:
    """The most that the process held of the host's memory, on Linux, and the pass of the GPU's, of what torch knows."""
    status, found = Path("/proc/self/status"), {}
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    # Not getrusage: that begins with what the process that started this one held.
    if held := [line.split()[1] for line in lines if line.startswith("VmHWM:")]:
        found["memory_bytes"] = int(held[0]) * 1024
    if _is_used(cuda):
        found["gpu_memory_bytes"] = int(cuda.max_memory_allocated())
    return found


def _nothing() -> None:
    """What a scorer does before a pass that keeps nothing from one to the next."""


def versions(*packages: str) -> dict[str, str]:
    """The installed versions, as shown beside the figures."""
    return {package: importlib.metadata.version(package) for package in packages}


def fastest(choices: Sequence[Option], run: Callable[[Option], object]) -> Option:
    """The choice that takes least; the first runs once more before, as it may have to compile.

    A run ends with its results on the host.
    """

    def seconds(choice: Option) -> float:
        started = time.perf_counter()
        run(choice)
        return time.perf_counter() - started

    run(choices[0])
    return min(choices, key=seconds)


def distinct_prefixes(labels: Sequence[Ids]) -> list[tuple[int, ...]]:
    """What of the labels has to be fed: their proper prefixes, the empty one first, each once."""
    fed = {tuple(label[:end].tolist()) for label in labels for end in range(label.size)}
    return sorted(fed, key=lambda prefix: (len(prefix), prefix))


def _csr(rows: Sequence[npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    offsets = np.cumsum([0, *(row.size for row in rows)])
    return {"values": np.concatenate(rows).astype(np.int32), "offsets": offsets}


def _rows(values: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> list[Ids]:
    return [values[begin:end] for begin, end in pairwise(offsets)]
