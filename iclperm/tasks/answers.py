"""Answers of generated text: how one is read, what it is compared with, and when there is none."""

from __future__ import annotations

import re
import string
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from iclperm.base.worker import Overtime, Worker, WorkerError
from iclperm.errors import ConfigError, DataError
from iclperm.tasks.answer_keys import Answer
from iclperm.tasks.bases import with_bases
from iclperm.tasks.filters import UNREAD, ExactMatch, FiltersChoices, golds_of, golds_text
from iclperm.tasks.graded import absolute_error, best_f1, squad_normal
from iclperm.tasks.named_labels import NamedLabels

MAX_SECONDS = 5.0  # for one answer, of processor time
PATIENCE = (60.0, 120.0)
"""Seconds by the clock that a run's answers may be slow, all together: after the first none gets more than a moment,
after the second none that needs a process of its own is read."""
_NOT_SLOW, _MOMENT = 1.0, 0.25  # seconds: what is no loss of patience, and what is left without
GIVEN_UP = "timeout"
"""The rule of a text whose reading took too long."""
FIRST_LINE, ONE_NAMED, SEVERAL_NAMED = "first line", "one label named", "several labels named"
"""How labels are read in generated text, and why none was."""
MAX_CHARS = 1 << 20  # of a text
MAX_DIGITS = 60
MAX_MATH_CHARS = 1_000

_Ask = Callable[[dict[str, Any]], Any]  # the process that may be killed: see `work`


class Judgement(NamedTuple):
    """One text judged: the answer that was read, in its normal form, or None where there is none; the rule that read
    it, or why none could; its grade, 1 where it is right and 0 where it is wrong, between them where the check grades;
    and its absolute error, where the check has one."""

    answer: str | None
    rule: str | None
    grade: float
    error: float | None = None

    @property
    def is_correct(self) -> bool:
        """Whether it has the full grade."""
        return self.grade == 1


class Checker:
    """Judges generated texts against right answers; `open_checker` and `word_checker` make one."""

    def __init__(self, kind: _Kind, strip_think: bool, think_is_open: bool) -> None:
        self._kind = kind
        self._strip_think = strip_think
        self._think_is_open = think_is_open
        self._golds: dict[str, str] = {}

    def judge(self, texts: Sequence[str], golds: Sequence[str]) -> list[Judgement]:
        """One judgement a text; ``golds`` are the right answers as published.

        Raises `DataError` as `canonical_gold` does. A text that takes more than 5 seconds of processor time, or that
        comes when the run's patience is gone (`PATIENCE`), is unparsed by the rule "timeout", one that a checker fails
        on by the rule "failed".
        """
        return [self._judged(text, self.canonical_gold(gold)) for text, gold in zip(texts, golds, strict=True)]

    def canonical_gold(self, gold: str) -> str:
        """The right answer in its normal form; raises `DataError` naming the text that holds none."""
        if gold not in self._golds:
            try:
                found = self._kind.gold(gold)
            except (Overtime, WorkerError) as error:
                raise DataError(f"the right answer {_shown(gold)} cannot be read: {error}") from None
            if found is None:
                raise DataError(f"the right answer {_shown(gold)} is not {self._kind.noun}; repair the row or the task")
            self._golds[gold] = found
        return self._golds[gold]

    def _judged(self, text: str, gold: str) -> Judgement:
        spoken = strip_think(text, is_open=self._think_is_open) if self._strip_think else text
        if spoken is None:
            return Judgement(None, "unfinished thinking", 0)
        if len(spoken) > MAX_CHARS:
            return Judgement(None, "too long", 0)
        try:
            for rule, part in self._kind.parts(spoken):
                if (answer := self._kind.normal(part)) is not None:
                    return Judgement(answer, rule, *self._kind.grade(gold, answer))
        except Overtime:
            return Judgement(None, GIVEN_UP, 0)
        except WorkerError:
            return Judgement(None, "failed", 0)
        return Judgement(None, self._kind.unread(spoken), 0)


