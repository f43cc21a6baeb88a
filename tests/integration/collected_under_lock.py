"""A process in which the garbage collector runs at the worst moment: `python collected_under_lock.py`.

The thread that calls the master is about to take the session's lock. The training loop holds it, and there
the collector finds an iterator that nobody uses any more. The process prints `done`; one that hangs shows all
stacks after a while and ends with status 1. Run it with `PYTHONPATH=tests`.
"""

from __future__ import annotations

import faulthandler
import threading

from checked_locks import Watch, checked_locks
from loader_kit import acknowledged, elastic, numbers, once, trainer

from edl_torch.testing import FakeMaster

LIMIT_S = 60.0
LOCK = "Session._lock"


def main() -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    with checked_locks() as watch:
        fake = FakeMaster()
        with trainer(fake, {"a": 120}, in_process=False, records_per_shard=40) as (service, dataset):
            caller_waits, lock_is_held = schedule(watch)
            loader = elastic(dataset)
            iterator = iter(loader)
            first = numbers(next(iterator))
            assert caller_waits.wait(LIMIT_S)
            abandoned = [iterator]
            del iterator

            def collect(name: str, held: tuple[str, ...]) -> None:
                if name == LOCK and threading.current_thread() is threading.main_thread():
                    watch.on_acquired = lambda name, held: None
                    lock_is_held.set()
                    abandoned.clear()

            watch.on_acquired = collect
            service.report_batch_done()
            assert not abandoned
            assert acknowledged(fake, service) == once(first)
            assert service.record_count == 0
    print("done")


def schedule(watch: Watch) -> tuple[threading.Event, threading.Event]:
    """Two events: the thread that calls is about to take the lock, and it goes on."""
    waits, goes_on = threading.Event(), threading.Event()

    def stop(name: str, held: tuple[str, ...]) -> None:
        if name == LOCK and threading.current_thread().name == "edl-calls":
            waits.set()
            goes_on.wait(LIMIT_S)

    watch.before_acquiring = stop
    return waits, goes_on


if __name__ == "__main__":
    main()
