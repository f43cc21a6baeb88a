"""The demo: two ranks train one model, are killed on the way, and prove that nothing was lost or came twice.

    python examples/coco/demo.py
    python examples/coco/demo.py --quiet

It starts a master that keeps a journal and `train.py --demo` under torchrun, kills a rank and the master, and
lets `edl-torch audit` judge what the ranks wrote down. Other arguments go to train.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from options import parse

from edl_torch import MasterClient
from edl_torch.cli.main import main as edl_torch
from edl_torch.core.status import DatasetStatus, MasterStatus
from edl_torch.errors import EdlError, InvalidArgument

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KILL_RANK, KILL_MASTER = 0.3, 0.6  # of all training
LOOK_S = 0.1
AWAY_S = 3.0  # the master is dead for so long
START_S, STOP_S = 60.0, 40.0
OF_A_RUN = ("audit", "checkpoints", "journal", "logs")  # of an earlier run: this one begins at the beginning
TAIL = 30  # lines of the log, where the job fails


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. 0: trained, and proven; 2: wrong input; else what failed."""
    parser = argparse.ArgumentParser(prog="demo.py", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), metavar="DIR", help="(runs/demo)")
    parser.add_argument("--quiet", action="store_true", help="kill nobody")
    options, rest = parser.parse_known_args(argv)
    try:
        parse(["--demo", *rest])  # wrong input is said at once, and not by each rank
    except InvalidArgument as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    for name in OF_A_RUN:
        shutil.rmtree(options.output / name, ignore_errors=True)
    (options.output / "logs").mkdir(parents=True)
    master = Master(options.output)
    try:
        return run(master, options.output, quiet=options.quiet, arguments=rest)
    except EdlError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        master.stop()


def run(master: Master, output: Path, *, quiet: bool, arguments: Sequence[str]) -> int:
    """The whole story; returns the exit status."""
    say("The master deals out the records, and keeps a journal of it:")
    master.start()
    say("Two ranks train one model (DDP, under torchrun) on generated pictures with captions.")
    job = Job(master.address, output, arguments)
    try:
        if not quiet:
            kill_rank(master, job)
            kill_master(master, job)
        status = job.wait()
    finally:
        job.stop()
    if status:
        print(job.last_words, file=sys.stderr)
        return status
    page = output / "audit.html"
    say("Each rank wrote down what it trained on. The audit judges that, with the master's journal.")
    say(f"What it finds is drawn in {page}, and in short:")
    judged = ("--state", str(output / "journal"), "--html", str(page))
    return edl_torch(["audit", str(output / "audit"), *judged])


def kill_rank(master: Master, job: Job) -> None:
    """Kill rank 1 when a part of the training is done and there is a checkpoint to go on from."""
    saved = job.output / "checkpoints"
    job.wait_until(lambda: master.share >= KILL_RANK and any(saved.glob("[0-9]*")) and 1 in master.ranks)
    pid = master.ranks[1]
    os.kill(pid, signal.SIGKILL)
    say(f"{master.share:.0%} of the training is done. Rank 1 was just killed (kill -9 {pid}).")
    say("torchrun starts both again. They go on from the last checkpoint, model and position in the data.")


def kill_master(master: Master, job: Job) -> None:
    """Kill the master later, and start it again."""
    job.wait_until(lambda: master.share >= KILL_MASTER)
    say(f"{master.share:.0%} of the training is done. Now the master is killed (kill -9 {master.pid}).")
    master.kill()
    say(f"The ranks finish the batch in hand, and wait. In {AWAY_S:.0f} s it is started again:")
    time.sleep(AWAY_S)
    master.start()
    say("It goes on from its journal, and so do the ranks: nobody else had to start again.")


class Master:
    """`edl-torch master` with a journal in `output`, at one address however often it starts."""

    def __init__(self, output: Path) -> None:
        self.address = f"127.0.0.1:{_free_port()}"
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._page = f"127.0.0.1:{_free_port()}" if find_spec("aiohttp") else ""  # edl-torch[web]
        self._client = MasterClient(self.address, "demo", master_timeout_s=2.0)

    def __repr__(self) -> str:
        return f"<Master {self.address} pid={self.pid}>"

    @property
    def pid(self) -> int:
        """Its process; 0 before it was started."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it, and say where it is when it serves."""
        command = [sys.executable, "-m", "edl_torch", "master", "--addr", self.address]
        command += ["--state", str(self._output / "journal")]
        command += ["--http", self._page] if self._page else []
        with (self._output / "logs" / "master.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
        deadline = time.monotonic() + START_S
        while self.status() is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise EdlError(f"the master does not start: see {self._output / 'logs' / 'master.log'}")
            time.sleep(LOOK_S)
        say(f"    {' '.join(['edl-torch', *command[3:]])}  (pid {self.pid})")
        if self._page:
            say(f"    Watch it at http://{self._page}/")

    def status(self) -> MasterStatus | None:
        """What it says of itself; None while it does not answer."""
        try:
            return self._client.status()
        except EdlError:
            return None

    @property
    def share(self) -> float:
        """How much of the training is done, of 0 to 1."""
        status = self.status()
        return _share(status.datasets[0]) if status is not None and status.datasets else 0.0

    @property
    def ranks(self) -> dict[int, int]:
        """The process of each rank: both are in a trainer's label, `host-rank-pid`."""
        status = self.status()
        labels = [] if status is None else [trainer.worker_id.split("-") for trainer in status.trainers]
        return {int(rank): int(pid) for *_, rank, pid in labels}

    def kill(self) -> None:
        """As the kernel or a power failure would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """End it."""
        self._client.close()
        _end(self._process)


class Job:
    """`train.py --demo` under torchrun with two ranks."""

    def __init__(self, master: str, output: Path, arguments: Sequence[str]) -> None:
        self.output = output
        self._log = output / "logs" / "torchrun.log"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=0.2"]
        command += [str(HERE / "train.py"), "--demo", "--output", str(output)]
        command += [
            "--audit",
            str(output / "audit"),
            "--batch-size",
            "16",
            "--workers",
            "0",
            "--threads",
            "1",
        ]
        env = environment() | {"EDL_MASTER_ADDR": master, "OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([*command, *arguments], stderr=log, env=env)

    def __repr__(self) -> str:
        return f"<Job pid={self._process.pid}>"

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition, or the end. Raises EdlError where the end came first."""
        while not condition():
            if self.over:
                raise EdlError(f"the job ended before anybody was killed:\n{self.last_words}")
            time.sleep(LOOK_S)

    def wait(self) -> int:
        """Wait for the end; the exit status."""
        return self._process.wait()

    def stop(self) -> None:
        """End it, if it goes on."""
        _end(self._process)

    @property
    def last_words(self) -> str:
        """The end of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-TAIL:])


def say(text: str) -> None:
    """One line, in place of the progress line that a rank may have drawn there."""
    print(f"\r{text:<100}" if sys.stdout.isatty() else text, flush=True)


def environment() -> dict[str, str]:
    """Ours, without what would lead the processes to another master or job."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("EDL_", "TORCHELASTIC"))
    }
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths)}


def _share(dataset: DatasetStatus) -> float:
    return dataset.acknowledged / (dataset.size * dataset.num_epochs)


def _free_port() -> int:
    """One that no outgoing connection gets: the master is away for a while, and comes back to it."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
