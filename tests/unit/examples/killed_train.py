"""`train.py` as a process that saves one checkpoint and is killed later, both at given batches.

    python killed_train.py SAVE_AT KILL_AT|saving ARGUMENTS…

With `saving` it is killed while it writes the next checkpoint, when that is whole but not in its place yet.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "coco"))

import checkpoint
import train


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DoomedTrainer(train.Trainer):
    save_at = 0
    kill_at = 0
    taken = 0

    def look_around(self, service: Any) -> None:
        self.taken += 1
        if self.taken == self.save_at:
            self.save(service)
        elif self.taken == self.save_at + 3 and not self.kill_at:
            checkpoint.os.replace = die
            self.save(service)
        elif self.taken == self.kill_at:
            die()


def main(save_at: str, kill_at: str, *arguments: str) -> int:
    DoomedTrainer.save_at = int(save_at)
    DoomedTrainer.kill_at = 0 if kill_at == "saving" else int(kill_at)
    train.Trainer = DoomedTrainer  # type: ignore[misc]
    return train.main(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
