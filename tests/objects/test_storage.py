"""One face for data anywhere: what is listed is what is read, and the network is no record's fault."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import random
import socket
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from stores import BUCKET, KEY, SECRET, Place, Request, bucket_of, put, served, web_server

from edl_torch.errors import InvalidArgument, OutputError, ReaderError, SourceChanged, SourceUnavailable
from edl_torch.readers.storage import Object, Storage
from edl_torch.readers.storage.drivers import Transient, tag_of
from edl_torch.readers.storage.requests import Ahead, Fetch, Trying

CONTENT = {f"{'abc'[n % 3]}/{n:03d}.bin": random.Random(n).randbytes(1000 + 37 * n) for n in range(40)}


EACH_THAT_LISTS = pytest.mark.parametrize("place", ["local", "file", "memory", "s3"], indirect=True)


@pytest.fixture
def stored(place: Place, tmp_path: Path) -> tuple[str, Storage]:
    """The same objects at each kind of place."""
    for name, data in CONTENT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return place.of(tmp_path), Storage(place.options)


@EACH_THAT_LISTS
def test_what_is_listed_is_there_and_is_read(stored):
    base, storage = stored
    found = {one.name: one for one in storage.listing(base + "/")}
    assert {name: one.size for name, one in found.items()} == {
        f"{base}/{name}": len(data) for name, data in CONTENT.items()
    }
    assert storage.look(f"{base}/a/000.bin") == found[f"{base}/a/000.bin"]
    for name in (f"{base}/a", base, f"{base}/a/00", f"{base}/none"):
        assert storage.look(name) is None
    assert list(storage.listing(f"{base}/none")) == []
    assert {one.name for one in storage.listing(f"{base}/a")} == {n for n in found if "/a/" in n}
    ranges, expected = [], []
    rng = random.Random(7)
    for name, data in CONTENT.items():
        for _ in range(5):
            start = rng.randrange(len(data))
            length = rng.randrange(len(data) - start + 1)
            ranges.append((found[f"{base}/{name}"], start, length))
            expected.append(data[start : start + length])
        ranges.append((found[f"{base}/{name}"], 0, len(data)))
        expected.append(data)
    copy = pickle.loads(pickle.dumps(storage))
    assert list(copy.read_many(ranges)) == expected
    with pytest.raises(ReaderError, match="are not in it"):
        storage.read(ranges[0][0], 5, ranges[0][0].size)


@EACH_THAT_LISTS
def test_what_is_put_is_there_whole(stored):
    base, storage = stored
    for data in (b"", b"first", random.Random(1).randbytes(300_000)):
        storage.put(f"{base}/new.bin", data)
        one = storage.look(f"{base}/new.bin")
        assert storage.read(one) == data
        assert [each.name for each in storage.listing(base) if "new" in each.name] == [f"{base}/new.bin"]
    with storage.apart() as apart:
        apart.put(f"{base}/new.bin", b"apart")
    assert storage.read(storage.look(f"{base}/new.bin")) == b"apart"


def test_what_cannot_be_written_is_said(tmp_path):
    with pytest.raises(OutputError, match=r"none/x' cannot be written: No such file or directory"):
        Storage().put(f"{tmp_path}/none/x", b"")
    with web_server(tmp_path) as url, pytest.raises(OutputError, match="a web server takes no files"):
        Storage().put(f"{url}/x", b"")


@EACH_THAT_LISTS
def test_another_process_answers_the_same(stored):
    base, storage = stored
    with storage.apart() as apart:
        found = sorted(apart.listing(base), key=lambda one: one.name)
        assert found == sorted(storage.listing(base), key=lambda one: one.name)
        assert apart.read(found[0], 3, 5) == storage.read(found[0], 3, 5)
        assert apart.look(f"{base}/none") is None
        with pytest.raises(SourceChanged):
            apart.read(Object(found[0].name, found[0].size + 1))


def test_an_object_that_is_written_again_has_changed(weed, bucket):
    storage = Storage(weed.options())
    put(bucket, {"again/x": b"first", "again/gone": b"12345"})
    one, gone = (storage.look(f"s3://{BUCKET}/again/{name}") for name in ("x", "gone"))
    put(bucket, {"again/x": b"other"})
    bucket.delete_object(Bucket=BUCKET, Key="again/gone")
    with pytest.raises(SourceChanged, match=r"again/x.*the same size, but not the same"):
        storage.read(one)
    with pytest.raises(SourceChanged, match="it is gone"):
        storage.read(gone)
    put(bucket, {"again/x": b"fir"})
    with pytest.raises(SourceChanged):  # the range is beyond its end now
        storage.read(one, 4, 1)


def test_an_object_that_came_in_parts(weed, bucket):
    """Its ETag is no digest of its bytes, and the same wherever the store says it."""
    parts = [random.Random(n).randbytes(5 << 20) for n in range(2)]
    upload = bucket.create_multipart_upload(Bucket=BUCKET, Key="parts/x")["UploadId"]
    told = []
    for number, part in enumerate(parts, 1):
        where = {"Bucket": BUCKET, "Key": "parts/x", "UploadId": upload}
        answer = bucket.upload_part(**where, PartNumber=number, Body=part)
        told.append({"PartNumber": number, "ETag": answer["ETag"]})
    bucket.complete_multipart_upload(**where, MultipartUpload={"Parts": told})
    assert "-2" in bucket.head_object(Bucket=BUCKET, Key="parts/x")["ETag"]
    storage = Storage(weed.options())
    (one,) = storage.listing(f"s3://{BUCKET}/parts")
    assert one == storage.look(one.name)
    assert storage.read(one) == b"".join(parts)
    assert storage.read(one, (5 << 20) - 3, 6) == parts[0][-3:] + parts[1][:3]


def test_odd_names(weed, bucket):
    names = [
        "ü é.bin",
        "a%20b.bin",
        "a+b c#d?.bin",
        "[1]*.bin",
        "a:b&c=d.bin",
        "~.bin",
        "%2F.bin",
        "日本.bin",
    ]
    put(bucket, {f"odd/{name}": name.encode() for name in names})
    storage = Storage(weed.options())
    found = list(storage.listing(f"s3://{BUCKET}/odd"))
    assert {one.name: storage.read(one).decode() for one in found} == {
        f"s3://{BUCKET}/odd/{name}": name for name in names
    }


# Faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["503", "500", "reset", "short", "wrong"])
def test_faults_of_the_network_are_tried_again(weed, bucket, proxy, kind):
    """Each second request is answered so; each range comes back right, in its place."""
    put(bucket, {f"faults/{name}": data for name, data in CONTENT.items()})
    storage = Storage(weed.options(proxy.url))
    found = sorted(storage.listing(f"s3://{BUCKET}/faults"), key=lambda one: one.name)
    rng, seen = random.Random(3), set()

    def fault(request: Request) -> str:
        new = request.path not in seen
        seen.add(request.path)
        return kind if new and rng.random() < 0.5 else ""

    proxy.fault = fault
    wanted = [(one, 1, one.size - 1) for one in found]
    expected = [CONTENT[one.name.split("/faults/")[1]][1:] for one in found]
    assert list(storage.read_many(wanted)) == expected
    assert len(proxy.log) > len(found) + 10


def test_a_listing_that_is_cut_goes_on_where_it_was(weed, bucket, proxy):
    put(bucket, {f"cut/{n:04d}": b"" for n in range(1100)})
    storage = Storage(weed.options(proxy.url))
    chance = random.Random(5)
    proxy.fault = lambda _: chance.choice(["short", "503", "reset", "", ""])
    names = [one.name for one in storage.listing(f"s3://{BUCKET}/cut")]
    assert names == [f"s3://{BUCKET}/cut/{n:04d}" for n in range(1100)]
    proxy.fault = lambda _: "short"
    with pytest.raises(SourceUnavailable, match="cannot be reached"):
        list(storage.listing(f"s3://{BUCKET}/cut"))


def test_a_server_that_is_away_is_unavailable_after_the_patience(weed, bucket, proxy):
    put(bucket, {"away": b"123"})
    storage = Storage(weed.options(proxy.url), patience_s=1.0)
    one = storage.look(f"s3://{BUCKET}/away")
    proxy.fault = lambda _: "503"
    began = time.monotonic()
    with pytest.raises(SourceUnavailable, match=r"away' cannot be reached .*SlowDown.*check the network"):
        storage.read(one)
    # It ends before the pause that would outlast the patience, which is at most two thirds of it.
    assert 0.25 < time.monotonic() - began < 30
    proxy.fault = lambda _: ""
    assert storage.read(one) == b"123"


def test_credentials_that_have_expired_are_asked_for_anew(weed, bucket, proxy):
    put(bucket, {"expired": b"123"})
    storage = Storage(weed.options(proxy.url))
    one = storage.look(f"s3://{BUCKET}/expired")
    left = ["403", "403"]
    proxy.fault = lambda _: left.pop() if left else ""
    assert storage.read(one) == b"123"
    assert not left
    proxy.fault = lambda _: "403"
    with pytest.raises(ReaderError, match="is refused: check the credentials") as caught:
        storage.read(one)
    assert SECRET not in str(caught.value)


def test_what_is_wrong_is_said_with_its_remedy(weed, bucket):
    url = f"s3://{BUCKET}/x"

    def said(name: str, **other: Any) -> str:
        began = time.monotonic()
        with pytest.raises((ReaderError, InvalidArgument)) as caught:
            list(Storage({**weed.options(), **other}, patience_s=1).listing(name))
        assert time.monotonic() - began < 30
        assert SECRET not in str(caught.value)
        return str(caught.value)

    assert "check the credentials in storage_options" in said(url, secret="another-secret-9999")
    assert "another-secret" not in said(url, secret="another-secret-9999")
    assert "does not take these storage_options" in said(url, nonsense="1")
    for panics in ({"endpoint_url": "minio:9000"}, {"region": "a\n"}, {"key": f"{KEY}\n"}):
        assert "an endpoint begins with http:// or https://, and none of them has a" in said(url, **panics)
    assert "leave user and password out" in said("http://me:pass@host/x")
    assert "secret" not in (signed := said("http://host/x.tar?X-Amz-Signature=secret"))
    assert "'http://host/x.tar?…' has a query" in signed
    for name in ("s3:///x", "s3://*/x"):
        assert "names no bucket" in said(name)
    for name in ("a//b", "a/../b", "a\nb"):
        assert "reads no such name, rename it" in said(f"{url}/{name}")
        with pytest.raises(ReaderError, match="reads no such name"):
            Storage(weed.options()).look(f"{url}/{name}")


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_server_that_takes_connections_and_says_nothing_is_not_listed_for_ever(weed):
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(SourceUnavailable, match="cannot be reached"):
            list(Storage(weed.options(address)).listing(f"s3://{BUCKET}/x"))
        assert time.monotonic() - began < 90


def test_an_object_in_an_archive_is_named_and_no_credentials_are_blamed(moto):
    options = {"endpoint_url": moto, "key": KEY, "secret": SECRET}
    client = bucket_of(options)
    client.put_object(Bucket=BUCKET, Key="cold.bin", Body=b"1", StorageClass="GLACIER")
    storage = Storage(options)
    with pytest.raises(ReaderError, match=r"cold.bin' is archived .*: restore it"):
        storage.read(storage.look(f"s3://{BUCKET}/cold.bin"))


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "given"])
def test_an_endpoint_has_any_of_its_names(weed, bucket, monkeypatch, name):
    put(bucket, {"named.bin": b"1"})
    options = {"key": KEY, "secret": SECRET}
    if name == "given":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        options["aws_endpoint"] = weed.address
    else:
        monkeypatch.setenv(name, weed.address)
    storage = Storage(options, patience_s=1)
    assert storage.look(f"s3://{BUCKET}/named.bin") is not None
    assert storage.endpoint == weed.address


# Many at once --------------------------------------------------------------------------------------------


class Unmade(MemoryFileSystem):
    """A file system that fails as it is made: as HDFS does without Java, or as the network does once."""

    cachable = False
    fails: ClassVar[list[OSError]] = []

    def __init__(self, **options: Any) -> None:
        if self.fails:
            raise self.fails.pop()
        super().__init__(**options)


@pytest.mark.parametrize(
    ("fails", "left"),
    [
        ([OSError("Unable to load libjvm")] * 3, 2),
        ([ConnectionRefusedError("later"), OSError(errno.ENETUNREACH, "later")], 0),
    ],
)
def test_a_file_system_that_cannot_be_made_is_an_error_at_once_but_for_the_network(
    fails: list[OSError], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("unmade", Unmade, clobber=True)
    monkeypatch.setattr(Unmade, "fails", fails)
    storage = Storage(None, patience_s=60)
    if left:
        with pytest.raises(ReaderError, match=r"cannot be reached .*libjvm"):
            storage.look("unmade://data/none")
    else:
        assert storage.look("unmade://data/none") is None
    assert len(fails) == left


def test_many_requests_are_under_way(weed, bucket, proxy):
    """The store answers none before 96 have come: as many threads ask, and the one that waits may, too."""
    put(bucket, {f"many/{n}": b"x" * 100 for n in range(300)})
    storage = Storage(weed.options(proxy.url))
    found = list(storage.listing(f"s3://{BUCKET}/many"))
    proxy.log.clear()
    whole = threading.Event()

    def wait(request: Request) -> str:
        if request.under_way >= 96:
            whole.set()
        assert whole.wait(60)
        return ""

    proxy.fault = wait
    assert sum(map(len, storage.read_many([(one, 0, one.size) for one in found]))) == 30_000
    assert max(one.under_way for one in proxy.gets()) in (96, 97)


def test_the_slowest_requests_are_sent_again_and_few_of_them(weed, bucket, proxy):
    """Each slow one holds its answer until all others were taken: without a second one nothing would end."""
    put(bucket, {f"slow/{n:03d}": b"%d" % n for n in range(300)})
    storage = Storage(weed.options(proxy.url))
    found = sorted(storage.listing(f"s3://{BUCKET}/slow"), key=lambda one: one.name)
    slow = {f"/{BUCKET}/slow/{n:03d}" for n in range(60, 300, 40)}
    lock, ended = threading.Lock(), threading.Event()
    proxy.log.clear()

    def hold(request: Request) -> str:
        with lock:
            is_slow = request.path in slow
            slow.discard(request.path)
        if is_slow:
            assert ended.wait(60)
        return ""

    proxy.fault = hold
    assert list(storage.read_many([(one, 0, one.size) for one in found])) == [b"%d" % n for n in range(300)]
    ended.set()
    assert not slow
    assert 306 <= len(proxy.log) <= 1.05 * 300


def test_bytes_under_way_are_bounded(weed, bucket, proxy, monkeypatch):
    monkeypatch.setattr("edl_torch.readers.storage.requests.MOST_BYTES", 1000)
    put(bucket, {f"large/{n}": b"x" * 300 for n in range(40)})
    storage = Storage(weed.options(proxy.url))
    found = list(storage.listing(f"s3://{BUCKET}/large"))
    proxy.latency_s = 0.02
    proxy.log.clear()
    assert sum(map(len, storage.read_many([(one, 0, one.size) for one in found]))) == 12_000
    assert max(one.under_way for one in proxy.gets()) <= 4


def test_of_large_answers_two_are_asked_for_while_nobody_waits(monkeypatch):
    """Each is more than half of what there is room for: the next one but one is asked for as one is taken."""
    monkeypatch.setattr("edl_torch.readers.storage.requests.MOST_BYTES", 1000)
    monkeypatch.setattr("edl_torch.readers.storage.requests._threads", None)
    asked: list[int] = []

    def job(number: int) -> Fetch:
        asked.append(number)
        return Fetch(lambda: b"", 600)

    ahead = Ahead(9, job)
    assert asked == [0, 1]
    for number in range(5):
        ahead.take(number)
        assert asked == [*range(number + 3)]
    ahead.close()


def test_what_nobody_takes_is_given_up(weed, bucket, proxy):
    put(bucket, {f"left/{n}": b"x" * 100 for n in range(300)})
    storage = Storage(weed.options(proxy.url))
    found = list(storage.listing(f"s3://{BUCKET}/left"))
    proxy.log.clear()
    closed = threading.Event()

    def wait(request: Request) -> str:
        if not request.path.endswith(first):
            assert closed.wait(60)
        return ""

    first = found[0].name.removeprefix("s3:/")
    proxy.fault = wait
    reading = storage.read_many([(one, 0, one.size) for one in found])
    next(reading)
    reading.close()
    closed.set()
    from edl_torch.readers.storage.requests import threads

    assert threads().nbytes == 0
    for one in found[:3]:
        storage.read(one)
    assert len(proxy.log) <= 1 + 96 + 3


def test_threads_take_in_any_order(weed, bucket):
    put(bucket, {f"any/{n:03d}": hashlib.sha256(b"%d" % n).digest() for n in range(200)})
    storage = Storage(weed.options())
    found = sorted(storage.listing(f"s3://{BUCKET}/any"), key=lambda one: one.name)
    ahead = storage.ahead([(one, 0, one.size) for one in found])
    numbers = list(range(200))
    random.Random(1).shuffle(numbers)
    got: dict[int, bytes] = {}

    def take(mine: list[int]) -> None:
        for number in mine:
            got[number] = ahead.take(number)

    several = [threading.Thread(target=take, args=(numbers[n::4],)) for n in range(4)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join(30)
    assert got == {n: hashlib.sha256(b"%d" % n).digest() for n in range(200)}


def test_an_error_of_any_kind_reaches_who_takes_the_answer_and_costs_no_thread():
    def fail() -> bytes:
        raise MemoryError("no room for the answer")

    for _ in range(3):
        ahead = Ahead(100, lambda number: Fetch(fail, 1))
        for number in range(100):
            with pytest.raises(MemoryError):
                ahead.take(number)
    assert Fetch(lambda: b"well", 4).take() == b"well"
    ahead = Ahead(100, lambda number: Fetch(lambda: b"%d" % number, 1))
    assert [ahead.take(number) for number in range(100)] == [b"%d" % number for number in range(100)]


# The web -------------------------------------------------------------------------------------------------


def test_a_web_server(tmp_path):
    (tmp_path / "a b%.bin").write_bytes(b"0123456789")
    with web_server(tmp_path) as url:
        storage = Storage()
        one = storage.look(f"{url}/a%20b%25.bin")
        assert one is not None
        assert (one.size, storage.read(one), storage.read(one, 2, 3)) == (10, b"0123456789", b"234")
        assert storage.look(f"{url}/none") is None
        with pytest.raises(ReaderError, match="lists no files"):
            list(storage.listing(url))
        (tmp_path / "a b%.bin").write_bytes(b"012345678")
        with pytest.raises(SourceChanged, match="10 bytes then, 9 now"):
            storage.read(one)


def test_a_web_server_without_ranges_is_named(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"0123456789")
    with served(partial(SimpleHTTPRequestHandler, directory=str(tmp_path))) as url:
        one = Storage().look(f"{url}/a.bin")
        assert Storage().read(one) == b"0123456789", "whole objects need none"
        with pytest.raises(ReaderError, match=r"cannot do that \(.*\); parts .* need one that knows ranges"):
            Storage().read(one, 2, 3)


# Forks ---------------------------------------------------------------------------------------------------


def test_looking_apart_leaves_obstore_out_of_this_process(weed, bucket):
    """A program of its own: here obstore has run already."""
    import subprocess

    put(bucket, {"apart/x": b"123"})
    program = (
        "import sys, json\n"
        "from edl_torch.readers.storage import Storage\n"
        f"with Storage(json.load(sys.stdin)).apart() as apart:\n"
        f"    (one,) = apart.listing('s3://{BUCKET}/apart')\n"
        "    assert apart.read(one) == b'123'\n"
        "    arguments = open('/proc/self/task/%d/children' % __import__('os').getpid()).read().split()\n"
        "    said = [open(f'/proc/{pid}/cmdline').read() for pid in arguments]\n"
        "    assert not any('numpy' in open(f'/proc/{pid}/maps').read() for pid in arguments), 'it is dear'\n"
        "assert 'obstore' not in sys.modules\n"
        "print(said)\n"
    )
    import json

    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(weed.options()),
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert "serve(" in done.stdout
    assert SECRET not in done.stdout


def test_an_etag_is_one_with_and_without_its_quotes() -> None:
    """Azure's listings have none, and its answers to a read have them."""
    assert tag_of('"0x26406BC62CF4A20"') == tag_of("0x26406BC62CF4A20") == tag_of('W/"0x26406BC62CF4A20"') > 0
    assert tag_of('"0x26406BC62CF4A20"') != tag_of('"0x26406BC62CF4A21"')
    assert tag_of(None) == tag_of("") == 0


def test_a_request_that_is_tried_again_leaves_the_users_random_numbers_as_they_were() -> None:
    def attempt(_: bool) -> str:
        tried.append(1)
        if len(tried) == 1:
            raise Transient("slow down", busy=True)
        return "answer"

    tried: list[int] = []
    before = random.getstate()
    assert Trying(30.0).until_done("s3://b/x", attempt) == "answer"
    assert len(tried) == 2
    assert random.getstate() == before
