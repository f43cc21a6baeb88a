"""Identity of a dataset: the fields that, with the epoch, fix every record's place.

It is plain JSON-able values, for journals, tokens and calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from edl_torch.fingerprint import UNKNOWN, describe_change, differ
from edl_torch.shard import OPTIONS, DatasetSpec

_MISSING = "nothing"
_ORDER = {name: option for name, option in OPTIONS.items() if option.metadata["orders"]}
_DATA = ("sources", "names", "below", "num_sources", "size", "fingerprint")
_LABELS = {
    "sources": "sources (digest of their ranges in order)",
    "names": 'names of sources (digest; with fingerprint="v1" the same data may lie in another folder)',
    "below": "names of sources below their folder, in order (digest)",
}


def identity(spec: DatasetSpec) -> dict[str, object]:
    """Return the identity of a valid `spec`, as strings, integers and booleans by field name.

    Options that are rare are left out where they have their defaults.
    """
    names = [source.name for source in spec.sources]
    folder = folder_of(names)
    fields: dict[str, object] = {
        "sources": _digest("srcs", (f"{source.start}+{source.count}" for source in spec.sources)),
        "names": _digest("name", names),
        "below": _digest("name", (name.removeprefix(folder) for name in names)),
        "num_sources": len(spec.sources),
        "size": spec.size,
    }
    for name, option in _ORDER.items():
        if (value := getattr(spec, name)) != option.default or not option.metadata["rare"]:
            fields[name] = value
    return fields


def differences(
    registered: Mapping[str, object], asked: Mapping[str, object], *, asked_is_older: bool = False
) -> list[str]:
    """Return a line for each field in which two identities differ, such as `seed: registered 0, asked 7`.

    An unknown fingerprint differs from none; where both are known, sources may lie in another folder.
    `asked_is_older` says which data were there first.
    """
    prints = [str(found.get("fingerprint", UNKNOWN)) for found in (registered, asked)]
    then, now = reversed(prints) if asked_is_older else prints
    lines = [f"data: {describe_change(then, now)}"] if differ(then, now) else []
    passed_over = {"fingerprint", "names" if all(prints) else "below", "below" if lines else ""}
    for field in dict.fromkeys((*registered, *asked)):
        option = _ORDER.get(field)
        absent = option.default if option is not None and option.metadata["rare"] else _MISSING
        old, new = registered.get(field, absent), asked.get(field, absent)
        if old != new and field not in passed_over:
            lines.append(f"{_LABELS.get(field, field)}: registered {old}, asked {new}")
    return lines


def data_differences(registered: Mapping[str, object], asked: Mapping[str, object]) -> list[str]:
    """Return the lines of `differences` that are of the data."""
    one, other = ({f: found[f] for f in _DATA if f in found} for found in (registered, asked))
    return differences(one, other)


def but_data(found: Mapping[str, object]) -> dict[str, object]:
    """Return an identity without what says which data it is of."""
    return {field: value for field, value in found.items() if field not in _DATA}


def folder_of(names: Sequence[str]) -> str:
    """Return what names begin with that says where the data lie: their folder with its slash; of one all."""
    if len(names) < 2:
        return "".join(names)
    first, last = min(names), max(names)  # what these two share all share
    shared = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[: first.rfind("/", 0, shared) + 1]


def _digest(person: str, texts: Iterable[str]) -> str:
    """BLAKE2b (RFC 7693) over the length and the bytes of each text: 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16, person=f"edl_torch {person}".encode())
    for text in texts:
        # Names of files may hold undecodable bytes as lone surrogates.
        name = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d:%b;" % (len(name), name))
    return digest.hexdigest()
