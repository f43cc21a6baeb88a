"""A mixture with a bad record whose data lie elsewhere by the time that it goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from loader_kit import PickingReader
from mixture_proof import prove

from edl_torch import ElasticDataLoader, LocalMaster, Mixture
from edl_torch.cli.main import main

BAD = 2  # of the last file of three records


class Files(PickingReader):
    """Files in a folder, of which one may have a record that cannot be read."""

    def __init__(self, counts: Mapping[str, int], torn: str = "") -> None:
        super().__init__(counts)
        self.torn = torn, BAD

    def number(self, name: str, index: int) -> int:
        if (name, index) == self.torn:
            raise ValueError("torn")
        return super().number(name, index)

    def fingerprint(self) -> str:
        return "v1"


def loader(
    folder: str, names: tuple[str, ...], logs: Path, readers: Any = None, **more: Any
) -> ElasticDataLoader:
    readers = readers or {
        "small": Files({folder + name: 3 for name in names}, torn=folder + names[-1]),
        "large": Files({folder + "large": 4000}),
    }
    return ElasticDataLoader(
        Mixture(readers, {"small": bool(readers["small"]) * 1, "large": 1}, num_records=600),
        batch_size=10,
        collate_fn=list,
        seed=3,
        on_bad_record="quarantine",
        max_bad_records=1,
        audit_dir=logs,
        **more,
    )


def check(logs: Path, bad: int, capsys: pytest.CaptureFixture[str]) -> None:
    main(["audit", str(logs), "--json"])
    (said,) = json.loads(capsys.readouterr().out)["datasets"]
    assert (said["verdict"], said["records"], said["quarantined"]) == ("DELIVERED", 600, bad)
    assert (said["lost"], said["doubled"], said["contradictions"]) == (0, 0, [])
    assert prove([str(logs)])["quarantined"] == bad


@pytest.mark.parametrize("names", [("one",), ("one", "x/one")], ids=str)
def test_a_bad_record_is_the_same_one_after_its_folder_was_moved(
    names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is one row, counts once, and the audit believes the passes that the token says it was met in."""
    met = 300 // (3 * len(names))
    with loader("/data/old/", names, tmp_path) as one:
        for number, _ in enumerate(one, 1):
            if number == 25:
                one.stepped()
                token = one.state_dict()
            if number == 30:  # some are rolled back
                break
    moved = "/data/x/"
    with loader(moved, names, tmp_path) as one:
        one.load_state_dict(token)
        for _ in one:
            pass
        (bad,) = one.quarantined()
        assert (bad.name, bad.index, bad.passes) == (f"small:{moved}{names[-1]}", BAD, (0, met))
        status = one.service.session.master.dataset_status("training")
        assert (status.failure, status.quarantined) == ("", met)
    check(tmp_path, met, capsys)


def test_a_bad_record_is_the_same_one_for_a_master_that_goes_on_while_its_folder_moves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a checkpoint, and after it."""
    names, master = ("one", "two"), LocalMaster()
    with loader("/data/old/", names, tmp_path, master_client=master) as one:
        for number, _ in enumerate(one, 1):
            if number == 25:
                one.stepped()
                break
    with loader("/data/new/", names, tmp_path, master_client=master) as one:
        token = None
        for number, _ in enumerate(one, 1):
            if number == 5:
                one.stepped()
                token = one.state_dict()
        one.load_state_dict(token)
        for _ in one:
            pass
        assert [(bad.name, bad.passes) for bad in one.quarantined()] == [("small:/data/new/two", (0, 50))]
    check(tmp_path, 50, capsys)


def test_a_bad_record_of_a_component_that_has_left_stays_in_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It left while its master ran, whose later checkpoint tells of passes that earlier logs tell of."""
    names, master, token = ("one", "two"), LocalMaster(), None
    with loader("/data/old/", names, tmp_path, master_client=master) as one:
        for number, _ in enumerate(one, 1):
            if number == 20:
                one.set_weights({"small": 0, "large": 1})
            if number == 50:
                one.stepped()
                break
    one_left = {"small": None, "large": Files({"/data/old/large": 4000})}
    with loader("/data/old/", names, tmp_path, one_left, master_client=master) as one:
        for number, _ in enumerate(one, 1):
            if number == 5:
                one.stepped()
                token = one.state_dict()
                break
    with loader(
        "/data/new/", names, tmp_path, {**one_left, "large": Files({"/data/new/large": 4000})}
    ) as one:
        one.load_state_dict(token)
        for _ in one:
            pass
        (bad,) = one.quarantined()
        assert (bad.name, bad.index) == ("small:two", BAD)
    check(tmp_path, bad.times, capsys)
