"""Every kind of image file has a defined outcome."""

from __future__ import annotations

import io
import json
import multiprocessing
import pickle
import struct
import zlib

import cv2
import numpy as np
import PIL.Image
import pytest
from image_files import broken_images, encode, odd_images, render, with_exif_orientation

from edl_torch.errors import BadRecord, InvalidArgument
from edl_torch.readers import CocoCaptionsReader, ImageFolderReader, ImageManifestReader
from edl_torch.readers.images.decode import decode_image, read_image, truncated_format

IMAGE = render(7)


def pil_bytes(image: PIL.Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float = 6.0) -> None:
    assert found.shape == expected.shape
    assert np.abs(found.astype(float) - expected).mean() < tolerance


@pytest.mark.parametrize(("name", "data"), odd_images().items())
def test_odd_images_decode_to_three_uint8_channels(name, data):
    image = decode_image(data, name)
    assert image.shape == ((32, 24, 3) if name == "rotated.jpg" else (24, 32, 3))
    assert image.dtype == np.uint8
    assert image.flags.c_contiguous
    assert image.flags.writeable


PICTURE = PIL.Image.fromarray(IMAGE)
GRAY = np.repeat(IMAGE[..., :1], 3, axis=2)
PALETTE = PICTURE.quantize(16)
EXACT = {
    "16 bits": (odd_images()["rgb16.png"], IMAGE),
    "16 bits, gray": (odd_images()["gray16.png"], GRAY),
    "alpha": (odd_images()["rgba.png"], IMAGE),
    "palette": (pil_bytes(PALETTE, "PNG"), np.asarray(PALETTE.convert("RGB"))),
    "webp": (pil_bytes(PICTURE, "WEBP", lossless=True), IMAGE),
    **{kind: (pil_bytes(PICTURE, kind), IMAGE) for kind in ("PNG", "BMP", "TIFF", "PPM")},
}
JPEGS = [{}, {"progressive": True}, {"restart_marker_rows": 1}]
NEARLY = {
    "gray": (odd_images()["gray.jpg"], GRAY, 6.0),
    "CMYK": (pil_bytes(PICTURE.convert("CMYK"), "JPEG", quality=95), IMAGE, 6.0),
    **{
        f"JPEG {options}": (pil_bytes(PICTURE, "JPEG", quality=95, subsampling=0, **options), IMAGE, 3.0)
        for options in JPEGS
    },
}


@pytest.mark.parametrize("what", EXACT)
def test_what_loses_nothing_is_the_image_in_rgb(what):
    data, expected = EXACT[what]
    assert np.array_equal(decode_image(data, what), expected)


@pytest.mark.parametrize("what", NEARLY)
def test_jpegs_are_nearly_the_image_in_rgb_whatever_comes_behind_them(what):
    data, expected, tolerance = NEARLY[what]
    image = decode_image(data + b"\x00\xffgarbage", what)
    assert_close(image, expected, tolerance)
    assert (what == "gray") == bool((image == image[..., :1]).all())


def test_a_webp_that_is_cut_is_truncated():
    assert truncated_format(pil_bytes(PICTURE, "WEBP", lossless=True)[:-10]) == "WebP"


@pytest.mark.parametrize(
    ("orientation", "turn"),
    [
        (1, lambda a: a),
        (2, lambda a: a[:, ::-1]),
        (3, lambda a: a[::-1, ::-1]),
        (4, lambda a: a[::-1]),
        (5, lambda a: a.transpose(1, 0, 2)),
        (6, lambda a: np.rot90(a, -1)),
        (7, lambda a: a[::-1, ::-1].transpose(1, 0, 2)),
        (8, lambda a: np.rot90(a)),
    ],
)
def test_exif_orientation_is_applied(orientation, turn):
    plain = encode(IMAGE)
    found = decode_image(with_exif_orientation(plain, orientation), "x")
    assert np.array_equal(found, turn(decode_image(plain, "x")))


@pytest.mark.parametrize(("name", "data"), broken_images().items())
def test_broken_images_name_path_reason_and_remedy(name, data, tmp_path):
    path = tmp_path / name
    path.write_bytes(data)
    reason = {"empty.jpg": "empty (0 bytes)", "text.jpg": "no image"}.get(name, "is truncated after")
    with pytest.raises(BadRecord) as caught:
        read_image(str(path))
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)
    assert "take it out of the dataset" in str(caught.value)


@pytest.mark.parametrize("path", ["", "a\x00b.jpg"])
def test_unusable_paths_are_bad_records(path, tmp_path):
    with pytest.raises(BadRecord, match="cannot be read"):
        read_image(str(tmp_path / path))


@pytest.mark.parametrize("options", JPEGS)
def test_a_jpeg_cut_off_anywhere_is_truncated(options):
    plain = pil_bytes(PIL.Image.fromarray(IMAGE), "JPEG", **options)
    thumbnail = encode(IMAGE[::2, ::2])
    block = b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    data = plain[:2] + block + plain[2:]
    assert truncated_format(data) is None
    assert truncated_format(data + bytes(100)) is None
    embedded_end = 2 + len(block)  # here the thumbnail's end is the file's: only the decoder can tell
    cuts = [cut for cut in range(3, len(data) - 1) if cut != embedded_end]
    assert all(truncated_format(data[:cut]) == "JPEG" for cut in cuts)
    with pytest.raises(BadRecord):
        decode_image(data[:embedded_end], "x")


