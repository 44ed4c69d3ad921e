r"""Numbers with a base, such as ``10_8``: math-verify 0.9 leaves the base out, and takes it for 10 and for ``10_9``."""

from __future__ import annotations

import re

_NAMES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen",
)  # fmt: skip
_BASE = rf"(?:[0-9]+|{'|'.join(_NAMES[2:])})"
_WRAPPED = rf"\{{\s*(?:\\(?:text|mathrm|rm|mbox|textrm)\s*\{{\s*)?(?P<within>{_BASE})\s*\}}{{1,2}}"
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"
_BASED = re.compile(
    rf"(?<![0-9.])(?:(?P<plain>{_NUMBER})|(?<![\w^}}])(?P<open>[({{])\s?(?P<inner>{_NUMBER})\s?[)}}])\s?\\?_\s?"
    rf"(?:{_WRAPPED}|(?P<alone>[0-9]+))"
)


def with_bases(latex: str) -> tuple[str, tuple[tuple[str, int], ...]]:
    r"""Mathematics in which every base is written in one way, and its numbers with a base, sorted.

    Two answers can be equal only where the latter are. ``10_{\text{eight}}`` and ``(10)_8`` become ``10_{8}``.
    """
    found: list[tuple[str, int]] = []

    def plainly(match: re.Match[str]) -> str:
        digits = (match["plain"] or match["inner"]).replace(",", "")
        said = match["within"] or match["alone"]
        base = int(said) if said[0].isdigit() else _NAMES.index(said)
        found.append((digits.lstrip("0") or "0", base))
        return f"{digits}_{{{base}}}"

    return _BASED.sub(plainly, latex), tuple(sorted(found))
