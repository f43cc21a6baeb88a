"""`edl-torch master` and `edl-torch status` as processes, with trainers that are killed."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import preloaded
import pytest
from cases import cases
from every_reader import KINDS, made
from master_kit import EDL, MakeMaster, write_rows_reader
from processes import quiet_port

import edl_torch
from edl_torch import DataShardService, ElasticDataLoader, MasterClient, ShardedDataset, TaskType
from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    LeaseCall,
    RegisterCall,
    Registration,
    ReportCall,
)
from edl_torch.readers import load_reader, open_reader
from edl_torch.shard import Source
from edl_torch.testing import wait_until
from edl_torch.testing.fake_master import Listening


def run(*arguments, **options):
    return preloaded.run([*EDL, *arguments], capture_output=True, text=True, timeout=60, **options)


def register(client, session, size=8):
    registration = Registration(name="d", sources=(Source(name="", count=size),), records_per_shard=4)
    call = RegisterCall(session=session, worker_id=client.worker_id, batch_size=2, registration=registration)
    answer = client.call(call)
    FENCES[session] = answer.fence
    return answer


FENCES = {}  # of the sessions of the test that runs


def lease(client, session, request, wait_s=0.0, **options):
    options = {"count": 1, "epoch": NEW_PASS, "fence": FENCES[session]} | options
    return client.call(LeaseCall(session=session, dataset="d", request=request, **options), wait_s)


def acknowledge(client, session, request, grants):
    done = tuple(Acknowledgement(task=g.task, attempt=g.attempt, upto=g.slice.stop) for g in grants)
    fence = FENCES[session]
    return client.call(
        ReportCall(session=session, dataset="d", fence=fence, request=request, acknowledgements=done)
    )


# Starting and stopping ------------------------------------------------------------------------------------


def test_port_0_picks_a_port_and_says_which(tmp_path):
    file = tmp_path / "address"
    process = preloaded.Popen(
        [*EDL, "master", "--addr", "127.0.0.1:0", "--address-file", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        address = process.stdout.readline().split()[-1]
        assert file.read_text().strip() == address
        assert int(address.rpartition(":")[2]) > 0
    finally:
        process.kill()
        process.communicate()


def test_sigterm_answers_who_waits_and_ends_with_0(start_master):
    master = start_master()
    client = master.client()
    register(client, "a", 2)
    register(client, "b", 2)
    client.attend("b", 2, Listening(2))
    lease(client, "a", 1)
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(lease(client, "b", 1, 30, epoch=0)))
    waiting.start()
    wait_until(lambda: acknowledge(client, "a", 1, ()).wanted)
    master.process.send_signal(signal.SIGTERM)
    assert master.process.wait(25) == 0  # less than it would wait
    waiting.join(60)
    assert answers[0].nothing_yet


def test_trainers_are_not_bounded_by_what_a_process_is_given_unasked(make_master):
    """A connection is a file, and many systems give a process few before it asks for more."""
    master, few = make_master(), 100
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    master.start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (few, most)))
    host, _, port = master.address.rpartition(":")
    with ExitStack() as connections:
        for _ in range(few):
            connections.enter_context(socket.create_connection((host, int(port)), 10))
        assert master.client(master_timeout_s=30).status().trainers == ()


PATIENT = """
import sys
from edl_torch.cli import main
from edl_torch.master.server import MasterServer

