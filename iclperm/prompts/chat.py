"""Chats: the model's own template, rendered where it can do no harm and cut into what it writes around the turns.

A template is code that came with a model. It is rendered in a process that can be killed, a few times; prompts are put
together from the pieces, so that contexts times queries stays a product, and some are compared with the template's own.
"""

from __future__ import annotations

import atexit
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray

from iclperm.errors import ConfigError, ModelError, RequestError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.parser import Parser

    from iclperm.tasks import Task
    from iclperm.tasks.killable import Worker

Message = dict[str, str]
Mode = Literal["none", "single", "multiturn"]

MAX_TEMPLATE_CHARS = 1 << 18
MAX_RENDERED_CHARS = 1 << 22
MAX_RENDER_SECONDS = 10.0
_CHATS_PER_CALL = 8
_USERS = ("iclpermasksone", "iclpermaskstwo", "iclpermasksthree")
_ASSISTANTS = ("iclpermsaysone", "iclpermsaystwo", "iclpermsaysthree")


class TemplateRefusal(ModelError):
    """A chat template does not render a conversation."""


@dataclass(frozen=True)
class Chat:
    """A conversation to render; ``is_open`` asks for the header of the turn that the model is to write."""

    messages: list[Message]
    is_open: bool


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja2 template that came with a model, and the special tokens that it sees by name."""

    source: str
    special: dict[str, str]

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """A tokenizer's template, of several the default; raises `ConfigError` where it has none."""
        template = tokenizer.chat_template
        source = template.get("default") if isinstance(template, Mapping) else template
        if not source:
            raise ConfigError("the model's tokenizer has no chat template; set chat to none, or take its chat version")
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are read")
        special = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        return cls(source, special)

    def render(self, chats: Sequence[Chat]) -> list[str]:
        """The text of each chat; raises `TemplateRefusal` with the template's reason, and `ModelError` where it takes
        too long."""
        from iclperm.tasks.killable import Overtime, WorkerError

        texts: list[str] = []
        for begin in range(0, len(chats), _CHATS_PER_CALL):
            some = [{"messages": chat.messages, "is_open": chat.is_open} for chat in chats[begin:][:_CHATS_PER_CALL]]
            try:
                rendered = _worker().call(
                    {"source": self.source, "special": self.special, "chats": some}, MAX_RENDER_SECONDS
                )
            except Overtime:
                raise ModelError(
                    f"the chat template takes more than {MAX_RENDER_SECONDS:g} seconds; set chat to none"
                ) from None
            except WorkerError as error:
                raise ModelError(f"the chat template cannot be rendered: {error}; set chat to none") from None
            texts += map(_text_of, rendered)
        return texts


def _text_of(rendered: Mapping[str, str]) -> str:
    if reason := rendered.get("error"):
        raise TemplateRefusal(f"the chat template cannot be rendered: {reason}; set chat to none")
    return rendered["text"]


@cache
def _worker() -> Worker:
    from iclperm.tasks.killable import Worker

    worker = Worker("iclperm.chat:render_chats")
    atexit.register(worker.close)
    return worker


def render_chats(payload: Mapping[str, Any]) -> list[dict[str, str]]:
    """The text of every chat, or the error that stopped it, in one line; called in a process that can be killed."""
    sandbox = _Sandbox()
    try:
        template = sandbox.from_string(payload["source"])
    except Exception as error:  # Jinja2's own, or Python's where it is nested too deeply
        return [{"error": _reason(error)}] * len(payload["chats"])
    known = {**payload["special"], "tools": None, "documents": None}
    return [
        _rendered(template, {**known, "messages": chat["messages"], "add_generation_prompt": chat["is_open"]})
        for chat in payload["chats"]
    ]


def _rendered(template: Template, values: Mapping[str, Any]) -> dict[str, str]:
    pieces, length = [], 0
    try:
        for piece in template.generate(values):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_RENDERED_CHARS:
                return {"error": f"it writes more than {MAX_RENDERED_CHARS} characters"}
    except Exception as error:  # whatever a template can do wrong
        return {"error": _reason(error)}
    return {"text": "".join(pieces)}


def _reason(error: Exception) -> str:
    if "strftime_now" in str(error):
        return "it asks for today's date, and prompts must not change with the day"
    return " ".join((str(error) or type(error).__name__).split())[:200].rstrip(".")


class _Generation(Extension):
    """``{% generation %}`` marks what an assistant writes, for training; here it is only what stands in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """What transformers gives to a template, without what is not the same every time: the date, and chance."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        del self.filters["random"], self.globals["lipsum"]


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


