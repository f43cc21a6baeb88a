"""Listings that are kept: one for all ranks, as it was until it is refreshed, and whole or not at all."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import cv2
import numpy as np
import preloaded
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import cases
from stores import BUCKET, Proxy, Weed, files_below, put
from terminal import Terminal
from test_readers import CASES, KINDS

from edl_torch.cli.main import main
from edl_torch.errors import DataFormatError, ReaderError, SourceChanged, SourceUnavailable
from edl_torch.readers.images.folder import ImageFolderReader
from edl_torch.readers.recordio.writer import RecordIOWriter
from edl_torch.readers.shared.mapped import kept_index
from edl_torch.readers.storage import Storage, kept
from edl_torch.readers.storage.kept import KeptAway
from edl_torch.shard import Shard, Task

ROOT = f"s3://{BUCKET}/kept"
RANK = """
import json, sys
from edl_torch.readers.images.folder import ImageFolderReader
from edl_torch.readers.tar.reader import TarReader
reader = ImageFolderReader(**json.load(sys.stdin))
print(reader.count, reader.classes, reader.fingerprint())
"""


def picture(number: int) -> bytes:
    data: bytes = cv2.imencode(".bmp", np.full((2, 2, 3), number % 250, np.uint8))[1].tobytes()
    return data


@pytest.fixture
def objects(bucket: Any) -> dict[str, bytes]:
    content = {f"kept/{'abc'[n % 3]}/{n:04d}.bmp": picture(n) for n in range(60)}
    found = bucket.list_objects_v2(Bucket=BUCKET, Prefix="kept/").get("Contents", [])
    for one in found:
        bucket.delete_object(Bucket=BUCKET, Key=one["Key"])
    put(bucket, content)
    settle()
    return content


@pytest.fixture(params=["folder", pytest.param("prefix", marks=pytest.mark.long)])
def lists(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "folder" else f"s3://{BUCKET}/.indexes/{uuid4().hex}/"


def ranks(count: int, **arguments: Any) -> set[str]:
    """What readers say that are made at once, each in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [preloaded.Popen([sys.executable, "-c", RANK], env=environment, **pipes) for _ in range(count)]
    for one in started:
        one.stdin.write(json.dumps({"root": ROOT, **arguments}))
        one.stdin.close()
    said = {one.stdout.read() for one in started}
    for one in started:
        assert one.wait(60) == 0
        one.stdout.close()
    return said


def settle() -> None:
    """Wait until what was put is older than a listing of now: stores have whole seconds."""
    now = time.time()
    while time.time() < math.floor(now) + 1:
        time.sleep(0.02)


def listed(proxy: Proxy) -> int:
    """Requests for listings since it was asked last."""
    count = len(proxy.lists())
    proxy.log.clear()
    return count


def test_ranks_list_once(weed: Weed, bucket: Any, proxy: Proxy, objects, lists: str):
    options, many = {"storage_options": weed.options(proxy.url)}, 8 if "://" in lists else 3
    (alone,) = ranks(1, **options)
    once = listed(proxy)
    assert once > 0
    options["index_dir"] = lists
    assert ranks(many, **options) == {alone}
    assert listed(proxy) == once
    put(bucket, {"kept/c/new.bmp": picture(3)})
    settle()
    assert ranks(1, **options) == {alone}
    assert listed(proxy) == 0
    # A listing takes longer than it takes until all ranks have asked for it.
    proxy.fault = lambda request: time.sleep(1.0 * ("list-type" in request.path)) or ""
    (grown,) = ranks(many, refresh=True, **options)
    proxy.fault = lambda request: ""
    assert listed(proxy) == once
    assert grown.startswith("61 ['a', 'b', 'c']")
    assert ranks(1, **options) == {grown}
    assert listed(proxy) == 0


def test_what_has_changed_since_it_was_kept_is_found_when_it_is_read(
    weed: Weed, bucket: Any, objects, lists: str
):
    def reader() -> ImageFolderReader:
        return ImageFolderReader(ROOT, storage_options=weed.options(), index_dir=lists)

    names = sorted(objects, key=lambda name: name[5:])
    first = reader()
    kept = reader()
    assert kept.fingerprint() == first.fingerprint()
    assert (kept.targets == first.targets).all()
    for number in (0, 33, 59):
        assert (kept.load(number)[0] == first.load(number)[0]).all()
        assert kept.image_files.path(number) == f"s3://{BUCKET}/{names[number]}"
    put(bucket, {names[0]: picture(201)})
    bucket.delete_object(Bucket=BUCKET, Key=names[1])
    for number in (0, 1):
        with pytest.raises(SourceChanged, match="refresh=True"):
            reader().load(number)
    assert reader().load(2)[1] == 0


