"""What a run leaves behind: the held-out evaluation, a sheet of captions, figures, the count of deliveries.

It does not know how the model was trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deliveries import Deliveries
from evaluate import Evaluation, HeldOut, evaluate, judge, read_scenes
from inputs import Data
from model import Captioner
from options import Options
from sheet import Cell, draw_sheet, save_png
from split import read_captions
from vocabulary import Vocabulary

from edl_torch.readers import CocoCaptionsReader

SHEET_CELLS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What came out of training; `history` has a row for each epoch.

    `shared` says that other trainers, with models of their own, may have got some of the records.
    """

    model: Captioner
    vocabulary: Vocabulary
    deliveries: Deliveries
    history: Sequence[dict[str, Any]]
    shared: bool = False


def finish(options: Options, data: Data, trained: Trained) -> int:
    """Evaluate, print and write; the exit status, 1 when deliveries were not exact."""
    reader = CocoCaptionsReader(str(data.val_images), str(data.val_annotations), per="image")
    held_out = HeldOut(reader, trained.model.config.image_size)
    result = evaluate(trained.model, held_out, trained.vocabulary, options.device, workers=options.workers)
    right = None
    if data.scenes is not None:
        right = judge(result.captions, read_scenes(data.scenes, read_captions(data.val_annotations)))
    exact = trained.deliveries.exact(options.epochs)
    _print_results(result, right, trained.deliveries.verdict(options.epochs, shared=trained.shared))
    sheet = options.output / "captions.png"
    save_png(sheet, _sheet(held_out, result, right))
    _write_metrics(options, trained, result, right)
    print(f"captions of held-out pictures: {sheet}")
    return 0 if exact or trained.shared else 1


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


def _write_metrics(options: Options, trained: Trained, result: Evaluation, right: list[bool] | None) -> None:
    deliveries = trained.deliveries
    metrics = {
        "epochs": list(trained.history),
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