@dataclass(frozen=True)
class ChatFormat:
    """What stands around the turns of a study's chats; what is said in a turn has no white space around it.

    A prompt is ``opening``, the demonstrations, the query's text, and ``reply`` before a label or ``generation`` before
    what the model writes. With ``single`` all is one user message. With ``multiturn`` a demonstration is its query, a
    user's turn, ``to_assistant``, its answer, and ``to_user``. ``system`` is the system message, "" where there is
    none; ``preface`` is what the first user says before anything else; ``opening`` holds both.
    """

    mode: Literal["single", "multiturn"]
    template: ChatTemplate
    system: str
    preface: str
    opening: str
    to_assistant: str
    to_user: str
    reply: str
    generation: str

    def writes(self, token: str) -> bool:
        """Whether a token that is more than white space stands in what the template writes."""
        pieces = (self.opening, self.to_assistant, self.to_user, self.reply, self.generation)
        return bool(token.strip()) and any(token in piece for piece in pieces)

    def demonstration(self, said: Sequence[str]) -> str:
        """The text of one demonstration: ``said`` is all of it, or the user's and the assistant's part."""
        return said[0] if self.mode == "single" else said[0] + self.to_assistant + said[1] + self.to_user

    def messages(self, demonstrations: Iterable[Sequence[str]], query: str) -> list[Message]:
        """The messages of one prompt."""
        told = [{"role": "system", "content": self.system}] if self.system else []
        if self.mode == "single":
            return [*told, _user(self.preface + "".join(said for (said,) in demonstrations) + query)]
        turns = [message for said in demonstrations for message in (_user(said[0]), assistant(said[1]))]
        first, *others = [*turns, _user(query)]
        return [*told, _user(self.preface + first["content"]), *others]


def chat_format(mode: Mode, task: Task, tokenizer: Any) -> ChatFormat | None:
    """How a study's prompts are put into the template of its tokenizer, None for ``none``.

    With ``multiturn`` the task's instruction is the system message, or opens the first user's turn where the template
    takes none. Raises `ConfigError` for a tokenizer without a template, `ModelError` for a template that fails, or that
    does not write a conversation turn by turn. A few renderings.
    """
    if mode == "none":
        return None
    template = ChatTemplate.of(tokenizer)
    if mode == "single":
        return _cut_single(template, task.opening().lstrip())
    instruction = task.instruction.strip()
    try:
        told = _cut_turns(template, instruction, "")
    except TemplateRefusal:
        if not instruction:
            raise
        told = None
    # A template may also leave out a system message without a word.
    return told if told and instruction in told.opening else _cut_turns(template, "", task.opening().lstrip())


def _cut_single(template: ChatTemplate, preface: str) -> ChatFormat:
    opened, answered = (
        _pieces(template, Chat(_conversation(1, num_answers), is_open=not num_answers)) for num_answers in (0, 1)
    )
    opening, generation = opened
    _refuse_uneven(opening == answered[0], "none")
    return ChatFormat("single", template, "", preface, opening + preface, "", "", answered[1], generation)


def _cut_turns(template: ChatTemplate, system: str, preface: str) -> ChatFormat:
    sizes = ((1, 0), (2, 1), (3, 2), (1, 1), (3, 3))
    told = [{"role": "system", "content": system}] if system else []
    none, one, two, answered, all_answered = (
        _pieces(template, Chat(told + _conversation(*size), is_open=size[0] > size[1])) for size in sizes
    )
    opening, to_assistant, to_user, _, _, generation = two
    reply = answered[1]
    expected = [
        [opening, generation],
        [opening, to_assistant, to_user, generation],
        [opening, to_assistant, to_user, to_assistant, to_user, generation],
        [opening, reply],
        [opening, to_assistant, to_user, to_assistant, to_user, reply],
    ]
    _refuse_uneven([none, one, two, answered[:-1], all_answered[:-1]] == expected, "single or none")
    return ChatFormat(
        "multiturn", template, system, preface, opening + preface, to_assistant, to_user, reply, generation
    )


def _conversation(num_users: int, num_answers: int) -> list[Message]:
    messages = [_user(_USERS[0])]
    for turn in range(num_answers):
        messages.append(assistant(_ASSISTANTS[turn]))
        if turn + 1 < num_users:
            messages.append(_user(_USERS[turn + 1]))
    return messages


def _pieces(template: ChatTemplate, chat: Chat) -> list[str]:
    """What the template writes before, between and after the contents of users and assistant."""
    (text,) = template.render([chat])
    said = [message["content"] for message in chat.messages if message["role"] != "system"]
    pieces = re.split("|".join(map(re.escape, said)), text)
    found = re.findall("|".join(map(re.escape, said)), text)
    if found != said:
        raise TemplateRefusal("the chat template changes, repeats or leaves out what is said; set chat to none")
    return pieces


