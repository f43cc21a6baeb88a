"""Processes of this machine that end when another one has ended.

It must not know what either of them does.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import threading
import time

LOOK_S = 0.5  # where the system has no pidfd
PATIENCE_S = 8.0  # for an end of its own: torch looks every 5 s


def until_gone(pid: int) -> None:
    """Return once the process `pid` has ended; at once where there is none."""
    try:
        number = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux; a kernel before 5.3; a sandbox that forbids it
        _poll_until_gone(pid)
        return
    try:
        poll = select.poll()
        poll.register(number, select.POLLIN)
        poll.poll()
    finally:
        os.close(number)


def _poll_until_gone(pid: int) -> None:
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        except PermissionError:  # it lives, under another user
            pass
        time.sleep(LOOK_S)


def end_with_parent() -> None:
    """End this process, a child made with `multiprocessing`, at the latest some seconds after its parent.

    A loader worker of torch would leave its loop, and then wait for ever to be rid of a batch that nobody
    takes: where the pipe is full, and other workers hold the end that is read.
    """
    parent = multiprocessing.parent_process()  # under forkserver too
    if parent is None or parent.pid is None:
        return

    def watch(pid: int = parent.pid) -> None:
        until_gone(pid)  # `parent.is_alive()` would not tell: children forked later hold that sign of life
        time.sleep(PATIENCE_S)
        os._exit(1)

    threading.Thread(target=watch, name="edl-orphan", daemon=True).start()
