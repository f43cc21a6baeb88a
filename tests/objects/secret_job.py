"""A job over a store that says all that it can: every line of its log, its objects as text, its errors.

    python secret_job.py FOLDER < settings.json

In the middle of its epoch it says `ready` and goes on when it is told to.
"""

from __future__ import annotations

import json
import logging
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from edl_torch import ElasticDataLoader, Mixture
from edl_torch.errors import EdlError
from edl_torch.readers.images.folder import ImageFolderReader
from edl_torch.readers.images.manifest import ImageManifestReader
from edl_torch.readers.tar.reader import TarReader


def readers(settings: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """One of each kind that a store has here."""
    base = settings["base"]
    return {
        "images": ImageFolderReader(f"{base}/images", storage_options=options),
        "listed": ImageManifestReader(f"{base}/list.csv", storage_options=options),
        "tars": TarReader(f"{base}/tars", fields="txt", storage_options=options),
    }


def say(what: Any) -> None:
    """Print what an error or an object says of itself."""
    print(repr(what), what, flush=True)


def provoke(settings: dict[str, Any]) -> None:
    """Print the errors of what is wrong."""
    base = settings["base"]
    for url, options in (
        (f"{base}/images", settings["wrong"]),
        (f"{base}/none", settings["options"]),
        (settings["signed"], settings["options"]),
        (settings["signed"].replace("://", "://user:" + settings["password"] + "@"), {}),
    ):
        for make in (ImageFolderReader, TarReader, ImageManifestReader):
            try:
                make(url, storage_options=options)
            except EdlError as exc:
                say(exc)
                traceback.print_exc()
            else:
                raise AssertionError(url)
    signed = Path(settings["folder"]) / "signed.csv"
    signed.write_text(f"file,label\n{settings['signed']},1\n")
    try:
        say(ImageManifestReader(signed, root=settings["base"], storage_options=settings["options"]).load(0))
    except EdlError as exc:
        say(exc)
        traceback.print_exc()
    signed.unlink()


def main(folder: Path, settings: dict[str, Any]) -> None:
    """Run the job."""
    logging.basicConfig(level=logging.DEBUG)
    found = readers(settings, settings["options"])
    data = Mixture(found, num_records=40) if settings["mixture"] else found["images"]
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ElasticDataLoader(
        data,
        batch_size=4,
        num_workers=settings["workers"],
        multiprocessing_context=settings["method"],
        collate_fn=len,
        audit_dir=folder / "audit",
    ) as loader:
        loader.attach(optimizer)
        for number, size in enumerate(loader):
            optimizer.zero_grad()
            model(torch.ones(size, 1)).sum().backward()
            optimizer.step()
            if number == 2:
                print("ready", flush=True)
                assert sys.stdin.readline() == "go on\n"
        (folder / "token").write_text(json.dumps(loader.state_dict()))
        torch.save({"loader": loader.state_dict()}, folder / "checkpoint.pt")
        for one in (loader, loader.service, data, *found.values()):
            say(one)
    if settings["is_pickled"]:
        (folder / "pickle").write_bytes(pickle.dumps(found))
    provoke(settings)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.stdin.readline()))
