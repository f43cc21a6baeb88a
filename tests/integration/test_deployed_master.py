"""The master as container and StatefulSet run it: only its own packages, TLS, token, probes, the end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import yaml
from processes import quiet_port

from edl_torch import DataShardService, ElasticDataLoader, MasterClient, ShardedDataset
from edl_torch.master.health import SERVICE
from edl_torch.readers import MapDatasetReader
from edl_torch.rpc.credentials import Credentials

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHECK = f"/{SERVICE}/Check"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"

pytestmark = [
    pytest.mark.long,  # it installs what the container has
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=200, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """What the Containerfile installs, in the way it does."""
    folder = tmp_path_factory.mktemp("edl")
    text = (DEPLOY / "Containerfile").read_text()
    installs = re.findall(r"pip --python /opt/edl install --no-cache-dir (.*?)(?: \\)?\n", text)
    assert installs == ["-c constraints.txt -r deploy/master-requirements.txt", "--no-deps /wheels/*.whl"]
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    pip = [sys.executable, "-m", "pip", "--python", folder, "--disable-pip-version-check"]
    run(*pip, "install", "-q", *installs[0].split(), cwd=ROOT)
    run(*pip, "install", "-q", "--no-deps", ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("secrets")
    run(DEPLOY / "kubernetes" / "secrets.sh", "jobs", folder)
    return folder


@pytest.fixture
def clean():
    """Nothing of the tests' own paths: the master imports what is installed."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("EDL_", "PYTHONPATH"))}


def container(kind, name):
    for path in sorted((DEPLOY / "kubernetes").rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] == kind and document["metadata"]["name"] == name:
                return document["spec"]["template"]["spec"]["containers"][0]
    raise AssertionError(f"no {kind} {name}")


class Pod:
    """The StatefulSet's container, with its paths in folders of the test and its ports on loopback."""

    def __init__(self, environment, secrets, folder, variables):
        self.health = f"127.0.0.1:{quiet_port()}"
        moved = {
            "/etc/edl/tls": secrets,
            "/etc/edl/access": secrets,
            "/var/lib/edl": folder / "state",
            "0.0.0.0:50001": "127.0.0.1:0",
            "0.0.0.0:50002": self.health,
        }
        spec = container("StatefulSet", "edl-master")
        arguments = []
        for argument in spec["args"]:
            for inside, outside in moved.items():
                argument = argument.replace(inside, str(outside))
            arguments.append(argument)
        self.command = environment / "bin" / "edl-torch"
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [self.command, "master", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=variables,
                cwd=folder,
            )
        ready = re.fullmatch(r"ready on 127\.0\.0\.1:(\d+)\n", self.process.stdout.readline())
        assert ready, self.log.read_text()
        self.address = f"localhost:{ready[1]}"  # a name of the certificate

    def check(self):
        """As the kubelet does."""
        with grpc.insecure_channel(self.health) as channel:
            return channel.unary_unary(CHECK)(b"", timeout=10)

    def close(self):
        self.process.kill()
        self.process.wait(20)
        self.process.stdout.close()


@pytest.fixture
def pod(environment, secrets, tmp_path, clean):
    made = Pod(environment, secrets, tmp_path, clean)
    yield made
    made.close()


@pytest.fixture
def trainer(pod, secrets):
    """What the Job's container has in its environment, with its paths moved."""
    given = {entry["name"]: entry.get("value", "") for entry in container("Job", "coco")["env"]}
    moved = {name: value.replace("/etc/edl", str(secrets)) for name, value in given.items()}
    return moved | {"EDL_MASTER_ADDR": pod.address}


def test_container_has_nothing_but_the_master(environment, clean):
    python = environment / "bin" / "python"
    listed = json.loads(run(sys.executable, "-m", "pip", "--python", python, "list", "--format", "json"))
    names = {package["name"].lower().replace("_", "-") for package in listed}
    needed = {"grpcio", "grpcio-health-checking", "protobuf", "numpy", "typing-extensions"}
    page = {
        "aiohttp",
        "aiohappyeyeballs",
        "aiosignal",
        "attrs",
        "frozenlist",
        "idna",
        "multidict",
        "propcache",
    }
    page |= {"prometheus-client", "yarl"}
    assert names == {"edl-torch"} | needed | page
    code = "import edl_torch.master.server, edl_torch.cli.main; print(edl_torch.__file__)"
    where = run(python, "-c", code, env=clean, cwd=environment)
    assert where.startswith(str(environment))


def test_job_against_the_master_of_the_manifests(pod, trainer, clean):
    assert pod.check() == SERVING
    reader = MapDatasetReader(range(100))
    seen = []
    with (
        MasterClient(pod.address, "w", credentials=Credentials.from_env(trainer)) as client,
        DataShardService(8, client, reader=reader, num_epochs=2) as service,
    ):
        while not service.finished:
            for batch in ElasticDataLoader(ShardedDataset(service, reader)):
                seen += batch.tolist()
    assert sorted(seen) == sorted([*range(100)] * 2)
    table = run(pod.command, "status", env=clean | trainer)
    assert "training" in table


def test_sigterm_is_told_to_the_probes_before_the_end(pod, trainer):
    with grpc.insecure_channel(pod.health) as channel:
        watch = channel.unary_stream(f"/{SERVICE}/Watch")(b"", timeout=30)
        assert next(watch) == SERVING
        pod.process.send_signal(signal.SIGTERM)
        assert next(watch) == NOT_SERVING
    assert pod.process.wait(20) == 0, pod.log.read_text()
