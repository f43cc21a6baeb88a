"""Tars in a store: the samples are those of the same tars here, and a sample costs a request at most."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from stores import BUCKET, put
from tar_files import samples_tar

from edl_torch.cli.main import main
from edl_torch.errors import DataFormatError, ReaderError, SourceChanged
from edl_torch.readers import TarReader


def test_samples_that_lie_together_are_one_request_in_any_order(weed, bucket, proxy, tmp_path, monkeypatch):
    """Those that are needed far from each other are one each, as what has come would be kept till then."""
    data = {
        f"cost/{n}.tar": Path(samples_tar(tmp_path / f"{n}.tar", 100, 100 * n)).read_bytes() for n in range(3)
    }
    put(bucket, data)
    url = f"s3://{BUCKET}/cost"
    reader = TarReader(url, ("cls",), storage_options=weed.options(proxy.url))
    shuffled, kept = random.Random(1).sample(range(300), 300), "edl_torch.readers.tar.reader._KEPT_AWAY"
    for order, kept_bytes, requests in ((range(300), 1 << 20, 3), (shuffled, 1 << 20, 3), (shuffled, 1, 300)):
        monkeypatch.setattr(kept, kept_bytes)
        proxy.log.clear()
        assert [number for (number,) in reader.load_each(order)] == list(order)
        assert len(proxy.ranges()) == requests == len(reader.requests(order))
        assert len(proxy.gets()) <= requests + 12, "4 % and 8 more may be slow"
    nearly = [*shuffled[:200], *shuffled[:200]]  # twice the same, and some that are not wanted
    assert [number for (number,) in reader.load_each(nearly)] == nearly


def test_tars_here_and_in_a_store_are_read_together(weed, bucket, proxy, tmp_path):
    here = samples_tar(tmp_path / "0.tar", 60)
    put(bucket, {"both/1.tar": Path(samples_tar(tmp_path / "1.tar", 60, 60)).read_bytes()})
    there, order = f"s3://{BUCKET}/both/1.tar", random.Random(1).sample(range(120), 120)
    for data, first in (([here, there], 0), ([there, here], 60)):
        reader = TarReader(data, ("cls",), storage_options=weed.options(proxy.url))
        assert [(number + first) % 120 for (number,) in reader.load_each(order)] == order
        assert len(reader.requests(order)) == 1, "of the store"


def test_a_tar_that_is_put_anew_has_changed(weed, bucket, tmp_path):
    content = bytearray(Path(samples_tar(tmp_path / "0.tar", 60)).read_bytes())
    put(bucket, {"changed/0.tar": bytes(content)})
    reader = TarReader(f"s3://{BUCKET}/changed/0.tar", storage_options=weed.options())
    assert reader.load(3)["cls"] == 3
    content[512] = ord("9")
    put(bucket, {"changed/0.tar": bytes(content)})
    for index in (3, 40):
        with pytest.raises(SourceChanged, match="has changed since it was listed"):
            reader.load(index)


@pytest.mark.usefixtures("of_environment")
def test_the_command_writes_indexes_into_a_store(weed, bucket, proxy, tmp_path, capsys):
    data = {f"idx/{n}.tar": Path(samples_tar(tmp_path / f"{n}.tar", 2000, n)).read_bytes() for n in range(2)}
    put(bucket, data)
    url = f"s3://{BUCKET}/idx"
    assert main(["index", url]) == 0
    assert "4,000 samples in 2 tar(s)" in (said := capsys.readouterr().out)
    assert "2 index(es) written" in said
    assert main(["index", f"{url}/{{0..1}}.tar"]) == 0
    assert "0 index(es) written" in capsys.readouterr().out
    reader = TarReader(url, ("cls",), storage_options=weed.options(proxy.url), index_dir=tmp_path / "none")
    assert reader.count == 4000
    (listing,) = (tmp_path / "none").iterdir()
    assert ".listing" in listing.name, "nothing was indexed here"
    assert reader.load(2001) == (2,)


def test_an_index_of_tars_in_a_store_is_kept(weed, bucket, proxy, tmp_path):
    put(bucket, {"kept/0.tar": Path(samples_tar(tmp_path / "0.tar", 2000)).read_bytes()})
    options = {"storage_options": weed.options(proxy.url), "index_dir": tmp_path / "kept"}
    for most in (100, 2):
        proxy.log.clear()
        assert TarReader(f"s3://{BUCKET}/kept/0.tar", **options).count == 2000
        assert len(proxy.ranges()) <= most
    samples = Path(samples_tar(tmp_path / "0.tar", 2000, 7)).read_bytes()
    put(bucket, {"kept/0.tar": samples})
    assert TarReader(f"s3://{BUCKET}/kept/0.tar", **options).load(0)["cls"] == 7


def test_what_is_not_there_is_said(weed, bucket, tmp_path):
    put(bucket, {"none/x.txt": b"", "none/a.tar": Path(samples_tar(tmp_path / "a", 3)).read_bytes()[:900]})
    for data, said in {
        "none/b.tar": "does not exist; check the path and the bucket",
        "none/{0..2}.tar": "0.tar' does not exist",
        "nowhere": "nowhere' does not exist: no object has that name, and none lies below it",
        "none/a.tar": "is cut short",
    }.items():
        with pytest.raises(DataFormatError, match=said):
            TarReader(f"s3://{BUCKET}/{data}", storage_options=weed.options())
    with pytest.raises(ReaderError, match=r"access .* is refused"):
        TarReader(f"s3://{BUCKET}/none/a.tar", storage_options={**weed.options(), "secret": "wrong"})
