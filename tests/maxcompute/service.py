"""What the service says about tables and partitions, as XML and JSON.

Pure: from tables to documents; it must not know HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from email.utils import formatdate
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from maxcompute.tables import Part, Table, parse_spec


def error_xml(code: str, message: str) -> bytes:
    """An error as both endpoints word it."""
    return (
        f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{escape(code)}</Code><Message>{escape(message)}"
        "</Message><RequestId>0000000000000000</RequestId><HostId>127.0.0.1</HostId></Error>"
    ).encode()


def tenant_json() -> bytes:
    """`GET /tenants`: one that has no schemas between projects and tables."""
    return json.dumps({"TenantId": "1", "Name": "test", "Parameters": {}}).encode()


def table_xml(table: Table) -> bytes:
    """`GET /projects/P/tables/T`."""
    return (
        f"<?xml version='1.0' encoding='UTF-8'?><Table><Name>{escape(table.name)}</Name><TableId>1</TableId>"
        f'<Schema format="Json"><![CDATA[{json.dumps(_schema(table))}]]></Schema><Owner>owner</Owner>'
        f"<CreationTime>{formatdate(table.modified_s, usegmt=True)}</CreationTime>"
        f"<LastModifiedTime>{formatdate(table.modified_s, usegmt=True)}</LastModifiedTime></Table>"
    ).encode()


def partitions_xml(table: Table, prefix: str, marker: str, page: int) -> bytes:
    """`GET …?partitions`: a page of the partitions that begin with `prefix`, from `marker` on."""
    wanted = parse_spec(prefix)
    found = [spec for spec in table.parts if wanted.items() <= parse_spec(spec).items()]
    start = int(marker or 0)
    after = str(start + page) if start + page < len(found) else ""
    entries = "".join(_partition_entry(spec, table.parts[spec]) for spec in found[start : start + page])
    return (
        f"<?xml version='1.0' encoding='UTF-8'?><Partitions><Marker>{after}</Marker>"
        f"<MaxItems>{page}</MaxItems>{entries}</Partitions>"
    ).encode()


def partition_xml(part: Part) -> bytes:
    """`GET …?partition=…`."""
    facts = {
        "createTime": part.modified_s,
        "lastDDLTime": part.modified_s,
        "lastModifiedTime": part.modified_s,
        "partitionSize": part.rows.nbytes,
        "partitionRecordNum": part.rows.num_rows,
    }
    return (
        "<?xml version='1.0' encoding='UTF-8'?><Partition><Schema><![CDATA["
        f"{json.dumps(facts)}]]></Schema></Partition>"
    ).encode()


def session_json(table: Table, session: str, status: str, count: int) -> bytes:
    """A download session, as the tunnel describes it."""
    columns = [_tunnel_column(*column) for column in table.columns.items()]
    keys = [_tunnel_column(*column) for column in table.partition_keys.items()]
    return json.dumps(
        {
            "DownloadID": session,
            "Status": status,
            "RecordCount": count,
            "QuotaName": "default",
            "Schema": {"IsVirtualView": False, "columns": columns, "partitionKeys": keys},
        }
    ).encode()


def _schema(table: Table) -> dict[str, Any]:
    return {
        "comment": "",
        "createTime": table.modified_s,
        "lastModifiedTime": table.modified_s,
        "columns": _columns(table.columns.items()),
        "partitionKeys": _columns(table.partition_keys.items()),
        "isVirtualView": False,
        "recordNum": sum(part.rows.num_rows for part in table.parts.values()),
    }


def _columns(columns: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {"name": name, "type": kind, "comment": "", "label": "", "isNullable": True} for name, kind in columns
    ]


def _tunnel_column(name: str, kind: str) -> dict[str, Any]:
    return {
        "column_id": "",
        "comment": "",
        "default_value": "",
        "name": name,
        "nullable": "true",
        "type": kind,
    }


def _partition_entry(spec: str, part: Part) -> str:
    columns = "".join(
        f"<Column Name={quoteattr(key)} Value={quoteattr(value)}/>" for key, value in parse_spec(spec).items()
    )
    times = "".join(
        f"<{name}>{part.modified_s}</{name}>" for name in ("CreationTime", "LastDDLTime", "LastModifiedTime")
    )
    counts = f"<PartitionSize>{part.rows.nbytes}</PartitionSize>"
    counts += f"<PartitionRecordCount>{part.rows.num_rows}</PartitionRecordCount>"
    return f"<Partition>{columns}{times}{counts}</Partition>"
