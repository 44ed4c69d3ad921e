"""Interactive twins of the figures, as Vega-Lite specifications for the page. Altair is loaded where they are made.

Every function gives a list of specifications, as one figure may hold several panels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from iclperm.report.figures import colour_code

Row = Mapping[str, Any]
Specification = dict[str, Any]

PICKED_SET, PICKED_PERMUTATION = "picked_set", "picked_permutation"
"""Signals of the charts of an explorer: which ordering is marked in them. Whoever draws them may set these."""
GREY = "#7A7A7A"  # seen on white and on black
PROMPT = "prompt"
"""What a row of a chart names its prompt by; ``page.js`` opens that where the row's point is picked."""
_MOST_PRINTED = 16  # columns of a heat map whose cells hold their numbers


def heat_chart(num_sets: int, num_permutations: int) -> list[Specification]:
    """Accuracy by set and permutation, of the named data ``cells``, with the picked ordering framed."""
    alt = _altair()

    base = alt.Chart(alt.Data(name="cells", values=[])).encode(
        x=alt.X("permutation:O").axis(labelAngle=0, labelOverlap=True, ticks=False, domain=False, title="permutation"),
        y=alt.Y("set:O").axis(ticks=False, domain=False, title="set", labelOverlap=True),
    )
    told = [alt.Tooltip("set:O"), alt.Tooltip("permutation:O"), alt.Tooltip("accuracy:Q", format=".4f")]
    colour = alt.Color("accuracy:Q").scale(scheme="viridis", zero=False, nice=False)
    cells = base.mark_rect(cursor="pointer").encode(
        color=colour.legend(orient="bottom", title="accuracy", gradientLength=220), tooltip=told
    )
    layers: list[Any] = [cells]
    if num_permutations <= _MOST_PRINTED:
        letters = alt.when("datum.is_bright").then(alt.value("black")).otherwise(alt.value("white"))
        printed = base.mark_text(fontSize=10, cursor="pointer")
        layers.append(printed.encode(text=alt.Text("accuracy:Q", format=".2f"), color=letters, tooltip=told))
    framed = base.transform_filter(_is_picked()).mark_rect(fillOpacity=0, stroke="#D55E00", strokeWidth=3)
    chart = alt.layer(*layers, framed).add_params(*_picked())
    height = min(max(24 * num_sets, 60), 480)
    return [_finished(chart.properties(width="container", height=height))]


def trajectory_chart(chance: float | None) -> list[Specification]:
    """Accuracy over k of single orderings, of the named data ``lines``, and their mean, of ``means``."""
    alt = _altair()

    x = alt.X("shots:Q").axis(grid=False, tickMinStep=1, format="d", title="number of demonstrations k")
    y = alt.Y("accuracy:Q").scale(zero=False).title("accuracy")
    single = alt.Chart(alt.Data(name="lines", values=[])).encode(x=x, y=y, detail="ordering:N")
    told = [alt.Tooltip("set:O"), alt.Tooltip("permutation:O"), alt.Tooltip("shots:O", title="k")]
    told.append(alt.Tooltip("accuracy:Q", format=".4f"))
    layers: list[Any] = [
        single.mark_line(strokeWidth=1, opacity=0.28, color="#0072B2"),
        single.mark_point(opacity=0, size=70, filled=True, cursor="pointer").encode(tooltip=told),
        alt.Chart(alt.Data(name="means", values=[])).mark_line(strokeWidth=3, point=True, color=GREY).encode(x=x, y=y),
        single.transform_filter(_is_picked()).mark_line(strokeWidth=3, color="#D55E00", point={"color": "#D55E00"}),
    ]
    if chance is not None:
        layers.append(_chance_rule(chance))
    return [_finished(alt.layer(*layers).add_params(*_picked()).properties(width="container", height=300))]