drain = MasterServer.drain
MasterServer.drain = lambda server, grace_s=600.0: drain(server, grace_s)
sys.exit(main.main(["master", "--addr", "127.0.0.1:0"]))
"""


def test_second_signal_is_not_waited_for():
    master = preloaded.Popen([sys.executable, "-c", PATIENT], stdout=subprocess.PIPE, text=True)
    try:
        port = int(master.stdout.readline().rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)):
            master.send_signal(signal.SIGTERM)
            master.send_signal(signal.SIGINT)
            assert master.wait(60) == 0
    finally:
        master.kill()
        master.communicate()


def test_error_is_one_line_without_a_traceback():
    """As in a process; all other errors are in test_commands_go_wrong.py."""
    done = run("master", "--training_data", "/no/such/data")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("edl-torch: error: the data '/no/such/data' does not exist")


def test_the_version_is_told():
    assert run("--version").stdout == f"edl-torch {edl_torch.__version__}\n"


# Datasets and status --------------------------------------------------------------------------------------


def test_datasets_of_the_command_line_are_there_for_trainers(tmp_path, monkeypatch, start_master):
    arguments = (
        *("--training_data", "t", "--validation-data", "v", "--records_per_task", "7", "--num-epochs", "2"),
        *("--shuffle_shards", *write_rows_reader(tmp_path, monkeypatch)),
        *("--custom_data_reader_params", "rows=30"),
    )
    client = start_master(*arguments).client()
    answer = client.call(
        RegisterCall(session="s", worker_id="w", batch_size=2, registration=Registration(name="training"))
    )
    assert answer.spec.sources == (Source(name="t", count=30),)
    assert (answer.spec.records_per_shard, answer.spec.num_epochs) == (7, 2)
    assert answer.spec.shuffle_shards
    status = client.dataset_status("evaluation")
    assert (status.task_type.name, status.num_epochs, status.size) == ("EVALUATION", 2, 30)


def test_status_as_table_and_as_json(start_master):
    master = start_master()
    client = master.client("trainer-7")
    register(client, "s")
    lease(client, "s", 1)
    table = run("status", "--addr", master.address)
    assert table.returncode == 0
    assert "trainer-7" in table.stdout
    assert "1/2" in table.stdout or "2/2" in table.stdout
    value = json.loads(run("status", "--json", env={**os.environ, "EDL_MASTER_ADDR": master.address}).stdout)
    assert value["datasets"][0]["task_type"] == "TRAINING"
    assert value["datasets"][0]["leased"] == 4


def test_status_of_nobody_is_one_line():
    port = quiet_port()
    code = (
        "import sys; from edl_torch.cli import main, status; status.STATUS_TIMEOUT_S = 0.1\n"
        f"sys.exit(main.main(['status', '--addr', '127.0.0.1:{port}']))"
    )
    done = preloaded.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("edl-torch: error: no answer from the master at 127.0.0.1")


# Trainers -------------------------------------------------------------------------------------------------


TRAINER = """
import os, signal, sys, time
from edl_torch.client.grpc.client import MasterClient
from edl_torch.core.calls import *
from edl_torch.testing.fake_master import Listening
from edl_torch.shard import Source

