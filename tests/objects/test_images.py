"""Images in a store: the records are those of the same folder here, whatever the network does."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from itertools import chain, product
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import preloaded
import pytest
from stores import BUCKET, Request, Weed, numbered, put

from edl_torch import DataShardService, ElasticDataLoader, ImageDataset, Mixture, MixtureComponent
from edl_torch.errors import SourceChanged, SourceUnavailable
from edl_torch.readers import ImageFolderReader


def picture(value: int) -> bytes:
    """A small PNG of one colour, with noise: its bytes are its own."""
    noise = np.random.default_rng(value).integers(0, 9, (8, 8, 3), dtype=np.uint8)
    return bytes(cv2.imencode(".png", noise + np.uint8(10 * (value % 20)))[1].tobytes())


def test_bad_images_are_set_aside_and_changed_ones_end_the_job(weed, bucket, proxy):
    put(bucket, {f"bad/c/{n:02d}.png": picture(n) for n in range(40)})
    put(bucket, {"bad/c/07.png": picture(7)[:60], "bad/c/08.png": b"", "bad/c/09.png": b"no picture"})
    root, options = f"s3://{BUCKET}/bad", weed.options(proxy.url)
    reader = ImageFolderReader(root, storage_options=options)
    with DataShardService(4, reader=reader, max_bad_records=10) as service:
        dataset = ImageDataset(service, reader, on_bad_record="quarantine")
        assert sum(len(labels) for _, labels in ElasticDataLoader(dataset)) == 37
        assert service.progress().quarantined == 3
    put(bucket, {"bad/c/20.png": picture(21)})
    with DataShardService(4, reader=reader, max_bad_records=10) as service:
        dataset = ImageDataset(service, reader, on_bad_record="quarantine")
        with pytest.raises(SourceChanged, match=r"bad/c/20\.png' has changed"):
            list(ElasticDataLoader(dataset))
        assert service.progress().quarantined == 3


@pytest.mark.usefixtures("of_environment")
def test_the_pages_program_reads_with_credentials_of_the_environment(bucket):
    """docs/objects.md"""
    page = (Path(__file__).parents[2] / "docs" / "objects.md").read_text(encoding="utf-8")
    put(bucket, {f"train/{'ab'[n % 2]}/{n}.png": picture(n) for n in range(70)})
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    with names["loader"] as loader:
        labels = [int(label) for epoch in loader.epochs() for _, batch in loader for label in batch]
    assert Counter(labels) == {0: 105, 1: 105}


# Networks -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(weed: Weed, bucket: Any) -> str:
    """300 pictures whose first pixel tells their number."""
    put(bucket, {f"many-images/{'ab'[n % 2]}/{n:03d}.png": numbered(n) for n in range(300)})
    return f"s3://{BUCKET}/many-images"


def numbers(batches: Any) -> list[int]:
    return [int(i[0, 0, 0]) + 250 * int(i[0, 0, 1]) for images, _ in batches for i in images]


@pytest.mark.parametrize(("threads", "shuffle"), [(0, True), (3, False), (3, "in_shard")])
def test_requests_are_under_way_across_leases(weed, many, proxy, shuffle, threads):
    """The store answers nothing before 90 have come, and leases are of 32 records: three at once."""
    options = weed.options(proxy.url)
    came: list[int] = []

    def fault(request: Request) -> str:
        came.append(request.under_way)
        return ""

    loader = ElasticDataLoader(
        many, batch_size=8, shuffle=shuffle, storage_options=options, num_threads=threads or None
    )
    proxy.fault, proxy.latency_s = fault, 0.1
    proxy.log.clear()
    with loader:
        assert sorted(numbers(loader)) == list(range(300))
    assert max(came) > 40
    assert 300 <= len(proxy.gets()) <= 312  # a slow answer is asked for again, 4 % of them at most


@pytest.mark.parametrize(("threads", "tagged"), [(0, False), (3, True)])
def test_components_of_a_mixture_are_asked_for_ahead_of_their_turn(
    weed, many, proxy, tmp_path, threads, tagged
):
    """Beside one in memory; the records are those of a mixture of the same pictures here."""
    for number in range(300):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        (tmp_path / "ab"[number % 2] / f"{number:03d}.png").write_bytes(numbered(number))
    more = {"transform": lambda image: image + 0} if tagged else {}
    memory = [(np.full((4, 4, 3), [number, 1, 9], np.uint8), 0) for number in range(50)]

    def read(data: str, **options: Any) -> list[int]:
        store = MixtureComponent(data, **more)
        parts = {"all": store, "again": MixtureComponent(data, shuffle="shards"), "memory": memory}
        mixed = Mixture(parts, {"all": 4, "again": 4, "memory": 2}, num_records=400)
        with ElasticDataLoader(
            mixed, batch_size=8, shuffle=True, seed=3, num_threads=threads or None, **options
        ) as loader:
            return numbers(loader)

    came: list[int] = []
    options = weed.options(proxy.url)
    expected = read(str(tmp_path))
    proxy.fault, proxy.latency_s = (lambda request: came.append(request.under_way) or ""), 0.1
    proxy.log.clear()
    assert read(many, storage_options=options) == expected
    assert max(came) > 40
    assert 320 <= len(proxy.gets()) <= 333  # slow answers, as above


@pytest.mark.parametrize("kind", ["503", "reset", "short"])
def test_a_network_that_fails_costs_no_record(weed, many, proxy, kind):
    options = weed.options(proxy.url)
    reader = ImageFolderReader(many, storage_options=options)
    seen: Counter[str] = Counter()

    def fault(request: Request) -> str:
        seen[request.path] += 1
        return kind if seen[request.path] == 1 and int(request.path[-7:-4]) % 3 == 0 else ""

    proxy.fault = fault
    with DataShardService(8, reader=reader, max_bad_records=300) as service:
        dataset = ImageDataset(service, reader, on_bad_record="quarantine")
        assert sorted(numbers(ElasticDataLoader(dataset))) == list(range(300))
        assert service.progress().quarantined == 0


def test_a_store_that_is_away_for_too_long_is_no_records_fault(weed, many, proxy, monkeypatch):
    monkeypatch.setattr("edl_torch.readers.storage.storage.PATIENCE_S", 1.0)
    reader = ImageFolderReader(many, storage_options=weed.options(proxy.url))
    with DataShardService(8, reader=reader, max_bad_records=300) as service:
        dataset = ImageDataset(service, reader, on_bad_record="quarantine")
        with ElasticDataLoader(dataset) as loader:
            batches = iter(loader)
            first = numbers([next(batches)])
            proxy.fault = lambda _: "503"
            came = map(numbers, ([batch] for batch in batches))
            with pytest.raises(SourceUnavailable, match="The record is not to blame"):
                first.extend(chain.from_iterable(came))
            assert service.progress().quarantined == 0
            proxy.fault = lambda _: ""
            rest = numbers(loader)
        assert set(first) | set(rest) == set(range(300))
        assert len(first) + len(rest) <= 308  # the batch in hand, when the error came, may come again


def test_a_program_ends_though_the_store_does_not_answer(weed, many, proxy, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\n"
        "from edl_torch import ElasticDataLoader\n"
        "url, options = json.load(sys.stdin)\n"
        "loader = ElasticDataLoader(url, batch_size=8, storage_options=options, num_threads=2)\n"
        "batches = iter(loader)\n"
        "next(batches)\n"
        "print('read', flush=True)\n"
        "sys.stdin.close()\n"
    )
    proxy.fault = lambda one: "" if "list-type" in one.path or int(one.path[-7:-4]) < 16 else "trickle"
    done = preloaded.run(
        [sys.executable, str(program)],
        input=json.dumps([many, weed.options(proxy.url)]),
        capture_output=True,
        text=True,
        timeout=25,  # seconds; answers hang for 30
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr[-2000:]


# Forks --------------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys
import edl_torch
from edl_torch import ElasticDataLoader

def run(first, url, options, method, threads):
    def loader(workers):
        return ElasticDataLoader(url, batch_size=8, storage_options=options, num_workers=workers,
            multiprocessing_context=method if workers else None, num_threads=threads or None, shuffle=True)
    if first == "reads":
        assert sum(len(labels) for _, labels in loader(0)) == 300
    elif first == "uses obstore":
        import obstore
        from obstore.store import S3Store
        store = S3Store("bucket", endpoint=options["endpoint_url"], access_key_id=options["key"],
            secret_access_key=options["secret"], client_options={"allow_http": True})
        assert len(list(obstore.list(store, "many-images")))
    for _ in range(2):
        with loader(3) as one:
            assert sum(len(labels) for _, labels in one) == 300

if __name__ == "__main__":
    run(*json.load(sys.stdin))
    print("done")
"""


STARTS = product(
    ("lists", "reads", "uses obstore"), (("fork", 0), ("fork", 2), ("spawn", 0), ("forkserver", 2))
)
FEW = [("lists", ("fork", 2)), ("reads", ("fork", 0))]


@pytest.mark.parametrize(
    ("first", "start"),
    [pytest.param(*case, marks=[] if case in FEW else pytest.mark.long) for case in STARTS],
)
def test_workers_read_whatever_their_parent_has_done(weed, many, tmp_path, first, start):
    """Which obstore alone would not: its threads are the parent's."""
    program, (method, threads) = tmp_path / "program.py", start
    program.write_text(PROGRAM)
    done = preloaded.run(
        [sys.executable, str(program)],
        input=json.dumps([first, many, weed.options(), method, threads]),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "done\n", done.stderr[-3000:]
    forked_late = method == "fork" and first != "lists"
    assert ("obstore ran before this process was forked" in done.stderr) == forked_late
