"""The whole recording, and the portion of it that is kept."""

from __future__ import annotations

from typing import Any

import pytest

from behaviour import cases, kept, refusals, shown, surface
from behaviour.place import place
from iclperm.report import figures

_BLANK = {"png": b"", "pdf": b"", "svg": b'<svg xmlns="http://www.w3.org/2000/svg"></svg>'}


def record(*, portable: bool) -> dict[str, Any]:
    """What users see, as JSON; ``portable``: what other machines can repeat, but for the last digits."""
    import transformers  # noqa: F401 - before anything is captured: what it logs goes where stderr was then

    with place() as there, pytest.MonkeyPatch.context() as patch:
        if portable:  # the pixels are not: half of the time would go into drawing them
            patch.setattr(figures, "_saved", lambda figure, form, is_text=True: _BLANK[form])
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
