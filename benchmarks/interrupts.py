"""Of 1,000 Ctrl-C in a notebook, how many leave a session that somebody must begin anew.

`python benchmarks/interrupts.py [--workers 2] [--interrupts 1000] [--step-ms 8]`. A cell trains; Ctrl-C comes
at a random moment, to the loader workers too, as at a terminal; the cell is run again. Where the loader
refuses, a new one takes its place.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
import warnings
from collections import Counter
from typing import Any

import torch

from edl_torch import ElasticDataLoader
from edl_torch.errors import ServiceClosed

RECORDS, BATCH = 1024, 4
WITHIN_S = 0.05, 0.5  # of a cell's start


class Notebook:
    """A model that learns each record once, its loader, and a cell that trains."""

    def __init__(self, workers: int, step_s: float) -> None:
        self._workers = workers
        self._step_s = step_s
        self.wrong = self.right = 0  # records of models that were trained to the end
        self.begin()

    def begin(self) -> None:
        """Take a new model and loader."""
        self.steps = False  # what a step that is cut off has changed is not known
        self._learnt: Any = torch.zeros(RECORDS, requires_grad=True)
        self._optimizer = torch.optim.SGD([self._learnt], lr=1.0)
        self._loader = ElasticDataLoader(
            torch.arange(RECORDS), BATCH, shuffle=True, num_workers=self._workers
        )
        self._loader.attach(self._optimizer)

    def run(self) -> None:
        """Run the cell, to the end of the data."""
        for batch in self._loader:
            self._optimizer.zero_grad()
            (-self._learnt[batch].sum()).backward()
            end = time.perf_counter() + self._step_s
            while time.perf_counter() < end:
                pass
            self.steps = True
            self._optimizer.step()
            self.steps = False

    def end(self) -> None:
        """Count what the model has learnt once, and what not."""
        self._loader.close()
        right = int((self._learnt == 1).sum())
        self.right += right
        self.wrong += RECORDS - right

    def refuses(self) -> bool:
        """Whether the loader cannot go on."""
        try:
            self._loader.progress()
        except ServiceClosed as error:
            return "cut off in its middle" in str(error)
        return False

    def close(self) -> None:
        """Give the loader up."""
        self._loader.close()


def press(after_s: float, came: threading.Event) -> None:
    """Ctrl-C, and again where Python loses it in a finaliser."""
    while not came.wait(after_s):
        os.killpg(0, signal.SIGINT)
        after_s = 5.0


def train(notebook: Notebook, after_s: float) -> str:
    """Train until one Ctrl-C comes. Returns what that cut off: "decision", "step" of the model, or ""."""
    came = threading.Event()
    presses = threading.Thread(target=press, args=(after_s, came))
    presses.start()
    try:
        while True:
            try:
                notebook.run()
            except ServiceClosed:  # the last Ctrl-C came between two models
                notebook.close()
            else:
                notebook.end()
            notebook.begin()
    except KeyboardInterrupt:
        came.set()
        presses.join()
    cut = "decision" if notebook.refuses() else "step" if notebook.steps else ""
    if cut:
        notebook.close()  # and the next cell begins with another
    return cut


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--interrupts", type=int, default=1000)
    arguments.add_argument("--step-ms", type=float, default=8)
    arguments.add_argument("--seed", type=int, default=1)
    options = arguments.parse_args()
    if os.getpgrp() != os.getpid():
        os.setpgrp()  # a terminal's Ctrl-C goes to its job alone
    warnings.filterwarnings("ignore", "the loop was left")
    chance = random.Random(options.seed)
    notebook = Notebook(options.workers, options.step_ms / 1e3)
    cut = Counter(train(notebook, chance.uniform(*WITHIN_S)) for _ in range(options.interrupts))
    notebook.close()
    print(
        f"{options.workers} workers, {options.step_ms:g} ms a batch, load {os.getloadavg()[0]:.1f}: "
        f"after {cut['decision']} of {options.interrupts} Ctrl-C the loader refused to go on, {cut['step']} "
        f"cut off a step. Of models that were trained to the end {notebook.right} records were "
        f"learnt once, {notebook.wrong} not"
    )


if __name__ == "__main__":
    main()
