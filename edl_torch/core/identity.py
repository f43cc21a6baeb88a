"""Identity of a dataset: the fields that, with the epoch, fix every record's place.

It is plain JSON-able values, for journals, tokens and calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from edl_torch.shard import DatasetSpec, Source

_MISSING = "nothing"
_ABSENT: dict[str, object] = {"shuffle_window": 1}


def identity(spec: DatasetSpec) -> dict[str, object]:
    """Return the identity of a valid `spec`, as strings, integers and booleans by field name.

    A `shuffle_window` of 1 is left out: those of older versions are without.
    """
    fields: dict[str, object] = {
        "sources": _digest(spec.sources),
        "num_sources": len(spec.sources),
        "size": spec.size,
        "records_per_shard": spec.records_per_shard,
        "seed": spec.seed,
        "shuffle": spec.shuffle,
        "shuffle_shards": spec.shuffle_shards,
        "shuffle_in_shard": spec.shuffle_in_shard,
    }
    return fields if spec.shuffle_window == 1 else fields | {"shuffle_window": spec.shuffle_window}


def differences(registered: Mapping[str, object], asked: Mapping[str, object]) -> list[str]:
    """Return a line for each field in which two identities differ, such as `seed: registered 0, asked 7`."""
    lines = []
    for field in dict.fromkeys((*registered, *asked)):
        absent = _ABSENT.get(field, _MISSING)
        old, new = registered.get(field, absent), asked.get(field, absent)
        if old != new:
            lines.append(f"{_label(field)}: registered {old}, asked {new}")
    return lines


def _label(field: str) -> str:
    return "sources (digest of names, ranges and their order)" if field == "sources" else field


def _digest(sources: tuple[Source, ...]) -> str:
    """BLAKE2b (RFC 7693) over name length, name, start and count of each source: 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16, person=b"edl_torch srcs 1")
    for source in sources:
        # Names of files may hold undecodable bytes as lone surrogates.
        name = source.name.encode("utf-8", "surrogatepass")
        digest.update(b"%d:%b%d+%d;" % (len(name), name, source.start, source.count))
    return digest.hexdigest()