class _Patience:
    """How long the answers of a run have been slow, and so how long the next may take."""

    def __init__(
        self, seconds: float, patience: tuple[float, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._patience = patience
        self._spent = 0.0

    def call(self, worker: Worker, job: dict[str, Any]) -> Any:
        """What the process says; raises as `Worker.call`, and `Overtime` at once where all patience is gone."""
        first, last = self._patience
        if self._spent >= last:
            raise Overtime(f"the answers of this run were slow for {last:g} seconds, and no more are waited for")
        started, allowed = self._clock(), _NOT_SLOW
        try:
            return worker.call(job, self._seconds if self._spent < first else min(self._seconds, _MOMENT))
        except (Overtime, WorkerError):
            allowed = 0.0
            raise
        finally:
            self._spent += max(0.0, self._clock() - started - allowed)


@contextmanager
def open_checker(
    answer: Answer,
    *,
    strip_think: bool = False,
    think_is_open: bool = False,
    seconds: float = MAX_SECONDS,
    patience: tuple[float, float] = PATIENCE,
) -> Iterator[Checker]:
    """A checker, and the process that it may need, which ends with the context.

    ``strip_think`` removes ``<think>`` blocks first; ``think_is_open`` says that the prompt opened one. What a pattern
    or a comparison may take are ``seconds`` of processor time, and less where ``patience`` (`PATIENCE`) is gone. Raises
    `ConfigError` where math-verify is needed and not installed.
    """
    libraries = ["math_verify"] if answer.check == "math" else []
    if not all(map(find_spec, libraries)):
        raise ConfigError("the check 'math' compares with math-verify; run: pip install 'iclperm[math]'")
    slow = _Patience(seconds, patience)
    with Worker("iclperm.tasks.answers:work", libraries) as worker:

        def ask(job: dict[str, Any]) -> Any:
            return slow.call(worker, job)

        yield Checker(_Patterned(_kind(answer, ask), answer, ask), strip_think, think_is_open)


def word_checker(words: Sequence[str], *, strip_think: bool = False, think_is_open: bool = False) -> Checker:
    """A checker of free text against label words, which are the right answers.

    Only its first line that is not blank is read, case aside. It is a label, punctuation around it aside (the rule
    `FIRST_LINE`), or else names one among other words (`ONE_NAMED`). One that names several gives no answer
    (`SEVERAL_NAMED`).

    Raises `ConfigError` naming two words that read alike.
    """
    return Checker(_Words(words), strip_think, think_is_open)


def strip_think(text: str, *, is_open: bool = False) -> str | None:
    """The text without its ``<think>…</think>`` blocks; None where one does not end: the model never answered.

    ``is_open`` says that the text begins within one. So it does, too, where the first tag is a ``</think>``. O(length).
    """
    kept: list[str] = []
    for piece in re.split(r"(</?think>)", text):
        if piece == "<think>":
            is_open = True
        elif piece == "</think>":
            if not is_open:
                kept.clear()
            is_open = False
        elif not is_open:
            kept.append(piece)
    return None if is_open else "".join(kept)


class _Kind:
    """What is particular to one check: where an answer stands, how it is written, what equals it."""

    noun: str

    def gold(self, text: str) -> str | None:
        """The normal form of a right answer as published; None where it holds none."""
        return self.normal(text)

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        """What may be the answer, best first, each after the rule that found it."""
        raise NotImplementedError

    def normal(self, part: str) -> str | None:
        """The normal form of an answer, the same however it was written; None where the text is no answer."""
        raise NotImplementedError

    def is_same(self, gold: str, answer: str) -> bool:
        """Whether an answer is right; both are in normal form."""
        return gold == answer

    def grade(self, gold: str, answer: str) -> tuple[float, float | None]:
        """The grade of an answer in 0..1, and its absolute error where there is one; both are in normal form."""
        return float(self.is_same(gold, answer)), None

    def unread(self, text: str) -> str | None:
        """Why no answer could be read from a text; None where there is none."""
        return None


class _Patterned(_Kind):
    """A kind whose answers, or right answers, are found by the task's own patterns where it has any."""

    def __init__(self, kind: _Kind, answer: Answer, ask: _Ask) -> None:
        self._kind = kind
        self._answer = answer
        self._ask = ask
        self.noun = kind.noun

    def gold(self, text: str) -> str | None:
        if self._answer.gold is None:
            return self._kind.gold(text)
        (part,) = self._found(text, [(self._answer.gold, False)])
        return None if part is None else self.normal(part)

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        rules = self._answer.rules
        if not rules:
            yield from self._kind.parts(text)
            return
        found = self._found(text, [(rule.pattern, rule.last) for rule in rules])
        for rule, part in zip(rules, found, strict=True):
            if part is not None:
                yield rule.name or rule.pattern, part

    def normal(self, part: str) -> str | None:
        return self._kind.normal(part)

    def is_same(self, gold: str, answer: str) -> bool:
        return self._kind.is_same(gold, answer)

    def grade(self, gold: str, answer: str) -> tuple[float, float | None]:
        return self._kind.grade(gold, answer)

    def _found(self, text: str, rules: list[tuple[str, bool]]) -> list[str | None]:
        # Patterns of a task file may take for ever, so not here.
        found: list[str | None] = self._ask({"find": rules, "text": text})
        return found


class _Numbers(_Kind):
    """GSM8K: what stands after ``####``, else the last number; compared digit for digit, never as floats."""

    noun = "a number, nor ends in '#### ' and one"
    _NUMBER = r"(?:(?<![\w)])[-\u2212])?\$?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    _STRICT = re.compile(rf"####\s{{0,9}}[$€£]?({_NUMBER})")
    _ANY = re.compile(_NUMBER)
    _ALONE = re.compile(rf"[$€£]?({_NUMBER})\s{{0,9}}%?\.?")

    def gold(self, text: str) -> str | None:
        return self.normal(text.rpartition("####")[2])

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        if strict := self._STRICT.search(text):
            yield "####", strict[1]
        for last in deque(self._ANY.finditer(text), maxlen=1):
            yield "last number", last[0]

    def normal(self, part: str) -> str | None:
        alone = self._ALONE.fullmatch(part.strip())
        if alone is None or len(alone[1]) > MAX_DIGITS:
            return None
        whole, _, decimals = alone[1].lstrip("-\u2212$").replace(",", "").partition(".")
        digits = f"{whole.lstrip('0') or '0'}.{decimals.rstrip('0')}".rstrip(".")
        return f"-{digits}" if alone[1][0] in "-\u2212" and digits != "0" else digits


class _Distances(_Numbers):
    """A number, graded by how far it is from the right one."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def grade(self, gold: str, answer: str) -> tuple[float, float | None]:
        error = absolute_error(answer, gold)
        return 1 - min(1.0, error / self._scale), error


class _Letters(_Kind):
    """MMLU-Pro: the three rules of its published evaluation, without its random guess, and only for whole words."""

    def __init__(self, count: int) -> None:
        self._letters = string.ascii_uppercase[:count]
        self.noun = f"one of the letters {self._letters}"
        one = rf"([{self._letters}])\b"
        self._rules = {
            "the answer is": re.compile(rf"[aA]nswer is:?\s{{0,9}}\(?{one}"),
            "answer:": re.compile(rf"[aA]nswer:\s{{0,9}}\(?{one}"),
        }
        self._alone = re.compile(rf"\b{one}")

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        plain = text.replace("**", "")
        for rule, pattern in self._rules.items():
            if match := pattern.search(plain):
                yield rule, match[1]
        for last in deque(self._alone.finditer(plain), maxlen=1):
            yield "last letter", last[1]

    def normal(self, part: str) -> str | None:
        letter = part.strip(" \t\r\n().:").upper()
        return letter if len(letter) == 1 and letter in self._letters else None


class _Math(_Kind):
    r"""MATH: the last ``\boxed{}``, else what follows "final answer is", else the last ``$…$``.

    math-verify says whether two are equal; numbers must have the same base, too.
    """

    noun = r"mathematics: neither \boxed{} nor one short line"
    _TOKEN = re.compile(r"\\(?:boxed|fbox)\s{0,9}\{|\\.|[{}]", re.DOTALL)
    _BARE = re.compile(r"\\(?:boxed|fbox) ([^${}\n]{1,1000})")
    _FINAL = re.compile(r"[fF]inal answer is:?\s{0,9}([^\n]{1,1000})")
    _AFTER = re.compile(r"(?:(?<!\\)\$|[*. ])+$")
    _DOLLARS = re.compile(r"(?<!\\)\$\$?([^$]{1,1000})\$\$?")

    def __init__(self, ask: _Ask) -> None:
        self._ask = ask
        self._outcomes: dict[tuple[str, str], bool | Overtime | WorkerError] = {}

    def gold(self, text: str) -> str | None:
        boxed = self._boxed(text)
        if boxed is None and "\n" in text.strip():
            return None
        return self.normal(text if boxed is None else boxed)

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        if (boxed := self._boxed(text)) is not None:
            yield r"\boxed", boxed
        for last in deque(self._FINAL.finditer(text), maxlen=1):
            yield "final answer is", last[1].partition(" I hope it is correct")[0]
        for last in deque(self._DOLLARS.finditer(text), maxlen=1):
            yield "last $", last[1]

    def normal(self, part: str) -> str | None:
        latex = " ".join(part.split()).lstrip("*$ ")
        if len(latex) > MAX_MATH_CHARS:
            return None
        latex = self._AFTER.sub("", latex)
        if latex.startswith((r"\(", r"\[")) and latex.endswith((r"\)", r"\]")):
            latex = latex[2:-2].strip()
        return latex or None

    def is_same(self, gold: str, answer: str) -> bool:
        if gold == answer:
            return True
        if (gold, answer) not in self._outcomes:
            (gold_plain, gold_bases), (answer_plain, answer_bases) = with_bases(gold), with_bases(answer)
            if gold_bases != answer_bases:
                return False
            try:
                self._outcomes[gold, answer] = self._ask({"gold": gold_plain, "answer": answer_plain})
            except (Overtime, WorkerError) as error:
                self._outcomes[gold, answer] = error
        outcome = self._outcomes[gold, answer]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _boxed(self, text: str) -> str | None:
        """The content of that box, among those that close, which opens last. O(length)."""
        if r"\boxed" not in text and r"\fbox" not in text:
            return None
        last, content, opened = -1, None, list[re.Match[str]]()
        for token in self._TOKEN.finditer(text):
            if token[0][-1] == "{" and token[0] != r"\{":
                opened.append(token)
            elif token[0] == "}" and opened:
                start = opened.pop()
                if start[0] != "{" and start.start() > last:
                    last, content = start.start(), text[start.end() : token.start()]
        if content is None and (bare := self._BARE.search(text)):
            content = bare[1]
        return content


class _Exact(_Kind):
    """The same text, white space aside, without what the task ignores."""

    noun = "text that can be compared"

    def __init__(self, answer: Answer, ask: _Ask) -> None:
        self._answer = answer
        self._ask = ask

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        yield "text", text

    def normal(self, part: str) -> str | None:
        if self._answer.ignore:
            part = self._ask({"remove": self._answer.ignore, "text": part})
        text = " ".join(part.split())
        return (text.casefold() if self._answer.ignore_case else text) or None


class _Filtered(_Kind):
    """One of several texts, as lm-evaluation-harness reads and compares them; right answers are a JSON list."""

    noun = "a JSON list of texts"

    def __init__(self, answer: Answer, ask: _Ask) -> None:
        self._ask = ask
        self._name = "text" if answer.filters is None else answer.filters.name
        self._steps = None if answer.filters is None else answer.filters.model_dump(mode="json", exclude_defaults=True)
        self._ignored = {
            "regexes_to_ignore": answer.ignore,
            "ignore_case": answer.ignore_case,
            "ignore_punctuation": answer.ignore_punctuation,
            "ignore_numbers": answer.ignore_numbers,
        }

    def gold(self, text: str) -> str | None:
        golds = golds_of(text)
        if golds is None:
            return None
        return golds_text(self._ask({"filters": None, "ignored": self._ignored, "texts": golds}))

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        (found,) = self._ask({"filters": self._steps, "ignored": self._ignored, "texts": [text]})
        if found is not None:
            yield self._name, found

    def normal(self, part: str) -> str | None:
        return part

    def is_same(self, gold: str, answer: str) -> bool:
        return answer in (golds_of(gold) or ())


class _Overlaps(_Kind):
    """Text, graded by the words that it shares with the nearest of several right answers, which are a JSON list."""

    noun = "a JSON list of texts, one at least with a word that is no article"

    def gold(self, text: str) -> str | None:
        golds = [plain for gold in golds_of(text) or () if (plain := squad_normal(gold))]
        return golds_text(golds) if golds else None

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        yield "text", text

    def normal(self, part: str) -> str | None:
        return squad_normal(part) or None

    def grade(self, gold: str, answer: str) -> tuple[float, float | None]:
        return best_f1(answer, golds_of(gold) or ()), None


class _Words(_Kind):
    """Label words."""

    def __init__(self, words: Sequence[str]) -> None:
        self.noun = f"one of {', '.join(words)}"
        self._words: dict[str, str] = {}
        for word in words:
            plain = _plain(word)
            if not plain:
                raise ConfigError(f"the label {word!r} has no letter or digit to be recognised by in generated text")
            if (other := self._words.setdefault(plain, word)) != word:
                raise ConfigError(f"the labels {other!r} and {word!r} read alike in generated text; reword one")
        self._named = NamedLabels(words)

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        line = _first_line(text)
        yield FIRST_LINE, line
        named = self._named.named(line)
        if len(named) == 1 and all(named.values()):
            yield ONE_NAMED, next(iter(named))

    def unread(self, text: str) -> str | None:
        return SEVERAL_NAMED if len(self._named.named(_first_line(text))) > 1 else None

    def normal(self, part: str) -> str | None:
        return self._words.get(_plain(part))


def work(job: dict[str, Any]) -> Any:
    """What the checker's process does: find patterns in a text, remove or filter them, or compare mathematics."""
    if "find" in job:
        return [_first(pattern, last, job["text"]) for pattern, last in job["find"]]
    if "remove" in job:
        text = job["text"]
        for pattern in job["remove"]:
            text = re.sub(pattern, "", text)
        return text
    if "filters" in job:
        return [_read_as(job["filters"], job["ignored"], text) for text in job["texts"]]
    import_module("sympy.core.random").seed(0)  # so that what was asked before changes nothing
    library = import_module("math_verify")
    gold, answer = (
        library.parse(rf"\boxed{{{job[side]}}}", parsing_timeout=None)  # its own limit is a signal, ours is the kill
        for side in ("gold", "answer")
    )
    return bool(library.verify(gold, answer, timeout_seconds=None))


def _first(pattern: str, last: bool, text: str) -> str | None:
    """The first group that holds text of the first match, or the last, or else the match."""
    matches = re.finditer(pattern, text)
    for match in deque(matches, maxlen=1) if last else matches:
        return next(filter(None, match.groups()), match[0])
    return None


def _read_as(steps: dict[str, Any] | None, ignored: dict[str, Any], text: str) -> str | None:
    """What of a text is compared: what the filters read in it, without what is ignored; None where they read none."""
    found = text if steps is None else FiltersChoices(**steps).read([text])
    if not isinstance(found, str) or (steps is not None and found == UNREAD):
        return None
    return ExactMatch(**ignored).plain(found)


def _kind(answer: Answer, ask: _Ask) -> _Kind:
    match answer.check:
        case "number":
            return _Numbers()
        case "letter":
            return _Letters(answer.letters or 10)
        case "math":
            return _Math(ask)
        case "exact":
            return _Exact(answer, ask)
        case "exact_match":
            return _Filtered(answer, ask)
        case "f1":
            return _Overlaps()
        case "absolute_error":
            return _Distances(answer.scale or 1)


def _first_line(text: str) -> str:
    return text.lstrip().partition("\n")[0]


def _plain(text: str) -> str:
    return " ".join(text.strip(string.punctuation + string.whitespace).casefold().split())


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"…{text[-77:]}")
