"""Answers: read as published, compared exactly, unparsed where there is none, and never a hang."""

import re
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from iclperm.base.worker import StartError, Worker, WorkerError
from iclperm.errors import ConfigError, DataError
from iclperm.tasks import answers
from iclperm.tasks.answer_keys import Answer
from iclperm.tasks.answers import Checker, Judgement, open_checker, strip_think, word_checker

UNPARSED = Judgement(None, None, False)


@pytest.fixture(scope="module")
def number():
    with open_checker(Answer(field="answer", check="number")) as checker:
        yield checker


@pytest.fixture(scope="module")
def letter():
    with open_checker(Answer(field="answer", check="letter")) as checker:
        yield checker


@pytest.fixture(scope="module")
def mathematics():
    pytest.importorskip("math_verify")
    with open_checker(Answer(field="solution", check="math")) as checker:
        yield checker


def judge(checker: Checker, text: str, gold: str) -> Judgement:
    (judgement,) = checker.judge([text], [gold])
    return judgement


def judge_by(text: str, right: str, seconds: float = answers.MAX_SECONDS, **answer) -> Judgement:
    with open_checker(Answer(field="answer", **answer), seconds=seconds) as checker:
        return judge(checker, text, right)


@pytest.mark.parametrize(
    ("text", "answer", "rule"),
    [
        (" 3 + 4 = 7\n#### 7", "7", "####"),
        ("#### 7\n\nQuestion: and 8?\n#### 8", "7", "####"),
        ("####7.", "7", "####"),
        ("#### $1,234.00", "1234", "####"),
        ("#### -$5", "-5", "####"),
        ("#### $-5", "-5", "####"),
        ("#### €5", "5", "####"),
        ("#### five, so 5", "5", "last number"),
        ("It takes 3 days, or 72 hours.", "72", "last number"),
        ("The total is **$2,450.50**!", "2450.5", "last number"),
        ("a rise of 15%", "15", "last number"),
        ("it fell to -12", "-12", "last number"),
        ("it fell to \u221212", "-12", "last number"),
        ("10-5", "5", "last number"),
        ("f(3)-5", "5", "last number"),
        ("1,234,567", "1234567", "last number"),
        ("the scores were 3, 4,5", "5", "last number"),
        ("half is .50", "0.5", "last number"),
        ("-0.00", "0", "last number"),
        ("007", "7", "last number"),
        ("none", None, None),
        ("", None, None),
        ("####", None, None),
        ("9" * 61, None, None),
    ],
)
def test_numbers_are_read_by_the_strict_rule_then_the_last_number(number, text, answer, rule):
    assert judge(number, text, "7") == Judgement(answer, rule, answer == "7")


def spellings(value: Decimal) -> st.SearchStrategy[str]:
    """The ways in which people write a number with up to four decimals."""
    plain = f"{abs(value):f}"
    whole, _, decimals = plain.partition(".")
    sign = "-" if value < 0 else ""
    forms = [plain, f"{int(whole):,}" + (f".{decimals}" if decimals else "")]
    forms += [f"{form}{'' if '.' in form else '.'}{zeros}" for form in [*forms] for zeros in ("0", "000")]
    return st.sampled_from(forms).flatmap(
        lambda form: st.sampled_from([f"{sign}{form}", f"{sign}${form}", f"{sign}{form}%", f"{sign}00{plain}"])
    )


values = st.decimals(-(10**9), 10**9, places=4, allow_nan=False).map(Decimal.normalize)


@given(st.data(), values)
def test_spellings_of_one_number_are_equal(number, data, value):
    gold, text = data.draw(spellings(value)), data.draw(spellings(value))
    assert judge(number, f"so it is {text}.", f"thus\n#### {gold}").is_correct
    assert judge(number, f"#### {text} \n", gold).is_correct
    assert Fraction(judge(number, text, gold).answer) == Fraction(value)


@given(st.data(), values, values)
@example(st.data(), Decimal("0.1"), Decimal("0.10000000000000001"))
def test_different_numbers_are_never_equal(number, data, one, other):
    if not hasattr(data, "draw"):  # the example
        assert not judge(number, str(one), str(other)).is_correct
    elif one != other:
        assert not judge(number, data.draw(spellings(one)), data.draw(spellings(other))).is_correct


@given(st.text() | st.text("-\u2212$#0123456789,.%e \n()") | st.text("{}$\\boxed answeri:ABC()*\n"))
def test_any_text_has_a_judgement(number, letter, text):
    for checker, gold in ((number, "7"), (letter, "B")):
        judgement = judge(checker, text, gold)
        assert (judgement.answer is None) == (judgement.rule is None)
        assert judgement.is_correct == (judgement.answer == gold)
        if judgement.answer is not None:
            assert judge(checker, judgement.answer, judgement.answer).is_correct


