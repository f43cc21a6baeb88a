"""Data that are not those registered, or a checkpoint's, are refused in one error that says what changed."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from learning_kit import Keeps

from edl_torch import DataShardService, ElasticDataLoader, LocalMaster, ShardedDataset
from edl_torch.audit.verdict import Outcome, audit, judge
from edl_torch.cli.audit import write_json, write_table
from edl_torch.cli.audit_page import write_page
from edl_torch.cli.verdict_words import headline, inexact
from edl_torch.errors import DatasetConflict, InvalidArgument, SourceChanged, TokenError
from edl_torch.readers import MapDatasetReader

OLD, NEW = np.arange(48.0), 100 + np.arange(60.0)


def picture(at: Path, number: int) -> None:
    cv2.imwrite(str(at), np.full((4, 4, 3), number, np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "images"
    made.mkdir()
    for number in range(48):
        picture(made / f"{number:02}.png", number)
    return made


def loader(data: Any, **more: Any) -> ElasticDataLoader:
    return ElasticDataLoader(data, batch_size=4, num_epochs=2, records_per_shard=8, **more)


def first(batches: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        next(batches)
    return batches


def other_file(folder: Path) -> None:
    (folder / "07.png").unlink()
    picture(folder / "99.png", 99)


SAID = "48 then and now: added '99.png'; removed '07.png'"


def test_a_checkpoint_of_a_folder_in_which_a_file_was_replaced_is_refused(folder: Path) -> None:
    with loader(str(folder)) as before:
        first(iter(before), 3)
        state = before.state_dict()
    other_file(folder)
    with loader(str(folder)) as after, pytest.raises(TokenError, match=SAID):
        after.load_state_dict(state)


def test_a_trainer_that_knows_the_dataset_by_name_alone_is_refused_too(folder: Path) -> None:
    from edl_torch import DataShardService, ShardedDataset
    from edl_torch.readers import open_reader

    master = LocalMaster()
    with loader(str(folder), master_client=master) as one:
        first(iter(one), 1)
    other_file(folder)
    with DataShardService(4, master) as service:
        batches = ElasticDataLoader(ShardedDataset(service, open_reader(str(folder)), shuffle=False))
        with pytest.raises(DatasetConflict, match=SAID):
            first(iter(batches), 1)


def test_unknown_data_match_any_and_the_first_known_ones_bind(folder: Path) -> None:
    class Unknown:
        def __len__(self) -> int:
            return 48

        def __getitem__(self, index: int) -> int:
            return index

    master = LocalMaster()
    for version in (None, "v1", None, "v1"):
        with loader(Unknown(), master_client=master, fingerprint=version) as one:
            first(iter(one), 1)
            state = one.state_dict()
    said = "fingerprint 'v1' then, 'v2' now"
    two = loader(Unknown(), master_client=master, fingerprint="v2")
    with two, pytest.raises(DatasetConflict, match=said):
        first(iter(two), 1)
    with loader(Unknown()) as unknown:
        unknown.load_state_dict(state)
        token = unknown.state_dict()
    with loader(Unknown(), fingerprint="v2") as other, pytest.raises(TokenError, match=said):
        other.load_state_dict(token)


@pytest.mark.parametrize(("version", "last"), [(None, "unknown"), ("v1", "unknown"), (None, "v1")])
def test_who_joins_data_without_having_looked_like_the_others_weakens_what_is_known(
    tmp_path: Path, version: str | None, last: str
) -> None:
    """The master of its own has the fingerprint of who came first; whoever joins may read other data."""

    class Unknown:
        def __len__(self) -> int:
            return 48

        def __getitem__(self, index: int) -> float:
            return 100.0 + index

    master = LocalMaster()
    with loader(OLD, master_client=master, audit_dir=tmp_path, fingerprint=version) as one:
        for _ in one:
            pass
    second = {"fingerprint": "v1"} if last == "v1" else {}
    with loader(Unknown(), master_client=master, audit_dir=tmp_path, **second) as two:
        for _ in two.epochs():
            for _ in two:
                pass
    (verdict,) = audit([tmp_path])
    assert verdict.known_by == "none"
    assert headline(verdict).endswith("data not known to be the same")
    words = {"partly": "partly looked at", "names": "the same by names", "given": "the same by fingerprint="}
    for strength, said in words.items():
        verdict.known_by = strength
        assert headline(verdict).endswith(f", data {said}")
    verdict.trainers = 1  # of one session alone nothing is said
    assert "data" not in headline(verdict)
    verdict.known_by = "none"  # a record may be another one in each epoch
    assert headline(verdict).endswith("data not known to be the same")
    verdict.num_epochs = 1
    assert "data" not in headline(verdict)
    verdict.trainers, verdict.known_by = 2, "whole"
    assert "data" not in headline(verdict)


class Numbers:
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> float:
        return float(index)


def test_who_reads_other_data_than_its_service_says_is_refused(tmp_path: Path) -> None:
    reader = MapDatasetReader(OLD)
    with DataShardService(4, reader=reader) as service:
        with pytest.raises(
            InvalidArgument,
            match=r"whose data are others: the values are others than then\. Give both the same",
        ):
            ShardedDataset(service, MapDatasetReader(OLD[::-1]), shuffle=False)
        first(
            iter(ElasticDataLoader(ShardedDataset(service, MapDatasetReader(OLD.copy()), shuffle=False))), 1
        )
        with pytest.raises(InvalidArgument, match="not known that it has the same data"):
            ShardedDataset(service, MapDatasetReader(Numbers()), shuffle=False)
    with DataShardService(4, reader=reader, fingerprint="v1") as service:
        ShardedDataset(service, MapDatasetReader(Numbers()), shuffle=False)


def test_what_a_service_knows_beside_what_is_read_is_no_change(tmp_path: Path) -> None:
    """Its reader's dataset has a list more than the one that is read."""
    more, read = Numbers(), Numbers()
    vars(more).update(labels=[0] * 48, names=["x"] * 48)
    vars(read).update(labels=[0] * 48)
    with DataShardService(4, reader=MapDatasetReader(more), audit_dir=tmp_path) as service:
        for _ in ElasticDataLoader(ShardedDataset(service, MapDatasetReader(read), shuffle=False)):
            pass
    (verdict,) = audit([tmp_path])
    assert not any("the data were changed" in said for said in inexact(verdict))


