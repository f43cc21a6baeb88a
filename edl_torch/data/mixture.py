"""`Mixture`: what a loader is given to train on several datasets at once, in exact shares.

It says what is mixed. The order is `core.mixture`'s; records are read through `readers.mixture`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import islice, pairwise
from numbers import Integral
from typing import Any, Literal, NamedTuple

from edl_torch.client.service import DataShardService
from edl_torch.core.mixture import ENDLESS, SPENT, parts_of, weights_by_name
from edl_torch.core.permutation import Permutation, derive_key
from edl_torch.data.dataset import OnBadRecord, ShardedDataset, of_image
from edl_torch.data.reading.sample_reading import Transform
from edl_torch.data.reading.seeding import draws_by_itself, with_own_numbers
from edl_torch.errors import InvalidArgument
from edl_torch.readers.base import is_source_error, reader_sources
from edl_torch.readers.mixture import ComponentReader, MixtureReader, read_alone
from edl_torch.shard import MixtureWeights, Source, TaskType

StoppingStrategy = Literal["first_exhausted", "all_exhausted"]
ShareOf = Mapping[str, float]  # a weight by component
Length = float | str | Callable[[Any], float]  # a mean, or how the length of a record is found
SAMPLE = 256  # records of which the mean length is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureComponent:
    """A dataset of a mixture with options of its own.

    Args:
        data: What an `ElasticDataLoader` reads: a reader, a map-style dataset, a path or address. None: this
            component has left the mixture.
        shuffle: As for `ElasticDataLoader`; None: as the loader says.
        shuffle_window: As for `ElasticDataLoader`.
        records_per_shard: Records of a shard of it. Default: as many as in the mixture's.
        on_bad_record: As for `ElasticDataLoader`; None: as the loader says.
        max_passes: After so many passes over it its share ends, and the others share it by their weights.
        transform: Applied to each record, before the loader's own `transform`. Of a reader that yields images
            it is given the image.
        target_transform: Applied to the target, of a reader that yields images with targets.
    """

    data: Any = field(kw_only=False)
    shuffle: bool | Literal["shards", "in_shard"] | None = None
    shuffle_window: int | None = None
    records_per_shard: int | None = None
    on_bad_record: OnBadRecord | None = None
    max_passes: int | None = None
    transform: Transform | None = None
    target_transform: Transform | None = None


class Mixture:
    """Several datasets as one, for `ElasticDataLoader(Mixture(…), batch_size=…)`.

    Records come in exact shares: as long as weights stay as they are, each component is within one record of
    its share at every index; a change takes over what each is owed. Each component's records come in passes,
    each of which has every record of it once, in an order of its own. What is at an index is a function of
    seed, weights and index, on any number of trainers.

    Args:
        components: Datasets by name; of one with options of its own a `MixtureComponent`, of one that has
            left None. No colon in names.
        weights: A weight for each component, in any unit; decimals are exact. A list of `(index, weights)`,
            the first one with 0, changes them as the mixture comes to these indices. Default: by size in
            records.
        stopping_strategy: "first_exhausted" ends with the first pass over any component that is complete,
            "all_exhausted" when each has had one.
        num_records: Records after which the mixture ends. With neither it is endless, and the loop ends it,
            or it ends when each component with a weight has had its `max_passes`, where all have some.
        temperature: Without weights: shares go by size, in tokens with `unit="tokens"`, to the power of
            1/temperature. 1 is by size; the larger, the more alike the shares.
        with_component: Samples are pairs of the component's name and the sample.
        one_component: Each batch is of one component, for samples of other shapes: True, or a number of
            records that `batch_size` divides, for jobs that are to go on with other batch sizes. Components
            take turns of so many, and are within one turn of their shares.
        unit: What weights are shares of. "tokens" makes shares of records of them, by the mean length of a
            component's records, which `length` says.
        length: With `unit="tokens"`: the field of a record that is its length, or has it, as a list or a
            text; or a function of a record, as the component's reader yields it. Of each component, whether
            its mean is taken of 256 records, or of all where there are fewer. Or such for each, by name, or
            its mean length as a number.

    Raises:
        InvalidArgument: no components, weights for others or that cannot be used, two ends, no lengths.
    """

    def __init__(
        self,
        components: Mapping[str, Any],
        weights: ShareOf | Sequence[tuple[int, ShareOf]] | None = None,
        *,
        stopping_strategy: StoppingStrategy | None = None,
        num_records: int | None = None,
        temperature: float | None = None,
        with_component: bool = False,
        one_component: bool | int = False,
        unit: Literal["records", "tokens"] = "records",
        length: Length | Mapping[str, Length] | None = None,
    ) -> None:
        if not isinstance(components, Mapping) or not components:
            raise InvalidArgument('Mixture needs datasets by name, as Mixture({"web": web, "code": code})')
        for name in components:
            if not isinstance(name, str) or not name or ":" in name:
                raise InvalidArgument(f"a component is called {name!r}: give it a name, without a colon")
        if stopping_strategy is not None and num_records is not None:
            raise InvalidArgument("give stopping_strategy or num_records, not both: each says where it ends")
        if stopping_strategy not in (None, "first_exhausted", "all_exhausted"):
            raise InvalidArgument(
                f"stopping_strategy is {stopping_strategy!r}: give 'first_exhausted', 'all_exhausted' or None"
            )
        if num_records is not None and (
            not isinstance(num_records, int) or isinstance(num_records, bool) or not 0 < num_records < ENDLESS
        ):
            raise InvalidArgument(f"num_records is {num_records!r}: give a number of records, or None")
        if temperature is not None and weights is not None:
            raise InvalidArgument("temperature makes weights of sizes: leave it out, or weights")
        if temperature is not None and not _number(temperature) > 0:
            raise InvalidArgument(
                f"temperature is {temperature!r}: give a number above 0, 1 for shares by size"
            )
        if not isinstance(one_component, int) or one_component < 0:
            raise InvalidArgument(f"one_component is {one_component!r}: give True, or a number of records")
        # In the order of names, so that it does not matter in which order a program has them.
        self.components = {
            name: part if isinstance(part, MixtureComponent) else MixtureComponent(part)
            for name, part in sorted(components.items())
        }
        self.with_component = with_component
        self._one_component = one_component
        self._left = [name for name, part in self.components.items() if part.data is None]
        is_limited = all(part.max_passes or part.data is None for part in self.components.values())
        by_passes = SPENT if is_limited and num_records is None else ""
        self._stops = stopping_strategy or by_passes
        self._size = ENDLESS if num_records is None else num_records
        self._temperature = 1.0 if temperature is None else float(temperature)
        self._lengths = self._lengths_by(unit, length)
        self._changes = None if weights is None else self._in_order(weights)
        if not self._lengths:
            self._weights()  # that they make parts: those of tokens make some by lengths

    def _lengths_by(self, unit: str, length: Any) -> dict[str, Length]:
        """How the mean length of each component is known; of none where shares are of records."""
        if unit not in ("records", "tokens"):
            raise InvalidArgument(f"unit is {unit!r}: give 'records' or 'tokens'")
        if (unit == "tokens") != (length is not None):
            raise InvalidArgument(
                "unit='tokens' takes length=, the field of a record, a function of one, or mean lengths by "
                "name; without it leave length out"
            )
        if length is None:
            return {}
        there = [name for name in self.components if name not in self._left]
        by_name = dict(length) if isinstance(length, Mapping) else dict.fromkeys(there, length)
        missing, unknown = set(there) - {*by_name}, {*by_name} - {*self.components}
        if missing or unknown:
            what = [f"none of {', '.join(sorted(missing))}"] * bool(missing)
            what += [f"{', '.join(sorted(map(str, unknown)))}: no component"] * bool(unknown)
            raise InvalidArgument(f"length= is by component: {'; '.join(what)}. Give each that has data one")
        for name, one in by_name.items():
            is_mean = isinstance(length, Mapping) and 0 < _number(one) < math.inf
            if not (isinstance(one, str) or callable(one) or is_mean):
                raise InvalidArgument(
                    f"the length of {name!r} is {one!r}: give its mean length, a number above 0, by name, or "
                    f"the field of a record or a function of one"
                )
        return {name: by_name[name] for name in there}

    def _in_order(self, weights: ShareOf | Sequence[tuple[int, ShareOf]]) -> list[tuple[int, list[Fraction]]]:
        """The changes of weights, each with those of all components, exactly."""
        given: Any = [(0, weights)] if isinstance(weights, Mapping) else weights
        changes = list(given) if isinstance(given, Iterable) else [given]
        if not all(
            isinstance(change, tuple) and len(change) == 2 and isinstance(change[1], Mapping)
            for change in changes
        ):
            each = ", ".join(f"{name!r}: …" for name in islice(self.components, 3))
            raise InvalidArgument(
                f"weights are given by name, as {{{each}}}, or as [(0, {{…}}), (index, {{…}})]"
            )
        names = list(self.components)
        for start, _ in changes:
            if start is True or start is False or not isinstance(start, Integral):
                raise InvalidArgument(f"weights begin at {start!r}: give an index, so many records into it")
        found = [
            (int(start), weights_by_name("the mixture", names, shares, left=self._left))
            for start, shares in changes
        ]
        starts = [start for start, _ in found]
        if starts[:1] != [0] or any(one >= other for one, other in pairwise(starts)):
            raise InvalidArgument(f"weights begin at {starts}: give some from 0 on, then at later indices")
        return found

    def _weights(self, lengths: Sequence[float] = ()) -> tuple[MixtureWeights, ...] | None:
        """The changes of weights in parts of records; None where weights go by size."""
        if self._changes is None:
            return None
        return tuple(
            MixtureWeights(start=start, parts=parts_of(weights, list(self.components), lengths))
            for start, weights in self._changes
        )

    def open(
        self, parts: Sequence[ComponentReader], batch_size: int, task_type: TaskType, *, tagged: bool
    ) -> MixtureReader:
        """Return the reader of the mixture, of those of its components.

        Raises InvalidArgument for batches that would be of several components where they are to be of one.
        """
        one = self._one_component
        turn = batch_size if one is True else one or 1
        if one and turn % batch_size:
            raise InvalidArgument(
                f"one_component={turn} makes batches of one component, and batch_size={batch_size} does not "
                f"divide it: give a multiple of the batch size, or True"
            )
        means: list[float] = []
        if self._lengths:
            means = [0.0 if part.left else self._mean_length(part, task_type) for part in parts]
            parts = [
                replace(part, order={**part.order, "mean_length": mean})
                for part, mean in zip(parts, means, strict=True)
            ]
        weights = self._weights(means)
        if weights is None:
            weights = (MixtureWeights(start=0, parts=self._by_size(parts, means, task_type)),)
        return MixtureReader(
            parts, weights=weights, size=self._size, stops=self._stops, turn=turn, tagged=tagged
        )

    def _by_size(
        self, parts: Sequence[ComponentReader], means: Sequence[float], task_type: TaskType
    ) -> tuple[int, ...]:
        """Return shares of records by size, or with a temperature of tokens where these are known."""
        names = [part.name for part in parts]
        sizes = [
            0 if part.left else sum(source.count for source in reader_sources(part.reader, task_type))
            for part in parts
        ]
        if self._temperature == 1:
            return parts_of(sizes, names)
        longest = max(means, default=1.0) or 1.0
        tokens = [
            size * (mean / longest) for size, mean in zip(sizes, means or [1.0] * len(sizes), strict=True)
        ]
        most = max(tokens) or 1.0
        # Of the largest, so that none overflows.
        shares = [(one / most) ** (1 / self._temperature) if one else 0.0 for one in tokens]
        lost = [name for name, size, share in zip(names, sizes, shares, strict=True) if size and not share]
        if lost:
            raise InvalidArgument(
                f"temperature={self._temperature:g} leaves nothing to {', '.join(lost)}: give a larger one, "
                f"or weights"
            )
        return parts_of(shares, names, means)

    def _mean_length(self, part: ComponentReader, task_type: TaskType) -> float:
        """Return the mean length of a component's records: given, or taken of some, the same everywhere."""
        by = self._lengths[part.name]
        if not (isinstance(by, str) or callable(by)):
            return _number(by)
        who = f"component {part.name!r}"
        sources = reader_sources(part.reader, task_type)
        error: Exception | None = None
        lengths = []
        are_single = True
        for name, number in _sampled(sources):
            try:
                record = read_alone(part.reader, name, number)
            except Exception as exc:  # a bad record is the loop's to report
                if is_source_error(exc):
                    raise
                error = exc
            else:
                where = f"record {number} of {name!r}, {who}"
                found = _found_in(record, by, where)
                lengths.append(_length_of(found, where))
                are_single = are_single and getattr(found, "shape", None) == (1,)
        total = sum(lengths)
        if not 0 < total < math.inf:
            raise InvalidArgument(
                f"{who} has no mean length: its {len(lengths)} records that were read have {total:g} together"
            ) from error
        if are_single:
            raise InvalidArgument(
                f"{who}: each record has an array of one number as its length. Give a function that says "
                f"which it is, that number or 1: length=lambda record: int(record[…][0])"
            )
        return total / len(lengths)

    def __repr__(self) -> str:
        return f"<Mixture {', '.join(self.components)}>"


