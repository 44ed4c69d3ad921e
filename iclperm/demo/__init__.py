"""The bundled demo: a small model that learns labels in context, and the headlines it was trained and is tested on."""

from pathlib import Path


def model_path() -> Path:
    """Folder of the bundled model, as ``AutoModelForCausalLM.from_pretrained`` takes it."""
    return Path(__file__).parent / "model"


def data_path() -> Path:
    """Folder of mini_news: ``train.jsonl``, ``dev.jsonl`` and ``test.jsonl``, each line a ``text`` and a ``label``."""
    return Path(__file__).parent / "data" / "mini_news"
