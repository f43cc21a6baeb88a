"""Registration of datasets: when two descriptions are of one dataset, what makes one, and what one may be.

The first description makes a dataset; later ones must fit it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast, get_type_hints

from edl_torch.core.mixture import (
    ALL_EXHAUSTED,
    ENDLESS,
    FIRST_EXHAUSTED,
    LONGEST,
    MOST_LIMITED,
    SPENT,
    component_spec,
    first_turn,
    reweighed,
    with_lengths_of_left,
)
from edl_torch.core.permutation import MAX_SIZE
from edl_torch.errors import DatasetConflict, InvalidArgument, UnknownDataset
from edl_torch.fingerprint import UNKNOWN, describe_change, differ
from edl_torch.fingerprint import check as check_fingerprint
from edl_torch.shard import OPTIONS, Component, DatasetSpec, MixtureWeights, Registration, Source, TaskType

_MISSING = "nothing"
_ORDER = {name: option for name, option in OPTIONS.items() if option.metadata["orders"]}
_LOOKS = ("names", "below", "fingerprint")
_DATA = ("sources", "num_sources", "size", "components", *_LOOKS)
_LEFT: dict[str, object] = {"left": True}  # all that is known of a component that has left
_LABELS = {
    "turn": "one_component (records of one component in a row)",
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
    if spec.components:
        # Its one source is its length, which may follow from weights.
        fields = {field: value for field, value in fields.items() if field not in _DATA}
        fields["ends"], fields["turn"] = spec.stops or spec.size, spec.turn
        fields["components"] = {
            component.name: _LEFT
            if component.left
            else _but_seed(identity(component_spec(component, 0)))
            | ({"max_passes": component.max_passes} if component.max_passes else {})
            for component in spec.components
        }
    return fields


def _but_seed(found: dict[str, object]) -> dict[str, object]:
    return {field: value for field, value in found.items() if field != "seed"}


def differences(
    registered: Mapping[str, object],
    asked: Mapping[str, object],
    *,
    asked_is_older: bool = False,
    may_change: bool = False,
) -> list[str]:
    """Return a line for each field in which two identities differ, such as `seed: registered 0, asked 7`.

    An unknown fingerprint differs from none; where both are known, sources may lie in another folder.
    `asked_is_older` says which data were there first. Where components `may_change`, it is no difference that
    some have joined or left since.
    """
    if "components" in registered and "components" in asked:
        return _differences_of_mixtures(
            registered, asked, asked_is_older=asked_is_older, may_change=may_change
        )
    prints = [str(found.get("fingerprint", UNKNOWN)) for found in (registered, asked)]
    then, now = reversed(prints) if asked_is_older else prints
    lines = [f"data: {describe_change(then, now)}"] if differ(then, now) else []
    passed_over = {"fingerprint", "names" if all(prints) else "below", "below" if lines else ""}
    if lines or registered.get("size") != asked.get("size"):
        passed_over |= {"sources"}  # a digest that says no more
    for field in dict.fromkeys((*registered, *asked)):
        option = _ORDER.get(field)
        absent = option.default if option is not None and option.metadata["rare"] else _MISSING
        old, new = registered.get(field, absent), asked.get(field, absent)
        if field == "components":  # the other is no mixture
            lines.append(f"components: {'registered' if field in registered else 'asked'} alone")
        elif old != new and field not in passed_over:
            lines.append(f"{_LABELS.get(field, field)}: registered {old}, asked {new}")
    return lines


def _differences_of_mixtures(
    registered: Mapping[str, object], asked: Mapping[str, object], *, asked_is_older: bool, may_change: bool
) -> list[str]:
    old, new = (dict[str, Any](found) for found in (registered, asked))
    of_old, of_new = (found.pop("components") for found in (old, new))
    then, now = (of_new, of_old) if asked_is_older else (of_old, of_new)
    lines = differences(old, new)
    for name in dict.fromkeys((*of_old, *of_new)):
        if may_change and name in now and (name not in then or now[name] == _LEFT):
            continue
        if then.get(name) == _LEFT and name in now and now[name] != _LEFT:
            lines.append(f"component {name!r}: it has left; what comes back needs another name")
        elif name not in of_new or name not in of_old:
            lines.append(f"component {name!r}: {'registered' if name in of_old else 'asked'} alone")
        else:
            found = differences(of_old[name], of_new[name], asked_is_older=asked_is_older)
            lines += [f"component {name!r}: {line}" for line in found]
    return lines


def data_differences(registered: Mapping[str, object], asked: Mapping[str, object]) -> list[str]:
    """Return the lines of `differences` that are of the data."""
    one, other = ({f: found[f] for f in _DATA if f in found} for found in (registered, asked))
    return differences(one, other)


def but_data(found: Mapping[str, object]) -> dict[str, object]:
    """Return an identity without what says which data it is of."""
    return {field: value for field, value in found.items() if field not in _DATA}


def but_looks(found: Mapping[str, Any]) -> dict[str, object]:
    """Return an identity without names and fingerprints of its data: their sizes, and the order."""
    kept = {field: value for field, value in found.items() if field not in _LOOKS}
    if "components" in found:
        each = dict[str, Any](found["components"]).items()
        kept["components"] = {name: one if one == _LEFT else but_looks(one) for name, one in each}
    return kept


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


BATCHES_PER_SHARD = 8
NO_EPOCHS = (
    "has no epochs, only passes over each component, which follow from the weights: leave num_epochs out, "
    "and end it with num_records=, stopping_strategy= or the loop"
)
_GO_ON = (
    ". To go on with other data, start a master that has none of this dataset (with another --state), and "
    'load the checkpoint with data_changed="new_epoch"'
)

_HINTS = get_type_hints(DatasetSpec)
_CHOICES = {bool: "True or False", bool | None: "True, False or None", TaskType: "a TaskType"}


def check_batch_size(batch_size: int) -> None:
    """Raise InvalidArgument for one that no dataset could fill."""
    if not 1 <= batch_size <= MAX_SIZE:
        raise InvalidArgument(f"batch_size must be 1 or more, and {MAX_SIZE} at most, not {batch_size}")


def new_spec(registration: Registration, batch_size: int) -> DatasetSpec:
    """The dataset that a first registration describes. Raises UnknownDataset when it is a name alone."""
    if registration.sources is None:
        raise UnknownDataset(
            f"the master has no dataset {registration.name!r}, and the service gives no reader and no "
            f"dataset_size: pass one of them, or start the master with --training_data"
        )
    given = registration.given
    turn = given.get("turn", 1)
    _check_turn(f"dataset {registration.name!r}", turn, bool(registration.components))
    given.setdefault("records_per_shard", first_turn(BATCHES_PER_SHARD * batch_size, turn))
    given.setdefault("shuffle_in_shard", True if "shuffle_window" in given else None)
    if registration.components:
        given["components"] = _whole(registration.components, given["records_per_shard"])
        return _new_mixture(DatasetSpec(**given | {"shuffle_in_shard": False}), registration)
    spec = DatasetSpec(**given)
    validate_spec(spec)
    return spec


def _whole(components: tuple[Component, ...], records_per_shard: int) -> tuple[Component, ...]:
    """The components, of which those that leave their shards open have shards of so many records."""
    return tuple(
        component
        if component.records_per_shard or component.left
        else replace(component, records_per_shard=records_per_shard)
        for component in components
    )


def _new_mixture(spec: DatasetSpec, registration: Registration) -> DatasetSpec:
    validate_spec(spec)
    if registration.num_epochs is not None:
        raise InvalidArgument(f"mixture {spec.name!r} {NO_EPOCHS}")
    made = reweighed(spec, 0)
    return replace(made, num_epochs=0 if made.size == ENDLESS else 1)


def reconcile(registered: DatasetSpec, asked: Registration, *, alone: bool) -> DatasetSpec:
    """Return the registered dataset, with what `asked` may still change of it.

    The identity must agree in every field that `asked` names; a dataset made without a trainer leaves the
    in-shard shuffle and its window open for the first one, and who says nothing of it does not shuffle.
    The first known fingerprint binds it; where it agrees, sources have the names that `asked` gives them.
    Options differ freely while `alone` uses the dataset, and components of a mixture join and leave.
    Raises DatasetConflict with the differing fields.
    """
    given = asked.given
    check_fingerprint(given.get("fingerprint", UNKNOWN))
    if registered.shuffle_in_shard is None:
        registered = replace(
            registered,
            shuffle_in_shard=given.get("shuffle_in_shard", False),
            shuffle_window=given.get("shuffle_window", 1),
        )
    if asked.components:
        given["components"] = _whole(asked.components, registered.records_per_shard)
    if registered.stops:
        given.pop("sources", None)  # its length follows
    wanted = with_lengths_of_left(replace(registered, **given), registered.mean_lengths)
    old, new = identity(registered), identity(wanted)
    differing = differences(old, new, may_change=alone)
    if differing and asked.components and not differences(old, new, may_change=True):
        raise DatasetConflict(
            f"mixture {registered.name!r} has trainers of a program with other datasets, which cannot read "
            f"what joins ({'; '.join(differing)}): stop them all, and start this program; it goes on where "
            f"they were"
        )
    if registered.components and asked.sources is not None and not asked.components:
        differing.append("components: asked for a dataset that is no mixture")
    if not alone:
        differing += [
            f"component {there.name!r}: mean length registered {there.mean_length:g}, asked "
            f"{here.mean_length:g}"
            for there, here in zip(registered.components, wanted.components, strict=False)
            if there.mean_length != here.mean_length
        ]
    if wanted.weights != registered.weights and not alone and not differing:
        differing.append(f"weights: registered {_shown(registered.weights)}, asked {_shown(wanted.weights)}")
    if not alone:
        differing += option_differences(registered, asked)
    if differing:
        has_other_data = bool(data_differences(old, new))
        what = "data or settings" if has_other_data else "settings"
        raise DatasetConflict(
            f"dataset {registered.name!r} is registered with other {what}: {'; '.join(differing)}. "
            f"Use the registered ones, or another dataset_name" + _GO_ON * has_other_data
        )
    validate_spec(wanted)
    return wanted


def _shown(weights: Sequence[MixtureWeights]) -> str:
    return ", ".join(f"{change.parts} from {change.start}" for change in weights)


def check_data(registered: DatasetSpec, here: DatasetSpec) -> None:
    """Raise DatasetConflict unless the data `here` are those registered."""
    differing = data_differences(identity(registered), identity(here))
    if differing:
        raise DatasetConflict(
            f"dataset {registered.name!r} is registered with other data: {'; '.join(differing)}. "
            f"Give every rank the same data"
        )


def option_differences(registered: DatasetSpec, asked: Registration) -> list[str]:
    """Return a line for each option that `asked` names and that is another one in the registered dataset."""
    return [
        f"{name}: registered {getattr(registered, name)}, asked {wanted}"
        for name, wanted in asked.given.items()
        if name in OPTIONS and not OPTIONS[name].metadata["orders"] and wanted != getattr(registered, name)
    ]


# What a dataset may be ----------------------------------------------------------------------------------


def validate_spec(spec: DatasetSpec) -> None:
    """Raise `InvalidArgument`, naming field, value and remedy, unless `spec` describes a usable dataset."""
    if not isinstance(spec.name, str) or not spec.name:
        raise InvalidArgument(f"name is {spec.name!r}: give the dataset a name, such as 'training'")
    who = f"dataset {spec.name!r}"
    for name in OPTIONS:
        check_option(who, name, getattr(spec, name))
    _check_turn(who, spec.turn, bool(spec.components))
    _check_sources(who, spec)
    if spec.window > 1:
        _check_whole_shards(who, spec)
    if spec.components:
        _check_mixture(who, spec)


def _check_turn(who: str, turn: object, is_mixture: bool) -> None:
    """Raise InvalidArgument for a number of records that components cannot take turns by."""
    _check_integer(who, "turn", turn)
    if not 1 <= cast("int", turn) <= (MAX_SIZE if is_mixture else 1):
        raise InvalidArgument(
            f"{who}: turn is {turn}: give a number of records, 1 or more; 1 where it is no mixture"
        )


def _check_mixture(who: str, spec: DatasetSpec) -> None:
    names = [component.name for component in spec.components]
    for component in spec.components:
        if type(component.name) is not str or not component.name or ":" in component.name:
            raise InvalidArgument(f"{who}: component {component.name!r}: give it a name, without a colon")
        if not component.left:
            validate_spec(component_spec(component, spec.seed))
    if len(set(names)) < len(names):
        raise InvalidArgument(f"{who}: two components have one name: {', '.join(names)}")
    if spec.mean_lengths:
        for component in spec.components:
            may_be_unknown = component.left and not component.mean_length
            if not may_be_unknown and not 0 < component.mean_length < math.inf:
                raise InvalidArgument(
                    f"{who}, component {component.name!r}: its records have a mean length of "
                    f"{component.mean_length}: where one has a length, give each a number above 0"
                )
    limited = [component for component in spec.components if component.max_passes]
    for component in limited:
        _check_integer(f"{who}, component {component.name!r}", "max_passes", component.max_passes)
        if component.max_passes < 0:
            raise InvalidArgument(
                f"{who}, component {component.name!r}: max_passes is {component.max_passes}: give 1 or more"
            )
    if len(limited) > MOST_LIMITED:
        raise InvalidArgument(
            f"{who}: {len(limited)} components have max_passes, and {MOST_LIMITED} may: each changes the "
            "weights once"
        )
    if spec.stops not in ("", FIRST_EXHAUSTED, ALL_EXHAUSTED, SPENT):
        raise InvalidArgument(
            f"{who}: stopping_strategy is {spec.stops!r}: give {FIRST_EXHAUSTED!r}, {ALL_EXHAUSTED!r} or None"
        )
    if spec.shuffle or spec.shuffle_shards or spec.shuffle_in_shard:
        raise InvalidArgument(
            f"{who}: a mixture is shuffled by its components: give shuffle= to each of them"
        )
    starts = [change.start for change in spec.weights]
    if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
        raise InvalidArgument(f"{who}: weights begin at {starts}: give some from 0 on, then at later indices")
    for what, number in [
        ("records_per_shard", spec.records_per_shard),
        *(("weights from", n) for n in starts),
    ]:
        if number % spec.turn:
            raise InvalidArgument(
                f"{who}: {what} {number}: batches are of one component, {spec.turn} records at a time: give "
                f"a multiple of that"
            )
    for change in spec.weights:
        whole = all(type(part) is int and part >= 0 for part in change.parts)
        if len(change.parts) != len(names) or not whole or not 0 < sum(change.parts) <= LONGEST:
            raise InvalidArgument(
                f"{who}: weights from {change.start} on are {change.parts}: give a whole number of parts for "
                f"each component, {LONGEST} together at most"
            )
        if any(part and one.left for one, part in zip(spec.components, change.parts, strict=True)):
            raise InvalidArgument(f"{who}: weights from {change.start} on are of a component that has left")


def check_option(who: str, name: str, value: Any) -> None:
    """Raise `InvalidArgument` unless `value` is one for the option of that name."""
    hint, limits = _HINTS[name], OPTIONS[name].metadata
    if hint is str:
        check_fingerprint(value)
    elif hint is not int:
        if not isinstance(value, hint):
            raise InvalidArgument(f"{who}: {name} is {value!r}: give {_CHOICES[hint]}")
    else:
        _check_integer(who, name, value)
        if limits["least"] is not None and value < limits["least"]:
            raise InvalidArgument(f"{who}: {name} is {value}: {limits['remedy']}")
        if limits["orders"] and limits["least"] is not None and value > MAX_SIZE:
            raise InvalidArgument(f"{who}: {name} is {value}: 2**62 is the most")


def _check_integer(who: str, field: str, value: object) -> None:
    if type(value) is not int:
        kind = type(value).__name__
        raise InvalidArgument(
            f"{who}: {field} is {value!r} of type {kind}: give a Python int, as int(...) makes"
        )


def _check_sources(who: str, spec: DatasetSpec) -> None:
    for source in spec.sources:
        # One comparison chain for the usual case: there may be 10**5 sources.
        if not (
            type(source.name) is str
            and type(source.start) is int
            and type(source.count) is int
            and 0 <= source.start <= source.start + source.count <= MAX_SIZE
        ):
            _reject_source(who, source)
    size = spec.size
    if size <= 0:
        names = ", ".join(repr(source.name) for source in spec.sources[:3]) or "none"
        raise InvalidArgument(
            f"{who}: size is {size} records in {len(spec.sources)} source(s) ({names}), so there is nothing "
            f"to read: check that the data are there, and what create_shards() of your own reader returns"
        )
    if size > MAX_SIZE:
        raise InvalidArgument(f"{who}: size is {size} records: 2**62 is the most, split the dataset")
    _check_overlap(who, spec.sources)


def _check_whole_shards(who: str, spec: DatasetSpec) -> None:
    per = spec.records_per_shard
    shards = sum(-(-source.count // per) for source in spec.sources)
    if shards * per > MAX_SIZE:
        raise InvalidArgument(
            f"{who}: with windows of shards, {shards} shards of {per} records must be 2**62 records at most: "
            f"make smaller shards"
        )


def _reject_source(who: str, source: Source) -> None:
    where = f"{who}, source {source.name!r}"
    if type(source.name) is not str:
        raise InvalidArgument(f"{where}: name is not a string: give the storage's name as a str")
    _check_integer(where, "start", source.start)
    _check_integer(where, "count", source.count)
    if source.start < 0:
        raise InvalidArgument(f"{where}: start is {source.start}: give the first record's number, 0 or more")
    if source.count < 0:
        raise InvalidArgument(f"{where}: count is {source.count}: give the number of records, 0 or more")
    raise InvalidArgument(f"{where}: start + count is {source.start + source.count}: 2**62 is the most")


def _check_overlap(who: str, sources: tuple[Source, ...]) -> None:
    """A record is known by its name and number, so no two runs of one storage may share one."""
    if len({source.name for source in sources}) == len(sources):
        return
    runs = sorted((source.name, source.start, source.count) for source in sources if source.count)
    for (name, start, count), (next_name, next_start, next_count) in pairwise(runs):
        if name == next_name and next_start < start + count:
            raise InvalidArgument(
                f"{who}: records {start}..{start + count} and {next_start}..{next_start + next_count} of "
                f"{name!r} overlap: make the ranges disjoint, each record belongs to an epoch once"
            )
