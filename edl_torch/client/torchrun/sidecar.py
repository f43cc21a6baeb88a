"""The master of a torchrun job: a process beside an agent, which outlives workers, and ends with the agent.

Its certificate and token come from the variables that the job's trainers have: all nodes of a job are alike.
Workers agree through the job's own store who starts it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edl_torch.client.environment import page_address_from_env
from edl_torch.client.torchrun.job import Job, join_job
from edl_torch.errors import EdlError, InvalidArgument, MasterStartError
from edl_torch.rpc.credentials import AccessToken, Credentials, text_from_env
from edl_torch.system.address import Address, HostPort, Source, address_towards, parse_address

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarCredentials:
    """Files of the job's own master for TLS and its token.

    Attributes:
        token_file: of the token that it asks for; None: it asks for none.
        cert, key: its certificate; None: no TLS.
        ca: the authority of the certificates that it asks callers for; None: for none.
        insecure: whether the user said that the network is his own.
    """

    token_file: str | None = None
    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    insecure: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> SidecarCredentials:
        """From the variables of `Credentials.from_env`. Raises InvalidArgument where they do not fit."""
        given = Credentials.from_env(env)  # its checks
        own = cls(
            token_file=text_from_env("TOKEN_FILE", env),
            cert=text_from_env("TLS_CERT", env),
            key=text_from_env("TLS_KEY", env),
            ca=text_from_env("TLS_CA", env),
            insecure=given.insecure,
        )
        if given.tls and own.cert is None:
            raise InvalidArgument(
                "TLS is asked for, but the master that this job starts has no certificate, and it may be on "
                "any node: give all nodes EDL_MASTER_TLS_CERT and EDL_MASTER_TLS_KEY, a certificate for "
                "servers and clients, and in EDL_MASTER_TLS_NAME the name in it (see docs/torchrun.md); or "
                "start `edl-torch master` yourself and name it in EDL_MASTER_ADDR"
            )
        return own

    def options(self, *, exposed: bool) -> list[str]:
        """For `edl-torch master`. `exposed` says that other machines can reach it."""
        options = []
        if self.token_file is not None:
            options += ["--token-file", self.token_file]
        if self.cert is not None and self.key is not None:
            options += ["--tls-cert", self.cert, "--tls-key", self.key]
            if self.ca is not None:
                options += ["--tls-client-ca", self.ca]
        elif exposed:  # no wider open than the job's own store, which is torch's: docs/decisions/0020
            options += ["--insecure"]
        return options


# Where it is ------------------------------------------------------------------------------------------

CONNECT_S = 2.0
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterEntry:
    """A master's address, and what it asks its callers for; or why there is none.

    Attributes:
        address: `host:port`.
        token: that the master was given for this job alone; '' where it asks for none, or for the user's own.
        network: where a loopback address is meant; '' where the address is good anywhere.
        error: of the worker that could not start it.
    """

    address: str = ""
    token: str = field(default="", repr=False)
    network: str = ""
    error: str = ""

    @classmethod
    def of(cls, address: str, token: str = "") -> MasterEntry:
        """Of a master that listens there, seen from this machine."""
        local = all(ip.is_loopback for ip in parse_address(address).resolve())
        return cls(address=address, token=token, network=this_network() if local else "")

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: bytes) -> MasterEntry:
        """The reverse of `text`."""
        return cls(**json.loads(text))

    @property
    def answers(self) -> bool:
        """Whether a master answers there. Raises MasterStartError where this process cannot reach it."""
        return bool(self.address) and answers(self.here().address)

    def here(self) -> MasterEntry:
        """Itself, where this process can use it. Raises MasterStartError."""
        if self.error:
            raise MasterStartError(f"another worker could not start this job's master: {self.error}")
        if self.network and self.network != this_network():
            raise MasterStartError(
                f"this job's master listens on {self.address} of another node only, for the job began there "
                "alone and torchrun's --nnodes did not say that it may grow: start it again with "
                "EDL_MASTER_INSECURE=1 on all nodes, or start `edl-torch master` yourself and name it in "
                "EDL_MASTER_ADDR"
            )
        return self


def this_network() -> str:
    """A name of what 127.0.0.1 means to this process: containers of one machine have each their own."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def answers(address: str) -> bool:
    """Whether something listens there. A machine that is silent gets a few seconds."""
    where = parse_address(address)
    deadline = time.monotonic() + ANSWER_S
    while True:
        try:
            socket.create_connection((where.host, where.port), CONNECT_S).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            if time.monotonic() >= deadline:
                return False
        else:
            return True


# The process ------------------------------------------------------------------------------------------

START_S = 50.0
LOOK_S = 0.02
LOG_END = 2000  # characters of the log that are shown
_LOG, _ADDRESS, _TOKEN = (f"edl_torch_master.{what}" for what in ("log", "address", "token"))