def test_data_are_known_as_well_as_who_reads_them_knows_them(tmp_path: Path) -> None:
    master = LocalMaster()
    for _ in range(2):
        with DataShardService(4, master, reader=MapDatasetReader(OLD), audit_dir=tmp_path) as service:
            unknown = MapDatasetReader(Numbers(), "ndarray")
            batches = ElasticDataLoader(ShardedDataset(service, unknown, shuffle=False))
            for _ in batches:
                pass
    (verdict,) = audit([tmp_path])
    assert verdict.known_by == "none"


@pytest.mark.parametrize("bad", [{}, {"on_bad_record": "quarantine", "max_bad_records": 48}])
def test_a_list_that_becomes_shorter_has_changed_and_no_record_is_bad(bad: dict[str, Any]) -> None:
    data = list(range(48))
    with loader(data, shuffle=True, **bad) as batches:
        drawn = first(iter(batches), 2)
        del data[4:]
        with pytest.raises(SourceChanged, match="48 records when the job began, and has 4 now"):
            for _ in drawn:
                pass


@pytest.mark.parametrize(
    ("versions", "data", "strength", "said"),
    [
        ((None, None), OLD, "sampled", "data: sampled: "),
        (("v1", "v1"), [object()] * 48, "given", "data: given: "),
        ((None, None), [object()] * 48, "none", 'data: not compared: .*fingerprint="v1"'),
        ((None, "v1"), [object()] * 48, "none", 'data: not compared: .*fingerprint="v1"'),
    ],
    ids=["looked at", "given", "unknown", "known too late"],
)
def test_the_verdict_says_how_the_data_were_known(
    tmp_path: Path, versions: tuple[str | None, str | None], data: Any, strength: str, said: str
) -> None:
    token = None
    for version in versions:
        with loader(data, fingerprint=version, audit_dir=tmp_path, collate_fn=len) as batches:
            batches.load_state_dict(token)
            _in_hand = first(iter(batches), 3)
            token = batches.state_dict()
    (judgement,) = judge([tmp_path], unfinished=True)
    assert re.search(said, write_table([judgement.verdict]))
    write_page([judgement], tmp_path / "page.html", [str(tmp_path)])
    assert re.search(said, html.unescape((tmp_path / "page.html").read_text()), re.IGNORECASE)
    assert json.loads(write_json([judgement.verdict]))["datasets"][0]["known_by"] == strength


# On purpose: the next epoch has the new data ---------------------------------------------------------------