def test_what_is_kept_is_of_this_folder_and_store(weed: Weed, proxy: Proxy, objects, tmp_path: Path):
    def count(root: str, **other: Any) -> int:
        options = {"storage_options": weed.options(), "index_dir": tmp_path, **other}
        return ImageFolderReader(root, **options).count

    assert count(ROOT) == count(ROOT + "/") == 60
    assert count(ROOT + "/a") == 20
    with pytest.raises(DataFormatError, match="has no image"):
        count(ROOT, extensions=[".png"])
    proxy.fault = lambda _: "403"
    with pytest.raises(ReaderError, match="refused"):
        count(ROOT, storage_options=weed.options(proxy.url))
    for place in tmp_path.glob("*.edl-index"):
        place.write_bytes(place.read_bytes()[:-200])
    assert count(ROOT) == 60


def test_a_listing_that_is_cut_is_not_kept(weed: Weed, bucket: Any, proxy: Proxy, objects, lists: str):
    def reader() -> ImageFolderReader:
        return ImageFolderReader(ROOT, storage_options=weed.options(proxy.url), index_dir=lists)

    left = [""] * 2 + ["short"] * 1000  # the first pages come
    proxy.fault = lambda one: left.pop(0) if "list-type" in one.path else ""
    with pytest.raises(SourceUnavailable, match="cannot be reached"):
        reader()
    assert kept_in(lists, bucket) == []
    proxy.fault = lambda _: ""
    assert reader().count == 60


def kept_in(lists: str, bucket: Any) -> list[str]:
    """What is kept, claims that were left behind among it."""
    if "://" not in lists:
        return [place.name for place in Path(lists).glob("*.edl-index")]
    prefix = lists.removeprefix(f"s3://{BUCKET}/")
    return [one["Key"] for one in bucket.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])]


def test_an_object_that_is_put_while_it_is_listed_is_not_lost(weed: Weed, bucket: Any, proxy: Proxy, objects):
    """One that lands in a folder that was listed before, while a later folder shows that somebody writes."""
    is_written = threading.Event()

    def writer(request: Any) -> str:
        if "list-type" in request.path and "kept%2Fb" in request.path and not is_written.is_set():
            put(bucket, {"kept/a/late.bmp": picture(1), "kept/c/late.bmp": picture(2)})
            is_written.set()
        if "list-type" in request.path and "kept%2Fc" in request.path:
            assert is_written.wait(30)
        return ""

    proxy.fault = writer
    reader = ImageFolderReader(ROOT, storage_options=weed.options(proxy.url))
    names = {reader.image_files.path(number) for number in range(reader.count)}
    assert {f"{ROOT}/a/late.bmp", f"{ROOT}/c/late.bmp"} <= names
    assert reader.count == 62


def test_a_folder_that_is_emptied_while_it_is_listed_is_listed_again(
    weed: Weed, bucket: Any, proxy: Proxy, objects
):
    def remover(request: Any) -> str:
        if "list-type" in request.path and "kept%2Fb" in request.path:
            for name in [name for name in objects if name.startswith("kept/b/")]:
                bucket.delete_object(Bucket=BUCKET, Key=name)
        return ""

    proxy.fault = remover
    reader = ImageFolderReader(ROOT, storage_options=weed.options(proxy.url))
    assert (reader.count, reader.classes) == (40, ["a", "c"])


def test_a_folder_that_changes_all_the_time_is_no_data(weed, bucket: Any, proxy: Proxy, objects, lists):
    numbers = iter(range(1000))

    def writer(request: Any) -> str:
        if "list-type" in request.path and "delimiter" in request.path:
            put(bucket, {f"kept/c/late{next(numbers)}.bmp": picture(2)})
        return ""

    proxy.fault = writer
    with pytest.raises(SourceChanged, match="changes while it is listed"):
        ImageFolderReader(ROOT, storage_options=weed.options(proxy.url), index_dir=lists)
    assert kept_in(lists, bucket) == []


