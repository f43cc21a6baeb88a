"""Loaders of other libraries over the same pictures, for `threads.py --peers DIR`, and their environment.

Grain and SPDL read files by two threads of the trainer; LitData and WebDataset read copies in their own
formats, by two worker processes, which is what they have. All decode by `read_image` and apply the same
transform; all but SPDL, which is left to the order of its source, shuffle.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from harness import Round

from edl_torch.readers.images.decode import read_image

Transform = Callable[[Any], Any]

PACKAGES = ("grain", "spdl", "litdata", "webdataset")
KEPT = ("torch", "numpy", "protobuf")  # as they are here, or others would be measured
TARS = 4
THREADS = WORKERS = 2


# The environment ----------------------------------------------------------------------------------------


def enter(folder: Path, packages: Sequence[str] = PACKAGES) -> None:
    """Go on in an environment of its own in a folder, made where it is not there: this one and the peers."""
    folder = folder.absolute()
    python = folder / "bin" / "python"
    if Path(sys.prefix) == folder:
        return
    if not (folder / "complete").exists():
        _make(folder, python, packages)
    os.execv(python, [str(python), *sys.argv])


def _make(folder: Path, python: Path, packages: Sequence[str]) -> None:
    venv.create(folder, with_pip=True)
    found = subprocess.check_output(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], text=True
    )
    ours = "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
    Path(found.strip(), "these_packages.pth").write_text(ours)
    pins = folder / "pins.txt"
    pins.write_text("".join(f"{name}=={metadata.version(name)}\n" for name in KEPT))
    subprocess.check_call([python, "-m", "pip", "install", "--quiet", "-c", pins, *packages])
    (folder / "complete").touch()


# The loaders --------------------------------------------------------------------------------------------


def peers(
    paths: Sequence[str], count: int, transform: Transform, *, batch_size: int, scratch: Path
) -> dict[str, Round]:
    """All of them by name and version; each goes over `count` pictures."""
    repeated = [paths[number % len(paths)] for number in range(count)]
    load = partial(_load, transform)
    makers: dict[str, Callable[[], Round]] = {
        "grain": lambda: Grain(repeated, load, batch_size),
        "spdl": lambda: partial(_spdl, repeated, load, batch_size),
        "litdata": lambda: LitData(repeated, transform, batch_size, scratch),
        "webdataset": lambda: WebDataset(repeated, transform, batch_size, scratch),
    }
    return {f"{name} {metadata.version(name)}": make() for name, make in makers.items()}


def _load(transform: Transform, path: str) -> Any:
    return transform(read_image(path))


def _decoded(transform: Transform, data: bytes) -> Any:
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert image is not None
    return transform(cv2.cvtColor(image, cv2.COLOR_BGR2RGB))


def _counted(batches: Iterable[Any]) -> int:
    return sum(len(batch) for batch in batches)


def _stacked(samples: list[Any]) -> Any:
    if isinstance(samples[0], np.ndarray):
        return np.stack(samples)
    import torch

    return torch.stack(samples)


class Grain:
    """Grain's dataset, whose threads read ahead; each round is another epoch's order."""

    def __init__(self, paths: list[str], load: Callable[[str], Any], batch_size: int) -> None:
        self._paths, self._load, self._batch_size = paths, load, batch_size
        self._round = 0

    def __call__(self) -> int:
        import grain

        self._round += 1
        options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=2 * self._batch_size)
        samples = grain.MapDataset.source(self._paths).shuffle(seed=self._round).map(self._load)
        batches = samples.to_iter_dataset(options).batch(self._batch_size, batch_fn=_stacked)
        return _counted(batches)


def _spdl(paths: list[str], load: Callable[[str], Any], batch_size: int) -> int:
    from spdl.pipeline import PipelineBuilder

    builder = PipelineBuilder().add_source(paths).pipe(load, concurrency=THREADS, output_order="input")
    pipeline = builder.aggregate(batch_size).pipe(_stacked).add_sink(2).build(num_threads=THREADS)
    with pipeline.auto_stop():
        return _counted(pipeline.get_iterator())


class LitData:
    """Chunks of the files' bytes, read by LitData's loader and its workers."""

    def __init__(self, paths: list[str], transform: Transform, batch_size: int, scratch: Path) -> None:
        import litdata

        folder = scratch / "litdata"
        if not folder.exists():
            chunks = {"chunk_bytes": "16MB", "num_workers": 1, "verbose": False}
            litdata.optimize(_record, inputs=paths, output_dir=str(folder), start_method="fork", **chunks)
        dataset = litdata.StreamingDataset(
            str(folder), shuffle=True, transform=partial(_decoded_of, transform)
        )
        self._loader = litdata.StreamingDataLoader(
            dataset, batch_size=batch_size, num_workers=WORKERS, persistent_workers=True
        )

    def __call__(self) -> int:
        return _counted(self._loader)


def _record(path: str) -> dict[str, bytes]:
    return {"jpg": Path(path).read_bytes()}


def _decoded_of(transform: Transform, record: dict[str, bytes], *_: Any) -> Any:
    return _decoded(transform, record["jpg"])


class WebDataset:
    """Tar files, shuffled through a buffer and read by the workers of a `WebLoader`."""

    def __init__(self, paths: list[str], transform: Transform, batch_size: int, scratch: Path) -> None:
        import webdataset

        tars = [str(scratch / f"{number}.tar") for number in range(TARS)]
        for number, tar in enumerate(tars):
            if not os.path.exists(tar):
                _write_tar(tar, paths[number::TARS], number)
        samples = webdataset.WebDataset(tars, shardshuffle=TARS, empty_check=False).shuffle(256)
        samples = samples.to_tuple("jpg").map_tuple(partial(_decoded, transform))
        batches = samples.batched(batch_size, collation_fn=_first_stacked)
        self._loader = webdataset.WebLoader(
            batches, batch_size=None, num_workers=WORKERS, persistent_workers=True
        )

    def __call__(self) -> int:
        return _counted(self._loader)


def _first_stacked(samples: list[tuple[Any]]) -> Any:
    return _stacked([sample for (sample,) in samples])


def _write_tar(tar: str, paths: list[str], number: int) -> None:
    with tarfile.open(tar, "w") as file:
        for place, path in enumerate(paths):
            file.add(path, f"{number}-{place:06d}.jpg")
