"""Tars in a store: the samples are those of the same tars here, and a sample costs a request at most."""

from __future__ import annotations

import os
import random
import signal
import sys
from itertools import product
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from cases import cases
from stores import BUCKET, KEY, SECRET, Place, Request, Weed, put
from tar_files import samples_tar, write_tar

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.cli.main import main
from edl_torch.errors import DataFormatError, ReaderError, SourceChanged
from edl_torch.readers import TarReader, open_reader
from edl_torch.shard import Shard, Task

SIZES = (30, 0, 45)
PROGRAM = Path(__file__).parents[1] / "integration" / "tar_program.py"


def environment_of(weed: Weed) -> dict[str, str]:
    """Where the store is and its credentials, as obstore looks for them."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": weed.address,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


def write(folder: Path) -> list[str]:
    """Three tars; the second one has no sample."""
    folder.mkdir(exist_ok=True)
    paths = []
    for number, size in enumerate(SIZES):
        path = folder / f"t-{number:02}.tar"
        if size:
            chance = random.Random(number)
            content = []
            for n in range(size):
                content += [(f"{number}{n:04}.bin", chance.randbytes(chance.choice([10, 3000, 80_000])))]
                content += [(f"{number}{n:04}.cls", b"%d" % (100 * number + n))]
            write_tar(path, content, format=number % 3)
        else:
            write_tar(path, {"README": b"nothing"})
        paths.append(str(path))
    (folder / ".hidden.tar").write_bytes(b"")
    (folder / "notes.txt").write_bytes(b"")
    return paths


@pytest.fixture
def here(tmp_path: Path) -> TarReader:
    return TarReader(write(tmp_path / "here"))


@pytest.fixture
def there(place: Place, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    write(tmp_path / "there")
    return place.of(tmp_path / "there"), place.options


def everything(reader: TarReader) -> list[Any]:
    shard = Shard(name=reader.name, start=0, end=reader.count)
    return [{**record, "__url__": ""} for record in reader.read_records(Task(shard=shard))]


@pytest.mark.parametrize("place", ["memory", "s3", "http"], indirect=True)
def test_the_samples_are_those_of_the_same_tars_here(here, there):
    base, options = there
    named = [base] if not base.startswith("http") else []  # a web server lists nothing
    for data in (*named, f"{base}/t-{{00..02}}.tar", [f"{base}/t-{n:02}.tar" for n in range(3)]):
        reader = TarReader(data, storage_options=options)
        if isinstance(data, str) and ".tar" in data:
            assert everything(open_reader(data, storage_options=options)) == everything(here)
        assert reader.files == [f"{base}/t-{n:02}.tar" for n in range(3)]
        assert everything(reader) == everything(here)
    order = random.Random(5).sample(range(reader.count), reader.count)
    begun = reader.begin(order)
    for place, index in enumerate(order):
        expected = {**here.load(index), "__url__": ""}
        assert {**reader.load(index), "__url__": ""} == expected
        assert {**begun.record(place), "__url__": ""} == expected
    assert reader.fingerprint() == here.fingerprint()
    assert reader.fingerprint(whole=True) == here.fingerprint(whole=True)


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


@cases("threads, shuffle", [(None, True), (3, False)], product([None, 3], [True, False]))
def test_requests_are_under_way_across_leases(weed, bucket, proxy, tmp_path, shuffle, threads):
    """Leases are of 32 samples: of so many requests three are under way at once."""
    content = [
        (f"{n:04}.{s}", d) for n in range(300) for s, d in (("bin", bytes(40_000)), ("cls", b"%d" % n))
    ]
    put(bucket, {"way/0.tar": Path(write_tar(tmp_path / "0.tar", content)).read_bytes()})
    loader = ElasticDataLoader(
        f"s3://{BUCKET}/way/",
        batch_size=8,
        shuffle=shuffle,
        storage_options=weed.options(proxy.url),
        num_threads=threads,
    )
    came: list[int] = []
    proxy.fault, proxy.latency_s = lambda request: came.append(request.under_way) or "", 0.1
    proxy.log.clear()
    with loader:
        seen = [
            sample for batch in loader for sample in zip(batch["cls"].tolist(), batch["__key__"], strict=True)
        ]
    assert sorted(seen) == [(n, f"{n:04}") for n in range(300)]
    looks = 64
    assert len(proxy.gets()) <= (300 if shuffle else 20) + looks
    assert max(came) > (40 if shuffle else 2)


@pytest.mark.parametrize("way", [{}, {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 120}])
def test_each_sample_once_an_epoch_though_the_network_fails(weed, bucket, proxy, tmp_path, way):
    put(bucket, {"job/0.tar": Path(samples_tar(tmp_path / "0.tar", 60)).read_bytes()})
    chance = random.Random(3)

    def fault(request: Request) -> str:
        faults = ["503", "500", "reset", "short", "wrong"]
        return chance.choice(faults) if request.method == "GET" and chance.random() < 0.2 else ""

    proxy.fault = fault
    reader = TarReader(f"s3://{BUCKET}/job/0.tar", ("cls", "txt"), storage_options=weed.options(proxy.url))
    epochs = []
    with DataShardService(4, reader=reader, num_epochs=2, shuffle=True) as service:
        loader = ElasticDataLoader(ShardedDataset(service, reader), **way)
        while not service.finished:
            epochs.append(sorted(n for numbers, _ in loader for n in numbers.tolist()))
        assert service.progress().quarantined == 0
    assert epochs == [list(range(60))] * 2


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


def test_the_command_writes_indexes_into_a_store(weed, bucket, proxy, tmp_path, monkeypatch, capsys):
    data = {f"idx/{n}.tar": Path(samples_tar(tmp_path / f"{n}.tar", 2000, n)).read_bytes() for n in range(2)}
    put(bucket, data)
    url = f"s3://{BUCKET}/idx"
    for name, value in environment_of(weed).items():
        monkeypatch.setenv(name, value)
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
        "nowhere": "has no data file: expected a name that ends in .tar",
        "none/a.tar": "is cut short",
    }.items():
        with pytest.raises(DataFormatError, match=said):
            TarReader(f"s3://{BUCKET}/{data}", storage_options=weed.options())
    with pytest.raises(ReaderError, match=r"access .* is refused"):
        TarReader(f"s3://{BUCKET}/none/a.tar", storage_options={**weed.options(), "secret": "wrong"})


@pytest.mark.long  # test_killed_jobs kills those of images
@pytest.mark.parametrize("workers", [0, 2])
def test_a_job_that_is_killed_counts_each_sample_once(weed, bucket, tmp_path, capsys, workers):
    """The model counts what it was trained on; the credentials are those of the environment."""
    chance = random.Random(workers)
    for number in range(3):
        path = Path(samples_tar(tmp_path / f"{number}.tar", 20, 20 * number))
        put(bucket, {f"killed{workers}/{number}.tar": path.read_bytes()})
    environment = {**os.environ, **environment_of(weed)}
    data = f"s3://{BUCKET}/killed{workers}/{{0..2}}.tar"

    def run(place: str, last: int) -> int:
        arguments = [str(PROGRAM), data, str(tmp_path), "60", str(workers), place, str(last)]
        ran = preloaded.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=200
        )
        assert ran.returncode in (0, -signal.SIGKILL), ran.stderr
        return ran.returncode

    assert run(chance.choice(["read", "step", "saved"]), 3 * chance.randint(2, 4)) == -signal.SIGKILL
    assert run("read", 0) == 0
    assert torch.load(tmp_path / "counts.pt").tolist() == [2] * 60
    assert main(["audit", str(tmp_path / "audit")]) == 0
    assert "PROVEN, data the same by samples" in capsys.readouterr().out
