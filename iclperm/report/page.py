"""A report as one HTML file: it asks nothing of any network, and takes nothing that data says for markup.

Jinja2 escapes every text. Numbers for the figures lie in the page as JSON. The content security policy names the hashes
of the page's own scripts and style, and allows no other source, so that a text from data which came through would still
run nothing. Altair and vl-convert, which bring the interactive figures, are the extra ``page``; without them the page
has the figures as pictures.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from iclperm.base.files import write_whole
from iclperm.base.outputs import output
from iclperm.report import charts
from iclperm.report.bundle import bundle, problem
from iclperm.report.figures import at_width, drawn
from iclperm.report.parts import Plot, Table
from iclperm.report.wording import Said, reworded_chart

NAME = "report.html"
_MOST_SVG_BYTES = 300_000
_WIDE, _NARROW = 4.6, 3.7  # inches: wider figures are laid out once more for a telephone


@dataclass(frozen=True)
class Explorer:
    """Every ordering of one run: a heat map and curves in which one is picked, and what is known of that one.

    ``data`` is what ``page.js`` reads; see `iclperm.studies.page`. ``still`` is shown where nothing can be picked.
    ``prompts`` is what ``viewer.js`` reads (`iclperm.studies.prompts`), None where prompts are not shown.
    """

    name: str
    still: Plot
    data: Mapping[str, Any]
    notes: Sequence[str] = ()
    prompts: Mapping[str, Any] | None = None
    said: Said = str
    """What says accuracy in the words of a run's metric; as it is by default."""

    def charts(self) -> dict[str, list[charts.Specification]]:
        """The specifications by what they show."""
        found = {"heat": charts.heat_chart(self.data["sets"], len(self.data["permutations"]))}
        if len(self.data["shots"]) > 1:
            found["curves"] = charts.trajectory_chart(self.data["chance"])
        return {key: [reworded_chart(one, self.said) for one in each] for key, each in found.items()}


@dataclass(frozen=True)
class Page:
    """What a page shows, in its order."""

    title: str
    question: str
    alerts: Sequence[str]
    """What comes before anything else: that many answers are missing."""
    answer: Sequence[str]
    """The conclusion; its first sentence is the answer."""
    warnings: Sequence[str]
    plots: Mapping[str, Plot]
    tables: Sequence[Table]
    facts: Sequence[Table]
    """Method and provenance."""
    explorers: Sequence[Explorer] = ()
    notes: Sequence[str] = field(default=())
    """What the page leaves out."""
    kicker: str = "iclperm report"
    """The command that it is of."""


def can_draw() -> bool:
    """Whether interactive figures can be had here: by the libraries of the extra ``page``; see `bundle.problem`."""
    return problem() is None


def write_page(folder: str | Path, page: Page, *, is_interactive: bool, name: str = NAME) -> Path:
    """Writes ``page`` as a file of this name into ``folder``, whole; returns its path."""
    path = output(folder, is_folder=True) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    # A lone surrogate is no UTF-8; in JSON its escape is read back as what it was.
    write_whole(path, page_html(page, is_interactive=is_interactive).encode("utf-8", "backslashreplace"), durable=False)
    return path


def page_html(page: Page, *, is_interactive: bool) -> str:
    """The page as text; ``is_interactive`` needs the libraries that `can_draw` looks for."""
    import jinja2
    from markupsafe import Markup

    room = Path(__file__).parent
    scripts = [_text(room / "viewer.js") + _text(room / "page.js")] if page.explorers or is_interactive else []
    if is_interactive:
        scripts.insert(0, bundle())
    style = _text(room / "page.css") + _text(room / "viewer.css")
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(map(_source, scripts)) or "'none'",
        "style-src": _source(style),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, auto_reload=False
    )
    template = environment.from_string(_text(room / "page.html.j2"))
    viewer = environment.from_string(_text(room / "viewer.html.j2"))
    explorers = [
        {
            "name": each.name,
            "still": picture(each.still),
            "data": as_json(each.data),
            "charts": {key: as_json(found) for key, found in each.charts().items()} if is_interactive else {},
            "notes": each.notes,
            "viewer": "" if each.prompts is None else Markup(viewer.render(number=number, data=as_json(each.prompts))),
            "sets": each.data["sets"],
            "permutations": each.data["permutations"],
            "shots": each.data["shots"],
            "said": each.said,
        }
        for number, each in enumerate(page.explorers)
    ]
    figures = [
        {
            "words": plot.caption or stem.replace("_", " "),
            "still": picture(plot),
            "narrow": _narrow_picture(plot),
            "charts": [as_json([one]) for one in plot.charts()] if is_interactive and plot.charts else [],
        }
        for stem, plot in page.plots.items()
    ]
    return template.render(
        page=page,
        policy="; ".join(f"{name} {sources}" for name, sources in policy.items()),
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
        explorers=explorers,
        figures=figures,
    )


def as_json(value: Any) -> Any:
    """A value as JSON that can stand in a script element: no sign of it ends the element or begins a comment.

    Raises `ValueError` for a number that JSON lacks.
    """
    from markupsafe import Markup

    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def picture(plot: Plot) -> str:
    """A figure as a data address: SVG, or PNG where that would be large."""
    raw, kind = drawn(plot, "svg"), "svg+xml"
    if len(raw) > _MOST_SVG_BYTES:
        raw, kind = drawn(plot, "png"), "png"
    return f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"


def _narrow_picture(plot: Plot) -> str:
    """A wide figure laid out for a telephone, as narrow as it can be; "" of others."""
    width = max(_NARROW, plot.least)
    return picture(at_width(plot, width)) if plot.tall is not None and plot.size[0] > max(_WIDE, width) else ""


def _source(text: str) -> str:
    """What a policy calls an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
