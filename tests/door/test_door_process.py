"""Masters behind doors as processes: whole jobs, the command line, and the end."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import grpc
import preloaded
import pytest
from door_kit import SECRET, credentials, lease, register, report, token_file
from door_trainer import RECORDS
from processes import quiet_port

from edl_torch import DataShardService, MasterClient, ShardedDataset
from edl_torch.master.health import SERVICE
from edl_torch.readers import MapDatasetReader
from edl_torch.rpc.credentials import Credentials
from edl_torch.testing import wait_until

EDL = (sys.executable, "-m", "edl_torch")
TRAINER = Path(__file__).with_name("door_trainer.py")


def clean_environment(**more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EDL_MASTER_")}
    return kept | {name: str(value) for name, value in more.items()}


def run(*arguments, env=None):
    return preloaded.run(
        [*EDL, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean_environment() if env is None else env,
    )


class MasterProcess:
    """A master on one port, through all its lives."""

    def __init__(self, folder, *arguments):
        self.address = f"127.0.0.1:{quiet_port()}"
        self.log = folder / "master.log"
        self._arguments = ["--addr", self.address, *map(str, arguments)]
        self.process = None

    def start(self):
        self.kill()
        with self.log.open("ab") as log:
            self.process = preloaded.Popen(
                [*EDL, "master", *self._arguments], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout.readline() == f"ready on {self.address}\n", self.log.read_text()
        return self

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


@pytest.fixture
def master_process(tmp_path):
    masters = []

    def make(*arguments):
        masters.append(MasterProcess(tmp_path, *arguments))
        return masters[-1].start()

    yield make
    for master in masters:
        master.kill()


def options(certificates, token, *, mutual=True):
    cert, key = certificates.master
    given = ["--tls-cert", cert, "--tls-key", key, "--token-file", token]
    return [*given, "--tls-client-ca", certificates.ca] if mutual else given


def environment(certificates, token, address):
    cert, key = certificates.trainer
    return clean_environment(
        EDL_MASTER_ADDR=address,
        EDL_MASTER_TOKEN_FILE=token,
        EDL_MASTER_TLS_CA=certificates.ca,
        EDL_MASTER_TLS_CERT=cert,
        EDL_MASTER_TLS_KEY=key,
    )


# Whole jobs -----------------------------------------------------------------------------------------------


def test_job_through_a_closed_door_and_a_master_that_dies(tmp_path, certificates, token, master_process):
    """TLS both ways and the token, a kill -9 of the master in the middle; nothing secret is left anywhere."""
    state, audit, out = tmp_path / "state", tmp_path / "audit", tmp_path / "out"
    master = master_process(*options(certificates, token), "--state", state)
    env = environment(certificates, token, master.address)
    trainer = preloaded.Popen(
        [sys.executable, str(TRAINER), str(out), str(audit)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: out.exists() and len(out.read_text().split()) > 20, timeout_s=90)
        master.kill()
        seen = len(out.read_text().split())
        assert seen < RECORDS
        master.start()
        said, _ = trainer.communicate(timeout=120)
    finally:
        trainer.kill()
        trainer.communicate()
    assert trainer.returncode == 0, said
    assert Counter(map(int, out.read_text().split())) == Counter(range(RECORDS))
    table = run("status", env=env)
    told = run("status", "--json", env=env)
    (dataset,) = json.loads(told.stdout)["datasets"]
    assert (dataset["acknowledged"], dataset["finished"]) == (RECORDS, True)
    master.process.send_signal(signal.SIGTERM)
    assert master.process.wait(20) == 0
    written = [*state.iterdir(), *audit.rglob("*"), out, master.log]
    shown = [said, table.stdout, table.stderr, told.stdout, told.stderr]
    shown += [path.read_bytes().decode("latin-1") for path in written if path.is_file()]
    keys = [path.read_text()[60:90] for path in (certificates.master[1], certificates.trainer[1])]
    assert not [secret for secret in (SECRET, *keys) for text in shown if secret in text]


def test_nothing_secret_goes_to_loader_workers(start, certificates, token):
    from door_kit import door

    master = start(door(certificates, token=token))
    client = master.client(credentials(certificates, token=token))
    numbers = MapDatasetReader(range(8))
    with DataShardService(2, client, reader=numbers) as service:
        for dumps in (pickle.dumps, ForkingPickler.dumps):
            raw = bytes(dumps(ShardedDataset(service, numbers)))
            assert SECRET.encode() not in raw
            assert b"-----BEGIN" not in raw


# Status ---------------------------------------------------------------------------------------------------


def test_status_through_a_closed_door(certificates, token, master_process):
    master = master_process(*options(certificates, token))
    cert, key = certificates.trainer
    opened = ("--token-file", token, "--tls-ca", certificates.ca, "--tls-cert", cert, "--tls-key", key)
    done = run("status", "--addr", master.address, *opened)
    assert (done.returncode, "no dataset yet" in done.stdout) == (0, True), done.stderr
    assert run("status", env=environment(certificates, token, master.address)).returncode == 0


@pytest.mark.parametrize(
    ("opened", "message"),
    [
        ((), "speaks TLS"),
        (("tls_ca",), "none was given: EDL_MASTER_TLS_CERT"),
        (("tls_ca", "tls_cert", "tls_key"), "EDL_MASTER_TOKEN_FILE"),
        (("tls_ca", "tls_cert"), "belong together"),
    ],
)
def test_status_says_what_is_missing(certificates, token, master_process, opened, message):
    master = master_process(*options(certificates, token))
    cert, key = certificates.trainer
    files = {"tls_ca": certificates.ca, "tls_cert": cert, "tls_key": key}
    given = [part for name in opened for part in ("--" + name.replace("_", "-"), files[name])]
    done = run("status", "--addr", master.address, *given)  # at once: `run` waits less than a client would
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("edl-torch: error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_status_says_in_one_line_that_a_certificate_is_not_trusted(certificates, token, master_process):
    master = master_process(*options(certificates, token, mutual=False))
    done = run("status", "--addr", master.address, "--tls")  # by the authorities of the system
    assert done.returncode == 1
    assert "its certificate is not trusted" in done.stderr
    assert done.stderr.count("\n") == 1  # nothing of gRPC's own log


def test_names_of_trainers_do_not_reach_the_terminal_as_commands(master_process):
    master = master_process()
    with MasterClient(master.address, "evil\x1b[2J\nFAILED: no", credentials=Credentials()) as client:
        client.call(register("s\r\n", name="d\x1b]0;title\x07", worker_id=client.worker_id))
        table = run("status", "--addr", master.address).stdout
    assert "\x1b" not in table
    assert "evil\\x1b[2J\\nFAILED: no" in table
    assert not [line for line in table.splitlines() if line.startswith("FAILED")]
    log = master.log.read_text()
    assert "dataset=d\\x1b]0;title\\x07 worker=evil\\x1b[2J\\nFAILED: no session=s\\r\\n\n" in log


# Starting -------------------------------------------------------------------------------------------------


def test_open_address_with_a_closed_door_needs_no_switch_and_no_warning(tmp_path, certificates, token):
    address = tmp_path / "address"
    opened = map(str, options(certificates, token, mutual=False))
    master = subprocess.Popen(
        [*EDL, "master", "--addr", "0.0.0.0:0", "--address-file", str(address), *opened],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: address.exists() or master.poll() is not None, timeout_s=30)
        port = address.read_text().strip().rpartition(":")[2]
        given = credentials(certificates, token=token)
        with MasterClient(f"localhost:{port}", "w", credentials=given) as client:
            assert client.status().datasets == ()
    finally:
        master.terminate()
        _, said = master.communicate(timeout=20)
    assert "insecure" not in said
    assert "listening" not in said


@pytest.mark.parametrize(
    ("door", "words"),
    [
        ("nothing", "whoever reaches it may use it, unencrypted"),
        ("token", "whoever listens there can read the token"),
        ("tls", "whoever reaches it may use it"),
    ],
)
def test_open_address_with_a_door_ajar_is_refused_or_warned_of(tmp_path, certificates, token, door, words):
    cert, key = certificates.master
    given = {
        "nothing": [],
        "token": ["--token-file", str(token)],
        "tls": ["--tls-cert", str(cert), "--tls-key", str(key)],
    }[door]
    refused = run("master", "--addr", "0.0.0.0:0", *given)
    assert refused.returncode == 1
    assert words in refused.stderr
    assert "--insecure" in refused.stderr
    master = subprocess.Popen(
        [*EDL, "master", "--addr", "0.0.0.0:0", "--insecure", *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert master.stdout.readline().startswith("ready on ")
    master.terminate()
    _, said = master.communicate(timeout=20)
    assert f"though {words} (--insecure)" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--token-file", "{folder}/none"), "the token file '{folder}/none' cannot be read"),
        (("--token-file", "{folder}/short"), "16 or more ASCII"),
        (("--tls-cert", "{folder}/short"), "--tls-cert and --tls-key belong together"),
        (("--tls-client-ca", "{folder}/short"), "--tls-client-ca needs"),
        (("--tls-cert", "{cert}", "--tls-key", "{other}"), "do not belong together"),
        (("--tls-cert", "{folder}/short", "--tls-key", "{other}"), "is no PEM file"),
    ],
)
def test_files_that_cannot_be_used_are_told_in_one_line(tmp_path, certificates, arguments, message):
    (tmp_path / "short").write_text("hunter2")
    (tmp_path / "short").chmod(0o600)
    names = {"folder": tmp_path, "cert": certificates.master[0], "other": certificates.trainer[1]}
    done = run("master", "--addr", "127.0.0.1:0", *[part.format(**names) for part in arguments])
    assert done.returncode == 2
    assert done.stderr.startswith("edl-torch: error: ")
    assert message.format(**names) in done.stderr
    assert done.stderr.count("\n") == 1
    assert "hunter2" not in done.stderr


# The end --------------------------------------------------------------------------------------------------


def test_sigterm_tells_the_probes_answers_who_waits_and_keeps_everything(
    tmp_path, certificates, master_process
):
    token = token_file(tmp_path)
    master = master_process(*options(certificates, token, mutual=False), "--state", tmp_path / "state")
    tls = grpc.ssl_channel_credentials(certificates.ca.read_bytes())
    given = credentials(certificates, token=token)
    with (
        grpc.secure_channel(master.address, tls) as probe,
        MasterClient(master.address, "w", credentials=given, master_timeout_s=60.0) as client,
    ):
        watch = probe.unary_stream(f"/{SERVICE}/Watch")(b"", timeout=60)
        assert next(watch) == b"\x08\x01"
        a, b = (client.call(register(session, size=2)).fence for session in ("a", "b"))
        client.call(lease(1, "a", fence=a))
        answers = []
        waiting = threading.Thread(
            target=lambda: answers.append(client.call(lease(1, "b", epoch=0, fence=b), 25))
        )
        waiting.start()
        wait_until(lambda: client.call(report(1, "a", fence=a)).wanted)
        master.process.send_signal(signal.SIGTERM)
        assert list(watch) == [b"\x08\x02"]
        waiting.join(20)
        assert answers[0].nothing_yet
        assert master.process.wait(20) == 0
        master.start()
        assert client.dataset_status("d").leased == 2
