"""Identity of a dataset: the fields that, with the epoch, fix every record's place.

It is plain JSON-able values, for journals, tokens and calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from edl_torch.shard import DatasetSpec, Source

_MISSING = "nothing"


def identity(spec: DatasetSpec) -> dict[str, object]:
    """Return the identity of a valid `spec`, as strings, integers and booleans by field name."""
    return {
        "sources": _digest(spec.sources),
        "num_sources": len(spec.sources),
        "size": spec.size,
        "records_per_shard": spec.records_per_shard,
        "seed": spec.seed,
        "shuffle": spec.shuffle,
        "shuffle_shards": spec.shuffle_shards,
        "shuffle_in_shard": spec.shuffle_in_shard,
    }


def differences(registered: Mapping[str, object], asked: Mapping[str, object]) -> list[str]:
    """Return a line for each field in which two identities differ, such as `seed: registered 0, asked 7`."""
    fields = dict.fromkeys((*registered, *asked))
    pairs = ((field, registered.get(field, _MISSING), asked.get(field, _MISSING)) for field in fields)
    return [f"{_label(field)}: registered {old}, asked {new}" for field, old, new in pairs if old != new]


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
