"""The example's modules are scripts beside each other, no package: make them importable; a tiny dataset."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from coco_kit import arguments, weights

FOLDER = str(Path(__file__).parents[3] / "examples" / "coco")

if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 pictures, with 150 captions, and 4 that are held out."""
    import generate

    folder = tmp_path_factory.mktemp("coco") / "data"
    generate.generate(folder, generate.Recipe(images=30, val=4, size=32))
    return folder


@pytest.fixture(scope="module", autouse=True)
def no_master() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def uninterrupted(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run of train.py that nobody killed or told to end."""
    import train

    output = tmp_path_factory.mktemp("whole")
    assert train.main(arguments(dataset, output)) == 0
    return weights(output)
