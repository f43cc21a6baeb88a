"""Waiting for the end of another process of this machine, to end with it.

It must not know whose process that is.
"""

from __future__ import annotations

import os
import select
import time

LOOK_S = 0.5  # where the system has no pidfd


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
