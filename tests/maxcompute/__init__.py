"""A MaxCompute service on loopback: enough of it for an unmodified pyodps to read tables.

For tests of jobs that read tables, without an account and without a network. It knows no reader of ours.

    with MaxComputeServer() as server:
        server.add_table("clicks", {"id": "bigint", "price": "double"}, {"id": [1, 2], "price": [0.5, None]})
        odps = ODPS(server.access_id, server.access_key, server.project, server.endpoint)
"""

from __future__ import annotations

from maxcompute.faults import (
    Corrupt,
    Cut,
    Fail,
    Faults,
    Hold,
    Refuse,
    Rows,
)
from maxcompute.server import MaxComputeServer
from maxcompute.tables import Table

__all__ = [
    "Corrupt",
    "Cut",
    "Fail",
    "Faults",
    "Hold",
    "MaxComputeServer",
    "Refuse",
    "Rows",
    "Table",
]
