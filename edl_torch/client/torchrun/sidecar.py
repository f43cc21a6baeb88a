"""The master as a process beside a torchrun agent: it outlives workers, and ends with the agent.

It must not know how workers agree on who starts it.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from edl_torch.client.torchrun.credentials import SidecarCredentials
from edl_torch.client.torchrun.job import Job
from edl_torch.client.torchrun.master_entry import MasterEntry, answers
from edl_torch.errors import MasterStartError
from edl_torch.system.address import Address, HostPort, Source, address_towards

START_S = 50.0
LOOK_S = 0.02
LOG_END = 2000  # characters of the log that are shown


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
            address = _address_file(self._folder).read_text().strip()
            token = _read_if_there(_token_file(self._folder))
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
            log, address = folder / "edl_torch_master.log", _address_file(folder)
            for file in (address, _token_file(folder)):
                file.unlink(missing_ok=True)
            token = ""
            if exposed and own.token_file is None:
                token = secrets.token_urlsafe(32)
                own = own.with_token(_write_secret(_token_file(folder), token))
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


def _address_file(folder: Path) -> Path:
    return folder / "edl_torch_master.address"


def _token_file(folder: Path) -> Path:
    return folder / "edl_torch_master.token"


def _read_if_there(file: Path) -> str:
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        return ""


def _write_secret(file: Path, text: str) -> Path:
    """Write a file that nobody else ever could read."""
    number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(number, "w") as output:
        output.write(f"{text}\n")
    return file


def _command(job: Job, host: Address, address_file: Path) -> list[str]:
    command = [sys.executable, "-m", "edl_torch", "master", "--addr", str(HostPort(str(host), 0))]
    command += ["--address-file", str(address_file), "--with-process", str(job.agent)]
    state = os.environ.get("EDL_MASTER_STATE", "").strip()
    if state:
        command += ["--state", state]
    page = os.environ.get("EDL_HTTP", "").strip()
    if page:
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
    return _this_side(job)


def _this_side(job: Job, source: Source | None = None) -> Address:
    """This machine's address on its way to the job's store; nothing is sent."""
    try:
        return address_towards(job.host, job.port, source)
    except OSError as exc:
        raise MasterStartError(f"there is no way to MASTER_ADDR={job.host}: {exc}") from exc
