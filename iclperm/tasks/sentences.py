"""The first sentence of an English text, by rules alone: no model, nothing to download, and the same text for ever.

A library's next version would cut texts elsewhere, and prompts with them. So the rules are ours and few.
"""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NEVER_LAST = _words(
    "adm atty brig capt cmdr col comdr cpl dr fr gen gov hon lieut lt maj messrs mme mlle mr mrs ms msgr mt pfc "
    "pres prof pvt rep reps rev sen sens sgt st ste supt vs viz cf ft"
)
"""Abbreviations that stand before a name or a second part, so that no sentence ends with them."""
_SELDOM_LAST = _words(
    "ala ariz ark calif colo conn dak del fla ga ill ind kan kans ky la mass md me mich minn miss mo mont neb nebr "
    "nev okla ont ore pa penn que tenn tex va vt wash wis wyo jan feb mar apr jun jul aug sept sep oct nov dec mon "
    "tue tues wed thu thur thurs fri inc corp co cos ltd bros llc plc assn assoc dept univ inst natl intl int'l "
    "gov't govt jr sr esq ave blvd rd hwy rte etc al ed eds est approx"
)
"""Abbreviations that may end a sentence, though mostly they do not."""
_SMALL = _words("al approx co ed eds est etc inc jr sr viz vs cf")
"""Those of both that are written without a capital letter, too; others are then words, such as "ill" and "miss"."""
_NUMBERED = _words("no nos art fig pp sec vol ch")
"""Abbreviations before a number, and words elsewhere."""
_STARTERS = _words(
    "a about after although an and as at because before both but by despite during each even every for from he her "
    "here his how however i if in it it's its last many meanwhile most mr mrs ms my nor not now of on one or other "
    "others our she since so some still such that that's the their then there there's these they this those though "
    "to today under until we what when where while who why with yesterday yet you your"
)
"""Words that begin a sentence, where written with a capital letter."""
_END = re.compile(r"""(?<![.!?])([.!?]+)["'\u201d\u2019)\]]*(?=\s|$)|\n\s*\n""")
_BEFORE = re.compile(r"[\w.'&\u2019-]{1,40}$")
_SPACED = re.compile(r"\s*\.")
_NEXT = re.compile(r"""\s*["'\u201c\u2018(\[`]*([\w'\u2019]*)""")


def first_sentence(text: str) -> str:
    """The text up to the end of its first sentence, with the mark that ends it; white space around it is left out.

    A full stop after an abbreviation ("U.S.", "Inc.", "Mr.") or an initial ends none, unless what follows begins like a
    sentence ("in the U.S. The"); nor does a mark before a small letter, where the text has capital letters. A blank
    line does. Rules of English. O(length).
    """
    text = text.strip()
    is_small = text == text.lower()  # then a small letter tells nothing
    for end in _END.finditer(text):
        if end[1] is None:
            return text[: end.start()]
        if _ends(text, end, is_small):
            return text[: end.end()]
    return text


def _ends(text: str, end: re.Match[str], is_small: bool) -> bool:
    following = _NEXT.match(text, end.end())
    next_word = "" if following is None else following[1]
    if next_word[:1].islower() and not is_small:
        return False
    if end[1] != ".":
        return True
    if _SPACED.match(text, end.end()):  # ". . ."
        return False
    found = _BEFORE.search(text, max(0, end.start() - 40), end.start())
    word = "" if found is None else found[0].rpartition("-")[2].lstrip(".'\u2019")
    small = word.lower()
    is_abbreviation = is_small or small in _SMALL or not word[:1].islower()
    if is_abbreviation and small in _NEVER_LAST:
        return False
    if small in _NUMBERED or word == "p":
        return not next_word[:1].isdigit()
    if word.isdigit():
        return found is None or found.start() > 0  # "1. " opens a list
    is_initial = len(word) == 1 and word.isalpha() and word != "I" and (word.isupper() or is_small)
    is_dotted = "." in word and all(len(part) <= 2 and part.isalpha() for part in word.split("."))
    if is_initial or is_dotted or (is_abbreviation and small in _SELDOM_LAST):
        is_start = not is_small and next_word.lower() in _STARTERS and (len(next_word) > 1 or not is_initial)
        return is_start or end.end() == len(text)
    return True
