"""Mixtures through real loaders: shares, passes, tokens and changes of weights, against a book of its own."""

from __future__ import annotations

import gc
import importlib
import io
import json
import logging
import math
import random
import re
import subprocess
import sys
import tarfile
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cases import cases
from mixture_proof import prove
from torch.utils.data import IterableDataset, TensorDataset

from edl_torch import ElasticDataLoader, LocalMaster, Mixture, MixtureComponent
from edl_torch.cli.main import main
from edl_torch.cli.status import as_json, as_table
from edl_torch.core.calls import RegisterCall
from edl_torch.core.changes import Changes
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.persistence import dump, load
from edl_torch.core.registration import new_spec
from edl_torch.elasticdl.tasks import ForeignDataset
from edl_torch.elasticdl.wire import check_expressible
from edl_torch.errors import (
    BadRecord,
    DatasetConflict,
    EdlError,
    InvalidArgument,
    SourceChanged,
    StaleLease,
    TokenError,
    Unsupported,
)
from edl_torch.readers.map_dataset import MapDatasetReader
from edl_torch.readers.registry import open_reader
from edl_torch.readers.shared.files import OPEN_FILES
from edl_torch.shard import Component, MixtureWeights, Registration, Shard, Source, Task
from edl_torch.testing import ThreadPeers, wait_until

ROOT = Path(__file__).parents[2]
PROOF = Path(__file__).parents[1] / "mixture_proof.py"
SIZES = {"code": 37, "math": 5, "web": 400}
WEIGHTS = {"web": 0.6, "code": 0.3, "math": 0.1}

Found = tuple[str, int, int]  # component, pass, record


class Numbers:
    """A dataset of numbers, which tells whose they are."""

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return self.first + index


STARTS = {name: 1000 * place for place, name in enumerate(sorted(SIZES))}


def mixture(**more: Any) -> Mixture:
    parts: dict[str, Any] = {name: Numbers(STARTS[name], size) for name, size in SIZES.items()}
    return Mixture(parts, **{"weights": WEIGHTS, "num_records": 1000, **more})


def loader(mixed: Mixture | None = None, **more: Any) -> ElasticDataLoader:
    return ElasticDataLoader(
        mixture() if mixed is None else mixed, **{"batch_size": 10, "collate_fn": list, "seed": 3, **more}
    )


class Book:
    """What a mixture of unshuffled components gives at each index, by the rule as it is told in the docs."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.names = sorted(SIZES)
        self.lags = dict.fromkeys(self.names, Fraction(0))
        self.counts = dict.fromkeys(self.names, 0)
        self.found: list[Found] = []
        self.weigh(weights)

    def weigh(self, weights: Mapping[str, float]) -> None:
        total = sum(Fraction(str(weight)) for weight in weights.values())
        self.shares = {name: Fraction(str(weights[name])) / total for name in self.names}

    def leave(self, weights: Mapping[str, float]) -> None:
        """Go on with weights of which some may be 0: the others share out what those were owed."""
        self.weigh(weights)
        gone = sum(lag for name, lag in self.lags.items() if not self.shares[name])
        sign = -1 if gone > 0 else 1
        stays = {n: lag if self.shares[n] else Fraction(0) for n, lag in self.lags.items()}
        whole = sum(lag * sign for lag in stays.values() if lag * sign > 0) or Fraction(1)
        self.lags = {n: lag * (1 - abs(gone) / whole) if lag * sign > 0 else lag for n, lag in stays.items()}

    def upto(self, index: int) -> Book:
        while len(self.found) < index:
            may = [n for n in self.names if self.shares[n] and self.lags[n] + self.shares[n] > 0]
            due = {n: math.ceil((1 - self.lags[n]) / self.shares[n]) for n in may}
            self.lags = {n: self.lags[n] + self.shares[n] for n in self.names}
            now = [n for n in may if due[n] <= 1]
            first = min(now, key=lambda n: (-self.lags[n], n)) if now else min(may, key=lambda n: (due[n], n))
            number = self.counts[first]
            self.found.append((first, number // SIZES[first], number % SIZES[first]))
            self.counts[first] += 1
            self.lags[first] -= 1
        return self


def turns_of(book: Book, turns: int, turn: int) -> list[Found]:
    """The records of so many turns, by a book of turns."""
    seen, found = Counter[str](), []
    for name, _, _ in book.upto(turns).found[:turns]:
        numbers = range(seen[name], seen[name] + turn)
        found += [(name, number // SIZES[name], number % SIZES[name]) for number in numbers]
        seen[name] += turn
    return found


class Proof(NamedTuple):
    """What a program that knows nothing of the package makes of audit logs."""

    said: dict[str, Any]
    found: list[Found]


def proven(folder: Path) -> Proof:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(PROOF), str(folder), "--records"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, *lines = done.stdout.splitlines()
    records = [line.split() for line in lines]
    return Proof(json.loads(first), [(name, int(turn), int(number)) for name, turn, number in records])


def records_of(one: ElasticDataLoader, batch: Sequence[int]) -> list[Found]:
    """The records of the batch in hand, each held against what the batch has."""
    indices = one.records
    assert indices.passes is not None
    found = []
    for (name, index), number, value in zip(indices, indices.passes.tolist(), batch, strict=True):
        component = name.partition(":")[0]
        assert value == STARTS[component] + index
        found.append((component, number, index))
    return found


def trained(one: ElasticDataLoader, batches: int | None = None) -> list[Found]:
    found = []
    for number, batch in enumerate(one, 1):
        found += records_of(one, batch)
        if number == batches:
            one.stepped()
            break
    return found


READING: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_threads": 3},
    {"num_workers": 1, "num_threads": 2},
]


@pytest.mark.parametrize("reading", READING, ids=str)
def test_a_loop_is_given_what_the_weights_say(reading: dict[str, Any]) -> None:
    with loader(**reading) as one:
        assert len(one) == 100
        found = trained(one)
    book = Book(WEIGHTS).upto(1000).found
    assert Counter(found) == Counter(book)
    assert found == book or "num_workers" in reading
    assert Counter(name for name, _, _ in found) == {"web": 600, "code": 300, "math": 100}


class Together(Numbers):
    """Numbers that are read many at once."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self.first + index for index in indices]


