"""Mixtures of which each batch is of one component: shares over batches, what goes on, what is refused."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import cases
from mixture_proof import prove
from test_mixtures import (
    READING,
    SIZES,
    STARTS,
    WEIGHTS,
    Book,
    Found,
    Numbers,
    Torn,
    in_any_order,
    loader,
    mixture,
    records_of,
    tensors,
    turns_of,
)

from edl_torch import ElasticDataLoader, LocalMaster, Mixture, MixtureComponent
from edl_torch.core.calls import LeaseCall
from edl_torch.errors import DatasetConflict, InvalidArgument, TokenError
from edl_torch.shard import Slice

THREADS = {"num_threads": 3}


def batches(one: ElasticDataLoader, most: int | None = None) -> list[list[Found]]:
    """The records of each batch, all of one component."""
    found = []
    for number, batch in enumerate(one, 1):
        found.append(records_of(one, batch))
        assert len({name for name, _, _ in found[-1]}) == 1, found[-1]
        if number == most:
            one.stepped()
            break
    return found


def flat(found: Sequence[Sequence[Found]]) -> list[Found]:
    return [record for batch in found for record in batch]


@pytest.mark.parametrize("reading", READING, ids=str)
def test_each_batch_is_of_one_component_and_shares_are_kept_over_batches(
    reading: dict[str, Any], tmp_path: Path
) -> None:
    with loader(mixture(one_component=True), audit_dir=tmp_path, **reading) as one:
        assert len(one) == 100
        found = batches(one)
    assert [len(batch) for batch in found] == [10] * 100
    expected = turns_of(Book(WEIGHTS), 100, 10)
    assert Counter(flat(found)) == Counter(expected)
    assert flat(found) == expected or "num_workers" in reading
    assert Counter(batch[0][0] for batch in found) == {"web": 60, "code": 30, "math": 10}
    proof = prove([str(tmp_path)])
    assert Counter(proof["found"]) == Counter(expected)
    assert proof["from_its_share"] <= 10 or "num_workers" in reading


@cases(
    "batch_size, reading",
    [(3, {}), (6, THREADS), (12, {}), (4, {"num_workers": 2})],
    [*product((3, 4, 6, 12), ({}, THREADS)), (4, {"num_workers": 2})],
    ids=str,
)
def test_tensors_of_other_shapes_are_batched_by_component(batch_size: int, reading: dict[str, Any]) -> None:
    shapes = {name: 2 + place for place, name in enumerate(SIZES)}
    parts = {
        name: MixtureComponent(
            tensors(STARTS[name], size), transform=lambda row, n=shapes[name]: (row[0], row[1].repeat(n))
        )
        for name, size in SIZES.items()
    }
    mixed = Mixture(parts, WEIGHTS, num_records=1003, one_component=12)
    found = []
    with ElasticDataLoader(mixed, batch_size, seed=3, **reading) as one:
        for values, inputs in one:
            found.append(records_of(one, values.tolist()))
            assert inputs.shape == (len(values), 2 * shapes[found[-1][0][0]])
    assert Counter(flat(found)) == Counter(turns_of(Book(WEIGHTS), 84, 12)[:1003])
    assert sorted(map(len, found))[1:] == [batch_size] * (len(found) - 1)


BAD: list[tuple[list[int], dict[str, Any]]] = [
    *product(([0], [4], [0, 1, 2, 3, 4], [1, 3]), ({}, THREADS)),
    *(([1, 3], reading) for reading in READING if "num_workers" in reading),
]


@cases(
    "bad, reading, drop_last",
    [*((*case, False) for case in BAD[::3]), *((*case, True) for case in BAD[1::4])],
    [(*case, drop_last) for case in BAD for drop_last in (False, True)],
    ids=str,
)
def test_a_bad_record_makes_its_batch_shorter_and_mixes_none(
    bad: list[int], reading: dict[str, Any], drop_last: bool
) -> None:
    class Bad(Numbers):
        def __getitem__(self, index: int) -> int:
            if index in bad:
                raise ValueError("torn")
            return super().__getitem__(index)

    parts = {name: (Bad if name == "math" else Numbers)(STARTS[name], size) for name, size in SIZES.items()}
    mixed = Mixture(parts, WEIGHTS, num_records=600, one_component=10)
    more: dict[str, Any] = {"on_bad_record": "quarantine", "max_bad_records": 5, "records_per_shard": 20}
    with loader(mixed, batch_size=5, drop_last=drop_last, **more, **reading) as one:
        found = flat(batches(one))
        status = one.service.session.master.dataset_status("training")
    good = [
        record for record in turns_of(Book(WEIGHTS), 60, 10) if record[::2] not in [("math", n) for n in bad]
    ]
    assert status.acknowledged == len(found)
    assert status.quarantined == 600 - len(good)
    assert status.acknowledged + status.dropped + status.quarantined == 600
    if drop_last:
        assert Counter(found) <= Counter(good)
        assert {name for name, *_ in Counter(good) - Counter(found)} <= {"math"}
    else:
        assert Counter(found) == Counter(good)


@cases("seed", range(2), range(4))
def test_it_goes_on_with_other_trainers_batch_sizes_and_weights(seed: int, tmp_path: Path) -> None:
    noise, done, token = random.Random(seed), Counter[Found](), None
    book, new = Book(WEIGHTS), {"web": 0.1, "code": 0.5, "math": 0.4}
    for stage, sizes in enumerate(([10], [20, 5, 4], [4, 10], [20])):
        master = LocalMaster()
        with ExitStack() as stack:
            loaders = [
                stack.enter_context(
                    loader(
                        mixture(one_component=20, weights=WEIGHTS),
                        batch_size=size,
                        master_client=master,
                        num_workers=stage % 2,
                        audit_dir=tmp_path,
                        records_per_shard=80,
                    )
                )
                for size in sizes
            ]
            if token is not None:
                loaders[0].load_state_dict(token)
            loops = {one: iter(one) for one in loaders}
            kept = Counter(done)
            for turn, (one, batch) in enumerate(in_any_order(loops, noise, 25 if stage < 3 else 10_000)):
                records = records_of(one, batch)
                assert len({name for name, _, _ in records}) == 1
                kept.update(records)
                one.stepped()
                if stage == 1 and turn == 12:
                    start = loaders[0].set_weights(new)
                    assert start % 20 == 0
                    book.upto(start // 20).weigh(new)
            for one in loaders:
                one.service.session.flush()
            token, done = loaders[0].state_dict(), kept
            for loop in loops.values():
                loop.close()  # type: ignore[attr-defined]
    assert done == Counter(turns_of(book, 50, 20))
    assert prove([str(tmp_path)])["records"] == 1000


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("before", "after"), [(3, 4), (4, 6), (6, 4), (12, 3)])
def test_in_mid_turn_with_another_batch_size_what_is_left_of_the_turn_alone_has_a_shorter_batch(
    before: int, after: int, drop_last: bool
) -> None:
    mixed, more = mixture(one_component=12, num_records=120), {"records_per_shard": 120}
    with loader(mixed, batch_size=before, **more) as one:
        done = flat(batches(one, 24 // before + 1))
        token = one.state_dict()
    left = (12 - before) % after
    more |= {"batch_size": after, "drop_last": drop_last, "master_client": LocalMaster()}
    with loader(mixed, **more) as one, loader(mixed, **more) as two:  # what has come back is cut in two
        one.load_state_dict(token)
        found = batches(two, 2)
        loop = iter(one)
        found += [records_of(one, next(loop)), records_of(one, next(loop))]
        two.close()
        found += [records_of(one, batch) for batch in loop]
        status = one.service.session.master.dataset_status("training")
    assert {len({name for name, *_ in batch}) for batch in found} == {1}
    assert sorted(len(batch) for batch in found if len(batch) < after) == [left] * (
        left > 0 and not drop_last
    )
    assert status.dropped == left * drop_last
    assert len(done) + len(flat(found)) + status.dropped == 120


def test_passes_end_with_a_whole_batch_and_the_mixture_where_it_is_to() -> None:
    parts = {
        name: MixtureComponent(Numbers(STARTS[name], size), max_passes=2) for name, size in SIZES.items()
    }
    with loader(Mixture(parts, WEIGHTS, one_component=True)) as one:
        found = batches(one)
    assert Counter(batch[0][0] for batch in found) == {"math": 1, "code": 8, "web": 80}
    with loader(mixture(num_records=None, stopping_strategy="first_exhausted", one_component=True)) as one:
        found = batches(one)
    assert found[-1] == [("math", 0, number) for number in range(5)]


def first(records_per_shard: int | None = None, **more: Any) -> Any:
    with loader(mixture(one_component=True, **more), records_per_shard=records_per_shard) as one:
        return next(iter(one))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: loader(mixture(one_component=25)), "one_component=25 .* batch_size=10 does not"),
        (lambda: mixture(one_component=-3), "one_component is -3"),
        (lambda: mixture(one_component="yes"), "one_component is 'yes'"),
        (
            lambda: first(records_per_shard=25),
            "records_per_shard 25: batches are of one component, 10 records at a time",
        ),
        (
            lambda: first(weights=[(0, WEIGHTS), (25, WEIGHTS)]),
            "weights from 25: batches are of one component",
        ),
    ],
)
def test_where_it_cannot_hold_it_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        make()


def test_batches_of_other_turns_are_another_mixture() -> None:
    master = LocalMaster()
    with loader(mixture(one_component=True), master_client=master) as one:
        next(iter(one))
        token = one.state_dict()
        other = mixture(one_component=20)
        with (
            loader(other, batch_size=20, master_client=master) as two,
            pytest.raises(DatasetConflict, match=r"one_component .*: registered 10, asked 20"),
        ):
            next(iter(two))
    with (
        loader(mixture(one_component=True), batch_size=5) as one,
        pytest.raises(TokenError, match=r"one_component .*10"),
    ):
        one.load_state_dict(token)
    with loader(mixture(one_component=10), batch_size=5) as one:
        one.load_state_dict(token)
        assert len(flat(batches(one))) == 1000


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("collated", [False, True])
@pytest.mark.parametrize("is_bad", [False, True])
def test_a_batch_ends_with_a_lease_that_ends_within_a_turn(
    threads: int, collated: bool, is_bad: bool
) -> None:
    """It, or a bad record at its end, leaves a batch not whole; the next lease is of another component."""
    parts = {"a": Torn(0, 100), "b": range(100, 200)}
    mixed = Mixture(parts, {"a": 1, "b": 1}, num_records=200, one_component=10)
    more: dict[str, Any] = {"on_bad_record": "quarantine", "max_bad_records": 5, "records_per_shard": 20}
    if not collated:
        more["collate_fn"] = list
    with ElasticDataLoader(mixed, 5, num_threads=threads or None, **more) as one:
        master = one.service.session.master
        call = master.call

        def lent(request: Any, *rest: Any, **keywords: Any) -> Any:
            answer = call(request, *rest, **keywords)
            if not isinstance(request, LeaseCall):
                return answer
            cut = [replace(grant, slice=cut_of(grant.slice)) for grant in answer.grants]
            return replace(answer, grants=tuple(cut))

        def cut_of(slice: Slice) -> Slice:
            skip, limit = (0, 2 + is_bad) if not slice.shard else (14, 6)
            return replace(slice, skip=skip, limit=limit)

        master.call = lent
        found = []
        for number, batch in enumerate(one, 1):
            values = batch.tolist() if collated else batch
            found.append(values)
            assert len({value < 100 for value in values}) == 1, values
            if number == 6:
                break
    assert found[0] == [0, 1]
    assert found[1][0] == 114


@pytest.mark.parametrize(
    "end", [{"num_records": 30}, {"num_records": None, "stopping_strategy": "first_exhausted"}]
)
def test_new_weights_at_an_end_within_a_turn_begin_no_segment_and_the_checkpoint_is_loaded(
    end: dict[str, Any],
) -> None:
    """All is lent to one that leaves; the next has other weights, which nothing is left for."""
    master = LocalMaster()
    options: dict[str, Any] = {"batch_size": 2, "records_per_shard": 4}
    parts = {"a": Numbers(0, 23), "b": Numbers(1000, 50)}

    def job(weights: dict[str, float], **more: Any) -> ElasticDataLoader:
        return loader(Mixture(parts, weights, one_component=4, **end), **options, **more)

    with job({"a": 1, "b": 1}, master_client=master) as one:
        pulled = iter(one)
        next(pulled)
        size = master.status().datasets[0].size
        assert size % 4
        while master.status().datasets[0].todo:
            next(pulled)
    (left,) = master.status().datasets
    assert left.acknowledged < size  # no step was taken with the last batch: it came back
    with job({"a": 1, "b": 3}, master_client=master) as one:
        token = one.state_dict()
        first = [value for batch in one for value in batch]
    with job({"a": 1, "b": 3}) as one:
        one.load_state_dict(token)
        assert sorted(value for batch in one for value in batch) == sorted(first)
    assert len(first) == size - left.acknowledged


def test_a_torn_record_of_a_batch_of_its_own_is_the_batch() -> None:
    parts = {name: (Torn if name == "math" else Numbers)(STARTS[name], size) for name, size in SIZES.items()}
    more: dict[str, Any] = {"on_bad_record": "quarantine", "max_bad_records": 1}
    with loader(Mixture(parts, WEIGHTS, num_records=100, one_component=1), batch_size=1, **more) as one:
        assert len(batches(one)) == 98


@pytest.mark.parametrize("reading", READING, ids=str)
def test_images_columns_and_records_are_batched_by_component(reading: dict[str, Any], tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": range(90)}), tmp_path / "rows.parquet", row_group_size=15)
    for label in ("cat", "dog"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for number in range(10):
            picture = np.full((6, 8, 3), number, np.uint8)
            cv2.imwrite(str(tmp_path / "pictures" / label / f"{number}.png"), picture)
    parts = {
        "numbers": range(50),
        "pictures": MixtureComponent(str(tmp_path / "pictures"), transform=np.asarray),
        "rows": str(tmp_path / "rows.parquet"),
    }
    mixed = Mixture(parts, {"numbers": 1, "pictures": 2, "rows": 3}, num_records=240, one_component=True)
    kinds: Counter[str] = Counter()
    with ElasticDataLoader(mixed, 10, shuffle=True, seed=3, **reading) as one:
        for batch in one:
            (name,) = {source.partition(":")[0] for source, _ in one.records}
            kinds[name] += 1
            if name == "pictures":
                assert (batch[0].shape, batch[1].shape) == ((10, 6, 8, 3), (10,))
            elif name == "rows":
                assert batch["n"].tolist() == [number for _, number in one.records]
            else:
                assert batch.tolist() == [number for _, number in one.records]
    assert kinds == {"numbers": 4, "pictures": 8, "rows": 12}
