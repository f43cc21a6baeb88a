"""The command line of `train.py`, checked as far as arguments alone can be checked."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from edl_torch.client.environment import finds_master_through_torchrun, master_address_from_env
from edl_torch.errors import InvalidArgument

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every argument with its value; what was left out has its default."""

    images: Path | None
    annotations: Path | None
    val_images: Path | None
    val_annotations: Path | None
    val_share: float
    scenes: Path | None
    epochs: int
    batch_size: int
    lr: float
    image_size: int
    width: int
    min_count: int
    workers: int
    reading_threads: int
    threads: int
    device: torch.device
    seed: int
    output: Path
    checkpoint_every_s: float
    checkpoint_steps: int
    audit: Path | None
    resume: Path | None
    rewind: bool
    master: str | None
    demo: bool
    demo_images: int

    @property
    def shared(self) -> bool:
        """Whether other trainers may read the same dataset."""
        return self.master is not None


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, printed by `main` like any other."""

    def error(self, message: str) -> NoReturn:
        raise InvalidArgument(f"{message} (--help lists the arguments)")


def parse(argv: Sequence[str] | None) -> Options:
    """The options in `argv`. Raises InvalidArgument."""
    values = vars(_parser().parse_args(argv))
    output = values["output"] = values["output"] or Path("runs/demo" if values["demo"] else "runs/coco")
    if values["resume"] is True:
        values["resume"] = output / CHECKPOINT
    values["device"] = _device(values["device"])
    _check_together(values)
    values["master"] = values["master"] or _master_of_environment()
    _check_data(values)
    return Options(**values)


def _parser() -> Parser:
    parser = Parser(
        prog="train.py", description="Train an image captioner on elastically sharded COCO captions."
    )
    _add_data(parser.add_argument_group("data"))
    _add_training(parser.add_argument_group("training"))
    _add_machine(parser.add_argument_group("machine"))
    _add_files(parser.add_argument_group("files"))
    return parser


def _add_data(data: argparse._ArgumentGroup) -> None:
    data.add_argument("--images", type=Path, metavar="DIR", help="folder of the training images")
    data.add_argument("--annotations", type=Path, metavar="JSON", help="their captions, in COCO's format")
    data.add_argument(
        "--val-images", type=Path, metavar="DIR", help="folder of held-out images (default: --images)"
    )
    data.add_argument(
        "--val-annotations", type=Path, metavar="JSON", help="their captions (default: hold some out)"
    )
    data.add_argument(
        "--val-share", type=_share, default=0.1, metavar="X", help="share of images to hold out (0.1)"
    )
    data.add_argument("--scenes", type=Path, metavar="JSON", help="what generate.py drew, to judge captions")
    data.add_argument("--demo", action="store_true", help="draw a dataset into OUTPUT/data and train on it")
    data.add_argument("--demo-images", type=_count, default=3000, metavar="N", help="pictures to draw (3000)")


def _add_training(train: argparse._ArgumentGroup) -> None:
    train.add_argument("--epochs", type=_count, default=4, metavar="N", help="passes over all captions (4)")
    train.add_argument("--batch-size", type=_count, default=32, metavar="N", help="captions in a batch (32)")
    train.add_argument(
        "--lr", type=_positive, default=2e-3, metavar="X", help="highest learning rate (0.002)"
    )
    train.add_argument(
        "--image-size", type=_image_size, default=64, metavar="N", help="side of the model's input (64)"
    )
    train.add_argument(
        "--width", type=_width, default=96, metavar="N", help="the model's width, in eights (96)"
    )
    train.add_argument(
        "--min-count", type=_count, default=2, metavar="N", help="rarer words become <unk> (2)"
    )
    train.add_argument("--seed", type=int, default=0, metavar="N", help="fixes weights and order (0)")


def _add_machine(machine: argparse._ArgumentGroup) -> None:
    machine.add_argument("--workers", type=_natural, default=2, metavar="N", help="loader processes (2)")
    machine.add_argument(
        "--reading-threads",
        type=_natural,
        default=0,
        metavar="N",
        help="threads that read in each loader process, or in the trainer (0)",
    )
    machine.add_argument(
        "--threads",
        type=_natural,
        default=0,
        metavar="N",
        help="threads to compute with (those cores that loader processes leave)",
    )
    machine.add_argument(
        "--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1, mps (the best there is)"
    )
    machine.add_argument(
        "--master", metavar="HOST:PORT", help="share the data with others (default: $EDL_MASTER_ADDR)"
    )


def _add_files(files: argparse._ArgumentGroup) -> None:
    files.add_argument("--output", type=Path, metavar="DIR", help="for checkpoints and results (runs/coco)")
    files.add_argument(
        "--checkpoint-every",
        type=_positive,
        default=60.0,
        dest="checkpoint_every_s",
        metavar="S",
        help="seconds (60)",
    )
    files.add_argument(
        "--checkpoint-steps", type=_count, default=50, metavar="N", help="under torchrun: steps (50)"
    )
    files.add_argument("--audit", type=Path, metavar="DIR", help="write down there what is trained on")
    files.add_argument(
        "--resume",
        nargs="?",
        type=Path,
        const=True,
        metavar="FILE",
        help=f"go on from FILE (OUTPUT/{CHECKPOINT})",
    )
    files.add_argument(
        "--rewind", action="store_true", help="with --resume and a master: take the data back, too"
    )


def _check_data(values: dict[str, Any]) -> None:
    if values["demo"]:
        if values["images"] or values["annotations"] or values["val_images"] or values["val_annotations"]:
            raise InvalidArgument("--demo draws its own dataset: leave --images and --annotations out")
        return
    if values["images"] is None or values["annotations"] is None:
        raise InvalidArgument("give --images DIR and --annotations JSON, or --demo")
    if values["val_images"] is not None and values["val_annotations"] is None:
        raise InvalidArgument("--val-images needs --val-annotations")


def _master_of_environment() -> str | None:
    """As edl_torch reads it: under torchrun MASTER_ADDR means something else."""
    return None if finds_master_through_torchrun() else master_address_from_env()


def _check_together(values: dict[str, Any]) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ and (values["resume"] or values["rewind"]):
        raise InvalidArgument(
            "under torchrun all go on from OUTPUT/checkpoints by themselves: leave --resume out"
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        name = "cpu" if accelerator is None else accelerator.type
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as exc:
        raise InvalidArgument(f"--device {name}: this machine's torch cannot use it") from exc
    return device


def _number(text: str, kind: type[int] | type[float], least: float, what: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _natural(text: str) -> int:
    return int(_number(text, int, 0, "a whole number from 0"))


def _count(text: str) -> int:
    return int(_number(text, int, 1, "a whole number from 1"))


def _image_size(text: str) -> int:
    return int(_number(text, int, 16, "a whole number from 16"))


def _width(text: str) -> int:
    width = int(_number(text, int, 8, "a multiple of 8"))
    if width % 8:
        raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of 8")
    return width


def _positive(text: str) -> float:
    return float(_number(text, float, 1e-12, "a positive number"))


def _share(text: str) -> float:
    share = float(_number(text, float, 1e-6, "a share between 0 and 1"))
    if share >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1")
    return share