def tensors(first: int, count: int) -> TensorDataset:
    return TensorDataset(torch.arange(first, first + count), torch.arange(count).repeat(2, 1).T.contiguous())


OF_LEASES: list[tuple[int, dict[str, Any]]] = [  # batches of several leases, and leases of many
    *product((7, 64, 900), ({}, {"num_threads": 3})),
    (64, {"num_workers": 2}),
]


@cases(
    "records_per_shard, reading, make",
    [*((*case, Together) for case in OF_LEASES[::3]), *((*case, tensors) for case in OF_LEASES[1::3])],
    [(*case, make) for case in OF_LEASES for make in (Together, tensors)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_records_that_are_read_together_come_in_their_order(
    make: Callable[[int, int], Any], records_per_shard: int, reading: dict[str, Any]
) -> None:
    parts: dict[str, Any] = {name: make(STARTS[name], size) for name, size in SIZES.items()}
    if make is Together:
        parts["math"] = Numbers(STARTS["math"], SIZES["math"])  # beside one that is not
    mixed = Mixture(parts, WEIGHTS, num_records=1000)
    options = {"batch_size": 16, "records_per_shard": records_per_shard, "shuffle": True, **reading}
    found = []
    with ElasticDataLoader(mixed, seed=3, **options) as one:
        for batch in one:
            values = batch[0] if make is tensors else batch
            found += records_of(one, values.tolist())
            if make is tensors:
                starts = torch.tensor([STARTS[component] for component, _, _ in found[-len(values) :]])
                assert torch.equal(batch[1], (values - starts).repeat(2, 1).T)
                assert batch[1].untyped_storage().nbytes() == batch[1].nbytes
    turns = [name for name, _, _ in Book(WEIGHTS).upto(1000).found]
    assert Counter(name for name, _, _ in found) == Counter(turns)
    assert [name for name, _, _ in found] == turns or "num_workers" in reading


@pytest.mark.parametrize("make", [Numbers, tensors])
def test_a_dataset_that_shrank_is_told_and_no_record_is_bad(make: Callable[[int, int], Any]) -> None:
    parts = {name: make(STARTS[name], size) for name, size in SIZES.items()}
    options: dict[str, Any] = {"on_bad_record": "quarantine", "max_bad_records": 9, "records_per_shard": 10}
    with ElasticDataLoader(Mixture(parts, WEIGHTS, num_records=1000), 10, seed=3, **options) as one:
        loop = iter(one)
        next(loop)
        web = parts["web"]
        if make is tensors:
            web.tensors = tuple(tensor[:3] for tensor in web.tensors)
        else:
            web.count, web.first = 3, None
        with pytest.raises(SourceChanged, match="had 400 records when the job began, and has 3 now"):
            list(loop)
        assert not one.quarantined()


def test_a_component_has_its_own_transform_and_the_loaders_after_it() -> None:
    parts = {"a": MixtureComponent([1, 2, 3], transform=lambda n: n + 10), "b": [7]}
    mixed = Mixture(parts, {"a": 1, "b": 1}, num_records=4, with_component=True)
    with ElasticDataLoader(mixed, 4, transform=lambda n: n * 2, collate_fn=list) as one:
        assert next(iter(one)) == [("a", 22), ("b", 14), ("a", 24), ("b", 14)]


def test_a_record_of_a_small_component_is_augmented_otherwise_in_each_pass() -> None:
    def draw(_: int, rng: np.random.Generator) -> int:
        return int(rng.integers(1 << 60))

    def drawn(**more: Any) -> list[tuple[Found, int]]:
        with loader(mixture(num_records=60), transform=draw, **more) as one:
            found = []
            for batch in one:
                indices = one.records
                assert indices.passes is not None
                keys = [
                    (*record, number) for record, number in zip(indices, indices.passes.tolist(), strict=True)
                ]
                found += list(zip(keys, batch, strict=True))
        return found

    plain = drawn()
    assert len({value for _, value in plain}) == 60
    assert dict(drawn(num_workers=2)) == dict(drawn(num_threads=2)) == dict(plain)


def test_weights_go_by_size_where_none_are_given() -> None:
    shares = {}
    for temperature in (None, 2, 1e9):
        with loader(mixture(weights=None, temperature=temperature, num_records=4420)) as one:
            shares[temperature] = Counter(name for name, _, _ in trained(one))
    assert shares[None] == {name: 10 * size for name, size in SIZES.items()}
    whole = sum(size**0.5 for size in SIZES.values())
    assert all(abs(shares[2][name] - 4420 * size**0.5 / whole) < 2 for name, size in SIZES.items())
    assert max(shares[1e9].values()) - min(shares[1e9].values()) < 3


def in_any_order(
    loops: dict[ElasticDataLoader, Iterator[Any]], noise: random.Random, most: int
) -> Iterator[tuple[ElasticDataLoader, Any]]:
    """Yield at most so many batches of loops beside each other; those that have ended are taken out."""
    for _ in range(most):
        if not loops:
            break
        one = noise.choice(list(loops))
        batch = next(loops[one], None)
        if batch is None:
            del loops[one]
            continue
        yield one, batch


def test_new_weights_begin_at_the_first_index_that_is_not_lent() -> None:
    new = {"web": 0.1, "code": 0.1, "math": 0.8}
    for workers in (0, 2):
        with loader(num_workers=workers, records_per_shard=40) as one:
            loop = iter(one)
            found = [record for _ in range(7) for record in records_of(one, next(loop))]
            start = one.set_weights(new)
            assert start >= 70
            assert start % 40 == 0
            assert start <= 70 + 40 * (2 + 2 * workers)
            assert one.set_weights(new) == start  # as when another rank sets them too
            found += [record for batch in loop for record in records_of(one, batch)]
        book = Book(WEIGHTS).upto(start)
        book.weigh(new)
        assert Counter(found) == Counter(book.upto(1000).found)


def test_a_schedule_changes_weights_as_it_comes_to_them() -> None:
    new = {"web": 0.1, "code": 0.8, "math": 0.1}
    with loader(mixture(weights=[(0, WEIGHTS), (433, new)])) as one:
        found = trained(one)
    book = Book(WEIGHTS).upto(433)
    book.weigh(new)
    assert found == book.upto(1000).found


def test_set_weights_are_in_the_token_and_a_program_that_is_edited_sets_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    new, edited = {"web": 0.2, "code": 0.2, "math": 0.6}, {"web": 1, "code": 1, "math": 2}
    with loader(records_per_shard=20) as one:
        loop = iter(one)
        found = [record for _ in range(5) for record in records_of(one, next(loop))]
        start = one.set_weights(new)
        found += [record for _ in range(20) for record in records_of(one, next(loop))]
        token = one.state_dict()
    book = Book(WEIGHTS).upto(start)
    book.weigh(new)
    with loader(records_per_shard=20) as one:  # as it was
        one.load_state_dict(token)
        assert found + trained(one) == book.upto(1000).found
    with loader(mixture(weights=edited), records_per_shard=20) as one, caplog.at_level(logging.WARNING):
        one.load_state_dict(token)
        assert "other weights than the checkpoint's: they hold from index 260 on" in caplog.text
        found += trained(one)
    at = next(index for index in range(250, 1000, 10) if index % 20 == 0)
    changed = Book(WEIGHTS).upto(start)
    changed.weigh(new)
    changed.upto(at)
    changed.weigh(edited)
    assert found == changed.upto(1000).found


def test_weights_of_a_mixture_that_went_back_are_not_set() -> None:
    with loader() as one:
        next(iter(one))
        fence = one.service.session.trainer.state.fence
        one.load_state_dict(None)
        with pytest.raises(StaleLease, match="went back to a checkpoint"):
            one.service.session.master.set_weights("training", WEIGHTS | {"web": 1}, key="k", fence=fence)


def test_the_status_says_what_each_component_was_to_give_and_has_given() -> None:
    with loader() as one:
        found = trained(one, 33)
        status = one.service.session.master.dataset_status("training")
    by_name = {component.name: component for component in status.components}
    assert {name: component.share for name, component in by_name.items()} == pytest.approx(WEIGHTS)
    given = status.components[0].given, status.components[1].given, status.components[2].given
    assert sum(given) == sum(component.open for component in status.components) + 330
    assert all(abs(component.wanted - component.given) <= 1 for component in status.components)
    done = Counter(name for name, _, _ in found)
    assert {name: c.given - c.open for name, c in by_name.items()} == done


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_epochs": 2}, "no epochs"),
        ({"shuffle_window": 3}, "MixtureComponent"),
        ({"fingerprint": "v1"}, "reader of each, as MapDatasetReader"),
        ({"target_transform": str}, "MixtureComponent"),
        ({"storage_options": {"key": "k"}}, "no component is one"),
    ],
)
def test_what_a_mixture_does_not_have_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        loader(**more)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"weights": {"web": 1}}, "code, math: no weight"),
        ({"weights": WEIGHTS | {"wbe": 1}}, "wbe: no component"),
        ({"weights": [(5, WEIGHTS)]}, "begin at"),
        ({"weights": [0.5, 0.3, 0.2]}, "weights are given by name, as {'code': …, 'math': …, 'web': …}"),
        ({"weights": 0.5}, "weights are given by name"),
        ({"weights": [("web", 0.6), ("code", 0.4)]}, "weights are given by name"),
        ({"weights": [(0, WEIGHTS), (1e6, WEIGHTS)]}, "begin at 1000000.0: give an index"),
        ({"weights": [(0, WEIGHTS), ("late", WEIGHTS)]}, "begin at 'late': give an index"),
        ({"weights": [(0, WEIGHTS), (True, WEIGHTS)]}, "begin at True: give an index"),
        ({"stopping_strategy": "first_exhausted"}, "not both"),
        ({"stopping_strategy": "never", "num_records": None}, "'never'"),
        ({"num_records": 0}, "num_records is 0"),
        ({"temperature": 2}, "temperature"),
        ({"weights": None, "temperature": -1}, "above 0"),
        ({"weights": None, "temperature": "2"}, "temperature is '2'"),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        mixture(**more)


