"""Train an image captioner on COCO captions, sharded elastically by edl_torch.

    python examples/coco/train.py --demo
    python examples/coco/train.py --images DIR --annotations captions_train2017.json --epochs 10

The loop in `Trainer.train` is all that elastic sharding asks of a training program; the rest is what any
training program has: options, checkpoints, a progress line, results.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import checkpoint
import torch
from batches import Batch, Encode, Fit, NumberedReader, collate
from deliveries import Deliveries
from evaluate import Evaluation, HeldOut, evaluate, judge, read_scenes
from generate import Recipe, generate
from model import Captioner, ModelConfig
from options import CHECKPOINT, Options, parse
from progress import ProgressLine, Standing
from sheet import Cell, draw_sheet, save_png
from split import hold_out, read_captions
from vocabulary import Vocabulary

from edl_torch import DataShardService, ElasticDataLoader, ImageDataset
from edl_torch.errors import EdlError, InvalidArgument
from edl_torch.readers import CocoCaptionsReader

SHEET_CELLS = 20
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


# --- files in ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The files of a run; `scenes` only where the pictures were drawn by generate.py."""

    images: Path
    annotations: Path
    val_images: Path
    val_annotations: Path
    scenes: Path | None


def find_data(options: Options) -> Data:
    """Check the files that were named; draw the demo's; hold images out where no held-out set was named."""
    if options.demo:
        return _demo_data(options.output / "data", options)
    if options.images is None or options.annotations is None:
        raise InvalidArgument("give --images and --annotations")
    images, val_images = _folder(options.images), _folder(options.val_images or options.images)
    annotations = _file(options.annotations)
    if options.val_annotations is not None:
        val_annotations = _file(options.val_annotations)
    else:
        annotations, val_annotations = hold_out(annotations, options.output / "split", options.val_share)
    scenes = None if options.scenes is None else _file(options.scenes)
    return Data(
        images=images,
        annotations=annotations,
        val_images=val_images,
        val_annotations=val_annotations,
        scenes=scenes,
    )