class Sidecar:
    """The master as a process beside an agent, also when an earlier worker of that agent started it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._folder = job.log_dir

    def running(self) -> MasterEntry | None:
        """A master beside this agent, if it answers."""
        if self._folder is None:
            return None
        try:
            address = (self._folder / _ADDRESS).read_text().strip()
            secret = self._folder / _TOKEN
            token = secret.read_text().strip() if secret.exists() else ""
        except OSError:
            return None
        return MasterEntry.of(address, token) if answers(address) else None

    def start(self) -> MasterEntry:
        """Start it and wait until it serves. Raises MasterStartError with what it said."""
        own = SidecarCredentials.from_env()
        host = _host(self._job, open_anyway=own.insecure)
        exposed = not host.is_loopback
        try:
            folder = self._folder or Path(tempfile.mkdtemp(prefix="edl_torch_"))
            log, address, secret = (folder / name for name in (_LOG, _ADDRESS, _TOKEN))
            for file in (address, secret):
                file.unlink(missing_ok=True)
            token = ""
            if exposed and own.token_file is None:
                token = secrets.token_urlsafe(32)
                # Nobody else could ever read it.
                number = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with open(number, "w") as output:
                    output.write(f"{token}\n")
                own = replace(own, token_file=str(secret))
            process = _launch([*_command(self._job, host, address), *own.options(exposed=exposed)], log)
        except OSError as exc:  # the others must hear of it
            raise MasterStartError(f"this job's master cannot be started: {exc}") from exc
        return MasterEntry.of(_await(process, address, log), token)


def _launch(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # torchrun ends a worker with all of its process group
        )
    threading.Thread(target=process.wait, name="edl-master-reaper", daemon=True).start()
    return process


def _command(job: Job, host: Address, address_file: Path) -> list[str]:
    command = [sys.executable, "-m", "edl_torch", "master", "--addr", str(HostPort(str(host), 0))]
    command += ["--address-file", str(address_file), "--with-process", str(job.agent)]
    state = os.environ.get("EDL_MASTER_STATE", "").strip()
    if state:
        command += ["--state", state]
    if page := page_address_from_env():
        command += ["--http", page]
    return command


def _await(process: subprocess.Popen[bytes], address: Path, log: Path) -> str:
    deadline = time.monotonic() + START_S
    while not address.exists():
        ended = process.poll() is not None
        if ended or time.monotonic() >= deadline:
            process.kill()
            said = log.read_text(errors="replace")[-LOG_END:].strip()
            what = (
                f"ended with status {process.returncode}" if ended else f"did not serve within {START_S:g} s"
            )
            raise MasterStartError(f"this job's master {what}. Its log, {log}, ends with: {said}")
        time.sleep(LOOK_S)
    return address.read_text().strip()


def _host(job: Job, *, open_anyway: bool) -> Address:
    """Where it listens: on the way to the other nodes, if there are or may be any."""
    if job.nodes == 1 and not (job.most_nodes > 1 or open_anyway):
        return ipaddress.IPv4Address("127.0.0.1")
    return this_side(job)


def this_side(job: Job, source: Source | None = None) -> Address:
    """This machine's address on its way to the job's store; nothing is sent."""
    try:
        return address_towards(job.host, job.port, source)
    except OSError as exc:
        raise MasterStartError(f"there is no way to MASTER_ADDR={job.host}: {exc}") from exc


# How workers agree on it ------------------------------------------------------------------------------

CLAIM_S = 60.0  # from a worker's claim to start the master until the others try it
NODES_S = 10.0  # how long a word from each node is waited for


def master_of_job() -> tuple[str, Credentials]:
    """Return the address of this job's master, which is started where there is none, and credentials for it.

    Also ties this process to its torchrun agent: it ends, as the agent would end it, when the agent is gone.
    Raises MasterStartError where no master can be started, InvalidArgument for an environment that is not
    torchrun's.
    """
    job = Job.from_env()
    entry = MasterFinder(job, join_job(job)).find()
    return entry.address, _credentials(entry)


def _credentials(entry: MasterEntry) -> Credentials:
    """The user's own; a token of the job's may go where the job's other words go, without TLS too."""
    given = Credentials.from_env()
    if not entry.token:
        return given
    return replace(given, token=AccessToken(entry.token.encode()), insecure=True)


class MasterFinder:
    """One worker's part in the agreement on the master.

    Masters of a job have numbers, from 1. The first worker to claim a number starts that master and writes
    its entry; the others read it. A master that does not answer is followed by the next number.
    """

    def __init__(self, job: Job, store: Store, sidecar: Sidecar | None = None) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        self._job = job
        self._store = PrefixStore(f"edl_torch/{job.run_id}/master", store)
        self._sidecar = Sidecar(job) if sidecar is None else sidecar

    def find(self) -> MasterEntry:
        number, newest = self._seen()
        if newest is not None and newest.answers:
            return newest
        if number == 1:
            kept = self._sidecar.running() or MasterEntry()
            self._store.set(f"node/{self._job.node}", kept.text)
        while True:
            if self._store.add(f"claim/{number}", 1) == 1:
                return self._write(number, self._from_before if number == 1 else self._sidecar.start)
            if _within(CLAIM_S, partial(self._store.check, [f"entry/{number}"])):
                return self._read(number).here()
            number += 1

    def _seen(self) -> tuple[int, MasterEntry | None]:
        """The first number without an entry that may still come, and the newest entry.

        A number whose entry is missing, with later ones claimed, belongs to a worker that died on the way.
        """
        number, newest = 1, None
        while self._store.check([f"claim/{number}"]):
            if self._store.check([f"entry/{number}"]):
                newest = self._read(number)
            elif not self._store.check([f"claim/{number + 1}"]):
                return number, newest
            number += 1
        return number, newest

    def _from_before(self) -> MasterEntry:
        """A master that an agent has kept from before this store, else a new one."""
        keys = [f"node/{node}" for node in range(self._job.nodes)]
        _within(NODES_S, lambda: self._store.check(keys))
        for key in keys:
            if self._store.check([key]):
                kept = MasterEntry.read(self._store.get(key))
                if kept.answers:
                    return kept
        return self._sidecar.start()

    def _write(self, number: int, make: Callable[[], MasterEntry]) -> MasterEntry:
        try:
            entry = make()
        except EdlError as error:  # the others must not wait for it
            self._store.set(f"entry/{number}", MasterEntry(error=str(error)).text)
            raise
        self._store.set(f"entry/{number}", entry.text)
        return entry

    def _read(self, number: int) -> MasterEntry:
        return MasterEntry.read(self._store.get(f"entry/{number}"))


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_S)
    return True
