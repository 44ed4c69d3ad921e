"""A tokenizer.json of a stranger, looked at before it is made a tokenizer; and its library, where it gives up."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from iclperm.base.files import read_given
from iclperm.errors import ModelError, TokenizationError, printable

_MOST_BYTES = 256 << 20
_MOST_GROWTH = 1_000  # characters that one may become: NFKD makes up to 18, a word for a character some dozens
_MOST_AROUND = 100
_MOST_ID = (1 << 31) - 1


def check_tokenizer_file(path: Path) -> Mapping[str, Any]:
    """What a tokenizer.json says.

    Raises ModelError in one line for what is no JSON object in a regular file, for a text that would grow beyond
    memory in it, and for ids that no model can have. O(its size).
    """
    try:
        content = json.loads(read_given(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = printable(" ".join(str(getattr(error, "strerror", None) or error).split()))[:200]
        raise ModelError(f"'{path}' cannot be read ({reason}); save or fetch it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"'{path}' is no tokenizer: a JSON object is needed; save or fetch it again")
    for key, inserted in (("normalizer", "content"), ("normalizer", "prepend"), ("decoder", "content")):
        texts = [part[inserted] for part in _parts(content.get(key)) if isinstance(part.get(inserted), str)]
        growth = math.prod(max(1, len(text)) for text in texts)
        if growth > _MOST_GROWTH:
            raise ModelError(
                f"'{path}' makes up to {growth:,} characters of one ({key}); {_MOST_GROWTH:,} are the most that are "
                "served: use the model's own tokenizer"
            )
    for part in _parts(content.get("post_processor")):
        for around in (part.get("single"), part.get("ids")):
            if isinstance(around, list) and len(around) > _MOST_AROUND:
                raise ModelError(
                    f"'{path}' puts {len(around):,} tokens around each text (post_processor); {_MOST_AROUND} are the "
                    "most that are served: use the model's own tokenizer"
                )
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    for token, number in vocabulary.items() if isinstance(vocabulary, dict) else ():
        if isinstance(number, int) and number > _MOST_ID:
            raise ModelError(
                f"'{path}' gives {printable(repr(token))[:100]} the id {number}, beyond those that a model can have; "
                "save or fetch it again"
            )
    return content


@contextmanager
def told_where_it_gives_up() -> Iterator[None]:
    """A panic of the tokenizers library, which passes every ``except Exception``, becomes a `TokenizationError`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = printable(" ".join(str(error).split()))[:200]
        raise TokenizationError(
            f"the tokenizers library gives up on a text ({reason}); use the model's own tokenizer.json"
        ) from None


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a value, itself included."""
    waiting = [value]
    while waiting:
        place = waiting.pop()
        if isinstance(place, dict):
            yield place
            waiting += place.values()
        elif isinstance(place, list):
            waiting += place
