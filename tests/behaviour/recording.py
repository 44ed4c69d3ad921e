"""The whole recording, and the portion of it that is kept."""

from __future__ import annotations

from typing import Any

from behaviour import cases, kept, refusals, shown, surface
from behaviour.place import place


def record(*, portable: bool) -> dict[str, Any]:
    """What users see, as JSON; ``portable``: what other machines can repeat, but for the last digits."""
    import transformers  # noqa: F401 - before anything is captured: what it logs goes where stderr was then

    with place() as there:
        return {
            "help": surface.helps(there),
            "names": surface.names(),
            "cases": cases.record(there, portable=portable),
            "shown": shown.record(there, portable=portable),
            "objects": surface.objects(),
            "refusals": refusals.record(there, portable=portable),
            **({} if portable else {"documented": surface.documented()}),
        }


def write_kept() -> None:
    """The fixture anew."""
    kept.write(kept.kept(record(portable=True)))
