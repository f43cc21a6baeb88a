"""The COCO example with one loader worker and eight threads in it: exact, and beside a plain loader."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import generate
import pytest
import torch
import train
from batches import Encode, Fit, NumberedReader, collate
from model import Captioner, ModelConfig
from split import read_captions
from torch.utils.data import DataLoader
from vocabulary import Vocabulary

from edl_torch import ElasticDataLoader
from edl_torch.audit.verdict import audit
from edl_torch.readers import CocoCaptionsReader

BATCH, THREADS, ROUNDS = 32, 8, 3
WARM_UP = 5  # batches that are not timed: those in which processes start
RECIPES = {
    "cpu": generate.Recipe(images=40, val=4, size=32),
    "cuda": generate.Recipe(images=600, val=4, size=480),  # as large as photographs
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.device], Path]:
    """Where the pictures for a device are; they are drawn once."""
    parent = tmp_path_factory.mktemp("coco")

    def folder_for(device: torch.device) -> Path:
        generate.generate(parent / device.type, RECIPES[device.type])
        return parent / device.type

    return folder_for


@pytest.fixture(autouse=True)
def no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_the_example_delivers_each_record_once(
    device: torch.device, folders: Callable[[torch.device], Path], tmp_path: Path
) -> None:
    data = folders(device)
    status = train.main(
        [
            *("--images", str(data / "images/train"), "--annotations", str(data / "captions_train.json")),
            *("--val-images", str(data / "images/val")),
            *("--val-annotations", str(data / "captions_val.json")),
            *("--scenes", str(data / "scenes_val.json"), "--output", str(tmp_path / "output")),
            *("--audit", str(tmp_path / "audit"), "--device", device.type, "--epochs", "2"),
            *("--image-size", "32", "--width", "16", "--threads", "1"),
            *("--workers", "1", "--reading-threads", str(THREADS)),
        ]
    )
    assert status == 0
    (verdict,) = audit([tmp_path / "audit"])
    assert verdict.proven, verdict


class Plain:
    """What a program without the package reads with a plain `DataLoader`."""

    def __init__(self, reader: NumberedReader, name: str, size: int, fit: Fit, encode: Encode) -> None:
        self._reader, self._name, self._size = reader, name, size
        self._fit, self._encode = fit, encode

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        image, target = self._reader.read_record(self._name, index)
        return self._fit(image), self._encode(target)


class Contest:
    """One epoch of the example's training with each loader, by turns."""

    def __init__(self, data: Path, device: torch.device) -> None:
        self._device = device
        annotations = data / "captions_train.json"
        captions = [each["caption"] for each in read_captions(annotations)["annotations"]]
        vocabulary = Vocabulary.from_captions(captions, 1)
        self._config = ModelConfig(vocabulary=len(vocabulary), width=96)
        images = str(data / "images/train")
        self._reader = NumberedReader(CocoCaptionsReader(images, str(annotations), per="annotation"))
        self._fit, self._encode = Fit(64), Encode(vocabulary, self._config.max_tokens)
        self.size = len(captions)

    def ours(self) -> float:
        with ElasticDataLoader(
            self._reader,
            BATCH,
            shuffle=True,
            transform=self._fit,
            target_transform=self._encode,
            num_workers=1,
            num_threads=THREADS,
            **self._common(),
        ) as loader:
            return self._rate(loader, loader.attach)

    def plain(self) -> float:
        ((name, _),) = self._reader.create_shards().items()
        dataset: Any = Plain(self._reader, name, self.size, self._fit, self._encode)
        return self._rate(
            DataLoader(dataset, BATCH, shuffle=True, num_workers=THREADS, **self._common()), lambda _: None
        )

    def _common(self) -> dict[str, Any]:
        pin = self._device.type == "cuda"
        return {"collate_fn": collate, "pin_memory": pin, "multiprocessing_context": "fork"}

    def _rate(self, loader: Iterable[Any], attach: Callable[[Any], object]) -> float:
        """Train on all of it; returns records per second."""
        model = Captioner(self._config).to(self._device)
        optimizer = torch.optim.AdamW(model.parameters())
        attach(optimizer)
        numbers: list[int] = []
        began, before = 0.0, 0
        for count, batch in enumerate(loader):
            if count == WARM_UP:
                began, before = time.perf_counter(), len(numbers)
            optimizer.zero_grad()
            images = batch.images.to(self._device, non_blocking=True)
            captions = batch.captions.to(self._device, non_blocking=True)
            model.loss(images, captions).backward()
            optimizer.step()
            numbers += batch.numbers.tolist()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        assert sorted(numbers) == list(range(self.size))
        return (len(numbers) - before) / (time.perf_counter() - began)


def test_a_worker_with_eight_threads_beside_eight_workers_of_a_plain_loader(
    device: torch.device, folders: Callable[[torch.device], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    contest = Contest(folders(device), device)
    rounds = ROUNDS if device.type == "cuda" else 1
    pairs = [(contest.ours(), contest.plain()) for _ in range(rounds)]
    ratio = statistics.median(ours / plain for ours, plain in pairs)
    if device.type == "cuda":
        with capsys.disabled():
            print(f"\nours and plain, records/s: {[tuple(map(round, pair)) for pair in pairs]}: {ratio:.2f}")
        assert ratio > 0.5
