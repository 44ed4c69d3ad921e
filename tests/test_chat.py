"""Chats: every prompt has the ids that transformers gives to the same conversation, and templates can do no harm."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import make_rows, make_task, write_rows
from transformers import AutoTokenizer

from iclperm import Study, Task, demo
from iclperm.errors import ConfigError, ModelError, RequestError, TokenizationError
from iclperm.prompts import chat
from iclperm.prompts.chat import ChatTemplate, TextTokenizer, chat_format
from iclperm.prompts.design import CONTENT_FREE, content_free_examples, draw
from iclperm.prompts.encode import prompt_tokens
from iclperm.prompts.render import prompt_text
from iclperm.prompts.tokenise import tokenise
from iclperm.tasks.templates import RenderLimits

TEMPLATES = Path(__file__).parent / "fixtures" / "chat"
# The tokens that a family's template writes: special ones, and others that are only added.
FAMILIES = {
    "qwen2": (["<|im_start|>", "<|im_end|>"], []),
    "gemma": (["<start_of_turn>", "<end_of_turn>"], []),
    "gemma3": (["<start_of_turn>", "<end_of_turn>"], []),
    "llama3": (["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], []),
    "deepseek_r1": (
        ["<\uff5cend\u2581of\u2581sentence\uff5c>"],
        ["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<think>", "</think>"],
    ),
}
MODES = ("single", "multiturn")


def make_solved_task(folder, **changes):
    """A task whose answers are written, each a sentence of its own."""
    wording = {
        "demonstration": "Q: {{ text }}\nA: {{ working }}",
        "query": "Q: {{ text }}\nA:",
        "fields": {"text": "text", "working": "working"},
        "labels": None,
        "answer": {"field": "working", "check": "number"},
        "max_new_tokens": 8,
    }
    path = make_task(folder, **{**wording, **changes})
    for split, name, count in ((1, "train", 60), (2, "test", 30)):
        rows = [{"text": row["text"], "working": f"It is {row['text'][-2:]}."} for row in make_rows(split, count)]
        write_rows(folder / f"{name}.jsonl", rows)
    return path


def bundled_tokenizer(template, special=(), added=()):
    """The demo model's tokenizer with a chat template and the tokens that it writes."""
    tokenizer = AutoTokenizer.from_pretrained(demo.model_path())
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.add_tokens(list(added))
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers():
    return {
        name: bundled_tokenizer((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), *tokens)
        for name, tokens in FAMILIES.items()
    }


def lay_out(path, tokenizer, mode, scoring="loglikelihood", **choices):
    task = Task.load(path)
    examples = {split: task.examples(split) for split in ("train", "test")}
    study = Study(**{"task": str(path), "sets": 2, "permutations": 2, "shots": [0, 1, 3], "queries": 4, **choices})
    design = draw(study, task, examples)
    prompts = tokenise(design, task, examples, tokenizer, study.seed, scoring=scoring, chat=mode)
    return (design, task, examples), prompts


def cells_of(parts, prompts, tokenizer, mode, scoring="loglikelihood"):
    """The text and the ids of every cell and label."""
    apart = {(cell.context, cell.query): cell for cell in prompts.general}
    format_ = chat_format(mode, parts[1], tokenizer)
    for cell in np.ndindex(*prompts.context_of.shape, len(prompts.queries)):
        text = prompt_text(*parts, cell=cell, scoring=scoring, chat=format_)
        context, query = int(prompts.context_of[cell[:3]]), cell[3]
        own = apart.get((context, query))
        joined = np.concatenate([prompts.contexts[context], prompts.queries[query]]) if own is None else own.prompt
        for label, ids in enumerate(prompts.continuations if own is None else own.continuations):
            yield text, text.continuations[label], np.concatenate([joined, ids]).tolist()


def of_transformers(tokenizer, text, continuation, **options):
    """The oracle: the ids of the same messages, with the answer begun, and none of what ends its turn."""
    messages = [*text.messages, {"role": "assistant", "content": continuation}] if continuation else [*text.messages]
    if not continuation:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
    return tokenizer.apply_chat_template(messages, continue_final_message=True, return_dict=False, **options)


