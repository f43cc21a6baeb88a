"""A planted secret is found nowhere: not in what a job writes, says, keeps or passes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import preloaded
import pytest
from master_kit import EDL, MasterProcess
from stores import BUCKET, KEY, SECRET, bucket_of, put
from tar_files import samples_tar

SESSION_TOKEN, SIGNATURE, PASSWORD = "planted-token-1509", "planted5ig2718", "planted-password-31"
WRONG = "planted-wrong-secret-17"
PLANTED = [text.encode() for text in (SECRET, SESSION_TOKEN, SIGNATURE, PASSWORD, WRONG)]
PROGRAM = Path(__file__).with_name("secret_job.py")


@pytest.fixture(scope="module")
def base(moto: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    picture = cv2.imencode(".png", np.zeros((4, 4, 3), np.uint8))[1].tobytes()
    tar = Path(samples_tar(tmp_path_factory.mktemp("tar") / "a.tar", 500)).read_bytes()
    images = {f"secret/images/{'ab'[n % 2]}/{n}.png": picture for n in range(40)}
    listed = b"file,label\n" + b"".join(b"images/a/%d.png,1\n" % n for n in range(0, 40, 2))
    client = bucket_of({"endpoint_url": moto, "key": KEY, "secret": SECRET})
    put(client, {**images, "secret/list.csv": listed, "secret/tars/a.tar": tar})
    return f"s3://{BUCKET}/secret"


def descendants(pid: int) -> list[int]:
    """A process and all that it has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = " ".join(each.read_text() for each in tasks).split()
    return [pid, *(one for child in children for one in descendants(int(child)))]


def planted_in(data: bytes) -> list[bytes]:
    return [secret for secret in PLANTED if secret in data]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder for what is temporary: the path of a socket has some hundred characters at most."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("given", "mixture", "workers", "method"),
    [
        ("options", True, 2, "fork"),
        pytest.param("environment", True, 1, "spawn", marks=pytest.mark.long),
        pytest.param("options", False, 2, "spawn", marks=pytest.mark.long),
    ],
)
def test_a_planted_secret_is_found_nowhere(
    weed, moto, base, tmp_path, short, given, mixture, workers, method
):
    """With credentials of the environment it is in no pickle, too; `storage_options` travel to workers so."""
    folder, kept = tmp_path / "job", tmp_path / "kept"
    for each in (folder, kept):
        each.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "EDL_INDEX_DIR": str(kept),
        "TMPDIR": str(short),
    }
    options = {"endpoint_url": moto}
    credentials = {"key": KEY, "secret": SECRET, "token": SESSION_TOKEN}
    if given == "options":
        options |= credentials
    else:
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        environment |= dict(zip(names, credentials.values(), strict=True))
    settings = {
        "base": base,
        "options": options,
        "wrong": {**weed.options(), "secret": WRONG},
        "signed": f"{weed.address}/{BUCKET}/x.tar?X-Amz-Expires=60&X-Amz-Signature={SIGNATURE}",
        "password": PASSWORD,
        "mixture": mixture,
        "workers": workers,
        "method": method,
        "is_pickled": given == "environment",
        "folder": str(tmp_path),
    }
    master = MasterProcess(tmp_path, state=tmp_path / "state")
    master.start()
    try:
        with (tmp_path / "stderr").open("w") as stderr:
            process = preloaded.Popen(
                [sys.executable, str(PROGRAM), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**environment, "EDL_MASTER_ADDR": master.address},
            )
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin as stdin, process.stdout as stdout:
            stdin.write(json.dumps(settings) + "\n")
            stdin.flush()
            before = []
            while (line := stdout.readline()) != "ready\n":
                assert line, (tmp_path / "stderr").read_text()[-3000:]  # it has ended
                before.append(line)
            processes = descendants(process.pid)
            assert len(processes) > workers
            for pid in processes:
                assert not planted_in(Path(f"/proc/{pid}/cmdline").read_bytes())
                if given == "options":
                    assert not planted_in(Path(f"/proc/{pid}/environ").read_bytes())
            stdin.write("go on\n")
            stdin.flush()
            said = "".join(before) + stdout.read()
            assert process.wait(60) == 0, (tmp_path / "stderr").read_text()[-3000:]
    finally:
        master.close()
    for command in (["audit", str(folder / "audit"), "--json"], ["audit", str(folder / "audit")]):
        done = preloaded.run([*EDL, *command], capture_output=True, text=True, timeout=120)
        said += done.stdout + done.stderr
    assert said.count("refused") >= 3
    assert not planted_in(said.encode())
    files = [each for place in (tmp_path, short) for each in place.rglob("*") if each.is_file()]
    names = {each.name for each in files}
    assert {"stderr", "token", "checkpoint.pt"} <= names
    assert any(each.parent == kept for each in files)
    assert any(each.is_relative_to(tmp_path / "state") for each in files)
    assert ("pickle" in names) == (given == "environment")
    for each in files:
        assert not planted_in(os.fsencode(each) + each.read_bytes()), each