class Stream(IterableDataset[int]):
    """It has no record by number."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ([], "has no records"),
        (5, "not 5"),
        ("no/such/folder", "does not exist"),
        ([MapDatasetReader(range(3)), MapDatasetReader(range(3))], "a list of readers is no dataset"),
        ([TensorDataset(torch.zeros(3)), Stream()], "can only be iterated"),
        (Mixture({"inner": range(5)}), "put its components there"),
        (MixtureComponent(range(5), shuffle="yes"), "shuffle is 'yes'"),  # type: ignore[arg-type]
        (MixtureComponent(range(5), shuffle_window=0), "must be 1 or more, not 0"),
    ],
)
def test_a_component_that_cannot_be_read_is_named(part: Any, said: str) -> None:
    with pytest.raises(EdlError, match=said) as caught:
        ElasticDataLoader(Mixture({"good": range(5), "wrong": part}), 5, shuffle=True)
    assert "component 'wrong' of the mixture" in "".join(caught.value.__notes__)


def test_a_list_of_datasets_is_their_concatenation() -> None:
    listed = [TensorDataset(torch.arange(3)), TensorDataset(torch.arange(3, 7))]
    with ElasticDataLoader(listed, 2) as one:
        assert [record for (batch,) in one for record in batch.tolist()] == [*range(7)]
    parts = {"listed": listed, "one": TensorDataset(torch.arange(7, 14))}
    with ElasticDataLoader(Mixture(parts, num_records=14), 2, shuffle=True) as one:
        assert sorted(record for (batch,) in one for record in batch.tolist()) == [*range(14)]


@pytest.mark.parametrize("weights", [[0.6, 0.4], None, [(0, WEIGHTS)]], ids=str)
def test_weights_that_are_not_by_name_are_not_set(weights: Any) -> None:
    with loader() as one, pytest.raises(InvalidArgument, match="for each component by name"):
        one.set_weights(weights)


def test_a_pass_after_the_end_is_told_where_a_mixture_ends() -> None:
    with loader() as one:
        trained(one)
        with pytest.warns(UserWarning, match="come to its end.*num_records="):
            assert trained(one) == []


def test_another_mixture_is_not_taken_for_it() -> None:
    master = LocalMaster()
    with loader(master_client=master) as one:
        token = one.state_dict() if next(iter(one)) else None
        other = Mixture(
            {name: Numbers(0, size) for name, size in SIZES.items() if name != "math"}, num_records=1000
        )
        with (
            loader(other, master_client=master) as two,
            pytest.raises(DatasetConflict, match="'math': registered"),
        ):
            next(iter(two))
        with (
            loader(Numbers(0, 5), master_client=master) as two,
            pytest.raises(DatasetConflict, match="no mixture"),
        ):
            next(iter(two))
        edited = mixture(weights=WEIGHTS | {"web": 1})
        with (
            loader(edited, master_client=master) as two,
            pytest.raises(DatasetConflict, match="weights: registered"),
        ):
            next(iter(two))
    with loader(other) as two, pytest.raises(TokenError, match="has not: math"):
        two.load_state_dict(token)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first block with data of five sources, of which a few batches are read, and its second in the
    loop."""
    page = (ROOT / "docs" / "mixtures.md").read_text(encoding="utf-8")
    mix, change, *_ = re.findall(r"```python\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    for name in ("web", "code", "books", "math", "chat"):
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        (folder / "0.txt").write_text("".join(f"{name} {n}\n" for n in range(50)))
    seen: list[str] = []

    def note(loader: ElasticDataLoader) -> bool:
        seen.extend(name.partition(":")[0] for name, _ in loader.records)
        if len(seen) == 640:
            exec(change, {"loader": loader})
        loader.stepped()
        return len(seen) == 6400

    block = mix.replace("    ...", "    if note(loader): break")
    assert block != mix
    exec(block, {"parse_formula": str.strip, "tokenize": str.split, "note": note})
    shares = {name: seen[:640].count(name) / 640 for name in set(seen)}
    assert shares == pytest.approx(
        {"web": 0.6, "code": 0.2, "books": 0.1, "math": 0.05, "chat": 0.05}, abs=0.002
    )
    assert seen[-1600:].count("code") == 480


class Labelled:
    """Inputs, and a label that follows from them or does not."""

    def __init__(self, *, is_noise: bool) -> None:
        noise = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(200, 4, generator=noise)
        follows = (self.inputs[:, 0] > 0).long()
        self.labels = torch.randint(2, (200,), generator=noise) if is_noise else follows

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.labels[index]


def test_weights_follow_losses_in_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "mixtures")
    example = importlib.import_module("weights_from_losses")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    mixed = Mixture(
        {name: Labelled(is_noise=name == "noise") for name in ("noise", "rule")}, num_records=3200
    )
    with ElasticDataLoader(mixed, 16, shuffle=True, audit_dir=tmp_path) as one:
        example.train(one, model, torch.optim.SGD(model.parameters(), 0.5))
        shares = {c.name: c.share for c in one.service.session.master.dataset_status("training").components}
    assert shares["noise"] > 0.57  # nothing is to be learnt there, so its part of the losses grows
    said = audit(tmp_path, capsys)
    assert (said["verdict"], said["records"]) == ("PROVEN", 3200)
    proof = prove([str(tmp_path)])
    assert proof["components"]["noise"]["given"] > 1650
    assert not proof["calm"]


