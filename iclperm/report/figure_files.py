"""Figures as files that a user names: which figure, in which form, and how wide."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Self, get_args

from iclperm.base.files import writable, write_whole
from iclperm.base.outputs import output
from iclperm.errors import ConfigError, RequestError
from iclperm.report.figures import at_width, drawn
from iclperm.report.parts import Plot

Form = Literal["pdf", "svg", "png"]
_INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72.27}  # pt as TeX has it
_WIDTH = re.compile(rf"(\d+\.?\d*|\.\d+)\s*({'|'.join(_INCHES)})", re.ASCII)
_NAMED = re.compile(r"([\w-]+)=(.+)", re.DOTALL)


class FigureFile(NamedTuple):
    """A file for one figure."""

    path: Path
    name: str | None
    """Of the figure; None for the one that the file is called like, else the first."""
    width: float | None
    """Inches; None for the figure's own."""

    @classmethod
    def of(cls, text: str, width: str | None = None) -> Self:
        """What "FILE", or "NAME=FILE", stands for, at a ``width`` such as "3.3in"; raises `ConfigError`."""
        name, path = named_file(text)
        if path.suffix.lower().removeprefix(".") not in _forms():
            raise ConfigError(f"{path} is no figure; give a file that ends in {', '.join(f'.{f}' for f in _forms())}")
        return cls(path, name, None if width is None else inches(width))

    def written(self, plots: Mapping[str, Plot]) -> Path:
        """Draws its figure into the file, and returns that; raises `ConfigError` for a figure that there is not, or a
        width that leaves its letters no room."""
        if not plots:
            raise ConfigError("there is no figure to write")
        name = self.name or (self.path.stem if self.path.stem in plots else next(iter(plots)))
        if name not in plots:
            raise ConfigError(f"there is no figure {name!r}; there are {', '.join(plots)}")
        plot = plots[name]
        if self.width is not None:
            try:
                plot = at_width(plot, self.width)
            except RequestError as error:
                raise ConfigError(f"{name}: {error}; give another --width") from None
        target = output(self.path)
        raw = drawn(plot, _form(target), is_text=True)
        with writable(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, raw)
        return target


def figure_files(texts: Sequence[str], width: str | None) -> list[FigureFile]:
    """What `FigureFile.of` makes of each; raises `ConfigError` for a width without any."""
    if width is not None and not texts:
        raise ConfigError("--width is that of a figure; name one with --figure FILE")
    return [FigureFile.of(text, width) for text in texts]


def named_file(text: str) -> tuple[str | None, Path]:
    """A name and a path of "NAME=FILE", or no name and the path."""
    found = _NAMED.fullmatch(text)
    return (None, Path(text)) if found is None else (found[1], Path(found[2]))


def inches(text: str) -> float:
    """A width such as "3.3in", "8.4cm", "84mm" or "240pt" in inches; raises `ConfigError`."""
    found = _WIDTH.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"a width is a number and a unit, such as 3.3in, 8.4cm or 240pt; got {text!r}")
    return float(found[1]) * _INCHES[found[2]]


def _forms() -> tuple[Form, ...]:
    return get_args(Form)


def _form(path: Path) -> Form:
    ending = path.suffix.lower().removeprefix(".")
    return next(form for form in _forms() if form == ending)
