"""From a design to token ids: which demonstrations in which order, as text, as tokens, cut where they may be shared.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iclperm.base.lazy import loaded_on_use

if TYPE_CHECKING:
    from iclperm.prompts.chat import TextTokenizer, chat_format

__all__ = ["TextTokenizer", "chat_format"]

__getattr__, __dir__ = loaded_on_use(
    __name__,
    {
        "iclperm.prompts.chat": ("TextTokenizer", "chat_format"),
    },
)