client = MasterClient(sys.argv[1], "victim")
registration = Registration(name="d", sources=(Source(name="", count=8),), records_per_shard=4)
call = RegisterCall(session="victim", worker_id="victim", batch_size=2, registration=registration)
named = {"session": "victim", "dataset": "d", "fence": client.call(call).fence}
client.attend("victim", 1, Listening(1))
call = LeaseCall(**named, request=1, epoch=NEW_PASS, count=9)
grants = client.call(call).grants
done = Acknowledgement(task=grants[0].task, attempt=1, upto=1)
client.call(ReportCall(**named, request=1, acknowledgements=(done,)))
while not client._heartbeats["victim"].listener.standing:
    time.sleep(0.01)
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        print(os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
else:
    print(0, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("children", ["none", "fork"])
def test_killed_trainer_gives_its_records_back_after_the_grace(start_master, children):
    master = start_master("--grace-s", "0.2", "--lease-timeout-s", "600")
    trainer = preloaded.Popen(
        [sys.executable, "-W", "ignore", "-c", TRAINER, master.address, children],
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(trainer.stdout.readline())
    client = master.client()
    register(client, "heir")
    trainer.kill()
    got = []
    for request in range(1, 20):
        got += [g.slice for g in lease(client, "heir", request, 5.0, epoch=0, count=9).grants]
        if sum(s.limit for s in got) == 7:
            break
    assert sorted(s.shard * 4 + p for s in got for p in range(s.skip, s.stop)) == list(range(1, 8))
    if child:
        os.kill(child, signal.SIGKILL)
    trainer.communicate()


FORKING = """
import os, sys, threading, uuid
from edl_torch.client.grpc.client import MasterClient
from edl_torch.core.calls import *
from edl_torch.testing.fake_master import Listening, wait_until
from edl_torch.shard import Source

client = MasterClient(sys.argv[1], "parent")
registration = Registration(name="d", sources=(Source(name="", count=8),))
client.call(RegisterCall(session="parent", worker_id="parent", batch_size=2, registration=registration))
client.attend("parent", 1, Listening(1))
stop = threading.Event()
def load():
    while not stop.is_set():
        client.status()
threads = [threading.Thread(target=load) for _ in range(3)]
[thread.start() for thread in threads]
for number in range(20):
    child = os.fork()
    if child == 0:
        if number % 4 == 1:
            client.leave("parent", 1)
            client.close()
        if number % 4 == 2:
            sys.exit(0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    client.status()
stop.set()
[thread.join() for thread in threads]
wait_until(lambda: client._heartbeats["parent"].listener.standing)
client.close()
"""


@pytest.mark.parametrize("fork_support", [None, pytest.param("1", marks=pytest.mark.long)])
def test_forking_under_load_neither_hangs_nor_speaks(start_master, fork_support):
    master = start_master()
    env = {k: v for k, v in os.environ.items() if k != "GRPC_ENABLE_FORK_SUPPORT"}
    if fork_support:
        env["GRPC_ENABLE_FORK_SUPPORT"] = fork_support
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING, master.address],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [line for line in done.stderr.splitlines() if "GRPC_ENABLE_FORK_SUPPORT=1" not in line]
    assert (done.returncode, said) == (0, [])
    client = master.client()
    wait_until(lambda: not client.status().trainers, what="the parent's stream to break at its end")


def test_a_master_ends_with_the_process_that_it_is_beside(make_master: MakeMaster) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    master = make_master("--with-process", str(other.pid))
    master.start()
    other.kill()
    other.wait(60)
    assert master.process.wait(60) == 0
    other.stdin.close()


# `edl-torch master` makes the shards of every reader's data itself; trainers only name the dataset ----------


NAMES = {"training": TaskType.TRAINING, "evaluation": TaskType.EVALUATION, "prediction": TaskType.PREDICTION}
OWN_READER = """
from edl_torch import AbstractDataReader


class Numbers(AbstractDataReader):
    def __init__(self, data_origin, step=1):
        super().__init__()
        self.name, self.step = data_origin, step

    def create_shards(self, mode):
        return [(self.name, 100, 4 * int(mode))]

    def read_records(self, task):
        return (self.step * number for number in range(task.start, task.end))
"""


def drain(address: str, name: str, reader: Any) -> tuple[list[tuple[int, str, int]], Any]:
    """All of a dataset by a trainer that knows its name and how to read: (epoch, source, record), status."""
    client = MasterClient(address, "test", master_timeout_s=60)
    seen = []
    try:
        with DataShardService(2, client, dataset_name=name, task_type=NAMES[name]) as service:
            loader = ElasticDataLoader(ShardedDataset(service, reader), collate_fn=list)
            while not service.finished:
                for batch in loader:
                    assert len(batch) == len(loader.records)
                    seen += [(loader.epoch, *record) for record in loader.records]
            return seen, service.progress()
    finally:
        client.close()


@cases("kind", ["image_folder", "csv"], KINDS)
def test_trainers_of_every_reader_only_name_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_master: MakeMaster, kind: str
) -> None:
    with made(kind, tmp_path / "data") as data:
        for name, value in data.environment.items():
            monkeypatch.setenv(name, value)
        options = (f"--{name}_data={data.data}" for name in ("training", "validation", "prediction"))
        address = start_master(*options, "--records_per_task", "3", "--num_epochs", "2").address
        for (name, mode), count in zip(NAMES.items(), data.counts, strict=True):
            reader = open_reader(data.data, mode)
            assert type(reader).__name__ == data.reader
            seen, status = drain(address, name, reader)
            epochs = 1 if name == "prediction" else 2
            assert (status.size, status.num_epochs, status.task_type) == (count, epochs, mode)
            assert status.shards >= -(-count // 3)
            assert len(seen) == len(set(seen)) == count * epochs == status.acknowledged


def test_a_reader_of_ones_own_gets_path_mode_and_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_master: MakeMaster
) -> None:
    (tmp_path / "own_reader.py").write_text(OWN_READER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = (
        *("--training_data", "here", "--prediction_data", "there"),
        *("--custom_data_reader", "own_reader:Numbers", "--custom_data_reader_params", "step=5"),
    )
    address = start_master(*arguments).address
    for name, place in (("training", "here"), ("prediction", "there")):
        reader = load_reader("own_reader:Numbers", {"data_origin": place, "step": 5})
        seen, _ = drain(address, name, reader)
        assert sorted(seen) == [(0, place, 100 + n) for n in range(4 * int(NAMES[name]))]