def _demo_data(folder: Path, options: Options) -> Data:
    recipe = Recipe(images=options.demo_images, val=max(20, options.demo_images // 10), seed=options.seed)
    if generate(folder, recipe):
        print(f"drew {recipe.images} + {recipe.val} pictures into {folder}")
    return Data(
        images=folder / "images" / "train",
        annotations=folder / "captions_train.json",
        val_images=folder / "images" / "val",
        val_annotations=folder / "captions_val.json",
        scenes=folder / "scenes_val.json",
    )


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise InvalidArgument(f"the image folder {path} does not exist")
    return path


def _file(path: Path) -> Path:
    if not path.is_file():
        raise InvalidArgument(f"the file {path} does not exist")
    return path


def make_output(folder: Path) -> None:
    """Make the output folder and try it, so that nothing is trained that cannot be saved."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f".trial.{os.getpid()}"
        trial.touch()
        trial.unlink()
    except OSError as exc:
        raise InvalidArgument(f"cannot write into the output folder {folder}: {exc.strerror}") from exc


# --- training ---


class StopSignal:
    """Notes the first SIGINT or SIGTERM, to be asked about between batches; a second one interrupts."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number

    def asked(self) -> bool:
        """Whether a signal has come."""
        return self.number != 0


def leave_signals_to_trainer(worker_id: int) -> None:
    """For loader workers: Ctrl-C reaches all processes of a terminal, but the trainer alone decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


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


class Trainer:
    """A model, its optimizer, and all that a checkpoint holds except the position in the data."""

    def __init__(self, options: Options, vocabulary: Vocabulary, config: ModelConfig, size: int) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.vocabulary = vocabulary
        self.model = Captioner(config).to(options.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, weight_decay=0.01)
        self.deliveries = Deliveries(size)
        self.tally = Tally()
        self.history: list[dict[str, Any]] = []
        self.line = ProgressLine()
        self._saved_at = self.line.now()

    def train(self, service: DataShardService, loader: ElasticDataLoader, stop: StopSignal) -> None:
        """Train until the data is finished, or a signal asks to stop."""
        service.attach(self.optimizer)
        if self.options.resume is None:
            self.save(service)  # so that --resume never finds the checkpoint of an earlier run
        while not service.finished and not stop.asked():
            self._begin_epoch(service.epoch)
            for batch in loader:
                self._step(batch, len(loader))
                self._look_around(service, stop)
                if stop.asked():
                    return
            self._end_epoch(service)

    def _begin_epoch(self, epoch: int) -> None:
        if self.tally.epoch != epoch:  # else it goes on from a checkpoint
            self.tally = Tally(epoch=epoch)
        self.line.restart()

    def _step(self, batch: Batch, batches_in_epoch: int) -> None:
        share = min(1.0, self.tally.batches / max(1, batches_in_epoch))
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * schedule((self.tally.epoch + share) / self.options.epochs)
        images = batch.images.to(self.options.device, non_blocking=True)
        captions = batch.captions.to(self.options.device, non_blocking=True)
        self.optimizer.zero_grad()
        loss = self.model.loss(images, captions)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.deliveries.add(self.tally.epoch, batch.numbers)
        self.tally = self.tally.plus(len(batch.numbers), loss.item())
        self.line.count(len(batch.numbers))

    def _look_around(self, service: DataShardService, stop: StopSignal) -> None:
        if self.line.due:
            self._draw(service)
        if stop.asked() or self.line.now() - self._saved_at >= self.options.checkpoint_every_s:
            self.save(service)

    def _end_epoch(self, service: DataShardService) -> None:
        tally = self.tally
        epoch = f"epoch {tally.epoch + 1}/{self.options.epochs}"
        self.line.say(
            f"{epoch}: loss {tally.loss:.3f}, {tally.records} records, {self.line.rate:.0f} records/s"
        )
        loss = tally.loss if tally.records else None  # other trainers may have taken all of an epoch
        self.history.append({"epoch": tally.epoch, "loss": loss, "records": tally.records})
        self.tally = Tally(epoch=tally.epoch + 1)
        self.save(service)

    def _draw(self, service: DataShardService) -> None:
        progress = service.progress()
        self.line.draw(
            Standing(
                epoch=self.tally.epoch,
                num_epochs=self.options.epochs,
                done=progress.size - progress.todo - progress.leased,
                total=progress.size,
                loss=self.tally.loss,
                shards_left=progress.shards_left,
            )
        )

    @property
    def checkpoint_path(self) -> Path:
        """Where checkpoints go."""
        return self.options.output / CHECKPOINT

    def save(self, service: DataShardService) -> None:
        """Save the model and the position in the data: one instant, one file."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "config": asdict(self.model.config),
            "words": self.vocabulary.words,
            "data": service.state_dict(),
            "deliveries": self.deliveries.state_dict(),
            "tally": asdict(self.tally),
            "history": self.history,
            "rng": checkpoint.rng_state(),
        }
        checkpoint.save(self.checkpoint_path, state)
        self._saved_at = self.line.now()

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


# --- a whole run ---


def run(options: Options) -> int:
    """Train, evaluate, write results; the exit status."""
    _set_machine(options)
    make_output(options.output)
    saved = None if options.resume is None else checkpoint.load(_file(options.resume))
    data = find_data(options)
    trainer, reader = _make_trainer(options, data, saved)
    with StopSignal() as stop, _make_service(options, reader) as service:
        loader = _make_loader(options, service, reader, trainer)
        if saved is not None:
            trainer.load(saved)
            if options.rewind or not options.shared:
                service.load_state_dict(saved["data"])
        trainer.train(service, loader, stop)
    if stop.asked():
        print(f"stopped: go on with --resume {trainer.checkpoint_path}", file=sys.stderr)
        return 128 + stop.number
    return _finish(options, data, trainer)


def _set_machine(options: Options) -> None:
    if options.master is not None:
        os.environ["EDL_MASTER_ADDR"] = options.master
    if options.threads:
        torch.set_num_threads(options.threads)
    elif options.device.type == "cpu":  # leave the loader workers some room: contended threads crawl
        cores = os.cpu_count() or 1
        torch.set_num_threads(max(1, cores - min(options.workers, cores // 2)))


def _make_trainer(
    options: Options, data: Data, saved: dict[str, Any] | None
) -> tuple[Trainer, NumberedReader]:
    content = read_captions(data.annotations)
    if saved is not None:
        vocabulary, config = Vocabulary(saved["words"]), ModelConfig(**saved["config"])
    else:
        captions = (annotation["caption"] for annotation in content["annotations"])
        vocabulary = Vocabulary.from_captions(captions, options.min_count)
        config = ModelConfig(vocabulary=len(vocabulary), image_size=options.image_size, width=options.width)
    reader = NumberedReader(CocoCaptionsReader(str(data.images), str(data.annotations), per="annotation"))
    return Trainer(options, vocabulary, config, len(content["annotations"])), reader


def _make_service(options: Options, reader: NumberedReader) -> DataShardService:
    return DataShardService(
        batch_size=options.batch_size,
        reader=reader,
        num_epochs=options.epochs,
        shuffle_shards=True,
        seed=options.seed,
    )


def _make_loader(
    options: Options, service: DataShardService, reader: NumberedReader, trainer: Trainer
) -> ElasticDataLoader:
    config = trainer.model.config
    dataset = ImageDataset(
        service,
        reader,
        shuffle=True,
        transform=Fit(config.image_size),
        target_transform=Encode(trainer.vocabulary, config.max_tokens),
    )
    return ElasticDataLoader(
        dataset,
        num_workers=options.workers,
        collate_fn=collate,
        pin_memory=options.device.type == "cuda",
        persistent_workers=options.workers > 0,
        worker_init_fn=leave_signals_to_trainer,
        # of its own, so that a pass draws nothing from the generator that the model uses
        generator=torch.Generator().manual_seed(options.seed),
    )


# --- results ---


def _finish(options: Options, data: Data, trainer: Trainer) -> int:
    reader = CocoCaptionsReader(str(data.val_images), str(data.val_annotations), per="image")
    held_out = HeldOut(reader, trainer.model.config.image_size)
    result = evaluate(trainer.model, held_out, trainer.vocabulary, options.device, workers=options.workers)
    right = None
    if data.scenes is not None:
        right = judge(result.captions, read_scenes(data.scenes, read_captions(data.val_annotations)))
    exact = trainer.deliveries.exact(options.epochs)
    _print_results(result, right, trainer.deliveries.verdict(options.epochs, shared=options.shared))
    sheet = options.output / "captions.png"
    save_png(sheet, _sheet(held_out, result, right))
    _write_metrics(options, trainer, result, right)
    print(f"captions of held-out pictures: {sheet}")
    return 0 if exact or options.shared else 1


def _print_results(result: Evaluation, right: list[bool] | None, verdict: str) -> None:
    print(f"held-out loss {result.loss:.3f} per word, {len(result.captions)} pictures")
    if right is not None:
        print(f"held-out pictures whose caption names the right shapes and colours: {_share(right)}")
    print(verdict)


def _share(right: list[bool]) -> str:
    return f"{sum(right)} of {len(right)} ({sum(right) / len(right):.1%})"


def _sheet(held_out: HeldOut, result: Evaluation, right: list[bool] | None) -> Any:
    count = min(SHEET_CELLS, len(held_out))
    cells = []
    for place in range(count):
        number = place * len(held_out) // count  # from all over the held-out set
        picture, references = held_out.record(number)
        cells.append(
            Cell(
                picture=picture,
                caption=result.captions[number],
                reference=references[0] if references else "",
                right=None if right is None else right[number],
            )
        )
    title = "Unseen pictures, the model's captions, and in grey a person's"
    if right is not None:
        title = (
            f"Unseen pictures. Captions with the right shapes and colours: {_share(right)}. Grey: as drawn."
        )
    return draw_sheet(cells, title)


def _write_metrics(options: Options, trainer: Trainer, result: Evaluation, right: list[bool] | None) -> None:
    deliveries = trainer.deliveries
    metrics = {
        "epochs": trainer.history,
        "held_out": {
            "pictures": len(result.captions),
            "loss": result.loss,
            "right": None if right is None else sum(right),
            "right_share": None if right is None else sum(right) / len(right),
        },
        "deliveries": {
            "expected": deliveries.size * options.epochs,
            "delivered": deliveries.delivered,
            "repeated": deliveries.repeated,
        },
    }
    (options.output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
