"""Templates: whatever one asks for, it ends within its limits, and where it is rendered does not show in the text."""

import time

import pytest

from iclperm.base.worker import Worker
from iclperm.errors import DataError
from iclperm.tasks import templates
from iclperm.tasks.task import BUILTIN, Task
from iclperm.tasks.templates import ProcessFailed, RenderError, RenderLimits, Template, TooSlow, rendered_apart

ROWS = [
    {"text": " One. Two, three!  ", "parts": ["x", "yy", ""], "number": 2.5, "label": "Red"},
    {"text": "ß\u00e9\U0001f600\ud800\n\t<b>&", "parts": [["deep", 1], {"key": None}], "number": -3, "label": "Green"},
    {"text": "", "parts": [], "number": 0, "label": "Blue"},
]
SHORT = [
    "Q: {{ text }}\nA:",
    "{{ text.strip() | upper }} {{ label | default('none') }}",
    "{{ (text.strip().split('. ') | first).split()[:50] | join(' ') }}",
    "{{ (text | first_sentence).split()[:50] | join(' ') }}{{ number | first_sentence }}",
    "{{ text }}{% for part in parts %}\n{{ 'ABCDEFGHIJ'[loop.index0] }}. {{ part }}{% endfor %}",
    "{% for part in parts if part %}{{ part }}{% else %}{{ label }}{% endfor %}",
    "{% for a in parts %}{% for b in text %}{{ b }}{% endfor %}{% endfor %}",
    "{% if number > 1 and 'One' in text %}{{ number | round }}{% elif text %}-{% else %}{{ number | int }}{% endif %}",
    "{{ text ~ ' ' ~ label }}{{ number + 1 }}{{ number - 1 }}{{ -number }}",
    "{{ [text, label] | join(', ') }}{{ parts | join(label) }}",
    "{{ text | truncate(5, true, '') | title }}{{ text[1:-1] }}{{ text[loop] }}",
    "{{ parts[0] }}{{ parts | last }}{{ parts | length }}{{ text is string }}",
]
LONG = [
    "{{ text.strip(label) }}",
    "{{ text | trim(text) }}",
    "{{ number | round(number, 'ceil') }}",
    "{{ text | round(100000000, 'ceil') }}",
    "{{ text | truncate(number) }}",
    "{{ text ~ text.split() }}",
    "{{ [parts | list, text.split()] | length }}",
    "{{ text.split(label ~ label) }}",
    "{{ text.strip('" + "ab" * 40 + "') }}",
    "{{ text.upper() }}" * 65,
]
ENDLESS = {
    "a power": "{{ 1.5 | round(400000000, 'ceil') }}{{ text }}",
    "a power of the row": "{{ 1.5 | round(power, 'ceil') }}",
    "loops": "{% for a in text %}{% for b in text %}{% endfor %}{% endfor %}{{ text.strip(text) }}",
    "loops in this process": "{% for a in text %}{% for b in text %}{% endfor %}{% endfor %}",
}
REMEDY = "; correct the template, or this row's data"


def outcome(render):
    try:
        return render()
    except (RenderError, DataError) as error:
        said = str(error).removeprefix("the template 'query' cannot be rendered: ").removesuffix(REMEDY)
        return said.splitlines()[0]


@pytest.mark.parametrize("source", SHORT)
def test_text_is_the_same_wherever_it_is_rendered(source):
    template = Template("query", source)
    assert template.is_short
    for row in ROWS:
        here = outcome(lambda row=row: template.render(row))
        assert here == outcome(lambda row=row: next(rendered_apart("task", source, [row], RenderLimits())))


@pytest.mark.parametrize("source", LONG)
def test_what_may_last_is_rendered_apart(source):
    assert not Template("query", source).is_short


def test_the_templates_that_come_with_us_are_short():
    for path in sorted(BUILTIN.glob("*.yaml")):
        task = Task.load(path)
        names = ("query", "demonstration") if task.is_generated else ("query", "demonstration", "continuation")
        assert [name for name in names if not task._templates[name].is_short] == [], path.stem


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_what_does_not_end_is_ended_and_named(source):
    begin = time.perf_counter()
    template = Template("query", source, RenderLimits(seconds=0.3))
    assert time.perf_counter() - begin < 5, "nothing is computed before a row is there"
    rows = [{"text": "a" * 100_000, "power": 400_000_000}] * 2
    with pytest.raises(DataError) as caught:
        template.render_all(rows, ["train.jsonl:1", "train.jsonl:2"])
    said = "train.jsonl:1: the template 'query' cannot be rendered: it takes more than 0.3 seconds"
    assert str(caught.value) == said + REMEDY
    assert Template("query", "{{ text.strip(text) }}b").render({"text": "a"}) == "b"  # another process took its place


