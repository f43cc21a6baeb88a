"""Token: the data position as one JSON string, which a model checkpoint keeps."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise
from typing import Any, TypeVar

import numpy as np

from edl_torch.core.codec import from_row, row_of
from edl_torch.core.permutation import MAX_SIZE
from edl_torch.core.plan import Plan
from edl_torch.core.quarantine import QuarantinedRecord, places_of, quarantine_row, quarantined
from edl_torch.core.registration import but_data, data_differences, differences, identity
from edl_torch.errors import InvalidArgument, TokenError
from edl_torch.fingerprint import UNKNOWN, Fingerprint
from edl_torch.fingerprint import check as check_fingerprint
from edl_torch.shard import OPTIONS, DatasetSpec, MixtureSegment, MixtureWeights, Slice

R = TypeVar("R")

VERSION = 1
_ON_OTHER_DATA = (
    '. With data_changed="new_epoch" the job goes on with the new data in its next epoch, and abandons what '
    "is left of this one"
)
_BLOCK = 1 << 16  # records that are looked up together
_MOST_UNPACKED = 1 << 28  # bytes of what says which components a mixture has
MOST = MAX_SIZE  # of any number, the records of all epochs included: so all of them fit the wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """Data position: the cursor, every begun slice without outcome, and the outcomes that are not training.

    `identity` is that of the dataset; with it alone the token is the beginning of the data. Nothing is
    counted of epochs before `first_epoch`, which were of other data; the token with which they were left is
    `before`, in the token that began these. Of a mixture there are the weights that its program gave, the
    mean lengths of components where weights are of tokens, and the segments that records without outcome are
    in, or will be; its bad records have names without the folders of its components, which may lie elsewhere
    when it is loaded.
    """

    identity: Mapping[str, object]
    first_epoch: int = 0
    before: str = ""
    epoch: int = 0
    position: int = 0
    offset: int = 0
    open: tuple[Slice, ...] = ()
    remainders: tuple[Slice, ...] = ()
    quarantine: tuple[QuarantinedRecord, ...] = ()
    acknowledged: int = 0
    dropped: int = 0
    weights: tuple[MixtureWeights, ...] = ()
    mean_lengths: Mapping[str, float] = field(default_factory=dict)
    segments: tuple[MixtureSegment, ...] = ()

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the data; '' where none is known."""
        return str(self.identity.get("fingerprint", UNKNOWN))

    @property
    def components(self) -> list[str]:
        """The names of a mixture's components, in order."""
        return list(dict[str, Any](self.identity).get("components", ()))

    @property
    def _of_each_component(self) -> list[float]:
        return [self.mean_lengths.get(name, 0.0) for name in self.components]

    def option(self, name: str) -> Any:
        """The option of that name which a dataset must have to go on from here; None where it is open."""
        option = OPTIONS[name]
        return self.identity.get(name, option.default if option.metadata["rare"] else None)

    @property
    def abandoned(self) -> int:
        """Records of the epochs begun that have no outcome: what `onto` abandons."""
        begun = (self._next_epoch - self.first_epoch) * int(str(self.identity["size"]))
        return begun - self.acknowledged - self.dropped - self.quarantined

    @property
    def quarantined(self) -> int:
        """Outcomes that are bad records."""
        return sum([bad.times for bad in self.quarantine])

    @property
    def _next_epoch(self) -> int:
        return self.epoch + (self.position > 0 or self.offset > 0)

    def onto(self, spec: DatasetSpec) -> Token:
        """Return the beginning of the next epoch on other data, where nothing but the data has changed."""
        registered = identity(spec)
        if not self._has_other_data(registered):
            return self
        if spec.components:
            raise TokenError(
                f"mixture {spec.name!r} has other data than the checkpoint's, and no next epoch to begin "
                "with "
                f'them: leave data_changed="new_epoch" out, and give it the data of then or '
                f"load_state_dict(None)"
            )
        epoch = self._next_epoch
        return Token(identity=registered, first_epoch=epoch, epoch=epoch, before=self.encode())

    def _has_other_data(self, registered: Mapping[str, object]) -> bool:
        """Whether it is the data alone in which a dataset differs."""
        others = differences(but_data(registered), but_data(self.identity))
        return bool(data_differences(registered, self.identity)) and not others

    def check(self, spec: DatasetSpec) -> None:
        """Raise TokenError, field by field, unless this token is of the dataset `spec`."""
        registered = identity(spec)
        differing = differences(registered, self.identity, asked_is_older=True, may_change=True)
        if differing:
            gone = sorted({*self.components} - {component.name for component in spec.components})
            if gone and spec.components:
                raise TokenError(
                    f"the checkpoint's mixture {spec.name!r} has components that the program has not: "
                    f"{', '.join(gone)}. Leave them in, with weight 0, or as None once no record of them is "
                    f"open, as in Mixture({{{gone[0]!r}: None, …}}). Or load_state_dict(None) to begin anew"
                )
            raise TokenError(
                f"the token is not of dataset {spec.name!r} as registered: {'; '.join(differing)}. "
                f"Give the service what the checkpoint was made with, or load_state_dict(None) to begin anew"
                + _ON_OTHER_DATA
                * (not spec.components and self._has_other_data(registered))
            )

    def check_within(self, plan: Plan) -> None:
        """Raise TokenError unless each record before the cursor has exactly one place, and no other has one.

        So what grows from here never exceeds the records of all epochs, which are MOST at most.
        """
        try:
            self._check_cursor(plan)
            self._check_slices(plan)
            self._check_quarantine(plan)
            self._check_counts(plan)
        except InvalidArgument as exc:
            raise TokenError(f"damaged token of dataset {plan.spec.name!r}: {exc}") from exc

    def check_epochs(self, plan: Plan) -> None:
        """Raise TokenError in the middle of an epoch behind the last: records of it would be left out."""
        epochs = plan.spec.num_epochs
        ahead = self.epoch * plan.size + plan.records_before(self.epoch, self.position) + self.offset
        begun = {each.epoch for each in (*self.open, *self.remainders)} | (
            {ahead // plan.size} if ahead % plan.size else set()
        )
        if epochs and (beyond := [epoch for epoch in begun if epoch >= epochs]):
            raise TokenError(
                f"the token is in the middle of epoch {max(beyond)} of {plan.spec.name!r}, counted from 0, "
                f"which a job with num_epochs={epochs} has not: give num_epochs={max(beyond) + 1} or more"
            )

    def _check_cursor(self, plan: Plan) -> None:
        if self.first_epoch > min((s.epoch for s in (*self.open, *self.remainders)), default=self.epoch):
            raise InvalidArgument(f"epochs before {self.first_epoch} were of other data")
        if (self.position, self.offset) == (plan.num_windows, 0):
            return
        length = plan.records_in(self.epoch, plan.window_at(self.epoch, self.position))
        if self.offset >= length:
            raise InvalidArgument(f"the cursor is at record {self.offset} of a shard with {length}")
        if self.offset % plan.spec.turn:
            raise InvalidArgument(f"the cursor is in the middle of a turn of {plan.spec.turn} records")

    def _check_slices(self, plan: Plan) -> None:
        cursor = self.epoch, plan.records_before(self.epoch, self.position) + self.offset
        bad = (Slice(epoch=q.epoch, shard=q.shard, skip=q.position, limit=1) for q in self.quarantine)
        slices = sorted((*self.open, *self.remainders, *bad), key=lambda s: (s.epoch, s.shard, s.skip))
        for epoch, of_it in groupby(slices, key=lambda s: s.epoch):
            found = list(of_it)
            plan.length(found[-1].shard)  # the largest: it raises where the dataset has no such shard
            starts, ends = plan.window_bounds(epoch, np.array([s.shard for s in found]))
            for s, start, end in zip(found, starts.tolist(), ends.tolist(), strict=True):
                if not s.limit or start + s.stop > end:
                    length = plan.records_in(epoch, s.shard)
                    raise InvalidArgument(f"{s} is not a part of its shard, which has {length} records")
                if (epoch, start + s.stop) > cursor:
                    raise InvalidArgument(f"{s} reaches beyond the cursor")
        for before, s in pairwise(slices):
            if (s.epoch, s.shard) == (before.epoch, before.shard) and s.skip < before.stop:
                raise InvalidArgument(f"{s} overlaps another slice")

    def _check_quarantine(self, plan: Plan) -> None:
        if any(bool(bad.passes) != (plan.mixed is not None) for bad in self.quarantine):
            raise InvalidArgument("bad records of a mixture have passes, and of other datasets none")
        records = {(bad.name, bad.index) for bad in self.quarantine}
        if plan.mixed is not None and len(records) < len(self.quarantine):
            raise InvalidArgument("a bad record of a mixture is there twice")

    def check_passes(self, plan: Plan) -> None:
        """Raise TokenError where a bad record of a mixture was met in a pass of which it is open."""
        if plan.mixed is None or not self.quarantine:
            return
        met: dict[str, list[tuple[int, ...]]] = {}
        for bad in self.quarantine:
            met.setdefault(bad.name.partition(":")[0], []).append(bad.passes)
        for s in (*self.open, *self.remainders):
            for start in range(*(bounds := plan.indices_of(s)), _BLOCK):
                again = plan.mixed.met_again(start, min(start + _BLOCK, bounds[1]), met)
                if any(places_of(self.quarantine, found) for found in again):
                    raise TokenError(
                        f"damaged token of dataset {plan.spec.name!r}: {s} has a record that is in quarantine"
                    )

    def _check_counts(self, plan: Plan) -> None:
        epochs = self.epoch - self.first_epoch
        before = epochs * plan.size + plan.records_before(self.epoch, self.position) + self.offset
        if before > MOST:
            raise InvalidArgument(f"the cursor is behind {before} records; no job comes further than {MOST}")
        waiting = sum(s.limit for s in (*self.open, *self.remainders))
        placed = self.acknowledged + self.dropped + self.quarantined + waiting
        if placed != before:
            raise InvalidArgument(
                f"{before} records lie before the cursor, but {placed} are accounted for: "
                f"{self.acknowledged} acknowledged, {self.dropped} dropped, "
                f"{self.quarantined} in quarantine, {waiting} open"
            )

    def encode(self) -> str:
        """Return the token as one line of JSON."""
        return json.dumps(
            {
                "version": VERSION,
                "identity": _packed(self.identity),
                **({"first_epoch": self.first_epoch} if self.first_epoch else {}),
                **({"before": self.before} if self.before else {}),
                "cursor": [self.epoch, self.position, self.offset],
                "open": [row_of(s) for s in self.open],
                "crumbs": [row_of(s) for s in self.remainders],  # as tokens have called them from the first
                "quarantine": [quarantine_row(bad) for bad in self.quarantine],
                "acknowledged": self.acknowledged,
                "dropped": self.dropped,
                **({"weights": [row_of(change) for change in self.weights]} if self.weights else {}),
                **({"mean_lengths": self._of_each_component} if self.mean_lengths else {}),
                **({"segments": [row_of(segment) for segment in self.segments]} if self.segments else {}),
            },
            separators=(",", ":"),
        )

    @classmethod
    def decode(cls, text: str) -> Token:
        """Read a token. Raises TokenError when it is damaged or of a newer version."""
        try:
            return cls._from(json.loads(text))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, zlib.error) as exc:
            raise TokenError(f"not a data token ({exc}): pass what service.state_dict() returned") from exc

    @classmethod
    def _from(cls, value: dict[str, Any]) -> Token:
        if value["version"] != VERSION:
            raise TokenError(
                f"token version {value['version']} is not known here (this is {VERSION}): upgrade edl-torch"
            )
        epoch, position, offset = map(_count, value["cursor"])
        identity = _unpacked(value["identity"])
        for name, option in OPTIONS.items():
            if option.metadata["orders"] and option.metadata["least"] is not None:
                _count(identity.get(name, option.default))
        check_fingerprint(identity.get("fingerprint", UNKNOWN))
        return cls(
            identity=identity,
            first_epoch=_count(value.get("first_epoch", 0)),
            before=str(value.get("before", "")),
            epoch=epoch,
            position=position,
            offset=offset,
            open=_records(Slice, value["open"]),
            remainders=_records(Slice, value["crumbs"]),
            quarantine=tuple(map(quarantined, _checked(value["quarantine"]))),
            acknowledged=_count(value["acknowledged"]),
            dropped=_count(value["dropped"]),
            weights=_records(MixtureWeights, value.get("weights", ())),
            mean_lengths=_mean_lengths(identity, value.get("mean_lengths", ())),
            segments=_records(MixtureSegment, value.get("segments", ()), least=-MOST),
        )