# Of each reader the file that is renamed: what a listing of before has not.
MOVED = {
    **{f"{kind} folder": "1" for kind in ("csv", "text", "recordio", "tar")},
    "parquet folder": "day=1/part",
    "voc folder": "JPEGImages/0001",
    "captions": "images/0001",
}


@cases("kind", ["csv folder", "tar folder", "captions"], MOVED)
def test_every_reader_that_lists_takes_the_kept_listing(
    kind: str, weed: Weed, bucket: Any, proxy: Proxy, lists: str, tmp_path: Path
):
    root, case = f"of-{kind.replace(' ', '-')}-{uuid4().hex}", CASES[kind]
    (tmp_path / "data").mkdir()
    case.write(tmp_path / "data")
    files = files_below(tmp_path / "data")
    put(bucket, {f"{root}/{name}": data for name, data in files.items()})
    settle()

    def make(**more: Any) -> Any:
        how = {"storage_options": weed.options(proxy.url), "index_dir": lists, **more}
        return case.make(f"s3://{BUCKET}/{root}", how)

    first = make()
    assert listed(proxy) > 0
    kept = make()
    assert listed(proxy) == 0
    assert kept.create_shards() == first.create_shards()
    assert kept.fingerprint() == first.fingerprint()
    (moved,) = [name for name in files if f"{MOVED[kind]}." in name and "Annotations" not in name]
    put(bucket, {f"{root}/{moved.replace('1.', '3.').replace('part.', 'part3.')}": files[moved]})
    bucket.delete_object(Bucket=BUCKET, Key=f"{root}/{moved}")

    def read_all() -> None:
        again = make()
        assert again.create_shards() == first.create_shards()  # what was added is not in it
        for source, count in again.create_shards().items():
            list(again.read_records(Task(shard=Shard(name=source, start=0, end=count))))

    with pytest.raises(SourceChanged, match="refresh=True"):
        read_all()
    assert listed(proxy) == 0
    if kind not in ("voc folder", "captions"):
        grown = make(refresh=True)
        assert listed(proxy) > 0
        assert sum(grown.create_shards().values()) == sum(first.create_shards().values())


def test_two_that_list_at_once_end_with_one(weed: Weed, bucket: Any):
    """Where a claim is lost both work; what was kept first is what both have."""
    storage = Storage(weed.options())
    keep = storage.keep(f"s3://{BUCKET}/.indexes/{uuid4().hex}")
    begun, may_end, found = threading.Barrier(2), threading.Barrier(2), []

    def work(number: int) -> None:
        def build() -> dict[str, Any]:
            begun.wait(30)
            may_end.wait(30)
            return {"n": np.array([number])}

        found.append(kept_index(keep, {"path": "p", "kind": "k"}, build)["n"].tolist())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    threads[0].start()
    while not kept_in(f"{keep.name}.claim", bucket):
        time.sleep(0.01)
    bucket.delete_object(Bucket=BUCKET, Key=f"{keep.name}.claim".removeprefix(f"s3://{BUCKET}/"))
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1]
    assert kept_index(keep, {"path": "p", "kind": "k"}, dict)["n"].tolist() == found[0]


def test_the_claim_of_a_dead_process_is_not_waited_for(weed: Weed, bucket: Any, monkeypatch, caplog):
    monkeypatch.setattr(kept, "_SAID_AFTER_S", 0.1)
    name = f"s3://{BUCKET}/.indexes/{uuid4().hex}"
    put(bucket, {f"{name}.claim".removeprefix(f"s3://{BUCKET}/"): b"of a process that was killed"})
    keep = KeptAway(name, Storage(weed.options()), dead_after_s=0.3)
    header = {"path": "p", "kind": "k"}
    assert kept_index(keep, header, lambda: {"n": np.array([7])})["n"].tolist() == [7]
    assert kept_index(keep, header, dict)["n"].tolist() == [7]
    assert kept_in(f"{name}.claim", bucket) == []
    said = [record.getMessage() for record in caplog.records]
    assert said.count(f"index={name} another process makes it: waiting for that one") == 1