@pytest.mark.parametrize("gold", ["", "seven", "3 or 4", "#### ", "7 apples", "9" * 61, "1e5", "1/2"])
def test_a_gold_that_is_no_number_is_refused_by_name(number, gold):
    with pytest.raises(DataError, match=re.escape(f"the right answer {gold!r} is not a number")):
        number.canonical_gold(gold)


def test_golds_are_read_as_published(number, letter):
    assert number.canonical_gold("He has 2*3=<<2*3=6>>6 left.\n#### 1,006") == "1006"
    assert [letter.canonical_gold(gold) for gold in ("B", " (b) ", "J.")] == ["B", "B", "J"]
    for gold in ("K", "AB", "", "3"):
        with pytest.raises(DataError, match=rf"the right answer '{gold}' is not one of the letters ABCDEFGHIJ"):
            letter.canonical_gold(gold)


@pytest.mark.parametrize(
    ("text", "answer", "rule"),
    [
        ("A: Let's think. The answer is (C).", "C", "the answer is"),
        ("the answer is C", "C", "the answer is"),
        ("The **answer is (D)**, since", "D", "the answer is"),
        ("the answer is: B", "B", "the answer is"),
        ("The answer is (A).\n\nQuestion: x\nThe answer is (B).", "A", "the answer is"),
        ("**Answer:** B", "B", "answer:"),
        ("answer:\n(J)", "J", "answer:"),
        ("Answer: E. So the answer is (F).", "F", "the answer is"),
        ("either A or (D)", "D", "last letter"),
        ("The answer is Because, so G it is", "G", "last letter"),
        ("The answer is (Z)", None, None),
        ("the best one is BAD", None, None),
        ("", None, None),
    ],
)
def test_letters_are_read_by_the_published_rules(letter, text, answer, rule):
    assert judge(letter, text, "C") == Judgement(answer, rule, answer == "C")


def test_letters_beyond_the_options_are_none():
    assert judge_by("The answer is (E). Not A.", "D", check="letter", letters=4) == Judgement("A", "last letter", False)


@pytest.mark.parametrize(
    ("text", "gold", "answer", "rule", "is_correct"),
    [
        (r"so $\boxed{\frac12}$.", r"thus $x=\boxed{0.5}$", r"\frac12", r"\boxed", True),
        (r"\boxed{3} no, \boxed{4}", "4", "4", r"\boxed", True),
        (r"\boxed{\{1, \sqrt{4}\}}", r"\boxed{\{2,1\}}", r"\{1, \sqrt{4}\}", r"\boxed", True),
        (r"\boxed{x \boxed{7}}", "7", "7", r"\boxed", True),
        (r"\boxed{5} then \boxed{6", "5", "5", r"\boxed", True),
        (r"} { \fbox{5}", "5", "5", r"\boxed", True),
        (r"$\boxed 5$", r"$\boxed 5$", "5", r"\boxed", True),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", "(x+1)^2", r"\boxed", True),
        (r"\boxed{(x+1)^2}", "x^2+2x", "(x+1)^2", r"\boxed", False),
        (r"\boxed{\text{Bob}}", r"\text{Ada}", r"\text{Bob}", r"\boxed", False),
        (r"Final Answer: The final answer is $12$. I hope it is correct.", "12.0", "12", "final answer is", True),
        (r"The final answer is 12.", "12", "12", "final answer is", True),
        (r"so $x = 3$ and $y = 4$", "4", "y = 4", "last $", True),
        (r"so $$x = 3$$ and $$ y = 4 $$", "4", "y = 4", "last $", True),
        (r"The final answer is **\( 0.5 \)**.", r"\frac{1}{2}", "0.5", "final answer is", True),
        (r"The final answer is $.5$.", r"\frac12", ".5", "final answer is", True),
        (r"\boxed{12\$}", "12", r"12\$", r"\boxed", True),
        (r"\boxed{\$12}", r"12\$", r"\$12", r"\boxed", True),
        ("I do not know", "4", None, None, False),
        (r"\boxed{}", "4", None, None, False),
        (r"\boxed{" + "1+" * 600 + "1}", "601", None, None, False),
    ],
)
def test_mathematics_is_read_and_compared(mathematics, text, gold, answer, rule, is_correct):
    assert judge(mathematics, text, gold) == Judgement(answer, rule, is_correct)