def _refuse_uneven(is_even: bool, remedy: str) -> None:
    if not is_even:
        raise ModelError(f"the chat template writes the same turn otherwise in other places; set chat to {remedy}")


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """An assistant's message."""
    return {"role": "assistant", "content": content}


_ROLES = ("system", "user", "assistant")
_MARKERS = tuple(f"<|{name}|>" for name in (*_ROLES, "end"))
_MARKED = re.compile("(" + "|".join(map(re.escape, _MARKERS)) + ")")
_FIRST_MARKER, _END = 256, 256 + len(_ROLES)


class TextTokenizer:
    """A tokenizer of text itself, for models that are asked in text: a token for each byte of UTF-8, ids 0 to 255, and
    one for each marker of a chat, from 256 on: ``<|system|>``, ``<|user|>``, ``<|assistant|>``, ``<|end|>``.

    Ids turn back into the very text, or the messages. There is no BOS, and no two tokens ever merge.
    """

    is_fast = True
    all_special_ids = list(range(_FIRST_MARKER, _END + 1))  # noqa: RUF012
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    unk_token_id: int | None = None
    special_tokens_map: dict[str, str] = {}  # noqa: RUF012
    chat_template = (
        "{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )

    def __call__(self, text: Sequence[str], **options: Any) -> dict[str, list[Any]]:
        """``input_ids`` and ``offset_mapping``, the character that each token is of, or is part of."""
        encoded = list(map(_byte_tokens, text))
        return {"input_ids": [ids.tolist() for ids, _ in encoded], "offset_mapping": [spans for _, spans in encoded]}

    def get_added_vocab(self) -> dict[str, int]:
        """The ids of the markers."""
        return dict(zip(_MARKERS, self.all_special_ids, strict=True))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """ASCII as it is, other bytes in hexadecimal."""
        return [_MARKERS[i - 256] if i > 255 else chr(i) if 32 <= i < 127 else f"<0x{i:02X}>" for i in ids]

    def ids_to_text(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """The text that has these ids; raises `RequestError` for ids that are of no text."""
        values = np.asarray(ids, dtype=np.int64)
        places = np.flatnonzero(values >= _FIRST_MARKER)
        if values.size and not 0 <= values.min() <= values.max() <= _END:
            raise RequestError(f"the ids of text are 0 to {_END}, not {values.min()} to {values.max()}")
        pieces = []
        for begin, end in zip([0, *(places + 1)], [*places, len(values)], strict=True):
            pieces.append(_decoded(values[begin:end]))
            pieces += [_MARKERS[values[end] - _FIRST_MARKER]] if end < len(values) else []
        return "".join(pieces)

    def ids_to_messages(self, ids: Sequence[int] | NDArray[np.integer]) -> list[Message]:
        """The messages of a chat that has these ids; the assistant's last turn, not ended, counts where something is in
        it. Raises `RequestError` for ids that are of no chat."""
        values = np.asarray(ids, dtype=np.int64)
        messages, begin = [], 0
        while begin < len(values):
            role, ends = int(values[begin]) - _FIRST_MARKER, np.flatnonzero(values[begin + 1 :] >= _FIRST_MARKER)
            end = begin + 1 + int(ends[0]) if len(ends) else len(values)
            is_ended = end < len(values)
            if not 0 <= role < len(_ROLES) or (is_ended and values[end] != _END) or (not is_ended and role != 2):
                raise RequestError(f"the id {values[begin]} at {begin} begins no turn of a chat; render it as a chat")
            content = _decoded(values[begin + 1 : end])
            messages += [{"role": _ROLES[role], "content": content}] if is_ended or content else []
            begin = end + 1
        return messages


def _byte_tokens(text: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Ids int32 [N] and spans of characters int64 [N, 2]."""
    ids: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
    spans: list[NDArray[np.int64]] = [np.empty((0, 2), np.int64)]
    place = 0
    for piece in _MARKED.split(text):
        if piece in _MARKERS:
            ids.append(np.array([_FIRST_MARKER + _MARKERS.index(piece)], dtype=np.int32))
            spans.append(np.array([[place, place + len(piece)]]))
        else:
            raw = np.frombuffer(piece.encode(), dtype=np.uint8)
            ends = place + np.cumsum((raw & 0xC0) != 0x80)  # a byte that continues no character begins one
            ids.append(raw.astype(np.int32))
            spans.append(np.stack([ends - 1, ends], axis=1))
        place += len(piece)
    return np.concatenate(ids), np.concatenate(spans)


def _decoded(values: NDArray[np.int64]) -> str:
    try:
        return values.astype(np.uint8).tobytes().decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the ids are no text: {error}; give those of whole characters") from None
