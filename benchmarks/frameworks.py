"""What a step takes in another framework's loop with an ElasticDataLoader, and with a plain DataLoader.

    python benchmarks/frameworks.py [--only lightning accelerate …] [--workers 0 2] [--bare] [--json FILE]

Each framework that is installed trains the same model, a step of some 20 ms, in short rounds: a plain loader,
the elastic one, the plain one again, in one process. A ratio is that of the elastic loader to the mean of the
two beside it, so that a machine that gets slower or faster does so for both. The time of a step is that
between the ends of two steps of the optimizer; a round's is the median. With `--bare` the model takes next to
nothing, and the processor time of a step shows what the loaders themselves take.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from harness import parser, write_json
from torch.utils.data import DataLoader, Dataset

from edl_torch import ElasticDataLoader

WIDTH, BATCH = 1024, 64
STEPS, WARM = 25, 5  # of a round; the first ones are not counted: workers start
ROUNDS = 6  # at least: fewer have no interval
TARGET = 1.02
STEP_S = 0.03  # that a bare step's cost is compared with
Times = list[tuple[float, float]]  # of each step by the clock, and by this process's processor time


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows from memory."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((WIDTH,), index / self.size)}


class Layers(torch.nn.Module):
    """Some 20 ms a step on one thread."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)]
        self.layers = torch.nn.Sequential(*layers, torch.nn.ReLU())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}


class Clocked(torch.optim.SGD):
    """Notes when its steps end."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-3)
        self.ends: Times = []

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.ends.append((time.perf_counter(), time.process_time()))
        return result

    def times(self) -> Times:
        """What each step took that is counted."""
        pairs = zip(self.ends[WARM:], self.ends[WARM + 1 :], strict=False)
        return [(after[0] - before[0], after[1] - before[1]) for before, after in pairs]


def loader_of(elastic: bool, steps: int, workers: int, **more: Any) -> Any:
    rows = Rows(BATCH * steps)
    if elastic:
        return ElasticDataLoader(rows, BATCH, shuffle=True, num_workers=workers, **more)
    return DataLoader(rows, BATCH, shuffle=True, num_workers=workers)


def lightning(elastic: bool, steps: int, workers: int) -> Times:
    """A round in Lightning's Trainer."""
    import lightning.pytorch as pl

    from edl_torch.integrations.lightning import ElasticCallback

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Layers()
            self.optimizer = Clocked(self.model.parameters())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return self.optimizer

    module = Module()
    loader = loader_of(elastic, steps, workers, **({"lookahead": "manual"} if elastic else {}))
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[ElasticCallback(loader)] if elastic else [],
        **dict.fromkeys(quiet, False),
    )
    trainer.fit(module, loader)
    _close(loader)
    return module.optimizer.times()


def accelerate(elastic: bool, steps: int, workers: int) -> Times:
    """A round of a loop with Accelerate."""
    from accelerate import Accelerator

    from edl_torch.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True)
    layers = Layers()
    clocked = Clocked(layers.parameters())
    model, optimizer = accelerator.prepare(layers, clocked)
    loader = loader_of(elastic, steps, workers, **({"lookahead": "manual"} if elastic else {}))
    batches = prepare(accelerator, loader, optimizer) if elastic else accelerator.prepare(loader)
    for batch in batches:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    _close(loader)
    accelerator.free_memory()
    return clocked.times()


