"""A prediction job: every record gets a result, however many trainers there are and whichever of them die.

edl-torch master --addr 127.0.0.1:50001 --prediction_data photos --records_per_task 64 &
EDL_MASTER_ADDR=127.0.0.1:50001 python predict.py photos predictions/    # as many of these as you like
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from result_log import ResultLog

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset, TaskType
from edl_torch.errors import EdlError
from edl_torch.readers import open_reader

SIDE = 32

Predict = Callable[[torch.Tensor], torch.Tensor]


def load_model() -> Predict:
    """Stands for your model: images, float [n, 3, SIDE, SIDE], to scores, float [n, 4]."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIDE * SIDE, 4))
    return model.eval()


def to_input(record: Any) -> torch.Tensor:
    """An image, with or without its label, as the model takes it; runs in loader workers."""
    image = record[0] if isinstance(record, tuple) else record  # uint8 [height, width, 3]
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None] / 255
    return torch.nn.functional.interpolate(pixels, (SIDE, SIDE), mode="bilinear", antialias=True)[0]


def predict(options: argparse.Namespace, model: Predict, results: ResultLog) -> None:
    """Until each record has its result, here or elsewhere."""
    reader = open_reader(options.data, TaskType.PREDICTION)
    with DataShardService(
        options.batch_size, dataset_name="prediction", task_type=TaskType.PREDICTION
    ) as service:
        dataset = ShardedDataset(service, reader, transform=to_input)
        loader = ElasticDataLoader(dataset, num_workers=options.workers)
        while not service.finished:
            for images in loader:
                with torch.inference_mode():
                    scores = model(images)
                # On the disk first: to ask for the next batch acknowledges this one.
                results.write(loader.records, scores.argmax(dim=1).tolist())


def main(arguments: list[str] | None = None) -> int:
    """Take part in the job, or do all of it where there is no master."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="images that a reader knows")
    parser.add_argument("out", help="a folder for the results, which all trainers reach")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that decode")
    options = parser.parse_args(arguments)
    try:
        with ResultLog(options.out) as results:
            predict(options, load_model(), results)
    except (EdlError, OSError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
