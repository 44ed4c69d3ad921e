"""Labels that a sentence names, such as World in "The category is World."."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BEGINS, _ENDS = r"(?<!\w)(?<!\w[-'\u2019])", r"(?!\w|[-'\u2019]\w)"
_BEFORE_A_WORD = re.compile(r"\s+\w")


class NamedLabels:
    """Finds label words in a line of free text, whole words alone, case and the white space within them aside.

    Where labels overlap the longest counts: "New York" names no York. A label of one letter must be in its own case,
    and before another word it may be a word itself, as in "A man runs".
    """

    def __init__(self, words: Iterable[str]) -> None:
        ordered = sorted(words, key=len, reverse=True)
        self._words = {f"label_{place}": word for place, word in enumerate(ordered)}
        ways = (f"(?P<{name}>{_pattern(word)})" for name, word in self._words.items())
        self._pattern = re.compile(_BEGINS + f"(?:{'|'.join(ways)})" + _ENDS)

    def named(self, line: str) -> dict[str, bool]:
        """The labels in a line, and whether each is surely one, not a word such as A. O(length x labels)."""
        found: dict[str, bool] = {}
        for match in self._pattern.finditer(line):
            word = self._words[str(match.lastgroup)]
            is_word = len(word) == 1 and word.isalpha() and _BEFORE_A_WORD.match(line, match.end()) is not None
            found[word] = found.get(word, False) or not is_word
        return found


def _pattern(word: str) -> str:
    if len(word) == 1:
        return re.escape(word)
    return "(?i:" + r"\s+".join(map(re.escape, word.split())) + ")"