def transformers(elastic: bool, steps: int, workers: int) -> Times:
    """A round in a Transformers Trainer."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from edl_torch.integrations.transformers import ElasticTrainer

    class MyTrainer(ElasticTrainer, Trainer):  # type: ignore[misc]
        pass

    model = Layers()
    clocked = Clocked(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            num_train_epochs=1,
            dataloader_num_workers=workers,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(clocked, lambda _: 1.0)
        parts = {"model": model, "args": arguments, "optimizers": (clocked, scheduler)}
        if elastic:
            loader = loader_of(True, steps, workers)
            trainer = MyTrainer(**parts, elastic_loader=loader)
        else:
            trainer = Trainer(**parts, train_dataset=Rows(BATCH * steps))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        if elastic:
            _close(loader)
    return clocked.times()


def deepspeed(elastic: bool, steps: int, workers: int) -> Times:
    """A round of a loop over a DeepSpeed engine."""
    import deepspeed as ds
    import deepspeed.ops as ops

    from edl_torch.integrations.deepspeed import prepare

    ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} | where)
    ds.init_distributed("gloo", verbose=False)
    layers = Layers()
    clocked = Clocked(layers.parameters())
    config = {"train_micro_batch_size_per_gpu": BATCH}
    engine, *_ = ds.initialize(model=layers, optimizer=clocked, config=config)
    loader = loader_of(elastic, steps, workers)
    for batch in prepare(engine, loader) if elastic else loader:
        engine.backward(engine(**batch)["loss"])
        engine.step()
    _close(loader)
    return clocked.times()


def _close(loader: Any) -> None:
    if isinstance(loader, ElasticDataLoader):
        loader.close()


FRAMEWORKS: dict[str, Callable[[bool, int, int], Times]] = {
    "lightning": lightning,
    "accelerate": accelerate,
    "transformers": transformers,
    "deepspeed": deepspeed,
}


def measure(name: str, workers: int, steps: int, seconds: float) -> dict[str, Any]:
    """Rounds until the time is over, and what they say by the clock and by processor time."""
    rounds: list[tuple[Times, Times, Times]] = []
    began = 0.0
    for number in itertools.count(-1):  # the first one is not counted
        if number == 0:
            began = time.perf_counter()
        if number >= ROUNDS and time.perf_counter() - began > seconds:
            break
        before, ours, after = (_round(name, elastic, steps, workers) for elastic in (False, True, False))
        if number >= 0:
            rounds.append((before, ours, after))
    return {"framework": name, "workers": workers, "rounds": len(rounds)} | {
        kind: _compared(
            [[statistics.median(step[which] for step in times) for times in three] for three in rounds]
        )
        for which, kind in enumerate(("clock", "processor"))
    }


def _round(name: str, elastic: bool, steps: int, workers: int) -> Times:
    gc.collect()  # what the round before has left is none of this one's
    _quiet()  # frameworks choose levels of their own when they are imported
    return FRAMEWORKS[name](elastic, steps, workers)


def _compared(rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Of the seconds of a step in each round (plain, elastic, plain): medians, each with an interval.

    `against_itself` is the second plain loader against the first: what the machine can tell.
    """
    beside = [math.sqrt(before * after) for before, _, after in rounds]
    return {
        "step_s": rounds,
        "plain_s": statistics.median(beside),
        "ratio": median_with_interval(
            [ours / plain for (_, ours, _), plain in zip(rounds, beside, strict=True)]
        ),
        "more_s": median_with_interval(
            [ours - plain for (_, ours, _), plain in zip(rounds, beside, strict=True)]
        ),
        "against_itself": median_with_interval([after / before for before, _, after in rounds]),
    }


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and between which of the values that of all rounds lies, with 95 % confidence.

    Whatever their distribution: the number of values below the median is binomial. The interval of fewer than
    six is that of all of them, with less confidence.
    """
    ordered, number = sorted(values), len(values)
    below, rank = 0.0, 0
    while rank < number // 2 and (below := below + math.comb(number, rank) / 2**number) <= 0.025:
        rank += 1
    rank = max(rank, 1)
    return statistics.median(ordered), ordered[rank - 1], ordered[number - rank]


def verdict(low: float, high: float) -> str:
    """What an interval says of the target."""
    if high <= TARGET:
        return "met"
    return "missed" if low > TARGET else "not decided"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a row for each framework, and write JSON."""
    options_parser = parser(__doc__ or "")
    options_parser.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    options_parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    options_parser.add_argument(
        "--seconds", type=float, default=25.0, help="for each framework and number of workers"
    )
    options_parser.add_argument(
        "--bare", action="store_true", help="a model that takes nothing: look at the processor time of a step"
    )
    options = options_parser.parse_args(arguments)
    if options.bare:
        global WIDTH, BATCH
        WIDTH = BATCH = 8
    torch.set_num_threads(1)
    _quiet()
    steps = WARM + (3 if options.quick else 200 if options.bare else STEPS)
    results = []
    print(f"load {os.getloadavg()[0]:.1f}")
    for name in options.only:
        if not find_spec(name):
            print(f"{name}: not installed: make test-{name} has an environment with it")
            continue
        for workers in options.workers:
            result = measure(name, workers, steps, 0.0 if options.quick else options.seconds)
            results.append(result)
            print(f"{name}, {workers} workers, {result['rounds']} rounds")
            for kind in ("clock", "processor"):
                print(_row(kind, result[kind], bare=options.bare), flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")
    if options.json:
        write_json(options.json, {"quick": options.quick, "bare": options.bare, "frameworks": results})


def _row(kind: str, found: dict[str, Any], *, bare: bool) -> str:
    middle, low, high = found["more_s"]
    more = " … ".join(f"{seconds * 1e6:+,.0f}" for seconds in (low, high))
    more = f"{middle * 1e6:+,.0f} µs [{more}] of {found['plain_s'] * 1e6:,.0f} µs"
    if bare:
        return f"  {kind:<10}{more}: {middle / STEP_S:.1%} of a step of {STEP_S * 1e3:.0f} ms"
    middle, low, high = found["ratio"]
    itself, least, most = found["against_itself"]
    return (
        f"  {kind:<10}{middle:.3f} [{low:.3f} … {high:.3f}], {verdict(low, high)}; plain against itself "
        f"{itself:.3f} [{least:.3f} … {most:.3f}]; {more}"
    )


def _quiet() -> None:
    """Let frameworks say nothing."""
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "DS_ACCELERATOR": "cpu"}
    for logger in ("lightning.pytorch", "DeepSpeed"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


if __name__ == "__main__":
    main()