def test_a_png_cut_off_anywhere_is_truncated():
    data = encode(IMAGE, ".png")
    assert truncated_format(data) is None
    assert all(truncated_format(data[:cut]) == "PNG" for cut in range(8, len(data) - 12))


def test_an_absurd_size_in_the_header_is_a_bad_record():
    header = struct.pack(">IIBBBBB", 1 << 30, 1 << 30, 8, 2, 0, 0, 0)
    png = bytearray(encode(IMAGE, ".png"))
    png[16:29] = header
    png[29:33] = struct.pack(">I", zlib.crc32(b"IHDR" + header))
    with pytest.raises(BadRecord, match=r"x\.png"):
        decode_image(bytes(png), "x.png")


def report_opencv_settings(pipe) -> None:
    import cv2

    decode_image(encode(IMAGE), "x")
    pipe.send((cv2.getNumThreads(), cv2.utils.logging.getLogLevel() == cv2.utils.logging.LOG_LEVEL_SILENT))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("daemon", [True, False])
def test_opencv_threads_are_off_in_loader_workers_only(method, daemon):
    import cv2

    decode_image(encode(IMAGE), "x")  # a forked worker inherits what this process cached
    threads = cv2.getNumThreads()
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    worker = context.Process(target=report_opencv_settings, args=(there,), daemon=daemon)
    worker.start()
    try:
        assert here.poll(60), "the worker did not answer"
        found_threads, silent = here.recv()
    finally:
        worker.join(60)
    assert cv2.getNumThreads() == threads
    assert silent is daemon
    assert (found_threads <= 1) is (daemon or threads <= 1)


PHOTOGRAPH = render(3, height=96, width=130)


@pytest.mark.parametrize(
    ("min_side", "shape"),
    [
        (97, (96, 130)),
        (49, (96, 130)),
        (48, (48, 65)),
        (25, (48, 65)),
        (24, (24, 33)),
        (12, (12, 17)),
        (1, (12, 17)),
    ],
)
def test_a_jpeg_is_decoded_at_the_smallest_scale_that_is_large_enough(min_side, shape):
    image = decode_image(encode(PHOTOGRAPH), "photo.jpg", min_side)
    assert image.shape == (*shape, 3)
    assert image.flags.c_contiguous
    assert_close(image, cv2.resize(PHOTOGRAPH, shape[::-1], interpolation=cv2.INTER_AREA))


@pytest.mark.parametrize("options", [{"progressive": True}, {"subsampling": 0}, {"quality": 30}], ids=str)
def test_scaled_decoding_knows_every_kind_of_frame(options):
    data = pil_bytes(PIL.Image.fromarray(PHOTOGRAPH), "JPEG", **options)
    assert decode_image(data, "photo.jpg", 24).shape == (24, 33, 3)


def test_scaled_decoding_turns_images_upright_and_makes_grey_ones_rgb():
    turned = decode_image(with_exif_orientation(encode(PHOTOGRAPH), 6), "turned.jpg", 24)
    assert turned.shape == (33, 24, 3)
    upright = np.rot90(cv2.resize(PHOTOGRAPH, (33, 24), interpolation=cv2.INTER_AREA), -1)
    assert_close(turned, upright)
    grey = decode_image(encode(PHOTOGRAPH[..., 0].copy()), "grey.jpg", 24)
    assert grey.shape == (24, 33, 3)
    assert (grey[..., 0] == grey[..., 2]).all()


@pytest.mark.parametrize("ending", [".png", ".bmp"])
def test_other_formats_are_decoded_whole(ending):
    assert (decode_image(encode(PHOTOGRAPH, ending), "photo", 8) == PHOTOGRAPH).all()


def test_readers_decode_by_scale_and_refuse_what_is_none(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(encode(PHOTOGRAPH))
    (tmp_path / "list.csv").write_text("cat/1.jpg,0\n")
    made = {
        "file_name": "cat/1.jpg",
        "id": 1,
        "height": 96,
        "width": 130,
    }
    captions = {"images": [made], "annotations": [{"id": 1, "image_id": 1, "caption": "a cat"}]}
    (tmp_path / "captions.json").write_text(json.dumps(captions))
    readers = [
        ImageFolderReader(tmp_path, min_side=24),
        ImageManifestReader(tmp_path / "list.csv", min_side=24),
        CocoCaptionsReader(tmp_path, tmp_path / "captions.json", min_side=24),
    ]
    for reader in readers:
        assert pickle.loads(pickle.dumps(reader)).load(0)[0].shape == (24, 33, 3)
    for wrong in (0, -1, 1.5, True, "256"):
        with pytest.raises(InvalidArgument, match="min_side is"):
            ImageFolderReader(tmp_path, min_side=wrong)