def line_chart(
    rows: Sequence[Row],
    *,
    x: str,
    y: str,
    colours: Mapping[str, str],
    name: str = "",
    is_log: bool = False,
    chance: float | None = None,
) -> Specification:
    """Lines of ``rows`` with ``x``, ``y`` and ``name``, in bands from ``low`` to ``high`` where rows have them, and a
    dotted one at ``chance``."""
    alt = _altair()

    at = sorted({row["x"] for row in rows})
    across = alt.X("at:Q").axis(grid=False, format=",d", title=x, values=at, labelOverlap=True)
    across = across.scale(type="log", base=2, nice=False) if is_log else across
    scale = alt.Scale(domain=[*colours], range=[*map(colour_code, colours.values())])
    colour = alt.Color("name:N").scale(scale).legend(orient="bottom", title=name or None, columns=4, symbolOpacity=1)
    base = alt.Chart(alt.Data(values=[{"at": row["x"], **row} for row in rows])).encode(x=across, color=colour)
    told = [alt.Tooltip("name:N", title=" "), alt.Tooltip("x:Q", title=x), alt.Tooltip("y:Q", title=y, format=".4f")]
    up = alt.Y("y:Q").scale(zero=False).title(y)
    layers: list[Any] = [base.mark_line(strokeWidth=2).encode(y=up)]
    layers.append(base.mark_point(filled=True, size=60, opacity=1).encode(y=up, tooltip=told))
    if any(row.get("low") is not None for row in rows):
        layers.insert(0, base.mark_rule(strokeWidth=1.5).encode(y=alt.Y("low:Q").title(y), y2="high:Q"))
    if chance is not None:
        layers.append(_chance_rule(chance))
    return _finished(alt.layer(*layers).properties(width="container", height=300))


def point_chart(
    rows: Sequence[Row],
    *,
    x: str,
    y: str,
    colours: Mapping[str, str],
    baseline: str,
    name: str = "",
    others: Sequence[Row] = (),
) -> Specification:
    """Points of ``rows`` with ``x``, ``y`` and ``name``, bars where rows have ``x_low`` to ``y_high``; dashed lines
    through the ``baseline``. Behind them small ones of ``others``, which have ``words`` too."""
    alt = _altair()

    base = alt.Chart(alt.Data(values=[dict(row) for row in rows]))
    scale = alt.Scale(domain=[*colours], range=[*map(colour_code, colours.values())])
    colour = alt.Color("name:N").scale(scale).legend(orient="bottom", title=name or None, columns=4, symbolOpacity=1)
    across, up = alt.X("x:Q").scale(zero=False).title(x), alt.Y("y:Q").scale(zero=False).title(y)
    own = base.transform_filter(alt.FieldEqualPredicate(field="name", equal=baseline))
    dashed = {"strokeDash": [4, 3], "color": GREY}
    told = [
        alt.Tooltip("name:N", title=" "),
        *(alt.Tooltip(f"{at}:Q", format=".2f", title=t) for at, t in (("x", x), ("y", y))),
    ]
    layers: list[Any] = [own.mark_rule(**dashed).encode(x=across), own.mark_rule(**dashed).encode(y=up)]
    if others:
        small = alt.Chart(alt.Data(values=[dict(row) for row in others]))
        marks = small.mark_point(filled=True, size=26, opacity=0.55, cursor="pointer")
        layers.append(marks.encode(x=across, y=up, color=colour, tooltip=[alt.Tooltip("words:N", title=" ")]))
    if bounded := [
        dict(row) for row in rows if all(row.get(f"{at}_{end}") is not None for at in "xy" for end in ("low", "high"))
    ]:
        bars = alt.Chart(alt.Data(values=bounded)).mark_rule(opacity=0.5)
        layers.append(bars.encode(x=alt.X("x_low:Q").title(x), x2="x_high:Q", y=up, color=colour))
        layers.append(bars.encode(x=across, y=alt.Y("y_low:Q").title(y), y2="y_high:Q", color=colour))
    layers.append(base.mark_point(filled=True, size=110, opacity=1).encode(x=across, y=up, color=colour, tooltip=told))
    return _finished(alt.layer(*layers).properties(width="container", height=340))