@pytest.mark.parametrize(
    ("text", "gold", "is_correct"),
    [
        ("10_8", "10", False),
        ("10", "10_8", False),
        ("10_8", "108", False),
        ("108", "10_8", False),
        ("10_8", "10_9", False),
        ("10_8", "11_8", False),
        ("x=10_8", "10", False),
        (r"\frac{10_8}{2}", "5", False),
        ("(10_8, 3)", "(10, 3)", False),
        ("(10_8, 3_9)", "(10_9, 3_8)", False),
        ("(10)_8", "10", False),
        (r"10\_8", "10", False),
        (r"10_{\text{eight}}", "10", False),
        ("10_{8}", "10_8", True),
        ("(10)_8", "10_8", True),
        ("{10}_{8}", "10_8", True),
        (r"10\_8", "10_8", True),
        ("10_{10}", "10_10", True),
        (r"10_{\text{eight}}", "10_8", True),
        (r"10_{\mathrm{8}}", "10_8", True),
        ("x = 10_{8}", "10_8", True),
        ("010_2", "10_2", True),
        ("1,000_8", "1000_8", True),
        (r"\{2,10_8\}", r"\{10_{8},2\}", True),
        ("a_{1}+2", "2+a_1", True),
        ("x^{2}_1+1", "1+x_1^2", True),
        (r"2\log_{2}3", r"\log_2 9", True),
    ],
)
def test_numbers_are_equal_in_one_base_alone(mathematics, text, gold, is_correct):
    # math-verify 0.9 leaves the base out.
    assert judge(mathematics, rf"so \boxed{{{text}}}", rf"\boxed{{{gold}}}").is_correct == is_correct


def test_a_right_answer_of_mathematics_is_compared_in_its_order(mathematics):
    # A bare value answers an equation, and an equation a bare value; a whole inequality is not answered by its bound.
    assert judge(mathematics, r"\boxed{5}", r"\boxed{x=5}").is_correct
    assert judge(mathematics, r"\boxed{x=5}", r"\boxed{5}").is_correct


@settings(max_examples=20)
@given(st.text(r"0123456789.,+-/(){}[]\ \frac\sqrtx=", max_size=20))
def test_any_box_has_a_judgement(mathematics, content):
    judgement = judge(mathematics, rf"so \boxed{{{content}}}", "-17")
    assert judgement.answer is not None or judgement.rule in (None, "timeout", "failed")
    assert not judgement.is_correct


@pytest.mark.parametrize("gold", ["", "prose\nwithout a box", r"\boxed{}", "x" * 1001])
def test_a_gold_without_mathematics_is_refused(mathematics, gold):
    with pytest.raises(DataError, match="is not mathematics"):
        mathematics.canonical_gold(gold)


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" + "{" * 300_000,
        r"\boxed{" * 10_000,
        r"\boxed{" * 30_000 + "}" * 30_000,
        "$" * 300_000,
        "$a" * 150_000,
        "#### " * 60_000,
        "1," * 150_000,
        "9" * 300_000,
        "answer is" * 30_000,
        "answer:" + " " * 300_000,
        "final answer is " * 20_000,
    ],
)
def test_hostile_texts_are_read_in_linear_time(number, letter, mathematics, text):
    begin = time.process_time()
    for checker, gold in ((number, "3"), (letter, "B"), (mathematics, "3")):
        assert not judge(checker, text, gold).is_correct
    assert time.process_time() - begin < 20


def test_a_text_without_end_is_unparsed(number):
    assert judge(number, "7" + " " * answers.MAX_CHARS, "7") == Judgement(None, "too long", False)
    assert judge(number, "7" + " " * (answers.MAX_CHARS - 1), "7").is_correct
    assert strip_think("<think>" * 100_000) is None


def test_mathematics_that_does_not_end_is_unparsed_once(monkeypatch):
    pytest.importorskip("math_verify")
    with open_checker(Answer(field="a", check="math"), seconds=2) as checker:
        assert judge(checker, r"\boxed{9^{9^{9^9}}}", "3") == Judgement(None, "timeout", False)
        with monkeypatch.context() as second:
            second.setattr(Worker, "call", lambda *_: pytest.fail("asked again"))
            assert judge(checker, r"so \boxed{9^{9^{9^9}}}", "3") == Judgement(None, "timeout", False)
        assert judge(checker, r"\boxed{6/2}", "3").is_correct