def _packed(identity: Mapping[str, object]) -> dict[str, object]:
    """An identity as tokens have it: of a mixture's components all is in one text, of which 1,000 fit.

    That is JSON in columns, a field after the other, deflated (RFC 1951 in zlib's wrapper) and in base64.
    """
    found: dict[str, Any] = dict(identity)
    if components := found.get("components"):
        names = dict.fromkeys(field for each in components.values() for field in each)
        columns = {field: [each.get(field) for each in components.values()] for field in names}
        if "fingerprint" in columns:  # what deflates: it is packed itself
            columns["fingerprint"] = [
                text and Fingerprint.decode(text).row for text in columns["fingerprint"]
            ]
        text = json.dumps([list(components), columns], separators=(",", ":"))
        found["components"] = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    return found


def _unpacked(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Read what `_packed` has made. Raises ValueError, TypeError or zlib.error for anything else."""
    found = dict(packed)
    if "components" in found:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(base64.b64decode(found["components"], validate=True), _MOST_UNPACKED)
        if not unpacker.eof:
            raise ValueError("what it says of a mixture's components is cut off, or too long")
        names, columns = json.loads(text)
        if rows := columns.get("fingerprint"):
            columns["fingerprint"] = [row and Fingerprint.from_row(row).encode() for row in rows]
        found["components"] = {
            str(name): {field: column[c] for field, column in columns.items() if column[c] is not None}
            for c, name in enumerate(names)
        }
    return found


def _mean_lengths(identity: Mapping[str, Any], row: list[float]) -> dict[str, float]:
    """The mean lengths of a mixture's components by name, where they are known."""
    if not row:
        return {}
    if not all(type(length) is float and 0 <= length < math.inf for length in row):
        raise ValueError("it has something that is not a mean length where one belongs")
    by_name = zip(identity["components"], row, strict=True)
    return {name: length for name, length in by_name if length}


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST:  # True is no count
        raise ValueError("it has something that is not a count where one belongs")
    return value


def _records(kind: type[R], rows: Iterable[Any], *, least: int = 0) -> tuple[R, ...]:
    """Return the records of rows. Raises ValueError for a number below `least`, or beyond the wire's."""
    return tuple(from_row(kind, row) for row in _checked(rows, least=least))


def _checked(rows: Iterable[Any], *, least: int = 0) -> Iterable[Any]:
    for value in chain.from_iterable(rows):
        for number in value if isinstance(value, list) else (value,):
            if isinstance(number, int) and not least <= number <= MOST:
                raise ValueError("it has something that is not a count where one belongs")
    return rows