@pytest.mark.parametrize("bad", [0, 5, 40])
def test_the_row_that_does_not_end_is_found_among_others(bad):
    template = Template("query", "{{ 1.0 | round(power) }}{{ '' | trim(text) }}", RenderLimits(seconds=0.5))
    rows = [{"power": 1, "text": str(number)} for number in range(60)]
    assert template.render_all(rows) == ["1.0"] * 60
    slow = Template("query", "{{ 1.0 | round(power, 'floor') }}", RenderLimits(seconds=0.5))
    rows[bad] = {"power": 400_000_000, "text": ""}
    with pytest.raises(
        DataError, match=rf"^row {bad}: the template 'query' cannot be rendered: it takes more than 0\.5 "
    ):
        slow.render_all(rows, [f"row {number}" for number in range(60)])


@pytest.mark.parametrize(
    "source", ["{% for a in text %}{% endfor %}", "{% for a in text %}{% endfor %}{{ ''.strip(text) }}"]
)
def test_many_rows_may_not_take_long_together(source):
    template = Template("query", source, RenderLimits(seconds=0.1, seconds_a_row=1e-4))
    rows = [{"text": "a" * 20_000}] * 1_000
    with pytest.raises(
        DataError, match=rf"^(\d+): the template 'query' .*: it takes more than 0\.1\d* seconds for \d+ rows{REMEDY}$"
    ):
        template.render_all(rows, list(map(str, range(1_000))))


def test_many_and_large_rows_come_back_in_order():
    template = Template("query", "{{ text.strip(nothing) }}")
    assert not template.is_short
    rows = [
        {"text": f"{number}-" + "é" * (300_000 if number % 97 == 5 else 20), "nothing": ""} for number in range(700)
    ]
    assert template.render_all(rows) == [row["text"] for row in rows]


def test_a_row_that_is_no_json_is_named():
    template = Template("query", "{{ text.strip(text) }}")
    with pytest.raises(DataError, match=r"^b: the template 'query' cannot be rendered: Object of type set is not JSON"):
        template.render_all([{"text": "a"}, {"text": {"a"}}], ["a", "b"])


def test_what_is_too_long_is_refused_there_too():
    template = Template(
        "query", "{% for a in text %}{{ text }}{% endfor %}{{ ''.strip(text) }}", RenderLimits(chars=1000)
    )
    with pytest.raises(DataError, match=rf"^the template 'query' renders more than 1000 characters{REMEDY}$"):
        template.render({"text": "a" * 100})
    template = Template("query", "{{ text ~ text }}{{ ''.strip(text) }}", RenderLimits(chars=1000))
    with pytest.raises(DataError, match="cannot be rendered: it holds more than 1000 characters"):
        template.render({"text": "a" * 600})
    template = Template("query", "{{ text | list | join(text) }}{{ ''.strip(text) }}", RenderLimits(chars=1000))
    with pytest.raises(DataError, match="cannot be rendered: it joins more than 1000 characters"):
        template.render({"text": "a" * 400})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ 'a' * 4000000000 }}", "it holds more than 1048576 characters"),
        ("{{ 4000000000 * [1] }}", "it holds more than 1048576 characters"),
        ("{{ 'a' | center(4000000000) }}", "it needs too much memory"),
    ],
)
def test_memory_is_limited(source, said):
    begin = time.perf_counter()
    with pytest.raises(RenderError, match=said):
        list(rendered_apart("chat", source, [{}], RenderLimits()))
    assert time.perf_counter() - begin < 20


def test_a_power_without_end_is_killed():
    with pytest.raises(TooSlow, match=r"it takes more than 0\.5 seconds"):
        list(rendered_apart("chat", "{{ 9 ** 999999999 }}", [{}], RenderLimits(seconds=0.5)))


def test_a_process_that_dies_is_named(monkeypatch):
    with Worker("killable_targets:misbehave") as worker:
        monkeypatch.setattr(templates, "_worker", lambda: worker)
        with pytest.raises(ProcessFailed, match=r"^killable_targets:misbehave: AttributeError: 'dict'"):
            list(rendered_apart("task", "{{ text }}", [{}, {}], RenderLimits()))


def test_a_row_is_sent_without_what_the_template_does_not_read():
    template = Template("query", "{{ text.strip(text) }}")
    assert template.render({"text": "a", "other": {1}}) == ""