def _sampled(sources: Sequence[Source]) -> Iterator[tuple[str, int]]:
    """Yield the records of a component of which the mean length is taken, in order for readers of blocks."""
    size = sum(source.count for source in sources)
    chosen = Permutation(size, derive_key(0, 0, "mean length"))
    numbers = iter(sorted(map(chosen, range(min(size, SAMPLE)))))
    number, first = next(numbers, size), 0
    for source in sources:
        while number < first + source.count:
            yield source.name, source.start + number - first
            number = next(numbers, size)
        first += source.count


def _found_in(record: Any, by: str | Callable[[Any], float], who: str) -> Any:
    """Return what is the length of a record, or has it."""
    if callable(by):
        try:
            return by(record)
        except Exception as exc:  # whatever it raises
            exc.add_note(f"That is length= of {who}")
            raise
    try:
        return record[by]
    except (LookupError, TypeError, ValueError) as exc:
        fields = f"it has {', '.join(map(str, record))}" if isinstance(record, Mapping) else "it has none"
        raise InvalidArgument(f"{who}, has no field {by!r}: {fields}. Give another, or a function") from exc


def _length_of(found: Any, who: str) -> float:
    shape = tuple(getattr(found, "shape", ()))
    if len(shape) > 1:
        raise InvalidArgument(
            f"{who}, has an array of {len(shape)} dimensions as its length: give a function that says "
            f"which of {shape} it is"
        )
    try:
        length = float(len(found))
    except TypeError:  # it is the length
        length = _number(found)
    if not 0 <= length < math.inf:
        raise InvalidArgument(f"{who}, has the length {found!r}: it is to be a number, 0 or more")
    return length


