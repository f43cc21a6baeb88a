"""Identity of a dataset: the fields that, with the epoch, fix every record's place.

It is plain JSON-able values, for journals, tokens and calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from edl_torch.fingerprint import UNKNOWN, describe_change, differ
from edl_torch.shard import DatasetSpec, Source

_MISSING = "nothing"
_ABSENT: dict[str, object] = {"shuffle_window": 1, "fingerprint": UNKNOWN}
_DATA = ("sources", "num_sources", "size", "fingerprint")


def identity(spec: DatasetSpec) -> dict[str, object]:
    """Return the identity of a valid `spec`, as strings, integers and booleans by field name.

    A `shuffle_window` of 1 and an unknown `fingerprint` are left out.
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
    for field in _ABSENT:
        if (value := getattr(spec, field)) != _ABSENT[field]:
            fields[field] = value
    return fields


def differences(
    registered: Mapping[str, object], asked: Mapping[str, object], *, asked_is_older: bool = False
) -> list[str]:
    """Return a line for each field in which two identities differ, such as `seed: registered 0, asked 7`.

    An unknown fingerprint differs from none. `asked_is_older` says which data were there first.
    """
    lines = []
    for field in dict.fromkeys((*registered, *asked)):
        absent = _ABSENT.get(field, _MISSING)
        old, new = registered.get(field, absent), asked.get(field, absent)
        if field == "fingerprint":
            then, now = (str(new), str(old)) if asked_is_older else (str(old), str(new))
            if differ(then, now):
                lines.append(f"data: {describe_change(then, now)}")
        elif old != new:
            lines.append(f"{_label(field)}: registered {old}, asked {new}")
    return lines


def data_differs(registered: Mapping[str, object], asked: Mapping[str, object]) -> bool:
    """Return whether it is the data in which two identities differ, or among other things."""
    one, other = ({f: found[f] for f in _DATA if f in found} for found in (registered, asked))
    return bool(differences(one, other))


def but_data(found: Mapping[str, object]) -> dict[str, object]:
    """Return an identity without what says which data it is of."""
    return {field: value for field, value in found.items() if field not in _DATA}


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
