"""A loader worker ends when its trainer was killed, though it has batches that nobody will take.

torch's worker sees that its parent is gone and leaves its loop; but then the thread of its queue wants to be
rid of a batch, and waits for ever where the pipe is full: the other workers hold the end that is read. This
must not know what a worker does.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

LOOK_S = 2.0
PATIENCE_S = 8.0  # for an end of its own: torch looks every 5 s


def end_with_trainer() -> None:
    """End this process, at the latest some seconds after its parent."""
    trainer, parent = multiprocessing.parent_process(), os.getppid()

    def watch() -> None:
        # Both: it may be gone before this began, and workers forked later hold its other sign of life.
        while os.getppid() == parent and (trainer is None or trainer.is_alive()):
            time.sleep(LOOK_S)
        time.sleep(PATIENCE_S)
        os._exit(1)

    threading.Thread(target=watch, name="edl-orphan", daemon=True).start()
