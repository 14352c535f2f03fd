"""Files of other programs: an independent reader of token files, and a writer of parquet."""

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def tokens_of(path: Path) -> list[int]:
    data = path.read_bytes()
    magic, version, count = struct.unpack("<3i", data[:12])
    assert data[12:1024] == bytes(1012)
    dtype = {(20240520, 1): "<u2", (20240801, 7): "<u4"}[magic, version]
    tokens = np.frombuffer(data[1024:], dtype)
    assert tokens.size == count
    return tokens.tolist()


def parquet_bytes(rows: dict[str, Any] | list[dict[str, Any]], group: int = 5) -> bytes:
    """A table, of columns or of rows, in groups of so many rows."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    data = io.BytesIO()
    table = pyarrow.Table.from_pylist(rows) if isinstance(rows, list) else pyarrow.table(rows)
    parquet.write_table(table, data, row_group_size=group)
    return data.getvalue()
