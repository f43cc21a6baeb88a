from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from image_files import encode, render, write_coco, write_image_folder, write_manifest, write_voc

from edl_torch.readers.images.decode import decode_image


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("write", [write_coco, write_image_folder, write_manifest, write_voc])
def test_datasets_are_the_same_every_time(write, tmp_path):
    write(tmp_path / "one")
    write(tmp_path / "two")
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_images_differ_by_seed_and_survive_jpeg():
    images = [render(seed) for seed in range(12)]
    assert len({image.tobytes() for image in images}) == 12
    for image in images:
        assert (image.shape, image.dtype) == ((24, 32, 3), np.uint8)
        assert np.abs(decode_image(encode(image), "x").astype(int) - image).mean() < 8
    assert render(3, 10, 20).shape == (10, 20, 3)
