"""Data that are not those registered, or a checkpoint's, are refused in one error that says what changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from edl_torch import ElasticDataLoader, LocalMaster
from edl_torch.errors import DatasetConflict, TokenError


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


def test_a_trainer_whose_folder_has_another_file_is_refused(folder: Path) -> None:
    master = LocalMaster()
    with loader(str(folder), master_client=master) as one:
        first(iter(one), 1)
    other_file(folder)
    with loader(str(folder), master_client=master) as two, pytest.raises(DatasetConflict, match=SAID):
        first(iter(two), 1)


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


def test_the_same_array_of_another_process_is_the_same_data() -> None:
    with loader(np.arange(48.0)) as before:
        _in_hand = first(iter(before), 3)
        state = before.state_dict()
    with loader(np.arange(48.0)) as after:
        after.load_state_dict(state)
        assert sum(len(batch) for batch in after) == 36


def test_an_array_in_another_order_is_refused() -> None:
    with loader(np.arange(48.0)) as before:
        first(iter(before), 3)
        state = before.state_dict()
    with loader(np.arange(48.0)[::-1]) as after, pytest.raises(TokenError, match="data: "):
        after.load_state_dict(state)
