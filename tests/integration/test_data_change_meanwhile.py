"""Data that are changed while a job runs, and not only between two: no verdict says that all is exact.

A model that keeps what it was trained on says which records it has.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import write_coco, write_manifest, write_voc
from learning_kit import Keeps

from edl_torch import ElasticDataLoader, Mixture
from edl_torch.audit.verdict import Outcome, audit
from edl_torch.cli.verdict_words import headline, inexact
from edl_torch.readers import CocoCaptionsReader, ImageManifestReader, VocReader
from edl_torch.readers.base import reader_fingerprint
from edl_torch.readers.map_dataset import MapDatasetReader


def train(data: Any, at: Path, change: Callable[[], None], *, after: int = 12, **more: Any) -> Keeps:
    model = Keeps()
    options: dict[str, Any] = {"batch_size": 2, "audit_dir": at / "audit", "num_epochs": 2, **more}
    if isinstance(data, Mixture):
        del options["num_epochs"]
    with ElasticDataLoader(data, **options) as batches:
        batches.attach(model.optimizer)
        done = 0
        for _ in batches.epochs():
            for batch in batches:
                model.step(batch)
                done += 1
                if done == after:
                    change()
    return model


class Held:
    def __init__(self, values: Any) -> None:
        self.kept = values

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> Any:
        return self.kept[index]


class Together(Held):
    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self.kept[number] for number in numbers]


class OfAFile(Held):
    """Whose file each process opens for itself, as Hugging Face's do."""

    def __init__(self, file: Path) -> None:
        super().__init__(np.load(file))
        self.file = file

    def __getstate__(self) -> Path:
        return self.file

    def __setstate__(self, file: Path) -> None:
        self.__init__(file)  # type: ignore[misc]


class Stored(Held):
    """Its length is that of the list when it was made."""

    def __init__(self, values: Any) -> None:
        super().__init__(values)
        self.length = len(values)

    def __len__(self) -> int:
        return self.length


def reverse(values: Any) -> None:
    values[:] = values[::-1].copy() if hasattr(values, "copy") else values.flip(0)


@pytest.mark.parametrize("kind", ["array", "tensor", "list", "held", "together", "subset", "grown"])
def test_values_in_memory_that_are_changed_in_the_middle_are_no_proof(tmp_path: Path, kind: str) -> None:
    values: Any = torch.arange(48.0) if kind == "tensor" else np.arange(48.0)
    if kind == "list":
        values = values.tolist()
    data = {"held": Held, "together": Together}.get(kind, lambda values: values)(values)
    if kind == "subset":
        data = torch.utils.data.Subset(Held(values), range(48))
    if kind == "grown":
        values = values.tolist()
        data = Stored(values)
    model = train(data, tmp_path, lambda: values.insert(0, 99.0) if kind == "grown" else reverse(values))
    assert set(model.learnt.values()) != {2}  # the oracle
    (verdict,) = audit([tmp_path / "audit"])
    assert verdict.outcome is Outcome.INEXACT
    said = "the values are others than then" if kind in ("array", "tensor", "list") else "attributes of the "
    said = "nothing of what was looked at then is there now" if kind == "grown" else said
    assert f"the data were changed while they were read ({said}" in "".join(inexact(verdict))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("changes_in", [0, 1])
def test_data_that_change_under_a_loop_that_never_asks_for_the_end_are_no_proof(
    tmp_path: Path, changes_in: int, keep: bool
) -> None:
    values, model, kept = np.arange(48.0), Keeps(), []
    with ElasticDataLoader(values, batch_size=4, num_epochs=2, audit_dir=tmp_path) as batches:
        batches.attach(model.optimizer)
        for epoch in range(2):
            if keep:
                kept.append(iter(batches))
            for number, batch in enumerate(islice(kept[-1] if keep else batches, 12)):
                model.step(batch)
                if (epoch, number) == (changes_in, 5):
                    reverse(values)
    assert set(model.learnt.values()) != {2}
    (said,) = inexact(audit([tmp_path])[0])
    assert "the values are others than then" in said


def test_a_component_of_a_mixture_that_is_changed_in_the_middle_is_no_proof(tmp_path: Path) -> None:
    one, other = np.arange(48.0), np.arange(100.0, 148.0)
    mixture = Mixture({"one": one, "other": other}, stopping_strategy="all_exhausted")
    train(mixture, tmp_path, lambda: reverse(other))
    (verdict,) = audit([tmp_path / "audit"])
    assert verdict.outcome is Outcome.INEXACT
    assert "(the values are others than then)" in "".join(inexact(verdict))