def scatter_chart(rows: Sequence[Row], *, x: str, y: str, colours: Mapping[str, str]) -> Specification:
    """Points of ``rows`` with ``x``, ``y`` and ``name``; later rows are drawn over earlier ones."""
    alt = _altair()

    colour = alt.Color("name:N").scale(alt.Scale(domain=[*colours], range=[*map(colour_code, colours.values())]))
    base = alt.Chart(alt.Data(values=[dict(row) for row in rows]))
    across, up = (alt.X("x:Q").scale(zero=False).title(x), alt.Y("y:Q").scale(zero=False).title(y))
    points = base.mark_point(filled=True, size=80, opacity=0.75, cursor="pointer").encode(
        x=across,
        y=up,
        color=colour.legend(orient="bottom", title=None, columns=2, symbolOpacity=1),
        tooltip=[alt.Tooltip("words:N", title=" ")],
    )
    return _finished(alt.layer(points).properties(width="container", height=300))


def prompt_at(
    index_set: int, permutation: int, shots: int | None, words: str, run: str | None = None
) -> dict[str, Any]:
    """What makes a row's point stand for one prompt, of the named one of several runs; nothing where k is not known."""
    if shots is None:
        return {"words": words}
    at = {"run": run or "", "set": int(index_set), "permutation": int(permutation), "shots": int(shots)}
    return {PROMPT: at, "words": f"set {index_set}, permutation {permutation}: {words}"}


def matrix_chart(rows: Sequence[Row], *, x: str, y: str, value: str) -> Specification:
    """Cells of ``rows`` with ``x``, ``y`` and ``value``, in the order in which names come; numbers printed."""
    alt = _altair()

    across, down = ([*dict.fromkeys(str(row[at]) for row in rows)] for at in ("x", "y"))
    base = alt.Chart(alt.Data(values=[dict(row) for row in rows])).encode(
        x=alt.X("x:N").sort(across).axis(ticks=False, domain=False, title=x, labelLimit=220),
        y=alt.Y("y:N").sort(down).axis(ticks=False, domain=False, title=y, labelLimit=220),
        tooltip=[
            alt.Tooltip("y:N", title=y),
            alt.Tooltip("x:N", title=x),
            alt.Tooltip("value:Q", title=value, format=".4f"),
        ],
    )
    numbers = [row["value"] for row in rows if row["value"] is not None]
    bright = f"datum.value > {min(numbers) + 0.6 * (max(numbers) - min(numbers))}" if numbers else "false"
    letters = alt.when(bright).then(alt.value("black")).otherwise(alt.value("white"))
    colour = alt.Color("value:Q").scale(scheme="viridis", zero=False, nice=False).legend(orient="bottom", title=value)
    layers = (
        base.mark_rect().encode(color=colour),
        base.mark_text().encode(text=alt.Text("value:Q", format=".3f"), color=letters),
    )
    return _finished(alt.layer(*layers).properties(width="container", height=60 * len(down) + 20))


def _chance_rule(chance: float) -> Any:
    alt = _altair()

    base = alt.Chart(alt.Data(values=[{"accuracy": chance}])).encode(y="accuracy:Q", tooltip=alt.value("chance"))
    name = base.mark_text(align="left", baseline="bottom", dx=4, dy=-1, color=GREY)
    return alt.layer(
        base.mark_rule(strokeDash=[2, 4], color=GREY),
        name.encode(x=alt.value(0), text=alt.value(f"chance, {chance:.1%}")),
    )


def _altair() -> Any:
    """The library, as what its stubs call untyped would be refused at every call."""
    import altair

    return altair


def _picked() -> list[Any]:
    alt = _altair()

    return [alt.param(name=name, value=-1) for name in (PICKED_SET, PICKED_PERMUTATION)]


def _is_picked() -> str:
    return f"datum.set === {PICKED_SET} && datum.permutation === {PICKED_PERMUTATION}"


def _finished(chart: Any) -> Specification:
    """The specification without Altair's own theme: the page sets colours and letters. Validated by Altair."""
    found: Specification = chart.to_dict()
    found.pop("config", None)
    return {**found, "background": "transparent", "autosize": {"type": "fit-x", "contains": "padding"}}