def test_a_kept_index_that_is_damaged_or_of_other_data_is_made_again(weed: Weed, bucket: Any):
    keep = Storage(weed.options()).keep(f"s3://{BUCKET}/.indexes/{uuid4().hex}")
    key = keep.name.removeprefix(f"s3://{BUCKET}/")
    for number, header in enumerate(({"path": "p", "kind": "k"}, {"path": "q", "kind": "k"})):
        built = kept_index(keep, header, lambda number=number: {"n": np.array([number] * 99)})
        assert built["n"][0] == number
    data = bucket.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    put(bucket, {key: data[:-100]})
    assert kept_index(keep, header, lambda: {"n": np.array([5])})["n"].tolist() == [5]


@pytest.mark.usefixtures("of_environment")
def test_a_dry_run_says_what_an_epoch_asks_for_and_reads_no_record(
    proxy: Proxy, objects, tmp_path: Path, monkeypatch, capsys
):
    def said(data: str) -> dict[str, Any]:
        assert main(["check", data, "--dry-run", "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    size = sum(map(len, objects.values()))
    cost = {"requests": 60, "nbytes": size}
    assert said(ROOT) == {"data": ROOT, "records": 60, "epoch": {"shuffled": cost, "in_order": cost}}
    assert not proxy.gets()
    assert main(["check", ROOT, "--dry-run"]) == 0
    assert f"an epoch, shuffled: 60 request(s), {size:,} bytes" in capsys.readouterr().out
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["check", ROOT, "--workers", "0"]) == 0
    assert re.search(r"\d+ of 60 records, [\d,]+ bytes, \d+ s left", terminal.getvalue())
    (tmp_path / "x.csv").write_text("a\n1\n")
    assert main(["check", str(tmp_path / "x.csv"), "--dry-run"]) == 0
    assert "nothing of a store: the data are files of this machine" in capsys.readouterr().out


@pytest.mark.usefixtures("of_environment")
@pytest.mark.parametrize("kind", ["csv", "text", "recordio", "parquet"])
def test_a_dry_run_of_blocks_is_what_an_epoch_asks_for(
    kind: str, bucket: Any, proxy: Proxy, tmp_path: Path, capsys: Any
):
    lines = [f"{number},{'x' * 1500}\n".encode() for number in range(1500)]
    for part in (1, 2):
        if kind == "parquet":
            table = pa.table({"n": list(range(900)), "text": [os.urandom(600).hex() for _ in range(900)]})
            pq.write_table(table, tmp_path / f"{part}.parquet", row_group_size=256)
        elif kind == "recordio":
            with RecordIOWriter(tmp_path / f"{part}.recordio") as writer:
                for line in lines:
                    writer.write(os.urandom(100) + line)
        else:
            text = b"".join([b"n,text\n", *lines])
            (tmp_path / f"{part}.{'csv' if kind == 'csv' else 'txt'}").write_bytes(text)
    prefix = f"blocks-{uuid4().hex}"
    put(bucket, {f"{prefix}/{file.name}": file.read_bytes() for file in tmp_path.iterdir()})
    url = f"s3://{BUCKET}/{prefix}"
    proxy.log.clear()
    assert main(["check", url, "--dry-run", "--json", "--custom_data_reader", kind]) == 0
    epoch = json.loads(capsys.readouterr().out)["epoch"]
    assert epoch["in_order"]["requests"] >= 8
    for name in ("in_order", "shuffled"):
        reader = KINDS[kind](url)
        leases = [
            (source, at, min(at + 256, count))
            for source, count in reader.create_shards().items()
            for at in range(0, count, 256)
        ]
        proxy.log.clear()
        if name == "shuffled":  # as a window of all leases is read
            reader.expect(leases)
            order = [(source, number) for source, start, end in leases for number in range(start, end)]
            random.Random(2).shuffle(order)
            assert all(reader.read_record(*each) is not None for each in order)
        else:
            for source, start, end in leases:
                task = Task(shard=Shard(name=source, start=start, end=end))
                assert len(list(reader.read_records(task))) == end - start
        asked = [(one.path, one.range) for one in proxy.gets()]
        assert len(asked) <= 1.05 * len(set(asked)) + 1  # a slow one may be sent again
        ends = [part.removeprefix("bytes=").split("-") for _, part in set(asked)]
        sizes = {f"/{BUCKET}/{prefix}/{file.name}": file.stat().st_size for file in tmp_path.iterdir()}
        whole = sum(sizes[path] for path, part in set(asked) if not part)
        found = whole + sum(
            int(last) - int(first) + 1 for first, last in (end for end in ends if len(end) == 2)
        )
        assert {"requests": len(set(asked)), "nbytes": found} == epoch[name]
