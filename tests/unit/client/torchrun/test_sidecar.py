"""The master that a torchrun job starts: where it listens, and who may come in; its trainers end with it."""

from __future__ import annotations

import ipaddress
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from test_finding_master import JOB

from edl_torch.client.grpc.client import MasterClient
from edl_torch.client.torchrun import sidecar
from edl_torch.client.torchrun.job import Job
from edl_torch.client.torchrun.sidecar import MasterEntry, Sidecar, SidecarCredentials
from edl_torch.errors import AccessDenied, InvalidArgument, MasterStartError
from edl_torch.rpc.credentials import Credentials
from edl_torch.testing import wait_until

LOCAL = ipaddress.IPv4Address("127.0.0.1")
OUTSIDE = ipaddress.IPv4Address("192.0.2.7")
NAME = "master.of.the.job"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job whose agent is a process that does nothing, until the test ends."""
    agent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield replace(JOB, log_dir=tmp_path, agent=agent.pid)
    agent.kill()
    agent.communicate(timeout=60)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this test's environment is meant for it."""
    for name in [name for name in os.environ if name.startswith("EDL_MASTER")]:
        monkeypatch.delenv(name)


class Outside(ipaddress.IPv4Address):
    """This machine's loopback, said to be a way to others."""

    @property
    def is_loopback(self) -> bool:
        return False


