"""Where the first sentence of a text ends, by a rule at a time: how many texts are cut after an abbreviation.

    python benchmarks/sentences.py shared/data/ag_news/test.csv

reads AG News' published file (class, title, description), whose descriptions are the texts. Without a file the texts
are made up: names of firms and people, each before a second sentence. A cut is false where it falls after one of the
abbreviations below and the word that follows does not begin a sentence: these are looked for here, by a list of their
own, not by the rules. Of pysbd and sentencex, where they are installed, the same is printed, and how often they agree.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from iclperm.tasks.sentences import first_sentence

ABBREVIATIONS = re.compile(
    r"(?:^|[\s(\"'-])((?:[A-Z]\.)+|(?:Inc|Corp|Co|Ltd|Mr|Mrs|Ms|Dr|Gen|Sen|Rep|Gov|Lt|Col|Sgt|Capt|Prof|St|Jr|Sr|Calif|Mass"
    r"|Conn|Wash|Va|Ky|Fla|Tex|Mich|Minn|Pa|Ill|Ariz|Colo|Ore|Tenn|Ga|La|Md|Mo|Jan|Feb|Aug|Sept|Oct|Nov|Dec|No|vs)\.)$"
)
BEGINS = re.compile(
    r"(?:The|A|An|It|He|She|They|We|But|And|In|On|At|For|This|That|These|Those|His|Her|Its|Their|As|If|When|While"
    r"|After|Before|There|Now|Yet|So|Mr|Ms|Mrs)\b"
)
FIRMS = ("Acme Inc.", "Acme Corp.", "Acme Co.", "Acme Ltd.", "the U.S.", "the U.N.", "Mr. Fox", "Gen. Fox", "J. P. Fox")
DOES = ("Group left", "talks began", "President Lee spoke", "officials agreed")


def at_full_stop(text: str) -> str:
    """The rule before: up to the first ". ", as the template had it."""
    found = text.strip().split(". ")[0]
    return found + "." if len(found) < len(text.strip()) else found


def rules() -> Iterator[tuple[str, Callable[[str], str]]]:
    """Every rule that is here, by its name; the last are libraries, where they are installed."""
    yield 'first ". "', at_full_stop
    yield "iclperm", first_sentence
    if find_spec("sentencex"):
        sentencex = import_module("sentencex")
        yield "sentencex", lambda text: ([*sentencex.segment("en", text.strip())] or [""])[0].strip()
    if find_spec("pysbd"):
        segmenter = import_module("pysbd").Segmenter(language="en", clean=False)
        yield "pysbd", lambda text: (segmenter.segment(text.strip()) or [""])[0].strip()


def false_cut(text: str, found: str) -> str | None:
    """The abbreviation after which a text was cut though its sentence goes on; None where it was not."""
    rest = text.strip()[len(found) :]
    named = ABBREVIATIONS.search(found)
    if named is None or not rest.strip() or not rest[0].isspace() or BEGINS.match(rest.strip()):
        return None
    return named[1]


def texts_of(path: Path) -> list[str]:
    """The descriptions of a published file, without the marks that stand for line breaks in it."""
    with path.open(encoding="utf-8", newline="") as lines:
        return [row[2].replace("\\", " ") for row in csv.reader(lines)]


def made_up() -> list[str]:
    """Every firm or person in two places of a sentence, before another sentence."""
    pairs = [*product(FIRMS, DOES)]
    return [f"{who} {does} on Monday. Nobody knew." for who, does in pairs] + [
        f"On Monday {who} {does}, as {other} said. Nobody knew." for (who, does), other in product(pairs, FIRMS[:6])
    ]


def main() -> None:
    """Prints a table for the texts."""
    texts = texts_of(Path(sys.argv[1])) if len(sys.argv) > 1 else made_up()
    print(f"{len(texts):,} texts\n\n| rule | cut after an abbreviation | most often after | same as iclperm |")
    print("|---|---|---|---|")
    ours = [first_sentence(text) for text in texts]
    for name, rule in rules():
        found = [rule(text) for text in texts]
        cuts = Counter(filter(None, map(false_cut, texts, found)))
        often = ", ".join(f"{word} {number}" for word, number in cuts.most_common(4)) or "none"
        same = sum(one.split() == other.split() for one, other in zip(found, ours, strict=True)) / len(texts)
        print(f"| {name} | {cuts.total():,} ({cuts.total() / len(texts):.1%}) | {often} | {same:.1%} |")


if __name__ == "__main__":
    main()