def test_equal_pairs_are_compared_once(mathematics, monkeypatch):
    assert judge(mathematics, r"\boxed{\frac{10}{2}}", "5").is_correct
    monkeypatch.setattr(Worker, "call", lambda *_: pytest.fail("asked again"))
    assert judge(mathematics, r"so \boxed{\frac{10}{2}}", "5").is_correct
    assert judge(mathematics, r"\boxed{\text{as it is}}", r"\boxed{\text{as  it is}}").is_correct


def test_what_the_process_fails_on_is_unparsed(mathematics, monkeypatch):
    def fail(*_):
        raise WorkerError("died")

    monkeypatch.setattr(Worker, "call", fail)
    assert judge(mathematics, r"\boxed{8/2+\pi}", "5") == Judgement(None, "failed", False)


def test_math_verify_must_be_there(monkeypatch):
    monkeypatch.setattr(answers, "find_spec", lambda name: None)
    with (
        pytest.raises(ConfigError, match=r"pip install 'iclperm\[math\]'"),
        open_checker(Answer(field="a", check="math")),
    ):
        pytest.fail("opened")
    with open_checker(Answer(field="a", check="number")) as checker:
        assert judge(checker, "7", "7").is_correct


def test_a_library_that_cannot_be_imported_stops_the_run(monkeypatch):
    monkeypatch.setattr(answers, "Worker", lambda target, _: Worker(target, ["no_such_library"]))
    monkeypatch.setattr(answers, "find_spec", lambda _: True)
    with open_checker(Answer(field="a", check="math")) as checker, pytest.raises(StartError, match="no_such"):
        judge(checker, r"\boxed{1+1}", "2")


def test_exact_answers_are_equal_white_space_aside():
    assert judge_by(" New \n York ", "New York", check="exact") == Judgement("New York", "text", True)
    assert judge_by("new york", "New York", check="exact") == Judgement("new york", "text", False)
    assert judge_by("new york", "New York", check="exact", ignore_case=True).is_correct
    assert judge_by("York", "New York", check="exact", ignore_case=True) == Judgement("york", "text", False)
    assert judge_by(" \n ", "New York", check="exact") == UNPARSED
    with pytest.raises(DataError, match="the right answer ' ' is not text"):
        judge_by("x", " ", check="exact")


def test_ignored_patterns_are_removed_from_both_sides():
    ignore = [",", r"\$", "(?s).*#### "]
    assert judge_by("$1,234", "because\n#### 1,234", check="exact", ignore=ignore) == Judgement("1234", "text", True)


RULES = [{"name": "strict", "pattern": "#### (-?[0-9.,]+)"}, {"pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)", "last": True}]


@pytest.mark.parametrize(
    ("text", "check", "expected"),
    [
        ("1 and 22\n#### 7 and 8", "exact", Judgement("7", "strict", True)),
        ("it is 22 and 7", "exact", Judgement("7", RULES[1]["pattern"], True)),
        ("it is 7 and $22", "exact", Judgement("$22", RULES[1]["pattern"], False)),
        ("it is 7 and $22", "number", Judgement("22", RULES[1]["pattern"], False)),
        ("#### ,.,\n07.0", "number", Judgement("7", RULES[1]["pattern"], True)),
        ("none", "exact", UNPARSED),
    ],
)
def test_rules_of_the_task_are_tried_in_order(text, check, expected):
    assert judge_by(text, "7", check=check, rules=RULES) == expected


def test_a_gold_pattern_finds_the_right_answer():
    answer = {"check": "number", "gold": r"Result: (\S+)"}
    assert judge_by("7", "Result: 7 of 9", **answer).is_correct
    with pytest.raises(DataError, match="the right answer '7' is not a number"):
        judge_by("7", "7", **answer)


