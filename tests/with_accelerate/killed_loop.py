"""A job of Accelerate's that is killed again and again, and goes on from Accelerate's own states.

One program runs all attempts of a job, each in forked processes, so that torch and Accelerate are imported
once. An attempt dies where a random draw says; the last one lives. It writes what its model has learnt as
JSON. With several ranks the master is at `EDL_MASTER_ADDR`, else in the process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import warnings
from pathlib import Path

import torch
import torch._dynamo  # else the first optimizer does, in every attempt
import torch.distributed as dist
from accelerate import Accelerator
from memory_model import BATCH, EPOCHS, RECORDS, Remembers, Tally

from edl_torch import ElasticDataLoader
from edl_torch.client.torchrun import init_process_group
from edl_torch.integrations.accelerate import prepare

PLACES = ("batch", "backward", "step", "batch over", "saving", "epoch over", "clock", "clock")


class Death:
    """Kills its process at the `count`-th time that it comes to `place`; never without one.

    By the clock it is after so many milliseconds, wherever that is.
    """

    def __init__(self, place: str = "", count: int = -1) -> None:
        self.place = place
        self.count = count

    def start(self) -> None:
        if self.place == "clock":
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # nothing of Python's runs when it comes
            signal.setitimer(signal.ITIMER_REAL, self.count / 1000)

    def at(self, place: str) -> None:
        self.count -= place == self.place
        if not self.count:
            os.kill(os.getpid(), signal.SIGKILL)


def newest(folder: Path) -> Path | None:
    """The state that was saved last, whole."""
    found = sorted(folder.glob("state-*"), key=lambda path: int(path.name.partition("-")[2]))
    return found[-1] if found else None


def fit(options: argparse.Namespace, death: Death, folder: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)
    death.start()
    with ElasticDataLoader(
        torch.arange(RECORDS),
        batch_size=BATCH,
        shuffle=True,
        num_epochs=EPOCHS,
        num_workers=options.workers,
        lookahead="told",
        synchronous=options.ranks > 1,
        records_per_shard=5,
        audit_dir=folder / "audit",
    ) as loader:
        memory = Remembers()
        model, optimizer = accelerator.prepare(memory, Tally(memory.counts, mean=options.ranks > 1))
        batches = prepare(accelerator, loader, optimizer)
        state = newest(folder)
        saved = 0 if state is None else int(state.name.partition("-")[2])
        if state is not None:
            accelerator.load_state(str(state))
        accelerator.wait_for_everyone()

        def save() -> None:
            nonlocal saved
            saved += 1
            accelerator.save_state(str(folder / "half"))
            death.at("saving")
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (folder / "half").rename(folder / f"state-{saved}")
            accelerator.wait_for_everyone()

        done = 0
        for _ in batches.epochs():
            for batch in batches:
                death.at("batch")
                with accelerator.accumulate(model):
                    loss = model(batch)
                    weighed = batches.weigh(loss.mean()) if options.ranks > 1 else loss.sum()
                    accelerator.backward(weighed)
                    death.at("backward")
                    if options.ranks > 1:
                        batches.scale_gradients(optimizer)
                    optimizer.step()
                    death.at("step")
                    optimizer.zero_grad()
                done += 1
                if options.every and done % options.every == 0:
                    save()
                death.at("batch over")
            death.at("epoch over")
            save()
        if accelerator.is_main_process:
            learnt = {"learnt": memory.learnt, "finished": loader.progress().finished}
            (folder / "learnt.json").write_text(json.dumps(learnt))
        accelerator.wait_for_everyone()


def run(options: argparse.Namespace, ranks: int, death: Death, folder: Path) -> bool:
    """One attempt, in processes of its own. Returns whether it came to its end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                if options.ranks > 1:
                    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
                    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                    os.environ["ACCELERATE_USE_CPU"] = "true"
                    init_process_group("gloo")
                fit(options, death if rank == ranks - 1 else Death(), folder)
                if dist.is_initialized():
                    dist.destroy_process_group()
                status = 0
            except BaseException as error:  # noqa: BLE001  the top of a process
                sys.stderr.write(f"rank {rank}: {type(error).__name__}: {error}\n")
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(pid)
    dying, statuses = children[-1], {}
    while len(statuses) < ranks:
        pid, status = os.wait()
        statuses[pid] = status
        if not status:
            continue
        if pid != dying and dying not in statuses:  # it has ended before, or nobody was killed
            statuses[dying] = os.waitpid(dying, os.WNOHANG)[1]
        if not os.WIFSIGNALED(statuses[dying]):
            sys.exit("an attempt failed by itself")
        for other in set(children) - set(statuses):
            os.kill(other, signal.SIGKILL)
    return not any(statuses.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=1, help="at most; each attempt has some")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--every", type=int, default=0, help="batches between states; 0: an epoch")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--torchrun", action="store_true", help="be one rank, the last of which dies once")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if options.torchrun:
        first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        init_process_group("gloo")
        last = dist.get_rank() == options.ranks - 1
        fit(options, Death("batch", 6) if first_life and last else Death(), options.folder)
        return
    chance = random.Random(options.seed)
    died = 0
    while died < options.kills:
        place = chance.choice(PLACES)
        most = {"epoch over": EPOCHS, "saving": EPOCHS + (options.every > 0) * 4, "clock": 1500}
        count = chance.randint(1, most.get(place, EPOCHS * RECORDS // BATCH // options.ranks))
        ranks = chance.randint(1, options.ranks)
        print(f"attempt of {ranks} rank(s), dies at {place} {count}", flush=True)
        if run(options, ranks, Death(place, count), options.folder):
            break  # less was left than it should have died in
        died += 1
    ranks = chance.randint(1, options.ranks)
    print(f"last attempt of {ranks} rank(s) after {died} death(s)", flush=True)
    if not run(options, ranks, Death(), options.folder):
        sys.exit("the last attempt failed")


if __name__ == "__main__":
    main()
