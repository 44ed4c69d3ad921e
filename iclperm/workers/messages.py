"""What crosses between a driver and its workers: plain JSON values and Arrow tables, in frames of known length."""

from __future__ import annotations

import io
import json
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from iclperm.engine.plan import ContextPaths, Plan, plan_product
from iclperm.engine.tree import Rows, TokenArray
from iclperm.errors import PlanError
from iclperm.runs.answering import Asked
from iclperm.runs.layout import continuations_of, paths_of
from iclperm.runs.work import Product, Work

_LENGTH = struct.Struct("!Q")
_PIECE = 1 << 20


def packed(head: Mapping[str, Any], table: pa.Table | None = None) -> bytes:
    """A message: a JSON object, and a table where there is one."""
    raw = json.dumps(head, allow_nan=False).encode()
    sink = io.BytesIO()  # gives what was written without a copy: a plan may take a hundred MB
    sink.write(_LENGTH.pack(len(raw)) + raw)
    if table is not None:
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    return sink.getvalue()


def unpacked(message: bytes) -> tuple[dict[str, Any], pa.Table | None]:
    """The object and the table of a message; raises `ValueError` or `pa.ArrowException` for what is none."""
    begin = _LENGTH.size
    (length,) = _LENGTH.unpack_from(message)
    head = json.loads(message[begin : begin + length])
    rest = pa.py_buffer(message)[begin + length :]
    return head, pa.ipc.open_stream(rest).read_all() if rest.size else None


class Pipe:
    """Whole messages over a connected socket; may be used by one sender and one receiver at once."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: bytes) -> None:
        """Raises `OSError` where the other side is gone."""
        self._end.sendall(_LENGTH.pack(len(message)))
        self._end.sendall(message)

    def receive(self) -> bytes | None:
        """The next message; None where the other side is gone, be it in the middle of one."""
        try:
            length = self._exactly(_LENGTH.size)
            return None if length is None else self._exactly(_LENGTH.unpack(length)[0])
        except OSError:
            return None

    def close(self) -> None:
        """Ends the connection; who waits for a message gets None."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _exactly(self, size: int) -> bytes | None:
        pieces = bytearray()
        while len(pieces) < size:
            piece = self._end.recv(min(size - len(pieces), _PIECE))
            if not piece:
                return None
            pieces += piece
        return bytes(pieces)


def plan_message(work: Work, product: Product) -> bytes:
    """What a worker makes the plan of a product from; O(tokens of its factors)."""
    paths, choices = paths_of(work.prompts, product), work.prompts.choices
    own = [] if choices is None else [ids for query in product.queries for ids in choices[query]]
    rows = {
        "rows": paths.rows,
        "marks": paths.marks,
        "queries": Rows.of([work.prompts.queries[query] for query in product.queries]),
        "continuations": Rows.of(own or continuations_of(work.setting, work.prompts)),
    }
    head = {
        "is": "plan",
        "of_each_query": bool(own),
        "unit_tokens": product.plan.unit_tokens,
        "num_units": product.plan.num_units,
    }
    return packed(head, pa.table({name: _nested([each]) for name, each in rows.items()}))


def plan_from(head: Mapping[str, Any], table: pa.Table) -> Plan:
    """The plan of a message; raises `PlanError` where it is not cut as the sender's."""
    rows, marks, queries, continuations = (
        _rows(table[name].combine_chunks().flatten()) for name in ("rows", "marks", "queries", "continuations")
    )
    after: Any = _arrays(continuations)
    if head["of_each_query"]:
        each = len(after) // len(queries)
        after = [after[begin : begin + each] for begin in range(0, len(after), each)]
    plan = plan_product(ContextPaths(rows, marks), _arrays(queries), after, unit_tokens=int(head["unit_tokens"]))
    if plan.num_units != head["num_units"]:
        raise PlanError(f"a worker cuts {plan.num_units} units where its driver cuts {head['num_units']}")
    return plan


def part_message(asked: Asked) -> bytes:
    """A part for a worker to answer."""
    units = [asked.units.start, asked.units.stop]
    head = {"is": "part", "part": asked.part, "plan": asked.plan, "units": units}
    if asked.plan is not None:
        return packed(head)
    columns = {
        "prompt": _lists(Rows.of(asked.prompts)),
        "continuations": _nested(list(map(Rows.of, asked.continuations))),
    }
    return packed(head, pa.table(columns))


def part_from(head: Mapping[str, Any], table: pa.Table | None) -> Asked:
    """The part of a message."""
    prompts: list[TokenArray] = []
    continuations: list[list[TokenArray]] = []
    if table is not None:
        prompts = _arrays(_rows(table["prompt"].combine_chunks()))
        for number in range(len(table)):
            continuations.append(_arrays(_rows(table["continuations"].combine_chunks().slice(number, 1).flatten())))
    return Asked(head["part"], head["plan"], range(*head["units"]), prompts, continuations)


def _arrays(rows: Rows) -> list[TokenArray]:
    return [rows[number] for number in range(len(rows))]


def _lists(rows: Rows) -> pa.Array:
    """Rows of ids as an Arrow array of lists."""
    return pa.LargeListArray.from_arrays(pa.array(rows.offsets, pa.int64()), pa.array(rows.tokens, pa.int32()))


def _nested(groups: list[Rows]) -> pa.Array:
    """Groups of rows as an Arrow array of lists of lists."""
    offsets = np.cumsum([0, *map(len, groups)], dtype=np.int64)
    lists = _lists(groups[0]) if len(groups) == 1 else pa.concat_arrays([_lists(rows) for rows in groups])
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), lists)


def _rows(lists: pa.Array) -> Rows:
    """What `_lists` was made from."""
    lengths = lists.value_lengths().to_numpy()
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Rows(np.ascontiguousarray(lists.flatten().to_numpy(), np.int32), offsets)
