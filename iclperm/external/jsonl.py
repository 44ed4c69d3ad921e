"""Rows of a JSON Lines file, one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from iclperm.errors import DataError, is_out_of_memory
from iclperm.external.delimited import encoding_of
from iclperm.external.tensor import one_line


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, empty lines left out; raises DataError naming the first line that is no object."""
    try:
        with path.open(encoding=encoding_of(path)) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    raise DataError(f"{path}, line {number} is not JSON; write the file again") from None
                if not isinstance(row, dict):
                    raise DataError(
                        f"{path}, line {number} is no object but {type(row).__name__}; write the file again"
                    )
                yield row
    except (OSError, UnicodeError) as error:
        if is_out_of_memory(error):
            raise
        raise DataError(f"{path} cannot be read: {one_line(error)}; save it as UTF-8, or make it readable") from None
