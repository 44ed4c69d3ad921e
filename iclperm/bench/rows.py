"""What was measured of one contender, as a line of JSON; the rows of a file."""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from iclperm.errors import DataError


@dataclass(frozen=True)
class Row:
    """A contender on one case, model and dtype: all that the table is made of, as one line of JSON.

    ``prompts`` of ``all_prompts`` that the whole case or study has (0: not known) were taken; ``share`` is the part of
    their tokens that a pass scored. Of the same rounds are ``ours_seconds`` and, on all
    distinct tokens, the linear layers alone: ``torch_linear_seconds`` by the model's own modules, for which
    ``linear_library`` multiplied, ``linear_seconds`` by the fastest product known there, ``fastest_product``.
    ``new_tokens`` were written after each prompt; 0: labels were scored. ``memory_bytes`` is the most that the process
    held of the host's memory, ``gpu_memory_bytes`` the most that torch had allocated of the GPU's in a pass (None: on a
    CPU, or by a contender without torch). ``difference`` is the largest from the float32 oracle, in nats a label's
    token, of texts the most by which a token fell short of the oracle's likeliest; ``flips`` the share of prompts whose
    best label is not float32's, ``near_ties`` that of prompts whose two best labels lie within unpadded transformers'
    own error in this dtype. ``others_busy``: processors that other programs kept busy, before each round (Linux).
    """

    case: str
    model: str
    dtype: str
    device: str
    threads: int
    scale: float
    contender: str
    what: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    prompts: int = 0
    tokens_naive: int = 0
    tokens_unique: int = 0
    tokens_forwarded: int = 0
    share: float = 1.0
    seconds: list[float] = field(default_factory=list)
    ours_seconds: list[float] = field(default_factory=list)
    linear_seconds: list[float] = field(default_factory=list)
    torch_linear_seconds: list[float] = field(default_factory=list)
    linear_library: str = ""
    memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    load_seconds: float = 0.0
    warm_seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    difference: float | None = None
    bound: float | None = None
    flips: float | None = None
    near_ties: float | None = None
    failure: str | None = None
    case_what: str = ""
    case_digest: str = ""
    new_tokens: int = 0
    fastest_product: str = ""
    others_busy: list[float] = field(default_factory=list)
    all_prompts: int = 0

    @property
    def block(self) -> tuple[str, str, str, str, int, float, str]:
        """What the rows that are compared with each other have in common."""
        return self.model, self.case, self.dtype, self.device, self.threads, self.scale, self.case_digest

    @property
    def agrees(self) -> bool:
        return self.difference is not None and self.bound is not None and self.difference <= self.bound

    @property
    def whole_seconds(self) -> list[float]:
        """Seconds of each pass, scaled to all tokens of the case."""
        return [seconds / self.share for seconds in self.seconds]

    @property
    def speed_up(self) -> float | None:
        """How many times faster iclperm was; None for a contender that failed or disagreed."""
        if self.failure is not None or not self.agrees or not self.seconds or not self.ours_seconds:
            return None
        return statistics.median(self.whole_seconds) / statistics.median(self.ours_seconds)

    @property
    def times_linear(self) -> float | None:
        """Its seconds as a multiple of those of the linear layers alone, by the fastest product known."""
        if self.failure is not None or not self.agrees or not self.seconds or not self.linear_seconds:
            return None
        return statistics.median(self.whole_seconds) / statistics.median(self.linear_seconds)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Raises DataError for a line that is no row."""
        names = {each.name for each in fields(cls)}
        try:
            return cls(**{key: value for key, value in json.loads(line).items() if key in names})
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"not a row of the benchmark: {line[:60]!r} ({error}); give a file that it wrote") from None


def read_rows(file: Path) -> list[Row]:
    """The rows of a file, the latest of each contender alone; raises DataError naming the file.

    A last one that was not written to its end is left out, with a warning.
    """
    torn = torn_bytes(file)
    try:
        content = file.read_bytes()
        lines = content[: len(content) - torn].decode().splitlines()
        rows = [Row.from_json(line) for line in lines if line.strip()]
    except (DataError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {error}") from None
    if torn:
        warnings.warn(f"{file}: its last row was not written to the end, and is left out", stacklevel=1)
    return latest(rows)


def torn_bytes(file: Path) -> int:
    """Bytes at the end of a file that are the beginning of a row."""
    last = file.read_bytes().rpartition(b"\n")[2] if file.exists() else b""
    begin = b'{"case": "'
    return len(last) if begin.startswith(last[: len(begin)]) else 0


def latest(rows: Sequence[Row]) -> list[Row]:
    """A row for each contender of each block: the last one."""
    return list({(row.block, row.contender): row for row in rows}.values())