@pytest.mark.parametrize("kind", ["array", "tensor"])
@pytest.mark.parametrize(("workers", "persist"), [(0, False), (1, False), (1, True)])
def test_a_transform_that_writes_into_the_data_is_no_proof_where_they_are_read_again(
    tmp_path: Path, kind: str, workers: int, persist: bool
) -> None:
    """A record is a view of the data. Workers that end with their pass take what they wrote with them."""
    values: Any = np.arange(96.0).reshape(48, 2)
    more: dict[str, Any] = {"num_workers": workers, "persistent_workers": persist}

    def in_place(record: Any) -> Any:
        record += 1
        return record

    model = train(
        torch.from_numpy(values) if kind == "tensor" else values,
        tmp_path,
        lambda: None,
        transform=in_place,
        **more,
    )
    is_exact = set(model.learnt.values()) == {2}
    assert is_exact == (workers == 1 and not persist)
    (verdict,) = audit([tmp_path / "audit"])
    assert verdict.outcome is (Outcome.PROVEN if is_exact else Outcome.INEXACT)


def test_what_was_changed_after_the_token_that_a_job_goes_back_to_does_not_count(tmp_path: Path) -> None:
    values, model = np.arange(48.0), Keeps()
    more: dict[str, Any] = {"batch_size": 4, "audit_dir": tmp_path}
    with ElasticDataLoader(values, **more) as batches:
        batches.attach(model.optimizer)
        for number, batch in enumerate(batches):
            model.step(batch)
            if number == 5:
                token, kept = batches.state_dict(), model.learnt.copy()
                reverse(values)
    assert audit([tmp_path])[0].outcome is Outcome.INEXACT
    reverse(values)
    again = Keeps()
    again.learnt = kept
    again.module.load_state_dict(model.module.state_dict())
    with ElasticDataLoader(values, **more) as batches:
        batches.attach(again.optimizer, one_model="of this test")
        batches.load_state_dict(token)
        for batch in batches:
            again.step(batch)
    assert set(again.learnt.values()) == {1}
    (verdict,) = audit([tmp_path])
    assert headline(verdict) == "PROVEN, data the same by samples"


def test_the_users_word_stands_for_data_that_change_on_purpose(tmp_path: Path) -> None:
    values = np.arange(48.0)
    train(values, tmp_path, lambda: reverse(values), fingerprint="drawn anew in each epoch")
    assert audit([tmp_path / "audit"])[0].outcome is Outcome.PROVEN


def test_a_user_is_told_once_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = np.arange(48.0)
    train(values, tmp_path, lambda: reverse(values), num_epochs=3)
    assert caplog.text.count("the data were changed while they were read") == 1


def test_annotations_of_voc_that_are_changed_in_the_middle_are_no_proof(tmp_path: Path) -> None:
    reader = VocReader(write_voc(tmp_path))
    file = sorted(Path(reader.root).glob("Annotations/*.xml"))[1]

    def change() -> None:
        file.write_bytes(file.read_bytes().replace(b"</annotation>", b" </annotation>"))

    train(
        reader, tmp_path, change, after=1, collate_fn=lambda records: [r[1]["boxes"].sum() for r in records]
    )
    (verdict,) = audit([tmp_path / "audit"])
    assert verdict.outcome is Outcome.INEXACT
    assert f"4 then and now: changed '{file.stem}'" in "".join(inexact(verdict))


def test_a_list_that_is_written_to_after_it_was_read_has_the_fingerprint_of_what_was_read(
    tmp_path: Path,
) -> None:
    manifest = Path(write_manifest(tmp_path, [n % 3 for n in range(12)]))
    folder, captions, _ = write_coco(tmp_path)
    voc = VocReader(write_voc(tmp_path))
    for reader, file in (
        (ImageManifestReader(manifest), manifest),
        (CocoCaptionsReader(folder, captions), Path(captions)),
        (voc, Path(voc.name)),
    ):
        before = reader_fingerprint(reader)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        assert reader_fingerprint(reader) == before