@pytest.mark.parametrize("scoring", ["loglikelihood", "generate"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cell_has_the_ids_that_transformers_gives(tmp_path, tokenizers, family, mode, scoring):
    tokenizer = tokenizers[family]
    path = make_task(tmp_path, instruction="Name the colour.")
    parts, prompts = lay_out(path, tokenizer, mode, scoring)
    start = [] if "bos_token" in tokenizer.chat_template else [tokenizer.bos_token_id]
    for text, continuation, ids in cells_of(parts, prompts, tokenizer, mode, scoring):
        assert ids == start + of_transformers(tokenizer, text, continuation, date_string="26 Jul 2024")
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id
    assert prompts.start.tolist() == [tokenizer.bos_token_id]
    assert not prompts.general


@pytest.mark.parametrize("family", ["qwen2", "gemma"])
def test_a_generated_demonstration_is_cut_after_its_query(tmp_path, tokenizers, family):
    parts, prompts = lay_out(make_solved_task(tmp_path), tokenizers[family], "multiturn", "generate")
    start = [] if family == "gemma" else [tokenizers[family].bos_token_id]
    for text, continuation, ids in cells_of(parts, prompts, tokenizers[family], "multiturn", "generate"):
        assert ids == start + of_transformers(tokenizers[family], text, continuation)
        asked = [message["content"] for message in text.messages if message["role"] == "user"]
        answers = [message["content"] for message in text.messages if message["role"] == "assistant"]
        assert len(asked) == len(answers) + 1
        assert all(content.startswith("Q: The ") and content.endswith("\nA:") for content in asked)
        assert all(content.startswith("It is ") for content in answers)


def test_a_demonstration_that_does_not_begin_as_its_query_makes_no_turns(tmp_path, tokenizers):
    path = make_solved_task(tmp_path, demonstration="Question: {{ text }}\nA: {{ working }}")
    with pytest.raises(ConfigError, match="'colours': with chat multiturn the template 'demonstration' must begin as"):
        lay_out(path, tokenizers["qwen2"], "multiturn", "generate")
    lay_out(path, tokenizers["qwen2"], "single", "generate")


def test_a_generation_prompt_that_opens_a_thought_stands_before_no_label(tmp_path, tokenizers):
    path = make_task(tmp_path)
    queries = {}
    for scoring in ("loglikelihood", "generate"):
        _, prompts = lay_out(path, tokenizers["deepseek_r1"], "single", scoring, shots=0, sets=1, permutations=1)
        queries[scoring] = tokenizers["deepseek_r1"].decode(prompts.queries[0])
    assert queries["loglikelihood"].endswith("Colour:<\uff5cAssistant\uff5c>")
    assert queries["generate"].endswith("Colour:<\uff5cAssistant\uff5c><think>\n")


def shown(path, tokenizer, mode, cell=(0, 0, 1, 0), scoring="loglikelihood"):
    parts, _ = lay_out(path, tokenizer, mode, scoring)
    return prompt_text(*parts, cell=cell, scoring=scoring, chat=chat_format(mode, parts[1], tokenizer))


def test_the_turns_of_a_conversation(tmp_path, tokenizers):
    path = make_task(tmp_path, instruction="Name the colour.")
    text = shown(path, tokenizers["qwen2"], "multiturn")
    told, asked, answered, query = text.messages
    assert told == {"role": "system", "content": "Name the colour."}
    assert asked["content"].startswith("Thing: The ")
    assert asked["content"].endswith("\nColour:")
    assert (answered["role"], answered["content"]) in {("assistant", word) for word in ("Red", "Green", "Blue")}
    assert text.continuations == ["Red", "Green", "Blue"]
    around = "<|im_end|>\n<|im_start|>"
    assert text.context == (
        f"<|im_start|>system\nName the colour.{around}user\n{asked['content']}{around}assistant\n"
        f"{answered['content']}{around}user\n"
    )
    assert text.query == f"{query['content']}{around}assistant\n"


def test_one_message_holds_the_whole_prompt(tmp_path, tokenizers):
    path = make_task(tmp_path, instruction="Name the colour.", query="Thing: {{ text }}\nColour: ")
    text = shown(path, tokenizers["qwen2"], "single")
    (message,) = text.messages
    assert message["content"].startswith("Name the colour.\n\nThing: The ")
    assert message["content"].endswith("\nColour:")
    assert text.context.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nName")


@pytest.mark.parametrize("family", ["gemma", "qwen2"])
def test_an_instruction_opens_the_first_turn_where_there_is_no_system_message(tmp_path, tokenizers, family):
    path = make_task(tmp_path, instruction="Name the colour.")
    source = tokenizers[family].chat_template
    if family == "qwen2":  # in silence
        source = source.replace("for message in messages", "for message in messages if message.role != 'system'")
    tokenizer = bundled_tokenizer(source, *FAMILIES[family])
    for cell in ((0, 0, 0, 0), (0, 0, 2, 0)):
        first, *others = shown(path, tokenizer, "multiturn", cell).messages
        assert first["role"] == "user"
        assert first["content"].startswith("Name the colour.\n\nThing: ")
        assert len(others) == 2 * cell[2] + 2 * (cell[2] // 2)
        assert not any("Name" in message["content"] for message in others)


def test_first_tokens_and_content_free_queries_work_in_a_chat(tmp_path, tokenizers):
    path = make_task(tmp_path)
    choices = {"shots": 1, "sets": 1, "permutations": 1, "calibration": "contextual"}
    task = Task.load(path)
    study = Study(task=str(path), queries=4, **choices)
    examples = {split: task.examples(split) for split in ("train", "test")}
    examples[CONTENT_FREE] = content_free_examples(task, examples["train"])
    design = draw(study, task, examples)
    prompts = tokenise(design, task, examples, tokenizers["gemma"], 0, scoring="first_token", chat="multiturn")
    assert list(map(len, prompts.continuations)) == [1, 1, 1]
    asked = [tokenizers["gemma"].decode(query) for query in prompts.queries]
    assert asked[-3:] == [
        f"Thing: {text}\nColour:<end_of_turn>\n<start_of_turn>model\n" for text in ("N/A", "", "[MASK]")
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["qwen2", "deepseek_r1"])
def test_the_tokens_shown_are_those_scored(tmp_path, tokenizers, family, mode):
    tokenizer = tokenizers[family]
    parts, prompts = lay_out(make_task(tmp_path), tokenizer, mode)
    cell = (1, 1, 2, 3)
    text = prompt_text(*parts, cell=cell, chat=chat_format(mode, parts[1], tokenizer))
    context = prompts.contexts[prompts.context_of[cell[:3]]]
    tokens = prompt_tokens(text, tokenizer)
    assert tokenizer.convert_tokens_to_ids(tokens.pieces) == [*context, *prompts.queries[3]]
    assert tokens.num_context == len(context)
    assert tokens.opening == [tokenizer.bos_token]
    assert [tokenizer.convert_tokens_to_ids(label) for label in tokens.labels] == [
        ids.tolist() for ids in prompts.continuations
    ]


@pytest.mark.parametrize(("family", "token"), [("qwen2", "<|im_end|>"), ("deepseek_r1", "<think>")])
def test_what_the_template_writes_may_not_stand_in_the_data(tmp_path, tokenizers, family, token):
    path = make_task(tmp_path)
    write_rows(tmp_path / "test.jsonl", [{**row, "text": f"{row['text']} {token}"} for row in make_rows(2, 30)])
    with pytest.raises(TokenizationError, match="holds a special token of this tokenizer; remove it"):
        lay_out(path, tokenizers[family], "single")
    if family == "deepseek_r1":  # it is an ordinary word to a template that does not write it
        plain = bundled_tokenizer("{{ bos_token }}{% for m in messages %}{{ m.content }} {% endfor %}", added=[token])
        lay_out(path, plain, "single", "generate")


def test_a_bos_written_twice_is_refused(tmp_path, tokenizers):
    twice = bundled_tokenizer("{{ bos_token }}" + tokenizers["gemma"].chat_template, *FAMILIES["gemma"])
    with pytest.raises(TokenizationError, match=r"the chat template begins with BOS \(id 0\) twice"):
        lay_out(make_task(tmp_path), twice, "single")


def test_of_several_templates_the_default_is_taken():
    several = SimpleNamespace(chat_template={"tool_use": "b", "default": "a"}, special_tokens_map={"bos_token": "<s>"})
    assert ChatTemplate.of(several) == ChatTemplate("a", {"bos_token": "<s>"})


@pytest.mark.parametrize("template", [None, {}, {"tool_use": "b"}])
def test_a_tokenizer_without_a_template_is_refused(tmp_path, template):
    with pytest.raises(ConfigError, match="has no chat template; set chat to none"):
        chat_format("single", Task.load(make_task(tmp_path)), SimpleNamespace(chat_template=template))


def test_no_chat_needs_no_tokenizer(tmp_path):
    assert chat_format("none", Task.load(make_task(tmp_path)), None) is None


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ raise_exception('no\nsuch chat') }}", "no such chat"),
        ("{{ strftime_now('%d') }}", "it asks for today's date, and prompts must not change with the day"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{{ [1, 2] | random }}", "No filter named 'random'"),
        ("{% include '/etc/passwd' %}", "no loader for this environment"),
        ("{% for i in range(100) %}{{ 'a' * 100000 }}{% endfor %}", "writes more than 4194304 characters"),
        ("{{ 'a' * 10000000000000 }}", "cannot be rendered: "),
        ("{{ '(' * 1 }}{{ " + "(" * 5000 + ")" * 5000 + " }}", "cannot be rendered: "),
        ("{{ messages[0].content | upper }}", "changes, repeats or leaves out what is said"),
        (TURNS + "{{ messages[0].content }}", "changes, repeats or leaves out what is said"),
        ("{{ messages | length }}" + TURNS, "writes the same turn otherwise in other places"),
        (" " * (chat.MAX_TEMPLATE_CHARS + 1), "at most 262144 are read"),
    ],
)  # fmt: skip
def test_a_template_that_fails_or_harms_is_refused_in_one_line(tmp_path, source, complaint):
    tokenizer = SimpleNamespace(chat_template=source, special_tokens_map={})
    with pytest.raises(ModelError) as caught:
        chat_format("multiturn", Task.load(make_task(tmp_path)), tokenizer)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_without_end_is_killed(tmp_path):
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    task = Task.load(make_task(tmp_path))
    with pytest.raises(ModelError, match=r"takes more than 0\.3 seconds; set chat to none"):
        chat_format(
            "single", task, SimpleNamespace(chat_template=loops, special_tokens_map={}), RenderLimits(seconds=0.3)
        )
    assert chat_format("single", task, TextTokenizer()).opening == "<|user|>"  # another process took its place


