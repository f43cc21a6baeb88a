"""What a run reads and where it writes, checked before anything is trained. Raises InvalidArgument."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from generate import Recipe, generate
from options import Options
from split import hold_out

from edl_torch.errors import InvalidArgument


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
    images = existing_folder(options.images)
    val_images = existing_folder(options.val_images or options.images)
    annotations = existing_file(options.annotations)
    if options.val_annotations is not None:
        val_annotations = existing_file(options.val_annotations)
    else:
        annotations, val_annotations = hold_out(annotations, options.output / "split", options.val_share)
    scenes = None if options.scenes is None else existing_file(options.scenes)
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


def existing_folder(path: Path) -> Path:
    """The path, if it is a folder."""
    if not path.is_dir():
        raise InvalidArgument(f"the image folder {path} does not exist")
    return path


def existing_file(path: Path) -> Path:
    """The path, if it is a file."""
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
