"""The open models of the two papers: their configurations, and where those are from."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CONFIGS = Path(__file__).parent / "configs"
_ORDER = (
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-3b",
    "qwen2.5-7b",
    "gemma-2b",
    "gemma-7b",
    "gemma-2-2b",
    "gemma-2-9b",
    "gemma-3-27b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-3.1-8b",
    "deepseek-r1-distill-qwen-1.5b",
    "deepseek-r1-distill-qwen-7b",
)


@dataclass(frozen=True)
class PaperModel:
    """An open model of the papers: its config.json, where its values are from, and what was published of its size."""

    name: str
    hub_id: str
    is_gated: bool
    published_parameters: int
    published_in: str
    sources: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Within: a folder with the model's config.json and nothing else."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
            yield Path(folder)


def paper_models() -> tuple[PaperModel, ...]:
    """The 14 open models of the papers, by family and size."""
    texts = [(_CONFIGS / f"{slug}.json").read_text(encoding="utf-8") for slug in _ORDER]
    return tuple(PaperModel(**{**fields, "sources": tuple(fields["sources"])}) for fields in map(json.loads, texts))
