"""Train an image captioner on COCO captions, sharded elastically by edl_torch.

    python examples/coco/train.py --demo
    python examples/coco/train.py --images DIR --annotations captions_train2017.json --epochs 10
    torchrun --nproc-per-node=2 --max-restarts=3 examples/coco/train.py --demo

The loop in `Trainer.train` is all that elastic sharding asks of a training program; the rest is what any
training program has: options, checkpoints, a progress line, results.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import checkpoint
import torch
from batches import Batch, Encode, Fit, NumberedReader, collate
from deliveries import Deliveries
from inputs import Data, existing_file, find_data, make_output
from model import Captioner, ModelConfig, WithLoss
from options import CHECKPOINT, Options, parse
from progress import ProgressLine, Standing
from ranks import Ranks, join_ranks
from results import Trained, finish
from split import read_captions
from stopping import StopSignal
from vocabulary import Vocabulary

from edl_torch import ElasticDataLoader, load_checkpoint, save_checkpoint
from edl_torch.errors import EdlError
from edl_torch.readers import CocoCaptionsReader

CLIP_NORM = 1.0
WARM_UP = 0.04  # of all training


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. 0: trained; 1: the deliveries were not exact; 2: wrong input; 130, 143: stopped."""
    try:
        return run(parse(argv))
    except (EdlError, OSError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What this trainer did in one epoch so far."""

    epoch: int = 0
    batches: int = 0
    records: int = 0
    loss_sum: float = 0.0

    @property
    def loss(self) -> float:
        """The mean over records."""
        return self.loss_sum / self.records if self.records else math.nan

    def plus(self, records: int, loss: float) -> Tally:
        """With one more batch."""
        return replace(
            self,
            batches=self.batches + 1,
            records=self.records + records,
            loss_sum=self.loss_sum + loss * records,
        )

    def over(self, ranks: Ranks) -> Tally:
        """That of all ranks, on each; all call it together."""
        sums = ranks.sum(torch.tensor([self.records, self.loss_sum], dtype=torch.float64)).tolist()
        return replace(self, records=int(sums[0]), loss_sum=sums[1])

    def kept_by(self, ranks: Ranks) -> Tally:
        """A tally of all ranks is kept by the first one alone, so that it is not added up once more."""
        return self if ranks.first else replace(self, records=0, loss_sum=0.0)


class Trainer:
    """A model, its optimizer, and all that a checkpoint holds except the position in the data."""

    def __init__(
        self,
        options: Options,
        vocabulary: Vocabulary,
        config: ModelConfig,
        size: int,
        ranks: Ranks | None = None,
    ) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.vocabulary = vocabulary
        self.ranks = ranks or Ranks()
        self.model = Captioner(config).to(options.device)
        self.loss = self.ranks.wrap(WithLoss(self.model), options.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, weight_decay=0.01)
        self.deliveries = Deliveries(size)
        self.tally = Tally()
        self.history: list[dict[str, Any]] = []
        self.line = ProgressLine(None if self.ranks.first else open(os.devnull, "w"))  # noqa: SIM115
        self._saved_at = self.line.now()

    def train(self, loader: ElasticDataLoader) -> None:
        """Train until the data is finished, or a notice asks to stop."""
        loader.freeze_statistics(self.model)
        if self.ranks.together:
            self._load_together(loader)
        elif self.options.resume is None:
            self.save(loader)  # so that --resume never finds the checkpoint of an earlier run
        for epoch in loader.epochs():
            self._begin_epoch(epoch)
            for batch in loader:
                self.step(batch, loader)
                self.look_around(loader)
                if loader.preempted:  # on all ranks at the same batch
                    self.save(loader)
                    return
            self._end_epoch(loader)

    def _begin_epoch(self, epoch: int) -> None:
        if self.tally.epoch != epoch:  # else it goes on from a checkpoint
            self.tally = Tally(epoch=epoch)
        self.line.restart()

    def step(self, batch: Batch, loader: ElasticDataLoader) -> None:
        share = min(1.0, self.tally.batches / max(1, len(loader)))
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * schedule((self.tally.epoch + share) / self.options.epochs)
        images = batch.images.to(self.options.device, non_blocking=True)
        captions = batch.captions.to(self.options.device, non_blocking=True)
        self.optimizer.zero_grad()
        loss = self.loss(images, captions)
        loader.weigh(loss).backward()  # type: ignore[no-untyped-call]
        loader.scale_gradients(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        if loader.weight:  # 0 for a padding batch
            self.deliveries.add(self.tally.epoch, batch.numbers)
        self.tally = self.tally.plus(loader.weight, loss.item())
        self.line.count(loader.weight)

    def look_around(self, loader: ElasticDataLoader) -> None:
        if self.line.due and self.ranks.first:
            self._draw(loader)
        if self.ranks.together:  # clocks differ, and all must save at the same step
            if self.tally.batches % self.options.checkpoint_steps == 0:
                self.save(loader)
        elif self.line.now() - self._saved_at >= self.options.checkpoint_every_s:
            self.save(loader)

    def _end_epoch(self, loader: ElasticDataLoader) -> None:
        tally = self.tally.over(self.ranks)
        rate = self.ranks.sum(torch.tensor(self.line.rate)).item()
        epoch = f"epoch {tally.epoch}/{self.options.epochs}"
        self.line.say(f"{epoch}: loss {tally.loss:.3f}, {tally.records} records, {rate:.0f} records/s")
        loss = tally.loss if tally.records else None  # other trainers may have taken all of an epoch
        self.history.append({"epoch": tally.epoch, "loss": loss, "records": tally.records})
        if self.ranks.together:
            self.deliveries.gather(tally.epoch, self.ranks.sum)
        self.tally = Tally(epoch=tally.epoch + 1)
        self.save(loader)

    def _draw(self, loader: ElasticDataLoader) -> None:
        progress = loader.progress()
        self.line.draw(
            Standing(
                epoch=self.tally.epoch,
                num_epochs=self.options.epochs,
                done=progress.size - progress.todo - progress.leased,
                total=progress.size,
                rate=progress.rate,
                loss=self.tally.loss,
                shards_left=progress.shards_left,
            )
        )

    @property
    def trained(self) -> Trained:
        """What there is to evaluate."""
        return Trained(
            model=self.model,
            vocabulary=self.vocabulary,
            deliveries=self.deliveries,
            history=self.history,
            shared=self.options.shared and not self.ranks.together,
        )

    @property
    def checkpoint_path(self) -> Path:
        """Where checkpoints go."""
        return self.options.output / CHECKPOINT

    def save(self, loader: ElasticDataLoader) -> None:
        """Save the model and the position in the data: one instant, one file."""
        if self.ranks.together:
            self._save_together(loader)
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "config": asdict(self.model.config),
            "words": self.vocabulary.words,
            "data": loader.state_dict(),
            "deliveries": self.deliveries.state_dict(),
            "tally": asdict(self.tally),
            "history": self.history,
            "rng": checkpoint.rng_state(),
        }
        checkpoint.save(self.checkpoint_path, state)
        self._saved_at = self.line.now()

    def _save_together(self, loader: ElasticDataLoader) -> None:
        """The same on all ranks: what each counted is everybody's then."""
        self.deliveries.gather(self.tally.epoch, self.ranks.sum)
        tally = self.tally.over(self.ranks)
        self.tally = tally.kept_by(self.ranks)
        save_checkpoint(
            *(self.options.output / "checkpoints", self.loss, self.optimizer, loader.service),
            deliveries=self.deliveries.state_dict(),
            tally=asdict(tally),
            history=self.history,
        )

    def _load_together(self, loader: ElasticDataLoader) -> None:
        """Go on where this job's last checkpoint was, whoever saved it; or begin."""
        folder = self.options.output / "checkpoints"
        extra = load_checkpoint(folder, self.loss, self.optimizer, loader.service)
        if extra is not None:
            self.deliveries.load_state_dict(extra["deliveries"])
            self.tally = Tally(**extra["tally"]).kept_by(self.ranks)
            self.history = list(extra["history"])

    def load(self, state: dict[str, Any]) -> None:
        """Everything in a checkpoint but the position in the data."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.deliveries.load_state_dict(state["deliveries"])
        self.tally = Tally(**state["tally"])
        self.history = list(state["history"])
        checkpoint.set_rng_state(state["rng"])


def schedule(share: float) -> float:
    """The learning rate over its highest value when `share` of all training is done: warm-up, then cosine."""
    return min(1.0, share / WARM_UP + 0.05) * (0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, share))) / 2)


def run(options: Options) -> int:
    """Train, evaluate, write results; the exit status."""
    with join_ranks(options.device) as ranks:
        return _run(options, ranks)


def _run(options: Options, ranks: Ranks) -> int:
    _set_machine(options)
    with ranks.in_turn():
        make_output(options.output)
        data = find_data(options)
    saved = None if options.resume is None else checkpoint.load(existing_file(options.resume))
    trainer, reader = _make_trainer(options, data, saved, ranks)
    with StopSignal() as stop, make_loader(options, reader, trainer) as loader:
        stop.tell(loader)
        if saved is not None:
            trainer.load(saved)
            if options.rewind or not options.shared:
                loader.load_state_dict(saved["data"])
        trainer.train(loader)
    if loader.preempted:
        if ranks.first:
            again = "the same command" if ranks.together else f"--resume {trainer.checkpoint_path}"
            print(f"stopped: go on with {again}", file=sys.stderr)
        return 128 + (stop.number or signal.SIGTERM)  # another rank's
    return finish(options, data, trainer.trained) if ranks.first else 0


def _set_machine(options: Options) -> None:
    if options.master is not None:
        os.environ["EDL_MASTER_ADDR"] = options.master
    if options.threads:
        torch.set_num_threads(options.threads)
    elif options.device.type == "cpu":  # leave the loader workers some room: contended threads crawl
        cores = os.cpu_count() or 1
        torch.set_num_threads(max(1, cores - min(options.workers, cores // 2)))


def _make_trainer(
    options: Options, data: Data, saved: dict[str, Any] | None, ranks: Ranks
) -> tuple[Trainer, NumberedReader]:
    content = read_captions(data.annotations)
    if saved is not None:
        vocabulary, config = Vocabulary(saved["words"]), ModelConfig(**saved["config"])
    else:
        captions = (annotation["caption"] for annotation in content["annotations"])
        vocabulary = Vocabulary.from_captions(captions, options.min_count)
        config = ModelConfig(vocabulary=len(vocabulary), image_size=options.image_size, width=options.width)
    reader = NumberedReader(CocoCaptionsReader(str(data.images), str(data.annotations), per="annotation"))
    return Trainer(options, vocabulary, config, len(content["annotations"]), ranks), reader


def make_loader(options: Options, reader: NumberedReader, trainer: Trainer) -> ElasticDataLoader:
    config = trainer.model.config
    return ElasticDataLoader(
        reader,
        options.batch_size,
        num_epochs=options.epochs,
        shuffle="in_shard",
        seed=options.seed,
        transform=Fit(config.image_size),
        target_transform=Encode(trainer.vocabulary, config.max_tokens),
        audit_dir=options.audit,
        synchronous=trainer.ranks.together,
        num_workers=options.workers,
        num_threads=options.reading_threads,
        collate_fn=collate,
        pin_memory=options.device.type == "cuda",
        persistent_workers=options.workers > 0,
    )


if __name__ == "__main__":
    sys.exit(main())
