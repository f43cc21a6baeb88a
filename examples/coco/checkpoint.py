"""Checkpoints as files: written whole or not at all, read without executing anything in them."""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import torch

from edl_torch.errors import InvalidArgument


def save(path: Path, state: dict[str, Any]) -> None:
    """Write the state beside `path`, then rename: a crash leaves the checkpoint of before."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(scratch, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Raises InvalidArgument for a file that is none."""
    if not zipfile.is_zipfile(path):
        raise InvalidArgument(f"{path} is not a checkpoint of this program, or it is damaged")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as exc:
        raise InvalidArgument(f"{path} is not a checkpoint of this program, or it is damaged") from exc
    if not isinstance(state, dict) or "model" not in state or "data" not in state:
        raise InvalidArgument(f"{path} is not a checkpoint of this program")
    return state


def rng_state() -> dict[str, Any]:
    """The states of the generators that training may draw from."""
    version, numbers, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": [version, list(numbers), gauss]}


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators back to `rng_state()`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