def test_a_template_sees_what_transformers_gives_it(tokenizers):
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "    {% generation %}{{ m | tojson(sort_keys=true) }}{% endgeneration %}\n"
        "{% endfor %}{{ bos_token }}{{ tools is none }}{{ unheard_of }}{{ add_generation_prompt }}"
    )
    messages = [{"role": "system", "content": "no"}, {"role": "user", "content": "<ä>"}]
    tokenizer = tokenizers["qwen2"]
    theirs = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, add_generation_prompt=True)
    special = dict(tokenizer.special_tokens_map)
    assert ChatTemplate(source, special).render([chat.Chat(messages, is_open=True)]) == [theirs]
    assert "<ä>" in theirs


def test_a_turn_that_depends_on_its_place_leaves_one_message(tmp_path):
    task = Task.load(make_task(tmp_path))
    tokenizer = SimpleNamespace(chat_template="{{ messages | length }}" + TURNS, special_tokens_map={})
    with pytest.raises(ModelError, match="otherwise in other places; set chat to single or none"):
        chat_format("multiturn", task, tokenizer)
    with pytest.raises(ModelError, match="otherwise in other places; set chat to none"):
        chat_format("single", task, tokenizer)
    tokenizer.chat_template = "{% if messages | length > 2 %}!{% endif %}" + TURNS
    assert chat_format("single", task, tokenizer).opening == "<user>"