def _number(value: Any) -> float:
    """Return a number of any kind as a float; NaN for what is none, or too large for one."""
    if isinstance(value, bool) or not hasattr(value, "__float__") or getattr(value, "ndim", 0) > 0:
        return math.nan
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):
        return math.nan


class MixtureDataset(ShardedDataset):
    """The records of a mixture, each made into a sample by its component's transform, then by `transform`."""

    def __init__(
        self,
        service: DataShardService,
        reader: MixtureReader,
        mixture: Mixture,
        transform: Transform | None,
        *,
        on_bad_record: OnBadRecord,
        seed_transforms: bool,
    ) -> None:
        own = {name: part.on_bad_record or on_bad_record for name, part in mixture.components.items()}
        for name, each in own.items():
            if each not in ("raise", "quarantine"):
                raise InvalidArgument(
                    f"on_bad_record of component {name!r} is {each!r}: give 'raise' or 'quarantine'"
                )
        strictest: OnBadRecord = "quarantine" if "quarantine" in own.values() else "raise"
        super().__init__(
            service, reader, False, transform, on_bad_record=strictest, seed_transforms=seed_transforms
        )
        self.components = ", ".join(map(repr, own))
        self._raises = {name for name, each in own.items() if each == "raise"}
        self._parts = [
            _Steps(
                name,
                part.transform,
                part.target_transform,
                part.target_transform is not None or getattr(component.reader, "yields_images", False),
            )
            for (name, part), component in zip(mixture.components.items(), reader.parts, strict=True)
        ]
        self._tagged = reader.tagged
        self._with_component = mixture.with_component

    def _raises_of(self, name: str) -> bool:
        return name.partition(":")[0] in self._raises

    @property
    def _record_transform(self) -> Transform | None:
        last = with_own_numbers(self.transform)
        if not self._tagged:
            return last
        makers = [(part.name, part.make()) for part in self._parts]
        return partial(_sample, makers, last, self._with_component)

    @property
    def _draws_by_itself(self) -> bool:
        own = (transform for part in self._parts for transform in (part.transform, part.target_transform))
        return draws_by_itself(self.transform) or any(map(draws_by_itself, own))


class _Steps(NamedTuple):
    """What is made of the records of a component."""

    name: str
    transform: Transform | None
    target_transform: Transform | None
    is_image: bool

    def make(self) -> Transform | None:
        """Return what makes a sample of a record; None where the record is the sample."""
        if self.is_image:
            return of_image(self.transform, self.target_transform)
        return with_own_numbers(self.transform)


def _sample(
    makers: Sequence[tuple[str, Transform | None]],
    last: Transform | None,
    named: bool,
    tagged: tuple[int, Any],
) -> Any:
    """Make a sample of a record that a tagged `MixtureReader` has read."""
    place, sample = tagged
    name, make = makers[place]
    for step in (make, last):
        if step is not None:
            sample = step(sample)
    return (name, sample) if named else sample
