"""What a step takes in another framework's loop with an ElasticDataLoader, and with a plain DataLoader.

    python benchmarks/frameworks.py [--only lightning accelerate transformers] [--json FILE]

Each framework that is installed trains the same model, a step of some 30 ms, round by round with one loader
and the other. The time of a step is that between the ends of two steps of the optimizer.
"""

from __future__ import annotations

import logging
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
WARM = 5  # steps of a round that are not counted: workers start
ELASTIC, PLAIN, AGAIN = "elastic", "plain", "plain again"
Times = list[tuple[float, float]]  # by the clock, and by this process's processor time


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows from memory."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((WIDTH,), index / self.size)}


class Layers(torch.nn.Module):
    """Some 30 ms a step on one thread."""

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
    loader = loader_of(elastic, steps, workers, **({"lookahead": "told"} if elastic else {}))
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
    loader = loader_of(elastic, steps, workers, **({"lookahead": "told"} if elastic else {}))
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


def _close(loader: Any) -> None:
    if isinstance(loader, ElasticDataLoader):
        loader.close()


FRAMEWORKS: dict[str, Callable[[bool, int, int], Times]] = {
    "lightning": lightning,
    "accelerate": accelerate,
    "transformers": transformers,
}


def measure(name: str, steps: int, rounds: int, workers: int) -> dict[str, Any]:
    """Rounds of all contenders in turn. A ratio is that of two medians of neighbouring rounds.

    The plain loader is a contender twice: what it is against itself is what the machine can tell.
    """
    one_round = FRAMEWORKS[name]
    clock: dict[str, list[float]] = {ELASTIC: [], PLAIN: [], AGAIN: []}
    processor: dict[str, list[float]] = {ELASTIC: [], PLAIN: [], AGAIN: []}
    for number in range(-1, rounds):  # the first one is not counted
        for contender in clock if number % 2 else reversed(clock):
            times = one_round(contender == ELASTIC, steps, workers)
            if number >= 0:
                clock[contender].append(statistics.median(by_clock for by_clock, _ in times))
                processor[contender].append(statistics.median(by_work for _, by_work in times))
    return {
        "framework": name,
        "workers": workers,
        "step_s": clock,
        "processor_s": processor,
        "by_clock": {ours: _ratios(clock[ours], clock[PLAIN]) for ours in (ELASTIC, AGAIN)},
        "by_processor": {ours: _ratios(processor[ours], processor[PLAIN]) for ours in (ELASTIC, AGAIN)},
    }


def _ratios(these: list[float], those: list[float]) -> list[float]:
    """Quartiles, over the rounds."""
    ratios = [this / that for this, that in zip(these, those, strict=True)]
    return statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a row for each framework, and write JSON."""
    options_parser = parser(__doc__ or "")
    options_parser.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    options_parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    options_parser.add_argument(
        "--bare", action="store_true", help="a model that takes nothing: look at the processor time of a step"
    )
    options = options_parser.parse_args(arguments)
    if options.bare:
        global WIDTH, BATCH
        WIDTH = BATCH = 8
    steps, rounds = (WARM + 3, 1) if options.quick else (WARM + 40, 9)
    torch.set_num_threads(1)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    results = []
    print(f"load {os.getloadavg()[0]:.1f}")
    for name in options.only:
        if not find_spec(name):
            print(f"{name}: not installed: make test-{name} has an environment with it")
            continue
        for workers in options.workers:
            result = measure(name, steps, rounds, workers)
            results.append(result)
            step_ms = statistics.median(result["step_s"][PLAIN]) * 1000
            print(f"{name}, {workers} workers, {step_ms:.1f} ms a step")
            for contender, seconds in result["processor_s"].items():
                print(f"  {contender:<22}{min(seconds) * 1e6:,.0f} µs of processor time, at least")
            for ours in (ELASTIC, AGAIN):
                low, middle, high = result["by_clock"][ours]
                print(
                    f"  {ours + ' / ' + PLAIN:<22}{middle:.3f} [{low:.3f} … {high:.3f}], "
                    f"by processor time {result['by_processor'][ours][1]:.3f}",
                    flush=True,
                )
    print(f"load {os.getloadavg()[0]:.1f}")
    if options.json:
        write_json(options.json, {"frameworks": results})


if __name__ == "__main__":
    main()