@pytest.mark.parametrize("batches", [13, 24], ids=["last epoch", "finished"])
def test_other_data_for_which_no_epoch_is_left_are_told_so(
    batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    with loader(OLD) as before:
        model = Keeps()
        before.attach(model.optimizer)
        model.run(before, batches)
        state = before.state_dict()
    with loader(NEW, data_changed="new_epoch") as after:
        after.load_state_dict(state)
    assert "no epoch left for them (give num_epochs=3 or more)" in caplog.text


def test_data_that_come_back_have_an_era_of_their_own(tmp_path: Path) -> None:
    model, token = Keeps(), None
    for data, batches in ((OLD, 3), (NEW, 4), (OLD, 1 << 30)):
        with ElasticDataLoader(
            data, batch_size=4, num_epochs=4, shuffle=True, audit_dir=tmp_path, data_changed="new_epoch"
        ) as some:
            some.attach(model.optimizer)
            some.load_state_dict(token)
            model.run(some, batches)
            token = some.state_dict()
    found = audit([tmp_path])
    assert [(v.outcome, v.first_epoch, v.acknowledged, v.abandoned) for v in found] == [
        (Outcome.PROVEN, 0, 12, 36),
        (Outcome.PROVEN, 1, 16, 44),
        (Outcome.PROVEN, 2, 96, 0),
    ]
    assert [v.rolled_back for v in found] == [0, 0, 0]
    assert headline(found[0]) == "PROVEN, 36 more abandoned for other data, data the same by samples"


def test_other_data_and_another_seed_are_refused_all_the_same() -> None:
    with loader(OLD, shuffle=True) as before:
        state = before.state_dict()
    with (
        loader(NEW, shuffle=True, seed=1, data_changed="new_epoch") as after,
        pytest.raises(
            TokenError, match=r"seed: registered 1, asked 0.* or load_state_dict.None. to begin anew$"
        ),
    ):
        after.load_state_dict(state)


def test_the_beginning_of_other_data_is_the_beginning() -> None:
    with loader(OLD) as before:
        state = before.state_dict()
    with loader(NEW, data_changed="new_epoch") as after:
        after.load_state_dict(state)
        assert sum(len(batch) for batch in after) == 60
        assert after.service.progress().epoch == 1


# The same data, elsewhere ----------------------------------------------------------------------------------


def moved(folder: Path, tmp_path: Path) -> str:
    return str(shutil.copytree(folder, tmp_path / "other" / "place"))


def linked(folder: Path, tmp_path: Path) -> str:
    (tmp_path / "link").symlink_to(folder)
    return str(tmp_path / "link")


SPELLINGS = [moved, linked, lambda folder, _: f"{folder}/", lambda folder, _: os.path.relpath(folder)]
ELSEWHERE = pytest.mark.parametrize("elsewhere", SPELLINGS, ids=["moved", "linked", "slash", "relative"])


@ELSEWHERE
def test_a_checkpoint_goes_on_with_the_same_data_elsewhere_and_the_audit_sees_one_dataset(
    folder: Path, tmp_path: Path, elsewhere: Callable[[Path, Path], str]
) -> None:
    with loader(str(folder), audit_dir=tmp_path / "audit") as before:
        _in_hand = first(iter(before), 3)
        state = before.state_dict()
    again = loader(elsewhere(folder, tmp_path), audit_dir=tmp_path / "audit", data_changed="new_epoch")
    with again as after:
        after.load_state_dict(state)
        assert sum(len(batch[0]) for _ in after.epochs() for batch in after) == 2 * 48 - 12
    (verdict,) = audit([tmp_path / "audit"])
    assert (verdict.delivered, verdict.first_epoch, verdict.abandoned) == (True, 0, 0)


def test_a_bad_record_that_is_met_at_two_places_is_one(folder: Path, tmp_path: Path) -> None:
    """And a record's random numbers are the same wherever its file lies."""
    broken = sorted(folder.rglob("*.*"))[3]
    broken.write_bytes(b"x")
    there, drawn, token = moved(folder, tmp_path), [], None
    for place in (str(folder), there):
        with loader(
            place,
            on_bad_record="quarantine",
            max_bad_records=1,
            transform=lambda image: torch.rand(1),
            seed_transforms=True,
        ) as some:
            some.load_state_dict(token)
            drawn.append([batch[0].sum().item() for batch in some])
            assert {bad.name for bad in some.quarantined()} == {place}
            token = some.state_dict()
    with loader(
        there,
        transform=lambda image: torch.rand(1),
        seed_transforms=True,
        on_bad_record="quarantine",
        max_bad_records=1,
    ) as some:
        assert [batch[0].sum().item() for batch in some] == drawn[0]


def test_a_job_that_is_told_to_have_fewer_epochs_than_its_checkpoint_has_those_of_that(
    tmp_path: Path,
) -> None:
    more: dict[str, Any] = {"batch_size": 4, "records_per_shard": 8, "audit_dir": tmp_path}
    model = Keeps()
    with ElasticDataLoader(OLD, num_epochs=3, **more) as before:
        before.attach(model.optimizer)
        model.run(before, 14)
        middle = before.state_dict()
        model.run(before, 10)
        end = before.state_dict()
    with ElasticDataLoader(OLD, num_epochs=1, **more) as after:
        after.attach(model.optimizer)
        with pytest.raises(TokenError, match=r"middle of epoch 1 .* num_epochs=1 has not: give num_epochs=2"):
            after.load_state_dict(middle)
        after.load_state_dict(end)
        model.run(after)
    assert set(model.learnt.values()) == {2}
    (verdict,) = audit([tmp_path])
    assert (verdict.outcome, verdict.records, verdict.acknowledged) == (Outcome.PROVEN, 96, 96)
