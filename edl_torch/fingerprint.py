"""Fingerprint of a dataset's data: whether a trainer, or a checkpoint, has the data that are registered.

A fingerprint is of entries in order: files, partitions, sampled rows. Each has a name and maybe evidence, a
short text of what was looked at in it. Of up to `LISTED` entries it has the list itself, so that a difference
is named; of more it has a digest for each of up to 64 runs of them, so that it is known where they part. It
travels as text. Where the data lie, and when they were written, is not in it: hosts differ in that.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

from edl_torch.errors import InvalidArgument

UNKNOWN = ""  # the text of no fingerprint, which fits any
VALUES = "values"  # the entry of data that are a list, an array or a table themselves
LISTED = 1024  # entries
RUNS = 64
NAMED = 5  # entries of a message
MOST_CHARS = 1 << 17
_LONGEST = 256  # characters of a version
_MOST_BYTES = 1 << 20
_DIGEST_CHARS = 32
Part = tuple[str, str]  # name and evidence
STRENGTHS = ("none", "partly", "names", "given", "sampled", "whole")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What was looked at, as digests.

    Attributes:
        strength: "whole": every byte. "sampled": some bytes of each entry. "partly": of some entries.
            "names": names and some sizes. "given": what the user says, which is all that is compared.
        entries: How many there are.
        run: Entries that stand for one of `parts`; 1 where all are listed.
        parts: The name and the evidence of each entry; or of each run its first name, a digest of its names,
            and one of what was looked at in some of them.
        attributes: What was looked at in an object besides, in the same form; "" of a list that is still to
            be filled. Those that one of two fingerprints has beside all of the other's are no difference, as
            one may be filled as it is used; but see `known_by`.
        digest: Of all of it, 32 hex digits.
    """

    strength: str
    entries: int
    run: int
    parts: tuple[Part, ...]
    attributes: tuple[Part, ...]
    digest: str

    @classmethod
    def of(
        cls,
        strength: str,
        parts: Sequence[Part],
        *,
        run: int = 1,
        entries: int | None = None,
        attributes: Sequence[Part] = (),
    ) -> Fingerprint:
        """Return the fingerprint of these parts; of as many entries, unless said otherwise."""
        # What is looked at does not depend on what else there may be, such as a cache that is filled later.
        looked = "sampled" if strength == "partly" or attributes else strength
        looks = sum(bool(look) for _, look in attributes)
        count = len(parts) + looks if entries is None else entries
        rows = json.dumps([looked, count, run, list(parts), list(attributes)]).encode()
        digest = hashlib.blake2b(rows, digest_size=_DIGEST_CHARS // 2, person=b"edl_torch data 1")
        return cls(
            strength=strength,
            entries=count,
            run=run,
            parts=tuple(parts),
            attributes=tuple(attributes),
            digest=digest.hexdigest(),
        )

    @classmethod
    def given(cls, version: str) -> Fingerprint:
        """Return the fingerprint of data whose version the user says. Raises InvalidArgument for no text."""
        if not isinstance(version, str) or not 0 < len(version) <= _LONGEST:
            said = f"one of {len(version):,}" if isinstance(version, str) else repr(version)[:_LONGEST]
            raise InvalidArgument(
                f"fingerprint must be a text of 1 to {_LONGEST} characters, such as a version, not {said}"
            )
        return cls.of("given", [(version, "")])

    def encode(self) -> str:
        """Return it as text: strength, digest, and the rest packed."""
        rest = zlib.compress(json.dumps([self.entries, self.run, self.parts, self.attributes]).encode(), 1)
        return f"{self.strength}:{self.digest}:{base64.b64encode(rest).decode()}"

    @classmethod
    def decode(cls, text: str) -> Fingerprint:
        """Read a text that is not UNKNOWN. Raises InvalidArgument for one that `encode` does not make."""
        try:
            strength, digest, packed = text.split(":", 2)
            unpacker = zlib.decompressobj()
            rest = unpacker.decompress(base64.b64decode(packed, validate=True), _MOST_BYTES)
            found = cls.from_row([strength, *json.loads(rest)])
        except (ValueError, TypeError, zlib.error, RecursionError) as exc:
            raise InvalidArgument(f"no fingerprint of data: {text[:40]!r}: {exc}") from exc
        if found.digest != digest or strength not in STRENGTHS[1:] or not unpacker.eof:
            raise InvalidArgument(f"no fingerprint of data: {text[:40]!r} is damaged")
        return found

    def known(self, strength: str) -> Fingerprint:
        """Return it with another strength."""
        return self.from_row([strength, *self.row[1:]])

    @property
    def row(self) -> list[Any]:
        """All of it but the digest, which follows from it, as plain values."""
        return [self.strength, self.entries, self.run, self.parts, self.attributes]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Fingerprint:
        """Return what a `row` is of."""
        strength, entries, run, *both = row
        parts, attributes = ([(str(name), str(look)) for name, look in each] for each in both)
        return cls.of(str(strength), parts, run=int(run), entries=int(entries), attributes=attributes)

    def __repr__(self) -> str:
        return f"<Fingerprint {self.strength} {self.digest[:8]} entries={self.entries}>"


def check(text: Any) -> None:
    """Raise InvalidArgument for what is no fingerprint's text."""
    if not isinstance(text, str) or len(text) > MOST_CHARS:
        raise InvalidArgument(f"no fingerprint of data: a text of {MOST_CHARS:,} characters at most is one")
    if text != UNKNOWN:
        Fingerprint.decode(text)


def strength_of(text: str) -> str:
    """Return how strong a fingerprint is; "none" for UNKNOWN."""
    return text.partition(":")[0] or "none"


def differ(one: str, other: str) -> bool:
    """Return whether two fingerprints are known to be of different data."""
    if UNKNOWN in (one, other) or one.split(":")[1] == other.split(":")[1]:
        return False
    then, now = Fingerprint.decode(one), Fingerprint.decode(other)
    if "given" in (then.strength, now.strength):  # what a user says of an object stands, of a file its bytes
        return then.strength == now.strength or bool(then.parts and now.parts)
    if (then.run, then.parts) != (now.run, now.parts) or not _comparable(then, now):
        return True
    old, new = dict(then.attributes), dict(now.attributes)
    both = [name for name, look in old.items() if look and new.get(name)]
    if any(old[name] != new[name] for name in both):
        return True
    return not (then.parts or both) or bool(_beside(old, new) and _beside(new, old))


def lacks(now: str, then: str) -> bool:
    """Whether an attribute that was looked at then cannot be looked at now: while an object is used, what is
    looked at becomes more, and not less. Neither is UNKNOWN."""
    new = dict(Fingerprint.decode(now).attributes)
    return any(look and not new.get(name) for name, look in Fingerprint.decode(then).attributes)


def known_by(texts: Iterable[str], strengths: Iterable[str] = ()) -> str:
    """Return how strongly fingerprints that do not differ show that the data were the same.

    That is the weakest of theirs and of other `strengths`. Of what only one of them has looked
    at it is not known what it was in the others, unless they had a list for it that was still to be filled:
    then they show it partly.
    """
    different = set(texts)
    strengths = {*strengths, *map(strength_of, different)}
    if "given" in strengths and len(strengths) > 1:  # a word and a look were not compared
        return "none"
    least = weakest(strengths)
    attributes = [dict(Fingerprint.decode(text).attributes) for text in different - {UNKNOWN}]
    seen = {name: look for each in attributes for name, look in each.items() if look}
    is_beside = any(_beside(seen, each) for each in attributes)
    return weakest((least, "partly")) if is_beside else least


def weakest(strengths: Iterable[str]) -> str:
    """Return the weakest of some strengths."""
    return min(strengths, key=STRENGTHS.index)


def _beside(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """What was looked at in one of two objects, and is not in the other at all."""
    return [name for name, look in one.items() if look and name not in other]


def describe_change(before: str, now: str) -> str:
    """Say what was added, removed or changed between two fingerprints that differ; the first few by name."""
    old, new = Fingerprint.decode(before), Fingerprint.decode(now)
    if not _comparable(old, new):
        return f"{_looked_at(old)} then, and {_looked_at(new)} now: they cannot be compared"
    if old.strength == "given":
        return f"fingerprint {old.parts[0][0]!r} then, {new.parts[0][0]!r} now"
    if {name for name, _ in (*old.parts, *old.attributes, *new.parts, *new.attributes)} == {VALUES}:
        return "the values are others than then"
    is_listed = old.run == new.run == 1 or old.parts == new.parts
    said = _listed(old, new) if is_listed else _first_run(old, new)
    if not (old.parts or new.parts):
        said = f"attributes of the dataset: {said}"
    else:
        counts = f"{new.entries:,} then and now"
        if old.entries != new.entries:
            counts = f"{old.entries:,} then, {new.entries:,} now"
        said = f"{counts}: {said}"
    if old.attributes and new.attributes:
        said += '; where that is none of the data, give fingerprint="v1"'
    return said


def _comparable(one: Fingerprint, other: Fingerprint) -> bool:
    both = bool(
        one.attributes and other.attributes
    )  # of an object: how much is known may change with its use
    return both or one.strength == other.strength or "partly" in (one.strength, other.strength)


def _looked_at(found: Fingerprint) -> str:
    return f"fingerprint={found.parts[0][0]!r}" if found.strength == "given" else f"a look ({found.strength})"


def _listed(old: Fingerprint, new: Fingerprint) -> str:
    then, now = dict((*old.parts, *old.attributes)), dict((*new.parts, *new.attributes))
    of_object = dict(old.attributes)
    kinds = {
        "added": [name for name in now if name not in then],
        "removed": [n for n in then if n not in now or (n in of_object and then[n] and not now[n])],
        # Evidence that one of them lacks says nothing: other entries were sampled.
        "changed": [n for n, e in now.items() if e and then.get(n) and then[n] != e],
    }
    said = [f"{kind} {_names(names)}" for kind, names in kinds.items() if names]
    return "; ".join(said) or "the same ones in another order, or other ones of the same name"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(map(repr, islice(names, NAMED))) + more


def _first_run(old: Fingerprint, new: Fingerprint) -> str:
    """Where two lists part, of which at least one is too long to travel."""
    pairs = list(zip_longest(old.parts, new.parts, fillvalue=("the end", "")))
    # Of lists of unlike lengths other entries were looked at: their names alone tell where they part.
    looks = 2 if old.entries == new.entries else 1
    known, found = (
        [(name, each.split()[:looks]) for name, each in pair] for pair in zip(*pairs, strict=True)
    )
    differing = (at for at, (then, now) in enumerate(zip(known, found, strict=True)) if then != now)
    at = next(differing, len(pairs) - 1)
    then, now = pairs[at]
    if old.run != new.run:
        return f"too many to be listed; they begin with {then[0]!r} then, {now[0]!r} now"
    after = pairs[at + 1] if at + 1 < len(pairs) else (("the end", ""), ("the end", ""))
    return (
        f"the first difference is among the {new.run:,} entries from {then[0]!r} to {after[0][0]!r} then, "
        f"from {now[0]!r} to {after[1][0]!r} now"
    )
