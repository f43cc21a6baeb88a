"""The master as a process beside a torchrun agent: it outlives workers, and ends with the agent.

It must not know how workers agree on who starts it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

from edl_torch.errors import InvalidArgument, MasterStartError
from edl_torch.integrations.job import Job
from edl_torch.integrations.notice import HOW_TO_OPEN, answers
from edl_torch.rpc.address import HostPort, plain_ip

START_S = 50.0
LOOK_S = 0.02
LOG_END = 2000  # characters of the log that are shown


class BesideAgent:
    """Starts the master; knows the one that an earlier worker of the same agent has started."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._folder = job.log_dir

    def running(self) -> str | None:
        """The address of a master beside this agent, if it answers."""
        if self._folder is None:
            return None
        try:
            address = _address_file(self._folder).read_text().strip()
        except OSError:
            return None
        return address if answers(address) else None

    def start(self) -> str:
        """Start it and wait until it serves. Raises MasterStartError with what it said."""
        _check_no_tls()
        host = _host(self._job)
        folder = self._folder or Path(tempfile.mkdtemp(prefix="edl_torch_"))
        log, address = folder / "edl_torch_master.log", _address_file(folder)
        address.unlink(missing_ok=True)
        with open(log, "ab") as output:
            process = subprocess.Popen(
                _command(self._job, host, address),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # torchrun ends a worker with all of its process group
            )
        threading.Thread(target=process.wait, name="edl-master-reaper", daemon=True).start()
        return _await(process, address, log)


def _address_file(folder: Path) -> Path:
    return folder / "edl_torch_master.address"


def _command(job: Job, host: str, address_file: Path) -> list[str]:
    command = [sys.executable, "-m", "edl_torch", "master", "--addr", str(HostPort(host, 0))]
    command += ["--address-file", str(address_file), "--with-process", str(job.agent)]
    state = os.environ.get("EDL_MASTER_STATE", "").strip()
    if state:
        command += ["--state", state]
    token = os.environ.get("EDL_MASTER_TOKEN_FILE", "").strip()
    if token:
        command += ["--token-file", token]
    if not ipaddress.ip_address(host).is_loopback:
        command += ["--insecure"]
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


def _host(job: Job) -> str:
    """Where it listens: on the way to the other nodes if there may be any, else on this machine alone."""
    towards = _this_side(job)
    if towards.is_loopback:
        return str(towards)
    if _may_listen_to_network():
        return str(towards)
    if job.nodes == 1:
        return "127.0.0.1"
    raise MasterStartError(
        f"this job runs on {job.nodes} nodes, and no master is named: it would listen on {towards}, which "
        f"whoever reaches it may use: {HOW_TO_OPEN}"
    )


def _may_listen_to_network() -> bool:
    value = os.environ.get("EDL_MASTER_INSECURE", "").strip() or "0"
    if value not in ("0", "1"):
        raise InvalidArgument(f"EDL_MASTER_INSECURE is {value!r}: it must be 0 or 1")
    return value == "1"


def _check_no_tls() -> None:
    for name in ("EDL_MASTER_TLS", "EDL_MASTER_TLS_CA", "EDL_MASTER_TLS_CERT"):
        if os.environ.get(name, "").strip() not in ("", "0"):
            raise InvalidArgument(
                f"{name} is set, but a master that this job starts has no certificate, for it may be on any "
                "node: start `edl-torch master` yourself and name it in EDL_MASTER_ADDR"
            )


def _this_side(job: Job) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """This machine's address on its way to the job's store; nothing is sent."""
    try:
        row = socket.getaddrinfo(job.host, job.port, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(row[0], row[1], row[2])) as probe:
            probe.connect(row[4])
            return plain_ip(str(probe.getsockname()[0]))
    except OSError as exc:
        raise MasterStartError(f"there is no way to MASTER_ADDR={job.host}: {exc}") from exc