@pytest.fixture
def on_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if other machines could reach the master, who is told so by his own options only."""
    monkeypatch.setattr(sidecar, "this_side", lambda job: Outside("127.0.0.1"))


def check_serves(started: MasterEntry) -> None:
    """A worker of the job is let in."""
    with MasterClient(started.address, credentials=sidecar._credentials(started)) as client:
        assert client.status().datasets == ()


@pytest.mark.parametrize(
    ("nodes", "most_nodes", "open_anyway", "listens"),
    [
        (1, 1, False, LOCAL),
        (2, 1, False, OUTSIDE),
        (1, 3, False, OUTSIDE),
        (1, 1, True, OUTSIDE),
    ],
)
def test_where_it_listens(
    nodes: int,
    most_nodes: int,
    open_anyway: bool,
    listens: ipaddress.IPv4Address,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sidecar, "this_side", lambda job: OUTSIDE)
    job = replace(JOB, nodes=nodes, most_nodes=most_nodes)
    assert sidecar._host(job, open_anyway=open_anyway) == listens


@pytest.mark.parametrize(
    ("host", "towards", "elsewhere", "side"),
    [
        ("node-0", "10.0.0.5", None, "10.0.0.5"),
        ("node-0", "127.0.1.1", "10.0.0.5", "10.0.0.5"),  # on node-0 itself, by Debian's /etc/hosts
        ("node-0", "127.0.1.1", None, "127.0.1.1"),  # a machine without a network
        ("localhost", "127.0.0.1", "10.0.0.5", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1", "10.0.0.5", "127.0.0.1"),
    ],
)
def test_the_node_of_the_store_is_known_to_others_by_another_address(
    host: str, towards: str, elsewhere: str | None, side: str
) -> None:
    def source(name: str, port: int) -> ipaddress.IPv4Address:
        found = towards if name == host else elsewhere
        if found is None:
            raise OSError("Network is unreachable")
        return ipaddress.IPv4Address(found)

    assert str(sidecar.this_side(replace(JOB, host=host), source)) == side


def test_its_page_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_HTTP", "127.0.0.1:9000")
    command = sidecar._command(JOB, LOCAL, tmp_path / "address")
    assert command[command.index("--http") + 1] == "127.0.0.1:9000"


def test_no_way_to_the_store_is_said() -> None:
    def source(name: str, port: int) -> ipaddress.IPv4Address:
        raise OSError("Name or service not known")

    with pytest.raises(MasterStartError, match="no way to MASTER_ADDR=nowhere: Name or service not known"):
        sidecar.this_side(replace(JOB, host="nowhere"), source)


def test_on_a_network_it_asks_for_a_token_that_only_the_job_knows(job: Job, on_a_network: None) -> None:
    started = Sidecar(replace(job, nodes=2)).start()
    assert len(started.token) >= 40
    assert started.token not in repr(started)
    check_serves(started)
    with (
        MasterClient(started.address, credentials=Credentials(), master_timeout_s=5) as stranger,
        pytest.raises(AccessDenied),
    ):
        stranger.status()
    kept = Sidecar(job).running()
    assert kept == started, "a later worker of this agent knows it too"
    assert job.log_dir is not None
    file = job.log_dir / "edl_torch_master.token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert started.token not in (job.log_dir / "edl_torch_master.log").read_text()
    assert Sidecar(replace(job, nodes=2)).start().token != started.token, "each master has one of its own"


def test_on_one_machine_it_asks_for_nothing(job: Job) -> None:
    started = Sidecar(job).start()
    assert started.token == ""
    check_serves(started)


def test_the_users_token_is_the_jobs(
    job: Job, on_a_network: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("a token of the user's own\n".replace(" ", "-"))
    file.chmod(0o600)
    monkeypatch.setenv("EDL_MASTER_TOKEN_FILE", str(file))
    started = Sidecar(replace(job, nodes=2)).start()
    assert started.token == ""
    check_serves(started)


def test_a_token_that_cannot_be_read_is_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_MASTER_TOKEN_FILE", "/nowhere/none")
    with pytest.raises(InvalidArgument, match=r"token file .*none.* cannot be read"):
        Sidecar(job).start()


def test_with_a_certificate_of_the_nodes_it_speaks_tls(
    job: Job, on_a_network: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    made = authority.issue_cert(NAME)
    files = {name: tmp_path / name for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(files["ca"])
    made.cert_chain_pems[0].write_to_path(files["cert"])
    made.private_key_pem.write_to_path(files["key"])
    for name, file in files.items():
        monkeypatch.setenv(f"EDL_MASTER_TLS_{name.upper()}", str(file))
    monkeypatch.setenv("EDL_MASTER_TLS_NAME", NAME)

    started = Sidecar(replace(job, nodes=2)).start()
    check_serves(started)
    credentials = sidecar._credentials(started)
    without = {
        "token": "token",
        "name": "for other names",
        "cert": "wants callers with a certificate",
    }
    for missing, told in without.items():
        less = replace(credentials, **({missing: None} | ({"key": None} if missing == "cert" else {})))
        with (
            MasterClient(started.address, credentials=less, master_timeout_s=15) as stranger,
            pytest.raises(AccessDenied, match=told),
        ):
            stranger.status()
    assert job.log_dir is not None
    assert "--insecure" not in (job.log_dir / "edl_torch_master.log").read_text()


@pytest.mark.parametrize("name", ["EDL_MASTER_TLS", "EDL_MASTER_TLS_CA"])
def test_tls_without_a_certificate_is_refused_with_what_to_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca")
    monkeypatch.setenv(name, "1" if name == "EDL_MASTER_TLS" else str(tmp_path / "ca"))
    with pytest.raises(InvalidArgument, match=r"EDL_MASTER_TLS_CERT.*EDL_MASTER_TLS_NAME.*EDL_MASTER_ADDR"):
        Sidecar(JOB).start()


def test_what_exposes_it_is_said_to_the_master() -> None:
    assert SidecarCredentials().options(exposed=False) == []
    assert SidecarCredentials().options(exposed=True) == ["--insecure"]
    closed = SidecarCredentials(token_file="t", cert="c", key="k", ca="a")
    assert "--insecure" not in closed.options(exposed=True)


def test_what_a_master_says_that_cannot_start_is_shown(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    state.write_text("a file, no folder")
    monkeypatch.setenv("EDL_MASTER_STATE", str(state))
    with pytest.raises(MasterStartError, match=r"ended with status 2.*edl_torch_master\.log.*state"):
        Sidecar(job).start()


def test_a_folder_that_cannot_be_written_is_named(job: Job, tmp_path: Path) -> None:
    with pytest.raises(MasterStartError, match=r"cannot be started: .*gone"):
        Sidecar(replace(job, log_dir=tmp_path / "gone")).start()


def test_it_ends_with_its_agent(job: Job) -> None:
    Sidecar(job).start()
    os.kill(job.agent, signal.SIGKILL)
    kept = Sidecar(job)
    wait_until(lambda: kept.running() is None, timeout_s=30)


# A trainer ends with its agent ------------------------------------------------------------------------------


WORKER = """
import os, signal, sys, time
from edl_torch.client.torchrun import job as worker
worker.KILL_S = float(sys.argv[1])
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker._end_with(os.getppid())
print("there", flush=True)
time.sleep(120)
"""
AGENT = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]).wait()"


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(("kill_s", "worker"), [("120", "hears"), ("0.1", "deaf")])
def test_a_worker_ends_with_its_agent_though_it_is_deaf(kill_s: str, worker: str) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, WORKER, kill_s, worker], stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    assert agent.stdout.readline() == "there\n"
    agent.kill()
    assert agent.communicate(timeout=30) == ("", None)  # the worker had the other end of the pipe