def audit(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    main(["audit", str(folder), "--json", *options])
    (said,) = json.loads(capsys.readouterr().out)["datasets"]
    found: dict[str, Any] = said
    return found


def test_an_audit_says_what_each_component_was_to_give_and_gave(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = WEIGHTS | {"web": 3}
    with loader(audit_dir=tmp_path) as one:
        loop = iter(one)
        found = [record for _ in range(30) for record in records_of(one, next(loop))]
        start = one.set_weights(new)
        token = one.state_dict()
        for _ in range(20):  # rolled back
            next(loop)
    with loader(audit_dir=tmp_path) as one:
        one.load_state_dict(token)
        found += trained(one)
    said = audit(tmp_path, capsys)
    assert said["verdict"] == "DELIVERED"
    assert (said["records"], said["lost"], said["doubled"], said["open"]) == (1000, 0, 0, 0)
    book = Book(WEIGHTS).upto(start)
    book.weigh(new)
    assert found == book.upto(1000).found
    given = {one["name"]: one["acknowledged"] for one in said["components"]}
    assert given == book.counts
    wanted = {one["name"]: one["wanted"] for one in said["components"]}
    assert wanted == pytest.approx({name: book.counts[name] + float(book.lags[name]) for name in book.names})
    assert main(["audit", str(tmp_path), "--expect", "delivered"]) == 0
    assert "of 3 components: code " in capsys.readouterr().out
    proof = proven(tmp_path)
    assert proof.found == found
    assert proof.said["lineages"] == 2
    for name, one in proof.said["components"].items():
        assert one == pytest.approx(
            {"given": given[name], "share": wanted[name], "passes": given[name] / SIZES[name]}
        )


def test_an_audit_says_of_which_components_the_least_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{n}\n" for n in range(20)))
    for audit_dir, parts, least, said in (
        ("all", {"a": str(tmp_path / "a.txt"), "b": range(9)}, "sampled", "data: sampled: "),
        (
            "some",
            {"a": str(tmp_path / "a.txt"), "b": Numbers(0, 9)},
            "none",
            "data of b (of other components",
        ),
    ):
        with ElasticDataLoader(
            Mixture(parts, num_records=30), 5, audit_dir=tmp_path / audit_dir, collate_fn=list
        ) as one:
            for _ in one:
                pass
        found = audit(tmp_path / audit_dir, capsys)
        assert found["known_by"] == least
        assert {c["name"]: c["known_by"] for c in found["components"]} == {"a": "sampled", "b": least}
        page = tmp_path / "audit.html"
        main(["audit", str(tmp_path / audit_dir), "--html", str(page)])
        out = capsys.readouterr().out
        assert said in out
        # The loader of a mixture takes no fingerprint=.
        assert "at the loader" not in out
        assert ("MapDatasetReader" in out) == (least == "none")
        assert "A mixture of 30 records; ledger" in page.read_text()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_that_writes_to_a_record_that_is_read_again_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    """In a loader worker, too, which has a copy of its own and reads it again in each pass."""
    rows, counts = torch.zeros(20), list(range(20))
    parts = {"code": MixtureComponent(rows, transform=lambda row: float(row.add_(1))), "web": counts}
    with loader(
        Mixture(parts, {"code": 1, "web": 1}, num_records=100), audit_dir=tmp_path, num_workers=workers
    ) as one:
        learnt = [value for batch in one for value in batch]
    assert max(value for value in learnt if isinstance(value, float)) > 1  # another record in each pass
    said = audit(tmp_path, capsys)
    assert said["verdict"] == "INEXACT"
    assert ("in a loader worker" in str(said["inexact"])) == bool(workers)


@pytest.mark.parametrize("goes_on", ["on its master", "from a token"])
def test_datasets_join_and_leave_and_what_is_left_of_them_is_counted(
    goes_on: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [*SIZES, "books"]
    data = {name: Numbers(STARTS.get(name, 9000), SIZES.get(name, 11)) for name in names}
    audits = tmp_path / "audit"
    on_its_master = goes_on == "on its master"
    dispatcher, token, found = Dispatcher(ledger_id="first"), "", list[str]()

    def stage(parts: Mapping[str, Any], batches: int | None, weights: Any = None) -> None:
        """Train with these components, as a program that was edited and started again."""
        nonlocal dispatcher, token
        if token and on_its_master:  # which was killed meanwhile, too
            rows = {key: json.loads(json.dumps(row)) for key, row in dump(dispatcher).items()}
            dispatcher = load(rows, ledger_id=dispatcher.ledger_id, now=0.0, changes=Changes())
        elif token:
            dispatcher = Dispatcher(ledger_id=uuid.uuid4().hex)
        weights = weights or {name: 1 for name, part in parts.items() if part is not None}
        with loader(
            Mixture(parts, weights, num_records=1000),
            audit_dir=audits,
            records_per_shard=20,
            master_client=LocalMaster(dispatcher=dispatcher),
        ) as one:
            if token and not on_its_master:
                one.load_state_dict(token)
            for number, _ in enumerate(one, 1):
                found.extend(name.partition(":")[0] for name, _ in one.records)
                if number == batches:
                    one.stepped()
                    break
            token = one.state_dict()

    stage({name: data[name] for name in SIZES}, 13)
    assert Counter(found).keys() == SIZES.keys()
    stage(data, 16)
    assert Counter(found)["books"] in range(30, 40)
    without = {**data, "web": None}
    refused = DatasetConflict if on_its_master else TokenError
    with pytest.raises(refused, match=r"records without an outcome.* of web\. Give these their data once"):
        stage(without, 1)  # the half of a lease is open
    stage(data, 5, {"web": 0, "books": 1, "math": 1, "code": 1})
    gone = Counter(found)["web"]
    stage(without, 6, {"books": 1, "math": 1, "code": 2})
    with pytest.raises(refused, match="'web': it has left; what comes back needs another name"):
        stage(data, 1)
    with pytest.raises(refused, match=r"'web': registered alone|program has not: web\. Leave them in"):
        stage({name: data[name] for name in names if name != "web"}, 1)
    stage(without, 3, {"books": 0, "math": 1, "code": 1, "web": 0})
    stage({**without, "books": None, "films": Numbers(7000, 3)}, None)
    parts = dispatcher.dataset_status("training").components
    assert len(found) == 1000
    told = Counter(found)
    assert told["web"] == gone
    assert {one.name: one.given for one in parts} == told
    assert {one.name: (one.size, one.share) for one in parts if one.name in ("web", "books")} == {
        "web": (0, 0),
        "books": (0, 0),
    }
    said = audit(audits, capsys)
    assert (said["verdict"], said["lost"], said["acknowledged"]) == ("DELIVERED", 0, 1000)
    proof = proven(audits)
    assert Counter(name for name, _, _ in proof.found) == told
    assert (proof.said["records"], proof.said["missing"]) == (1000, 0)
    assert {one["name"]: one["acknowledged"] for one in said["components"]} == told
    assert all(one["size"] for one in said["components"])  # of those that have left, too


def test_a_component_that_has_left_has_no_weight_and_no_data() -> None:
    parts: dict[str, Any] = {"a": Numbers(0, 5), "b": None}
    with pytest.raises(InvalidArgument, match="b has left the mixture: give it no weight"):
        Mixture(parts, {"a": 1, "b": 1})
    with loader(Mixture(parts, num_records=20)) as one:
        with pytest.raises(InvalidArgument, match="b has left mixture 'training'"):
            one.set_weights({"a": 1, "b": 1})
        assert one.set_weights({"a": 2}) == 0
        assert [value for batch in one for value in batch] == [*range(5)] * 4
    with pytest.raises(InvalidArgument, match="weights are all 0"), loader(Mixture({"b": None})):
        pass


def test_a_dataset_joins_a_master_only_when_no_other_trainer_takes_part() -> None:
    master = LocalMaster()
    more = Mixture({"a": Numbers(0, 5), "b": Numbers(9, 5)}, num_records=20)
    with loader(Mixture({"a": Numbers(0, 5)}, num_records=20), master_client=master) as one:
        next(iter(one))
        with (
            pytest.raises(
                DatasetConflict, match=r"cannot read what joins .*'b': asked alone.*: stop them all"
            ),
            loader(more, master_client=master) as other,
        ):
            next(iter(other))
    with loader(more, master_client=master, batch_size=5) as other:
        assert max(value for batch in other for value in batch) >= 9


def test_a_mixture_whose_components_all_have_max_passes_ends_with_them() -> None:
    parts = {
        name: MixtureComponent(Numbers(STARTS[name], size), max_passes=2) for name, size in SIZES.items()
    }
    with loader(Mixture(parts, WEIGHTS)) as one:
        assert one.service.size == 2 * sum(SIZES.values())
        found = Counter(trained(one))
    assert found == Counter(
        (name, turn, n) for name, size in SIZES.items() for turn in (0, 1) for n in range(size)
    )
    for more, said in (
        ({"num_records": 5000}, "has 884 records"),
        ({"num_records": 1000, "weights": {"web": 0, "code": 1, "math": 1}}, "has 84 records"),
    ):
        wrong = Mixture(parts, **{"weights": WEIGHTS, **more})
        with loader(wrong) as one, pytest.raises(InvalidArgument, match=said):
            next(iter(one))
    with pytest.raises(InvalidArgument, match="max_passes of component 'a' must be 1 or more"):
        loader(Mixture({"a": MixtureComponent([1], max_passes=0), "b": [2]}))


def test_an_audit_names_records_without_an_outcome_by_component_and_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with loader(audit_dir=tmp_path, records_per_shard=20) as one:
        loop = iter(one)
        found = [record for _ in range(5) for record in records_of(one, next(loop))]
        one.set_weights({"code": 2, "math": 2, "web": 1})
        found += [record for batch in loop for record in records_of(one, batch)]
    (log,) = tmp_path.glob("*.audit")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if not line.startswith(("0 1 ", "0 30 "))))
    said = audit(tmp_path, capsys)
    assert (said["verdict"], said["lost"]) == ("REFUTED", 40)
    named = [
        (finding["records"]["name"].partition(":")[0], finding["records"]["epoch"], number)
        for finding in said["findings"]
        for number in range(finding["records"]["start"], finding["records"]["end"])
    ]
    assert sorted(named) == sorted(found[20:40] + found[600:620])
    page = tmp_path / "audit.html"
    main(["audit", str(tmp_path), "--html", str(page)])
    (name, turn, number), *_ = sorted(named)
    assert f"pass {turn}: records {number} to " in capsys.readouterr().out
    assert name in page.read_text()


def test_an_audit_of_an_endless_mixture_and_of_one_whose_end_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with loader(mixture(num_records=None), audit_dir=tmp_path / "endless") as one:
        found = trained(one, 50)
    said = audit(tmp_path / "endless", capsys)
    assert (said["verdict"], said["records"], said["open"]) == ("DELIVERED", 500, 0)
    ends = mixture(num_records=None, stopping_strategy="all_exhausted")
    with loader(ends, audit_dir=tmp_path / "moved") as one:
        loop = iter(one)
        found = records_of(one, next(loop))
        one.set_weights({"web": 1, "code": 1, "math": 1})
        found += [record for batch in loop for record in records_of(one, batch)]
    said = audit(tmp_path / "moved", capsys)
    assert (said["verdict"], said["records"], said["lost"]) == ("DELIVERED", len(found), 0)


def test_an_audit_of_a_lineage_that_was_left_and_would_have_ended_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = mixture(num_records=None, stopping_strategy="all_exhausted")
    with loader(ends, audit_dir=tmp_path) as one:
        loop = iter(one)
        for _ in range(20):
            next(loop)
        token = one.state_dict()
        one.set_weights({"web": 1, "code": 1, "math": 4})
        later = sum(len(batch) for batch in loop)
        one.load_state_dict(token)
        found = trained(one)
    assert later > len(found)
    said = audit(tmp_path, capsys)
    assert (said["verdict"], said["records"], said["lost"]) == ("DELIVERED", 200 + len(found), 0)


@cases(
    "who, parts, turn",
    [("all", 1, 1), ("rank 0", 2, 1), ("rank 0", 1, 10), ("all", 2, 10)],
    product(("all", "rank 0"), (1, 2), (1, 10)),
)
def test_ranks_that_step_together_share_it_and_go_on_with_others(who: str, parts: int, turn: int) -> None:
    """Models in `parts`: of these ranks one holds the leases, and the others get its batches."""
    mixed = mixture(one_component=turn > 1)
    new = WEIGHTS | {"web": 3}
    starts: list[int] = []
    tokens: list[Any] = []
    found: Counter[Found] = Counter()
    lock = threading.Lock()

    def train(peers: ThreadPeers, master: LocalMaster, *, stop: int) -> None:
        with loader(mixed, master_client=master, synchronous=peers, records_per_shard=20) as one:
            if tokens:
                one.load_state_dict(tokens[0])
            for number, batch in enumerate(one, 1):
                assert turn == 1 or len({value // 1000 for value in batch}) == 1
                if one.weight and peers.rank % parts == 0:
                    with lock:
                        found.update(records_of(one, batch))
                if number == 5 and stop and (who == "all" or peers.rank == 0):
                    start = one.set_weights(new)
                    with lock:
                        starts.append(start)
                if number == stop:
                    token = one.state_dict()
                    if peers.rank == 0:
                        kept.append(token)
                    one.stepped()
                    break

    failed: list[BaseException] = []
    for size, stop in ((4, 12), (2, 0)):
        kept: list[Any] = []
        master = LocalMaster()

        def run(peers: ThreadPeers, master: LocalMaster = master, stop: int = stop) -> None:
            try:
                train(peers, master, stop=stop)
            except BaseException as exc:  # noqa: BLE001  the top of a thread
                failed.append(exc)
            finally:
                peers.leave()

        group = ThreadPeers.group(size, 30.0, parts=parts)
        threads = [threading.Thread(target=run, args=(peers,), daemon=True) for peers in group]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        if failed:
            raise failed[0]
        tokens = kept
    assert len(set(starts)) == 1
    book = Book(WEIGHTS).upto(starts[0] // turn)
    book.weigh(new)
    assert found == Counter(turns_of(book, 1000 // turn, turn))


class Torn(Numbers):
    """One record cannot be read."""

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise ValueError("torn")
        return super().__getitem__(index)


@pytest.mark.parametrize("reading", READING, ids=str)
def test_bad_records_of_one_component_may_be_left_out_and_those_of_another_end_the_job(
    reading: dict[str, Any],
) -> None:
    def opened(math: Any, code: Any, **more: Any) -> ElasticDataLoader:
        parts = {
            "web": Numbers(STARTS["web"], 400),
            "math": MixtureComponent(Torn(STARTS["math"], 5), on_bad_record=math),
            "code": MixtureComponent(Torn(STARTS["code"], 37), on_bad_record=code),
        }
        weights = {**WEIGHTS, "code": more.pop("weight", 1)}
        return loader(Mixture(parts, weights, num_records=100), max_bad_records=2, **reading, **more)

    with opened("quarantine", "raise") as one, pytest.raises(BadRecord, match="record 2 of 'code:"):
        trained(one)
    with opened("quarantine", None, weight=0) as one:
        trained(one)
        assert {(bad.name, bad.index) for bad in one.quarantined()} == {("math:Torn", 2)}
    strict = opened("raise", None, on_bad_record="quarantine")
    with strict as one, pytest.raises(BadRecord, match="record 2 of 'math:"):
        trained(one)


def test_people_are_shown_components_and_no_end_where_there_is_none() -> None:
    master = LocalMaster()
    with loader(mixture(num_records=None), master_client=master) as one:
        trained(one, 20)
        status = master.status()
        table = as_table(status)
        lines = [line.split() for line in table.splitlines() if line.startswith("training")]
        assert str(1 << 62) not in table
        assert [line[1:4] for line in lines if line[1] in SIZES] == [
            ["code", "37", "0.3"],
            ["math", "5", "0.1"],
            ["web", "400", "0.6"],
        ]
        assert json.loads(as_json(status))["datasets"][0]["components"][2]["name"] == "web"


def test_other_data_of_a_component_are_refused_and_begin_no_epoch(tmp_path: Path) -> None:
    def of(rows: int, **more: Any) -> ElasticDataLoader:
        return loader(Mixture({"a": list(range(rows)), "b": [1]}, num_records=100), **more)

    with of(20) as one:
        next(iter(one))
        token = one.state_dict()
    with of(21) as one, pytest.raises(TokenError, match="component 'a': "):
        one.load_state_dict(token)
    with of(21, data_changed="new_epoch") as one, pytest.raises(TokenError, match="no next epoch"):
        one.load_state_dict(token)


def test_elasticdl_has_no_words_for_it() -> None:
    components = (
        Component(name="a", sources=(Source(name="s", count=9),), records_per_shard=4, shuffle_window=1),
    )
    registration = Registration(
        name="m",
        sources=(Source(name="", count=50),),
        components=components,
        weights=(MixtureWeights(start=0, parts=(1,)),),
    )
    with pytest.raises(InvalidArgument, match="is a mixture"):
        check_expressible(new_spec(registration, 4))
    call = RegisterCall(session="s", worker_id="w", batch_size=4, registration=registration)
    with pytest.raises(Unsupported, match="is a mixture"):
        ForeignDataset(call)


@cases("kind", ["csv", "tar"], ["csv", "parquet", "tar"])
def test_a_mixture_of_many_files_has_few_of_them_open(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OPEN_FILES, "limit", 10)
    parts = {f"f{n:02}": str(tmp_path / f"{n}.{kind}") for n in range(30)}
    for path in map(Path, parts.values()):
        rows = [{"a": f"{path.name}/{row}"} for row in range(3)]
        match kind:
            case "csv":
                path.write_text("a,n\n" + "".join(f"{row['a']},1\n" for row in rows))
            case "parquet":
                pq.write_table(pa.Table.from_pylist(rows), path)
            case _:
                with tarfile.open(path, "w") as tar:
                    for number, row in enumerate(rows):
                        about = tarfile.TarInfo(f"{number}.txt")
                        about.size = len(row["a"])
                        tar.addfile(about, io.BytesIO(row["a"].encode()))
    reader = open_reader(parts["f00"])
    next(iter(reader.read_records(Task(shard=Shard(name=parts["f00"], start=0, end=3)))))
    assert _open_below(tmp_path) == 1
    del reader
    gc.collect()
    most, found = _open_below(tmp_path), Counter[str]()
    assert not most
    with loader(Mixture(parts, dict.fromkeys(parts, 1), num_records=180)) as one:
        for batch in one:
            found.update(name.partition(":")[0] for name, _ in one.records)
            assert len(batch) == 10
            most = max(most, _open_below(tmp_path))
    assert found == dict.fromkeys(parts, 6)
    assert 0 < most <= 10


@pytest.mark.parametrize("reading", [{}, {"num_threads": 2}, {"num_workers": 1}], ids=str)
def test_readers_of_a_mixture_end_with_its_loader(reading: dict[str, Any], tmp_path: Path) -> None:
    """They are let go, with the files that they hold, and not by the collector's grace alone."""
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("x\n" + "1\n" * 50)
    readers: dict[str, Any] = {name: open_reader(str(tmp_path / f"{name}.csv")) for name in "ab"}
    readers["c"] = Numbers(0, 50)
    there = [weakref.ref(reader) for reader in readers.values()]
    with loader(Mixture(readers, num_records=100), **reading) as one:
        assert sum(len(batch) for batch in one) == 100
    del one
    readers.clear()
    wait_until(lambda: gc.collect() >= 0 and not any(ref() for ref in there))  # a thread may be at its end


def _open_below(folder: Path) -> int:
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the folder that is being read
            found += str(descriptor.readlink()).startswith(f"{folder}/")
    return found


def test_a_bad_record_that_hundreds_of_passes_meet_is_kept_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the ledger, its journal and tokens; the logs have each time, and agree with the token's passes."""
    parts = {"small": Torn(0, 3), "large": Numbers(1000, 4000)}
    mixed = Mixture(parts, {"small": 1, "large": 1}, num_records=2400)
    more: dict[str, Any] = {"batch_size": 50, "shuffle": True, "audit_dir": tmp_path}
    more |= {"on_bad_record": "quarantine", "max_bad_records": 1}
    kept, token = [], None
    with loader(mixed, **more) as one:
        for number, _ in enumerate(one, 1):
            if number % 8 == 0:
                one.stepped()
                token = one.state_dict()["token"]
                kept.append(len(json.dumps(json.loads(token)["quarantine"])))
            if number == 34:  # five more are rolled back
                break
    assert token is not None
    with loader(mixed, **more) as one:
        one.load_state_dict(token)
        trained = [value for batch in one for value in batch]
        status = one.service.session.master.dataset_status("training")
        assert [(bad.index, bad.passes) for bad in one.quarantined()] == [(2, (0, 400))]
        assert "0–399" in as_table(one.service.session.master.status())
    assert kept[-1] - kept[0] < 10
    assert (status.quarantined, status.acknowledged, len(status.quarantine)) == (400, 2000, 1)
    assert trained
    said = audit(tmp_path, capsys)
    assert (said["records"], said["quarantined"], said["lost"], said["doubled"]) == (2400, 400, 0, 0)
    assert (said["verdict"], prove([str(tmp_path)])["quarantined"]) == ("DELIVERED", 400)
    shares = {one["name"]: one for one in said["components"]}
    assert (shares["small"]["acknowledged"], shares["small"]["quarantined"]) == (800, 400)
    main(["audit", str(tmp_path)])
    assert "small 800 of 1,200.0 wanted, in 400.00 passes" in capsys.readouterr().out
