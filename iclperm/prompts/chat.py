"""Chats: a model's own template, cut into the pieces that it writes around the turns of a conversation.

A template is code that came with a model. It is rendered a few times, in a process that is killed at a limit
(`iclperm.tasks.templates`), and cut where the turns stand. Prompts are put together from the pieces, so that contexts
times queries stays a product, and some of them are compared with what the template itself makes of the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from iclperm.errors import ConfigError, ModelError, RequestError
from iclperm.tasks.templates import ProcessFailed, RenderError, RenderLimits, TooSlow, rendered_apart

if TYPE_CHECKING:
    from iclperm.tasks.task import Task

Message = dict[str, str]
Mode = Literal["none", "single", "multiturn"]

MAX_TEMPLATE_CHARS = 1 << 18
CHAT_LIMITS = RenderLimits(seconds=10.0, chars=1 << 22)
_USERS = ("iclpermasksone", "iclpermaskstwo", "iclpermasksthree")
_ASSISTANTS = ("iclpermsaysone", "iclpermsaystwo", "iclpermsaysthree")


class TemplateRefusal(ModelError):
    """A chat template does not render a conversation."""


@dataclass(frozen=True)
class Chat:
    """A conversation to render; where it ``is_open``, the header of the turn that the model is to write follows."""

    messages: list[Message]
    is_open: bool


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja2 template that came with a model, and the special tokens that it sees by name."""

    source: str
    special: dict[str, str]
    limits: RenderLimits = CHAT_LIMITS

    @classmethod
    def of(cls, tokenizer: Any, limits: RenderLimits = CHAT_LIMITS) -> Self:
        """A tokenizer's template, of several the default; raises `ConfigError` where it has none."""
        template = tokenizer.chat_template
        source = template.get("default") if isinstance(template, Mapping) else template
        if not source:
            raise ConfigError("the model's tokenizer has no chat template; set chat to none, or take its chat version")
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are read")
        special = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        return cls(source, special, limits)

    def render(self, chats: Sequence[Chat]) -> list[str]:
        """The text of each chat.

        Raises `TemplateRefusal` with the template's reason, and `ModelError` where it takes more than the limits or its
        process dies.
        """
        known = {**self.special, "tools": None, "documents": None}
        rows = [{**known, "messages": chat.messages, "add_generation_prompt": chat.is_open} for chat in chats]
        try:
            return list(rendered_apart("chat", self.source, rows, self.limits))
        except TooSlow as error:
            raise ModelError(f"the chat template {str(error).removeprefix('it ')}; set chat to none") from None
        except ProcessFailed as error:
            raise ModelError(f"the chat template cannot be rendered: {error}; set chat to none") from None
        except RenderError as error:
            raise TemplateRefusal(f"the chat template cannot be rendered: {_reason(error)}; set chat to none") from None


def _reason(error: RenderError) -> str:
    if "strftime_now" in str(error):
        return "it asks for today's date, and prompts must not change with the day"
    return " ".join(str(error).split())[:200].rstrip(".")


@dataclass(frozen=True)
class ChatFormat:
    """What stands around the turns of a study's chats.

    A prompt is ``opening``, the demonstrations, the query's text, and ``reply`` before a label or ``generation`` before
    what the model writes. With ``single`` all of it is one message of the user. With ``multiturn`` a demonstration is
    its query in the user's turn, ``to_assistant``, its answer, and ``to_user``; what a turn contains has no white space
    around it. ``system`` is the system message, "" where there is none; ``preface`` is the text before anything else in
    the user's first turn; ``opening`` holds both.
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
        """Whether the template writes this token; never of one that is white space."""
        pieces = (self.opening, self.to_assistant, self.to_user, self.reply, self.generation)
        return bool(token.strip()) and any(token in piece for piece in pieces)

    def demonstration(self, parts: Sequence[str]) -> str:
        """The text of one demonstration: ``parts`` are the whole of it, or the user's and the assistant's part."""
        return parts[0] if self.mode == "single" else parts[0] + self.to_assistant + parts[1] + self.to_user

    def messages(self, demonstrations: Iterable[Sequence[str]], query: str) -> list[Message]:
        """The messages of one prompt; ``demonstrations`` are in parts, as `demonstration` takes them."""
        return conversation(demonstrations, query, self.system, self.preface, is_single=self.mode == "single")


def conversation(
    demonstrations: Iterable[Sequence[str]], query: str, system: str, preface: str, *, is_single: bool
) -> list[Message]:
    """See `ChatFormat.messages`."""
    before = _system(system)
    if is_single:
        return [*before, _user(preface + "".join(text for (text,) in demonstrations) + query)]
    turns = [message for parts in demonstrations for message in (_user(parts[0]), assistant(parts[1]))]
    first, *others = [*turns, _user(query)]
    return [*before, _user(preface + first["content"]), *others]


def chat_format(mode: Mode, task: Task, tokenizer: Any, limits: RenderLimits = CHAT_LIMITS) -> ChatFormat | None:
    """How a study's prompts are put into the template of its tokenizer; None for the mode ``none``.

    With ``multiturn`` the task's instruction is the system message, or opens the user's first turn where the template
    takes no system message. ``limits`` are what each of the few renderings may take. Raises `ConfigError` for a
    tokenizer without a template, `ModelError` for a template that fails, or that does not write a conversation turn by
    turn.
    """
    if mode == "none":
        return None
    template = ChatTemplate.of(tokenizer, limits)
    if mode == "single":
        return _cut_single(template, task.opening().lstrip())
    instruction = task.instruction.strip()
    try:
        with_system = _cut_turns(template, instruction, "")
        # A template may also leave out a system message without a word.
        if instruction in with_system.opening:
            return with_system
    except TemplateRefusal:
        if not instruction:
            raise
    return _cut_turns(template, "", task.opening().lstrip())


def _cut_single(template: ChatTemplate, preface: str) -> ChatFormat:
    opened, answered = (
        _pieces(template, Chat(_conversation(1, num_answers), is_open=not num_answers)) for num_answers in (0, 1)
    )
    opening, generation = opened
    _refuse_uneven(opening == answered[0], "none")
    return ChatFormat("single", template, "", preface, opening + preface, "", "", answered[1], generation)


def _cut_turns(template: ChatTemplate, system: str, preface: str) -> ChatFormat:
    sizes = ((1, 0), (2, 1), (3, 2), (1, 1), (3, 3))
    none, one, two, answered, all_answered = (
        _pieces(template, Chat(_system(system) + _conversation(*size), is_open=size[0] > size[1])) for size in sizes
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


def _system(content: str) -> list[Message]:
    """The system message, if there is one."""
    return [{"role": "system", "content": content}] if content else []


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
    contents = [message["content"] for message in chat.messages if message["role"] != "system"]
    pieces = re.split("|".join(map(re.escape, contents)), text)
    found = re.findall("|".join(map(re.escape, contents)), text)
    if found != contents:
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
    """A tokenizer for models behind an API, which get text: its ids are the text itself.

    Each byte of UTF-8 is a token, ids 0 to 255, and so is each marker of a chat, from 256 on: ``<|system|>``,
    ``<|user|>``, ``<|assistant|>``, ``<|end|>``. Ids turn back into the very text, or the messages. There is no BOS,
    and no two tokens ever merge.
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
        """``input_ids``, and as ``offset_mapping`` the character that each token is, or is a part of."""
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
        """The messages of a chat that has these ids.

        The last turn, the assistant's, has no end marker; it is a message unless it is empty. Raises `RequestError` for
        ids that are of no chat.
        """
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
