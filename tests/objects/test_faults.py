"""Random faults of the network, and data that change beneath: what is handed out is what was listed."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import pytest
from stores import BUCKET, Request, put

from edl_torch.errors import SourceChanged
from edl_torch.readers.images.folder import ImageFolderReader
from edl_torch.readers.tar.reader import TarReader

IMAGES, TARS, SAMPLES = 90, 3, 40
FAULTS = ("503", "500", "reset", "short", "wrong", "trickle")


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class World:
    """What is in the bucket, in versions of one size. `manifest` says what the records hash to."""

    def __init__(self, client: Any, chance: random.Random) -> None:
        self._client, self._chance = client, chance
        self.manifest: dict[str, str] = {}
        self.images = [f"world/images/{'ab'[n % 2]}/{n:03d}.png" for n in range(IMAGES)]
        self.tars = [f"world/tars/{n}.tar" for n in range(TARS)]
        for key in (*self.images, *self.tars):
            self.write(key)

    def write(self, key: str) -> None:
        """Write another version."""
        if key.endswith(".png"):
            pixels = np.frombuffer(self._chance.randbytes(48), np.uint8).reshape(4, 4, 3)
            data = cv2.imencode(".png", pixels[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 0])[1].tobytes()
            self.manifest[key] = sha(pixels.tobytes())
        else:
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as tar:
                for sample in range(SAMPLES):
                    body = self._chance.randbytes(700)
                    self.manifest[f"{key}/{sample}"] = sha(body)
                    info = tarfile.TarInfo(f"{sample}.bin")
                    info.size = len(body)
                    tar.addfile(info, io.BytesIO(body))
            data = buffer.getvalue()
        put(self._client, {key: data})


def handed_out(reader: Any, order: list[int]) -> Iterator[tuple[str, str]]:
    """Key of the manifest and hash of each record."""
    prefix = f"s3://{BUCKET}/"
    if isinstance(reader, ImageFolderReader):
        for index, (image, _) in zip(order, reader.load_each(order), strict=True):
            yield reader.image_files.path(index).removeprefix(prefix), sha(image.tobytes())
    else:
        for sample in reader.load_each(order):
            yield f"{sample['__url__'].removeprefix(prefix)}/{sample['__key__']}", sha(sample["bin"])


MINUTES = [pytest.mark.long, pytest.mark.timeout(900)]
RUNS = [(5, 1), pytest.param(280, 2, marks=MINUTES), pytest.param(280, 3, marks=MINUTES)]


@pytest.mark.parametrize(("seconds", "seed"), RUNS)
def test_what_is_handed_out_is_what_was_listed(weed, bucket, proxy, seconds, seed):
    chance, fault_chance, lock = random.Random(seed), random.Random(seed + 1), threading.Lock()
    world = World(bucket, chance)
    proxy.trickle_s = 0.2
    rate, stale, is_let_in = 0.0, False, False
    met: dict[str, int] = {"records": 0, "changed": 0, "rounds": 0}

    def fault(request: Request) -> str:
        with lock:
            draw, kind, pause = fault_chance.random(), fault_chance.choice(FAULTS), fault_chance.random()
        if stale and "list-type" in request.path:
            return "stale"
        if draw < rate:
            return kind
        if is_let_in and draw < 1.3 * rate:
            return "403"  # credentials that have expired
        if draw > 0.98:
            time.sleep(0.1 * pause)
        return ""

    proxy.fault = fault
    ends = time.monotonic() + seconds
    while time.monotonic() < ends or met["rounds"] < 4:
        met["rounds"] += 1
        rate, is_let_in, stale = chance.choice((0.0, 0.03, 0.1)), False, False
        makes = (ImageFolderReader, TarReader)[met["rounds"] % 2]
        folder, keys = ("images", world.images) if makes is ImageFolderReader else ("tars", world.tars)
        expected = dict(world.manifest)
        if chance.random() < 0.3 and makes is ImageFolderReader:
            world.write(chance.choice(keys))
            stale = True  # the listing is from before: then what was written since has changed
        options = {"storage_options": weed.options(proxy.url)}
        reader: Any
        if makes is TarReader:
            reader = TarReader(f"s3://{BUCKET}/world/{folder}", decode=False, **options)
        else:
            reader = ImageFolderReader(f"s3://{BUCKET}/world/{folder}", **options)
        assert reader.count == (IMAGES if makes is ImageFolderReader else TARS * SAMPLES)
        is_written = stale
        for _ in range(3):
            order = chance.sample(range(reader.count), reader.count)
            changes_at = chance.randrange(4 * len(order))
            try:
                for number, (key, found) in enumerate(handed_out(reader, order)):
                    assert found == expected[key], (key, met)
                    is_let_in = True
                    met["records"] += 1
                    if number == changes_at:
                        world.write(chance.choice(keys))
                        is_written = True
            except SourceChanged:
                assert is_written
                met["changed"] += 1
                break
    print(met, len(proxy.log), "requests")
    assert met["records"] > 300
    assert {f for f in ("503", "500") if any(one.status == int(f) for one in proxy.log)} == {"503", "500"}
