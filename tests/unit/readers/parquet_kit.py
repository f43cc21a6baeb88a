"""Small Parquet datasets whose values say which row they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def table(first: int, count: int) -> pa.Table:
    """Rows `first … first + count - 1`: every value is a function of `id`; every fifth `text` is NULL."""
    ids = np.arange(first, first + count)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "half": pa.array(ids / 2, pa.float32()),
            "text": pa.array([None if i % 5 == 0 else f"r{i}" for i in ids], pa.string()),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 3) * 1.0), 3),
            "many": pa.array([list(range(i % 4)) for i in ids], pa.list_(pa.int32())),
        }
    )


def write(path: Path, rows: pa.Table | tuple[int, int] = (0, 20), group: int = 7, **options: Any) -> str:
    """Write a file with row groups of `group` rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = rows if isinstance(rows, pa.Table) else table(*rows)
    pq.write_table(content, path, row_group_size=group, **options)
    return str(path)


def write_hive(root: Path) -> str:
    """Two years, one folder of each colour; 35 rows in files of 20, 15 and 0."""
    write(root / "year=2023" / "colour=light%20blue" / "a.parquet", (0, 20))
    write(root / "year=2024" / "colour=red" / "b.parquet", (20, 15))
    write(root / "year=2024" / "colour=red" / "empty.parquet", (0, 0))
    (root / "_SUCCESS").touch()
    (root / "_temporary").mkdir()
    (root / "_temporary" / "half.parquet").write_bytes(b"PAR1")
    (root / ".hidden.parquet").write_bytes(b"")
    return str(root)
