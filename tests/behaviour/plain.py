"""What a recording leaves out, because it is another one each time: the whole list is here.

In texts: the folder of the recording, the package's own folder, names of sessions, ports, seconds that something took
or will take, the speed of the machine and the note on bfloat16 that goes by it, disk space, lines of progress. In
JSON: the values of the keys `VOLATILE`, and the checksum of a session's record. Of an API's replies: the time and the
checksum. Everything else is compared.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

VOLATILE = frozenset({"seconds", "seconds_left", "disk_bytes", "flops_per_second", "utilisation", "bfloat16_speedup"})
"""Keys of JSON whose values depend on time, or on how fast the machine is."""
_SUBSTITUTIONS = [
    (re.compile(pattern, re.MULTILINE), words)
    for pattern, words in (
        (r"\d{4}-?\d\d-?\d\dT\d{6}Z-[0-9a-f]{8,13}", "SESSION"),
        (r"(127\.0\.0\.1|localhost):\d+", "HOST:PORT"),
        (r"^.+: (reading|tokenising|loading|scoring)\b.*\n", ""),
        (r"computed in [\d.,]+ (s|min|h)\b", "computed in TIME"),
        (r"about [\d.,]+ (s|min|h) on this machine \(([^,]*), ([^,]*), .*?\)", r"about TIME on this machine (\2, \3)"),
        (r"^(estimated time +about|time left +about) [\d.,]+ (s|min|h)", r"\1 TIME"),
        (r"^note: dtype: bfloat16 would multiply[^)]*\)\n", ""),
        (r"^(disk space +)[\d.,]+ MB", r"\1SIZE"),
        (r"^(SESSION +)[\d,]+ +", r"\1TIME "),
        (r"[ \t]+$", ""),
    )
]
_SESSION = re.compile(r"\d{4}-?\d\d-?\d\dT\d{6}Z-[0-9a-f]{8,13}")


def plain_text(text: str, folders: dict[str, str]) -> str:
    """A text without what changes; ``folders`` are paths and the words for them."""
    for path, words in folders.items():
        text = text.replace(path, words)
    for pattern, words in _SUBSTITUTIONS:
        text = pattern.sub(words, text)
    return text


def plain_lines(text: str, folders: dict[str, str]) -> list[str]:
    """The same as lines."""
    return plain_text(text, folders).splitlines()


def plain_json(content: Any, folders: dict[str, str]) -> Any:
    """JSON without what changes."""
    if isinstance(content, dict):
        return {
            plain_text(key, folders): "VOLATILE" if key in VOLATILE else plain_json(value, folders)
            for key, value in content.items()
        }
    if isinstance(content, list):
        return [plain_json(value, folders) for value in content]
    return plain_text(content, folders) if isinstance(content, str) else content


def files_of(folder: Path, folders: dict[str, str]) -> dict[str, Any]:
    """Every file below a folder by its name: text and JSON as they are, of anything else the SHA-256."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        _SESSION.sub("SESSION", str(path.relative_to(folder))) + _which(path, paths): _content(path, folders)
        for path in paths
    }


def _which(path: Path, paths: list[Path]) -> str:
    """Sessions of one folder are told apart by their order."""
    sessions = [other for other in paths if other.parent == path.parent and _SESSION.match(other.name)]
    return f" ({sorted(sessions).index(path)})" if len(sessions) > 1 and path in sessions else ""


def _content(path: Path, folders: dict[str, str]) -> Any:
    raw = path.read_bytes()
    if path.parent.name == "environment":
        return plain_json({key: value for key, value in json.loads(raw).items() if key != "digest"}, folders)
    if path.parent.name == "api":
        entries = [json.loads(line)["entry"] for line in raw.splitlines()]
        return [{key: value for key, value in entry.items() if key != "time"} for entry in entries]
    if path.suffix == ".json":
        return plain_json(json.loads(raw), folders)
    if path.suffix == ".yaml" or path.name == "FORMAT":
        return plain_lines(raw.decode(), folders)
    return hashlib.sha256(raw).hexdigest()