def test_patterns_that_do_not_end_are_unparsed():
    endless = "(a+)+$"
    text = "a" * 60 + "b"
    unread = Judgement(None, "timeout", False)
    assert judge_by(text, "x", 0.3, check="exact", rules=[{"pattern": endless}]) == unread
    with pytest.raises(DataError, match=r"aab' cannot be read: .*took more than 0\.3 seconds of processor time"):
        judge_by("a", text, 0.3, check="exact", gold=endless)
    with pytest.raises(DataError, match="cannot be read"):
        judge_by("a", text, 0.3, check="exact", ignore=[endless])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"check": "guess"}, "an answer's key 'check' is 'guess'"),
        ({"letters": 4}, "the key 'letters' belongs to the check 'letter'"),
        ({"check": "letter", "letters": 27}, "an answer's key 'letters' is 27"),
        ({"ignore_case": True}, "the keys 'ignore' and 'ignore_case' belong to the check 'exact'"),
        ({"gold": "(a"}, "an answer's key 'gold' is '(a': is no regular expression of Python"),
        ({"gold": "x" * 501}, "an answer's key 'gold' is"),
        ({"check": "exact", "ignore": ["*"]}, "is no regular expression of Python"),
        ({"rules": [{"pattern": "["}]}, "'[': is no regular expression of Python"),
        ({"rules": [{"patern": "x"}]}, "did you mean 'pattern'?"),
        ({"feild": "x"}, "an answer has no key 'feild'; did you mean 'field'?"),
    ],
)
def test_a_wrong_answer_block_is_named_in_one_line(change, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        Answer(**{"field": "answer", "check": "number", **change})
    assert "\n" not in str(caught.value)


WORDS = ("World", "Sports", "Sci/Tech", "New York")


@pytest.mark.parametrize(
    ("text", "answer", "rule"),
    [
        (" World\n\nArticle: more", "World", "first line"),
        ("\n\n  sports.", "Sports", "first line"),
        ('"SCI/TECH"', "Sci/Tech", "first line"),
        ("**new   york**\n", "New York", "first line"),
        ("The category is World.", "World", "one label named"),
        ("It is **sci/tech**, so sci/tech\nSports", "Sci/Tech", "one label named"),
        ("Category: new  york (the city)", "New York", "one label named"),
        ("The category is either World or Sports.", None, "several labels named"),
        ("World Sports", None, "several labels named"),
        ("I think\nWorld", None, None),
        ("Worldwide", None, None),
        ("a world-class team, the world's, the real-world", None, None),
        ("York", None, None),
        ("", None, None),
        ("\n\n", None, None),
    ],
)
def test_a_label_is_the_first_line_or_named_in_it_alone(text, answer, rule):
    assert judge(word_checker(WORDS), text, "World") == Judgement(answer, rule, answer == "World")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is A.", "A"),
        ("(B) because a is less", "B"),
        ("Option 2: B", "B"),
        ("So it must be C", "C"),
        ("A man runs.", None),
        ("A man runs: A.", "A"),
        ("It is a question of taste, and a", None),
        ("A and B", None),
        ("A, B", None),
    ],
)
def test_a_label_of_one_letter_is_no_article(text, answer):
    assert judge(word_checker(["A", "B", "C"]), text, "A").answer == answer


def test_the_longest_label_is_named():
    checker = word_checker(["York", "New York", "Business", "Business News"])
    assert [judge(checker, f"It is {text}!", "York").answer for text in ("new york", "York", "business news")] == [
        "New York",
        "York",
        "Business News",
    ]


@given(st.text())
def test_no_other_text_is_a_word(text):
    judgement = judge(word_checker(WORDS), text, "Sports")
    assert judgement.answer is None or judgement.answer.casefold() in " ".join(text.casefold().split())


@pytest.mark.parametrize(
    ("words", "said"),
    [(("Yes", "yes!"), "the labels 'Yes' and 'yes!' read alike"), (("+", "-"), r"the label '\+' has no letter")],
)
def test_words_that_read_alike_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        word_checker(words)


def test_a_gold_that_is_no_word_is_refused():
    with pytest.raises(DataError, match="the right answer 'Weather' is not one of World, Sports"):
        word_checker(WORDS).judge(["World"], ["Weather"])


@pytest.mark.parametrize(
    ("text", "is_open", "left"),
    [
        ("plain", False, "plain"),
        ("<think>7</think>\n8", False, "\n8"),
        ("a<think>7</think>b<think>9</think>c", False, "abc"),
        ("7 and </think>8", False, "8"),
        ("7 and </think>8", True, "8"),
        ("<think>7 and </think>8", True, "8"),
        ("<think>7", False, None),
        ("8<think>7", False, None),
        ("still at it", True, None),
        ("", True, None),
    ],
)
def test_thinking_is_no_answer(number, text, is_open, left):
    assert strip_think(text, is_open=is_open) == left
    with open_checker(Answer(field="a", check="number"), strip_think=True, think_is_open=is_open) as checker:
        judgement = judge(checker, text, "8")
    unfinished = Judgement(None, "unfinished thinking", False)
    assert judgement == (unfinished if left is None else judge(number, left, "8"))


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "<", "think>"])))
def test_no_tag_is_left(pieces):
    left = strip_think("".join(pieces))
    assert left is None or strip_think(left) is None or "</think>" not in left


def test_texts_and_golds_come_in_pairs(number):
    assert number.judge([], []) == []
    with pytest.raises(ValueError, match="zip"):
        number.judge(["7"], ["7", "8"])