def test_contents_that_the_template_changes_are_noticed(tmp_path, tokenizers):
    path = make_task(tmp_path, demonstration=" Thing: {{ text }}\nColour: {{ label }}")
    lay_out(path, tokenizers["qwen2"], "single")
    with pytest.raises(ModelError, match=r"changes what is said \(query \d+ after [13] demonstrations\); begin"):
        lay_out(path, tokenizers["gemma"], "single")  # it trims


@pytest.mark.parametrize("scoring", ["loglikelihood", "generate"])
@pytest.mark.parametrize("mode", ["none", *MODES])
def test_text_itself_as_tokens_turns_back_into_text_and_messages(tmp_path, mode, scoring):
    path, tokenizer = make_task(tmp_path, instruction="Näme 色."), TextTokenizer()
    parts, prompts = lay_out(path, tokenizer, mode, scoring)
    assert not prompts.general
    assert prompts.counts.num_failed_seams == prompts.counts.num_failed_prompts == 0
    assert not len(prompts.start)
    for text, continuation, ids in cells_of(parts, prompts, tokenizer, mode, scoring):
        assert tokenizer.ids_to_text(ids) == text.context + text.query + continuation
        if mode != "none":
            answer = [{"role": "assistant", "content": continuation}] if continuation else []
            assert tokenizer.ids_to_messages(ids) == [*text.messages, *answer]


