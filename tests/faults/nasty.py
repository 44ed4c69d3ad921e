"""Known-bad contents of every kind of file, and how others are made of whole ones by chance."""

from __future__ import annotations

import copy
import io
import json
import pickle
import struct
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import yaml

BOMB = "\n".join(
    [f"a0: &a0 [{', '.join(['x'] * 10)}]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))]
)
YAML: dict[str, bytes] = {
    "nothing": b"",
    "a NUL": b"sets: 2\0\n",
    "a list": b"- 1\n",
    "text": b"just words\n",
    "a bomb": BOMB.encode(),
    "a circle": b"&a sets: *a\n",
    "a list of itself": b"shots: &a [*a]\n",
    "python": b"sets: !!python/object/apply:os.system ['touch owned']\n",
    "a python name": b"model: !!python/name:os.system\n",
    "a tag of its own": b"model: !x y\n",
    "deep lists": b"shots: " + b"[" * 20_000 + b"]" * 20_000,
    "deep maps": b"{a: " * 3_000 + b"}" * 3_000,
    "a long number": b"sets: " + b"9" * 100_000,
    "hexadecimal": b"sets: 0x" + b"F" * 10_000,
    "sexagesimal": b"sets: " + b":".join([b"59"] * 2_000),
    "a long text": b"model: " + b"x" * 5_000_000,
    "UTF-16": "sets: 2\n".encode("utf-16"),
    "no UTF-8": b"model: \xff\xfe\n",
    "a surrogate": b'model: "\\ud800"\n',
    "escapes": b'model: "\\e[2J\\e]0;x\\a"\n',
    "an unknown key of escapes": b'"\\e[2J": 1\n',
    "two documents": b"sets: 2\n---\nsets: 3\n",
    "a key twice": b"sets: 2\nsets: 3\n",
    "a merge": b"a: &a {sets: 2}\n<<: *a\n",
    "a merge of itself": b"&a\n<<: *a\n",
    "a date": b"sets: 2020-13-45\n",
    "not a number": b"sets: .nan\n",
    "without end": b"sets: .inf\n",
    "a binary": b"model: !!binary aGk=\n",
    "a null key": b"~: 1\n",
    "a list for a key": b"? [1, 2]\n: 1\n",
    "tabs": b"sets:\t2\n\tx: 1\n",
    "an anchor that is none": b"sets: *nothing\n",
    "an open quote": b'model: "demo\n',
    "a million lines": b"# x\n" * 1_000_000,
}
TEMPLATES: dict[str, str] = {
    "a class": "{{ text.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f.__globals__ }}",
    "an attribute by a filter": "{{ text | attr('__class__') }}",
    "a format": "{{ '{0.__class__}'.format(text) }}",
    "a format map": "{{ '{a.__class__}'.format_map({'a': text}) }}",
    "a loop": "{% for i in range(10**9) %}x{% endfor %}",
    "loops": "{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}",
    "a silent loop": "{% for i in range(9999) %}" * 3 + "{% endfor %}" * 3,
    "a long text": "{{ 'x' * 10**10 }}",
    "a long text by filters": "{{ text | center(10**10) }}",
    "a text of texts": "{% set n = namespace(a='xx') %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "a power": "{{ 10 ** 10 ** 8 }}",
    "a power of powers": "{{ (9 ** 9 ** 9) % 7 }}",
    "a list": "{{ range(99999) | list | join('x' * 99999) }}",
    "lipsum": "{{ lipsum(100000) }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% from 'os' import system %}",
    "extends": "{% extends 'x' %}",
    "no such name": "{{ nothing }}",
    "no such filter": "{{ text | nothing }}",
    "half a tag": "{{ text ",
    "half a block": "{% if text %}x",
    "deep": "{% if text %}" * 500 + "{% endif %}" * 500,
    "brackets": "{{ " + "(" * 5_000 + "text" + ")" * 5_000 + " }}",
    "a sum of many": "{{ " + "+".join(["1"] * 50_000) + " }}",
    "nothing": "",
    "blank": "   \n",
    "a NUL": "{{ text }}\0",
    "a division": "{{ 1 / 0 }}",
    "a slice": "{{ text[::0] }}",
    "a width": "{{ '%9999999999d' % 1 }}",
    "a width by a format": "{{ '{:>9999999999}'.format(1) }}",
    "wordwrap": "{{ text | wordwrap(0) }}",
    "indent": "{{ ('x\n' * 9999) | indent(99999) }}",
    "changes its data": "{{ text.append(1) }}",
    "escapes": "\x1b[2J{{ text }}",
    "a debugger": "{% debug %}",
    "do": "{% do 1 %}",
}
TABLES: dict[str, tuple[str, bytes]] = {
    "an empty jsonl": ("jsonl", b""),
    "deep JSON": ("jsonl", b"[" * 200_000 + b"\n"),
    "a long number": ("jsonl", b'{"text": "a", "label": ' + b"9" * 10_000 + b"}\n"),
    "a huge exponent": ("jsonl", b'{"text": "a", "label": 1e999}\n'),
    "NaN": ("jsonl", b'{"text": NaN, "label": "Red"}\n'),
    "an object for text": ("jsonl", b'{"text": {"a": 1}, "label": ["Red"]}\n'),
    "escapes": ("jsonl", json.dumps({"text": "\x1b[2J\x07", "label": "\x1b]0;x\x07"}).encode()),
    "no line break for long": ("jsonl", b'{"text": "' + b"a" * 20_000_000),
    "a million keys": ("jsonl", json.dumps({f"k{n}": n for n in range(200_000)}).encode()),
    "a NUL in CSV": ("csv", b"text,label\na\0,Red\n"),
    "quotes": ("csv", b'text,label\n"' * 2_000),
    "a long line of CSV": ("csv", b"text,label\n" + b"a" * 5_000_000),
    "a hundred thousand columns": ("csv", b",".join(b"c%d" % n for n in range(100_000)) + b"\n"),
    "a short parquet": ("parquet", b"PAR1PAR1"),
    "a parquet with a huge footer": ("parquet", b"PAR1" + struct.pack("<I", 0xFFFFFFF0) + b"PAR1"),
    "a parquet of noise": ("parquet", b"PAR1" + bytes(range(256)) * 4 + struct.pack("<I", 900) + b"PAR1"),
    "a folder's name": ("jsonl", b"\x1f\x8b" + b"x" * 100),
}


_EXTREMES = struct.pack("<4d", float("inf"), float("nan"), -1e308, 1e308)


class Owned:
    """What a pickle runs when it is loaded: it makes a file, and nothing may ever load it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (str(self._path), "w")


def arrays(owned: Path) -> dict[str, tuple[str, bytes]]:
    """Bad files for `iclperm stats`, beside those of `TABLES`; one that is loaded as a pickle writes ``owned``."""

    def shaped(shape: str, data: bytes = b"", kind: str = "'|u1'") -> bytes:
        return npy(f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}", data)

    def npy(header: str, data: bytes = b"") -> bytes:
        raw = header.encode() + b"\n"
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(raw)) + raw + data

    def zipped(**files: bytes) -> bytes:
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, raw in files.items():
                archive.writestr(name.replace("__", "/"), raw)
        return target.getvalue()

    objects = io.BytesIO()
    np.save(objects, np.array([Owned(owned)], dtype=object), allow_pickle=True)
    huge = "(1099511627776, 4, 4)"
    whole = io.BytesIO()
    np.save(whole, np.ones((2, 2, 3), np.uint8))
    return {
        "an array of objects": ("npy", objects.getvalue()),
        "a pickle alone": ("npy", pickle.dumps(Owned(owned))),
        "a huge shape": ("npy", shaped(huge)),
        "a negative shape": ("npy", shaped("(-1, 4)", b"\1" * 4)),
        "a shape without end": ("npy", shaped("(9223372036854775807, 9)")),
        "no dictionary": ("npy", npy("__import__('os').system('true')")),
        "a deep header": ("npy", npy("(" * 5_000)),
        "a strange type": ("npy", shaped("(2, 2)", kind="'<M8[ns]'", data=b"\0" * 32)),
        "a type of many": ("npy", shaped("(2,)", kind="[('a', '<f8'), ('b', 'O')]")),
        "no values": ("npy", shaped("(0, 4)")),
        "a number": ("npy", shaped("()", b"\1")),
        "thirty axes": ("npy", shaped(str((1,) * 30), b"\1")),
        "numbers without end": ("npy", shaped("(2, 2)", kind="'<f8'", data=_EXTREMES)),
        "an npz of a pickle": ("npz", zipped(**{"correct.npy": objects.getvalue()})),
        "an npz that climbs": ("npz", zipped(**{"..__..__correct.npy": whole.getvalue()})),
        "an npz of one bomb": ("npz", zipped(**{"correct.npy": shaped(huge, b"\0" * (1 << 26))})),
        "an npz that is none": ("npz", b"PK\x03\x04" + b"x" * 100),
        "an npz of nothing": ("npz", zipped()),
    }  # fmt: skip


def weights() -> dict[str, bytes]:
    """Bad safetensors files."""

    def file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(raw) if length is None else length) + raw + data

    def tensor(**values: Any) -> dict[str, Any]:
        return {"model.embed_tokens.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **values}}

    return {
        "nothing": b"",
        "a short length": b"\1\2\3",
        "a huge header": file(b"{}", length=1 << 62),
        "a header of a gigabyte": file(b"{}", length=1 << 30),
        "no JSON": file(b"{" * 100),
        "deep JSON": file(b"[" * 100_000),
        "a list": file([]),
        "no tensors": file({}),
        "offsets backwards": file(tensor(data_offsets=[8, 0]), b"\0" * 8),
        "offsets outside": file(tensor(data_offsets=[0, 1 << 40]), b"\0" * 8),
        "negative offsets": file(tensor(data_offsets=[-8, 0]), b"\0" * 8),
        "another size": file(tensor(shape=[1 << 40]), b"\0" * 8),
        "a size beyond numbers": file(tensor(shape=[1 << 33, 1 << 33]), b"\0" * 8),
        "no such type": file(tensor(dtype="F3"), b"\0" * 8),
        "overlapping": file({**tensor(), "x": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, b"\0" * 12),
        "a hole": file({"x": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, b"\0" * 12),
        "metadata that is a number": file({"__metadata__": 3}),
        "a name of escapes": file({"\x1b[2J": tensor()["model.embed_tokens.weight"]}, b"\0" * 8),
        "another tensor alone": file(tensor(), b"\0" * 8),
    }


VALUES: list[Any] = [
    None, True, 0, -1, 10**30, 1.5, float("nan"), float("inf"), "", " ", "x" * 70_000, "\x1b[2J", "\0", "../../..",
    "/dev/zero", "/dev/stdin", "/etc/passwd", "{{ 1/0 }}", [], {}, [[]], {"a": {"b": [1]}}, ["x"] * 5, [None], "\ud800",
    [-1], [10**18], {"": ""},
]  # fmt: skip


def mutated(content: Any, random: Random) -> Any:
    """A structure with some of its values replaced, removed, renamed or doubled."""
    found = copy.deepcopy(content)
    for _ in range(random.randint(1, 3)):
        place = found
        while isinstance(place, dict | list) and place:
            keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = random.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and random.random() < 0.7:
                place = place[key]
                continue
            match random.randrange(4):
                case 0:
                    del place[key]
                case 1 if isinstance(place, dict):
                    place[str(key) + "x"] = place.pop(key)
                case 2 if isinstance(place, list):
                    place.append(copy.deepcopy(place[key]))
                case _:
                    place[key] = copy.deepcopy(random.choice(VALUES))
            break
    return found


def as_yaml(content: Any) -> bytes:
    """A structure as YAML."""
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=False).encode("utf-8", "surrogatepass")


def as_json(content: Any) -> bytes:
    """A structure as JSON."""
    return json.dumps(content).encode("utf-8", "surrogatepass")


def scrambled(raw: bytes, random: Random) -> bytes:
    """Bytes with some of them flipped, cut, doubled, moved or replaced."""
    found = bytearray(raw)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(found) + 1)
        size = random.choice([1, 1, 2, 4, 16, 200])
        match random.randrange(6):
            case 0 if at < len(found):
                found[at] ^= 1 << random.randrange(8)
            case 1:
                del found[at : at + size]
            case 2:
                found[at:at] = random.randbytes(size)
            case 3:
                found[at:at] = found[at : at + size]
            case 4:
                found[at : at + size] = bytes([random.choice([0, 255, 10, 34, 44, 123])]) * size
            case _:
                del found[at:]
    return bytes(found)
