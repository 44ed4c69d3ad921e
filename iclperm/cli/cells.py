"""A grid on the terminal: what its cells cost, and how far they are."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from iclperm.cli.terminal import print_tables
from iclperm.errors import printable
from iclperm.grids.costs import CellCost, GridPlan
from iclperm.grids.running import GridRuns
from iclperm.models.tables import DEFAULT_RATE
from iclperm.progress import duration
from iclperm.report.parts import Table

_CHEAPEST, _DEAREST = 40, 20
"""Cells of a long grid that are shown; those between them are counted."""


def print_grid_plan(console: Console, plan: GridPlan, rate: float | None) -> None:
    """What each cell costs, and all of them together on this machine, one GPU and eight."""
    if plan.cells:
        print_tables(console, [_costs(plan, DEFAULT_RATE if rate is None else rate)])
    for line in (*_problems(plan), *_totals(plan, rate)):
        console.print(line, markup=False, soft_wrap=True)


def print_cells(console: Console, runs: GridRuns) -> None:
    """Each cell, and how far it is."""
    at_work = runs.at_work
    rows = [(name, "at work" if name in at_work else _state(runs, name)) for name in runs.cells]
    print_tables(console, [Table("Cells", ("cell", "state"), rows, texts=(0, 1))])
    counts = {"finished": len(runs.finished), "failed": len(runs.failed), "missing": len(runs.missing)}
    words = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    console.print("", f"{len(runs.cells)} cells: {words}", sep="\n", markup=False)
    if at_work:
        console.print(f"at work: {', '.join(at_work)}", markup=False, soft_wrap=True)
    elif runs.failed or runs.missing:
        console.print("the same command runs what is not finished", markup=False)


def _state(runs: GridRuns, name: str) -> str:
    if name in runs.finished:
        return "finished"
    return f"failed: {printable(runs.failed[name])}" if name in runs.failed else "not finished"


def _costs(plan: GridPlan, rate: float) -> Table:
    head = ("cell", "prompts", "tokens", "FLOP", "here", "one H100", "from")
    rows = [_row(cell, rate) for cell in plan.cells]
    if len(rows) > _CHEAPEST + _DEAREST:
        shown = {cell.name for cell in sorted(plan.cells, key=lambda cell: -(cell.flops or 0))[:_DEAREST]}
        dear = [row for row in rows[_CHEAPEST:] if row[0] in shown]
        left = len(rows) - _CHEAPEST - len(dear)
        rows = [*rows[:_CHEAPEST], (f"and {left} more, none as dear as these:", "", "", "", "", "", ""), *dear]
    return Table("Cells that are to be run", head, rows, texts=(0, 6))


def _row(cell: CellCost, rate: float) -> tuple[str, ...]:
    return (
        cell.name,
        "" if cell.prompts is None else f"{cell.prompts:,}",
        "" if cell.tokens is None else f"{cell.tokens:,}",
        "" if cell.flops is None else f"{cell.flops:.2g}",
        "" if cell.seconds is None else duration(cell.seconds),
        "" if cell.flops is None else duration(cell.flops / (rate * 1e12)),
        "" if cell.source == "planned" else cell.source,
    )


def _problems(plan: GridPlan) -> Iterator[str]:
    """Why cells could not be planned: each reason once."""
    reasons: dict[str, list[str]] = {}
    for cell in plan.cells:
        if cell.problem:
            reasons.setdefault(cell.problem, []).append(cell.name)
    for problem, names in reasons.items():
        yield ""
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"not planned: {names[0]}{more}: {printable(problem)}"


def _totals(plan: GridPlan, rate: float | None) -> Iterator[str]:
    yield ""
    if plan.finished:
        yield f"finished already: {len(plan.finished)} cells"
    if not plan.cells:
        yield "nothing is left to run"
        return
    yield (
        f"together: {len(plan.cells)} cells, {plan.total('prompts'):,.0f} prompts, "
        f"{plan.total('tokens'):,.0f} distinct tokens, {plan.total('flops'):.3g} FLOP"
    )
    if unknown := plan.unknown("flops"):
        yield f"without {len(unknown)} cells whose cost is not known here"
    if plan.total("seconds"):
        without = len(plan.unknown("seconds"))
        yield f"on this machine: {duration(plan.total('seconds'))} by its measured rate of matrix products" + (
            f", for {len(plan.cells) - without} of {len(plan.cells)} cells" if without else ""
        )
    assumed = DEFAULT_RATE if rate is None else rate
    why = "half of its data sheet's rate: an assumption, never measured" if rate is None else "as --rate says"
    one, eight = (duration(3600 * plan.hours(assumed, devices)) for devices in (1, 8))
    yield f"on one H100: {one}; on eight: {eight} (at {assumed:g} TFLOP/s each, {why})"
    if paid := plan.total("paid"):
        yield f"paid to APIs: at most {paid:,.2f}, in the currency of their prices"