def test_markers_of_text_may_not_stand_in_the_data(tmp_path):
    path = make_task(tmp_path)
    write_rows(tmp_path / "test.jsonl", [{**row, "text": f"{row['text']} <|end|>"} for row in make_rows(2, 30)])
    with pytest.raises(TokenizationError, match="holds a special token"):
        lay_out(path, TextTokenizer(), "single")


@given(st.text())
def test_any_text_comes_back_from_its_ids(text):
    tokenizer = TextTokenizer()
    encoded = tokenizer([text], add_special_tokens=False, return_offsets_mapping=True)
    ids, spans = encoded["input_ids"][0], encoded["offset_mapping"][0]
    assert tokenizer.ids_to_text(ids) == text
    assert bytes(ids) == text.encode()
    assert [text[begin:end] for begin, end in spans] == [sign for sign in text for _ in sign.encode()]


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text())), st.booleans())
def test_any_messages_come_back_from_their_ids(turns, is_open):
    tokenizer = TextTokenizer()
    text = "".join(f"<|{role}|>{content}<|end|>" for role, content in turns) + "<|assistant|>" * is_open
    (ids,) = tokenizer([text])["input_ids"]
    assert tokenizer.ids_to_messages(ids) == [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize("ids", [[104, 105], [257, 104], [257, 104, 257], [259], [258, 195], [-1], [260]])
def test_ids_of_no_chat_are_refused(ids):
    with pytest.raises(RequestError, match=r"begins no turn of a chat|are no text"):
        TextTokenizer().ids_to_messages(ids)


@pytest.mark.parametrize("ids", [[195], [-1, 3], [260]])
def test_ids_of_no_text_are_refused(ids):
    with pytest.raises(RequestError, match=r"the ids are no text|the ids of text are 0 to 259"):
        TextTokenizer().ids_to_text(ids)


def test_tokens_of_text_are_shown_as_signs_or_bytes():
    tokenizer = TextTokenizer()
    (ids,) = tokenizer(["<|user|>Aä\n<|end|>"])["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", "A", "<0xC3>", "<0xA4>", "<0x0A>", "<|end|>"]