class Slow(MapDatasetReader):
    """Takes half a minute for each look at its data, by a clock of its own."""

    now_s = 100.0
    looks = 0

    def fingerprint(self, *, whole: bool = False) -> Any:
        self.now_s += 30.0
        self.looks += 1
        return super().fingerprint()


@pytest.mark.parametrize("before_close", [True, False])
def test_a_slow_look_is_taken_seldom_and_at_the_end(tmp_path: Path, before_close: bool) -> None:
    values, model = np.arange(48.0), Keeps()
    slow = Slow(values)
    with ElasticDataLoader(slow, batch_size=4, audit_dir=tmp_path) as batches:
        batches.service.session.description.clock = lambda: slow.now_s
        batches.attach(model.optimizer)
        for batch in batches:
            model.step(batch)
            batches.state_dict()
        if before_close:
            reverse(values)
        assert slow.looks == 1
    assert slow.looks == 2
    assert audit([tmp_path])[0].outcome is (Outcome.INEXACT if before_close else Outcome.PROVEN)


@pytest.mark.parametrize("goes_back", [True, False])
@pytest.mark.parametrize("looked_at_token", [True, False])
def test_a_change_that_is_older_than_a_token_counts_for_who_goes_on_from_it(
    tmp_path: Path, *, looked_at_token: bool, goes_back: bool
) -> None:
    """As far as the looks can tell: a token whose look was put off may be younger than the change."""
    model, slow = Keeps(), Slow(np.arange(48.0))
    with ElasticDataLoader(slow, batch_size=4, audit_dir=tmp_path) as batches:
        batches.service.session.description.clock = lambda: slow.now_s
        batches.attach(model.optimizer)
        for batch in islice(batches, 3):
            model.step(batch)
        if looked_at_token:
            slow.now_s += 10_000.0
        token = batches.state_dict()
        if goes_back:
            batches.load_state_dict(token)
        reverse(slow.dataset)  # before the token, or after it, for all that the looks know
    with ElasticDataLoader(Slow(np.arange(48.0)), batch_size=4, audit_dir=tmp_path) as batches:
        batches.load_state_dict(token)
        batches.attach(model.optimizer)
        for batch in batches:
            model.step(batch)
    (verdict,) = audit([tmp_path])
    assert verdict.outcome is (Outcome.PROVEN if looked_at_token else Outcome.INEXACT), verdict


@pytest.mark.parametrize("saves", [True, False])
def test_data_that_were_looked_at_when_all_was_read_are_not_looked_at_again(
    tmp_path: Path, saves: bool
) -> None:
    slow, model = Slow(np.arange(48.0)), Keeps()
    with ElasticDataLoader(slow, batch_size=4, audit_dir=tmp_path) as batches:
        batches.service.session.description.clock = lambda: slow.now_s
        batches.attach(model.optimizer)
        for batch in batches:
            model.step(batch)
            slow.now_s += 1000.0
        assert slow.looks == 2
        if saves:
            batches.state_dict()
    assert slow.looks == 2


def test_an_older_iterator_that_is_closed_is_no_end_of_the_pass_that_runs(tmp_path: Path) -> None:
    slow, model = Slow(np.arange(48.0)), Keeps()
    with ElasticDataLoader(slow, batch_size=4, audit_dir=tmp_path) as batches:
        batches.service.session.description.clock = lambda: slow.now_s
        batches.attach(model.optimizer)
        older = iter(batches)
        newer = iter(batches)
        model.step(next(newer))
        slow.now_s += 10_000.0
        older.close()
        for batch in islice(newer, 11):
            model.step(batch)
        del newer  # it never heard of the end
        reverse(slow.dataset)
    assert audit([tmp_path])[0].outcome is Outcome.INEXACT


@pytest.mark.parametrize("changes", [True, False])
def test_other_data_that_workers_open_in_a_later_pass_are_noticed(tmp_path: Path, changes: bool) -> None:
    np.save(file := tmp_path / "x.npy", np.arange(8.0))
    data, other = OfAFile(file), np.arange(8.0)[:: -1 if changes else 1]
    options = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    train(data, tmp_path, lambda: np.save(file, other), after=4, **options)
    (verdict,) = audit([tmp_path / "audit"])
    assert (verdict.outcome is Outcome.INEXACT) == changes
    assert ("in a loader worker" in "".join(inexact(verdict))) == changes
