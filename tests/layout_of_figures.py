"""Whether the words of a figure have room."""

from __future__ import annotations

from typing import Any


def figure_of(plot: Any) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=plot.size)
    FigureCanvasAgg(figure)
    plot.draw(figure)
    figure.canvas.draw()
    return figure


def overlaps(plot: Any) -> list[tuple[str, str]]:
    """Words of a figure that run into others or out of the frame, as far as they are drawn."""
    from matplotlib import rc_context, rcParams
    from matplotlib.text import Text

    from iclperm.report.figures import _STYLE

    with rc_context():
        rcParams.update(_STYLE)
        figure = figure_of(plot)
        cells = {id(text) for axes in figure.axes if axes.images for text in axes.texts}
        texts = [each for each in figure.findobj(Text) if each.get_visible() and each.get_text().strip()]
        hidden = {
            id(label.label1 if which else label.label2)
            for axes in figure.axes
            for axis in (axes.xaxis, axes.yaxis)
            for label in axis.get_major_ticks()
            for which in (True, False)
            if not (label.label1 if which else label.label2).get_visible() or not is_inside(axis, label.get_loc())
        }
        boxes = [
            (each.get_text(), each.get_window_extent())
            for each in texts
            if id(each) not in hidden and id(each) not in cells
        ]
        frame = figure.bbox
        out = [(words, "") for words, box in boxes if box.x0 < -1 or box.y0 < -1 or box.x1 > frame.x1 + 1]
        return out + [
            (one, other)
            for place, (one, box) in enumerate(boxes)
            for other, against in boxes[place + 1 :]
            if min(box.x1, against.x1) - max(box.x0, against.x0) > 0.5
            and min(box.y1, against.y1) - max(box.y0, against.y0) > 1.5
        ]


def is_inside(axis: Any, place: float) -> bool:
    low, high = sorted(axis.get_view_interval())
    return bool(low - 1e-9 <= place <= high + 1e-9)
