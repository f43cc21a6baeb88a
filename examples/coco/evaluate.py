"""What the model makes of pictures it was not trained on.

It reads held-out pictures through a reader, plainly: they are not shared out among trainers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from batches import Fit
from generate import COLOURS, SHAPES
from model import Captioner
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from vocabulary import PAD, Vocabulary, words_of

from edl_torch import AbstractDataReader
from edl_torch.errors import DataFormatError
from edl_torch.readers.base import reader_sources

BATCH_SIZE = 64

Looks = frozenset[tuple[str, str]]  # (colour, shape) of each thing in a picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The loss per word over all captions, what the model says of each picture, and what people say."""

    loss: float
    captions: list[str]
    references: list[list[str]]


class HeldOut(Dataset[tuple[Tensor, list[str]]]):
    """The records of a reader that yields (image, captions), with images fitted to the model."""

    def __init__(self, reader: AbstractDataReader, image_size: int) -> None:
        (self.source,) = reader_sources(reader)
        self.reader, self.fit = reader, Fit(image_size)

    def __len__(self) -> int:
        return self.source.count

    def __getitem__(self, number: int) -> tuple[Tensor, list[str]]:
        image, captions = self.record(number)
        return self.fit(image), captions

    def record(self, number: int) -> tuple[Any, list[str]]:
        """The image as the reader gives it, and its captions."""
        image, captions = self.reader.read_record(self.source.name, self.source.start + number)
        return image, list(captions)


def evaluate(
    model: Captioner, held_out: HeldOut, vocabulary: Vocabulary, device: torch.device, workers: int = 0
) -> Evaluation:
    """Score and caption every held-out picture."""
    was_training = model.training
    model.eval()
    loader = DataLoader(held_out, batch_size=BATCH_SIZE, num_workers=workers, collate_fn=_collate)
    total, words = 0.0, 0
    captions: list[str] = []
    references: list[list[str]] = []
    with torch.no_grad():
        for images, texts in loader:
            features = model.encoder(images.to(device))
            tokens, owners = _encode(texts, vocabulary, model.config.max_tokens)
            tokens = tokens.to(device)
            total += float(model.caption_loss(features[owners.to(device)], tokens, reduction="sum"))
            words += int((tokens[:, 1:] != PAD).sum())
            captions += [vocabulary.decode(row) for row in model.greedy(features).tolist()]
            references += texts
    model.train(was_training)
    return Evaluation(loss=total / max(1, words), captions=captions, references=references)


def _collate(samples: list[tuple[Tensor, list[str]]]) -> tuple[Tensor, list[list[str]]]:
    return torch.stack([image for image, _ in samples]), [captions for _, captions in samples]


def _encode(texts: list[list[str]], vocabulary: Vocabulary, max_tokens: int) -> tuple[Tensor, Tensor]:
    """All captions of all images as padded tokens, and which image each belongs to."""
    rows = [
        (torch.tensor(vocabulary.encode(text, max_tokens - 1)), owner)
        for owner, captions in enumerate(texts)
        for text in captions
    ]
    tokens = pad_sequence([row for row, _ in rows], batch_first=True, padding_value=PAD)
    return tokens, torch.tensor([owner for _, owner in rows])


# --- the demo's ground truth ---


def read_scenes(path: Path, annotations: dict[str, Any]) -> list[Looks]:
    """What each held-out picture shows, in the order of the annotation file. See `generate.py`."""
    try:
        scenes = json.loads(path.read_bytes())
        by_image = {
            scene["image_id"]: frozenset((item["colour"], item["shape"]) for item in scene["items"])
            for scene in scenes
        }
        return [by_image[image["id"]] for image in annotations["images"]]
    except (ValueError, KeyError, TypeError) as exc:
        raise DataFormatError(
            f"{path} does not describe the scenes of the held-out pictures ({exc!r})"
        ) from exc


def looks_named(caption: str) -> Looks:
    """The colours and shapes that a caption names, as pairs: `a red star` is `("red", "star")`."""
    words = words_of(caption)
    return frozenset(pair for pair in pairwise(words) if pair[0] in COLOURS and pair[1] in SHAPES)


def judge(captions: Sequence[str], scenes: Sequence[Looks]) -> list[bool]:
    """Which captions name exactly the things in their picture, each with its colour and shape."""
    return [looks_named(caption) == looks for caption, looks in zip(captions, scenes, strict=True)]
