"""Model, optimizer and data position as one checkpoint, at the same step on every rank.

Written by `torch.distributed.checkpoint`, so that a job of another size can load it. A checkpoint is there
whole or not at all, and follows on the one that its model came from: where two incarnations of a job are
alive, as after a partition, only one goes on. The model is written first and the position is asked for last:
whoever was superseded meanwhile leaves nothing that would be loaded. It must not know what a token holds.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from edl_torch.client.peers import Doing, together
from edl_torch.client.service import DataShardService
from edl_torch.errors import CheckpointError, InvalidArgument
from edl_torch.system.whole_files import sync

_NAME = re.compile(r"\d{8}")
_PARTIAL = ".partial"
_DATA = "data.json"  # the position: what `service.state_dict()` returned


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    service: DataShardService,
    *,
    keep: int = 2,
    **extra: Any,
) -> Path:
    """Save a checkpoint into a new folder of `directory`; all ranks of a job call it at the same step.

    The batch in hand counts as trained on, unless an attached optimizer has not stepped on it yet. The data
    position is asked for last: a trainer that has been superseded leaves no checkpoint.

    Args:
        directory: of this job's checkpoints; the same for all ranks, on a file system that they share.
        model: plain, wrapped in DDP, or sharded by `fully_shard` (FSDP2). With `FullyShardedDataParallel`
            (FSDP1), one rank only: torch does not load what several have saved.
        optimizer: the model's; no `ZeroRedundancyOptimizer`, whose state each rank has a part of.
        service: gives the data position; more services can be had with `state_dict()` in `extra`.
        keep: how many of the newest checkpoints are kept.
        extra: what else belongs to it, as `torch.load(weights_only=True)` takes it: numbers, strings,
            tensors, lists and dicts of them, such as a scheduler's `state_dict()`.

    Returns the folder, `directory/00000001` and so on. Raises CheckpointError where it cannot be written, or
    where others have saved one since this job loaded or saved its last; earlier ones are then untouched, and
    what was written of this one goes. So does an older one that cannot be removed; the new one is saved then.
    StaleLease where others have taken the data back to a checkpoint since this job did, InvalidArgument for
    several ranks that do not all step together.
    """
    _check_ranks(service, model)
    folder = Path(directory)
    known = service.session.checkpoints
    partial = folder / _on_first(
        service, Doing.SAVE_CHECKPOINT, lambda: _prepare(folder, known.get(str(folder)))
    )
    name = partial.name.partition(".")[0]
    model_state, optimizer_state = get_state_dict(model, optimizer)
    more = io.BytesIO()
    torch.save(extra, more)
    state = {"model": model_state, "optimizer": optimizer_state, "extra": more.getvalue()}
    try:
        with _silent_when_alone():
            save(state, checkpoint_id=partial)
    except (OSError, CheckpointException) as exc:
        _raise_interruption(exc)
        raise _give_up(partial, partial, _reasons(exc)) from exc
    data = service.state_dict()
    _on_first(service, Doing.SAVE_CHECKPOINT, lambda: _finish(partial, folder / name, data, keep, known))
    return folder / name


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    service: DataShardService,
) -> dict[str, Any] | None:
    """Load the newest checkpoint of `directory`, or begin at the beginning where there is none.

    All ranks call it before the first pass, after the synchronous loader is made; their number need not be
    that of the job that saved. Returns what was saved as `extra`; None where there was no checkpoint. Raises
    CheckpointError for one that cannot be read, TokenError for one of another dataset, StaleLease where
    others took the data back to a checkpoint meanwhile, InvalidArgument for several ranks that do not all
    step together. After an error, or Ctrl-C, the model may hold a part of the checkpoint while the data are
    where they were: load again before training.
    """
    _check_ranks(service, model)

    def choose() -> str:
        session = service.session
        session.run(
            session.trainer.position.note_history()
        )  # first: whatever others restore from here on is seen
        return _newest(Path(directory))

    name = _on_first(service, Doing.LOAD_CHECKPOINT, choose)
    service.session.checkpoints[str(Path(directory))] = name
    if not name:
        service.load_state_dict(None)
        return None
    folder = Path(directory) / name
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "extra": b""}
    try:
        data = json.loads((folder / _DATA).read_text())
        with _silent_when_alone():
            load(state, checkpoint_id=folder)
    except (OSError, CheckpointException, json.JSONDecodeError) as exc:
        _raise_interruption(exc)
        raise CheckpointError(
            f"the checkpoint '{folder}' cannot be read: {_reasons(exc)}. Give the model and the kind of "
            "optimizer that it was saved with, or another folder to begin anew; if its files are damaged, "
            "remove it: the one before is taken"
        ) from exc
    set_state_dict(*(model, optimizer), model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    service.load_state_dict(data)
    extra: dict[str, Any] = torch.load(io.BytesIO(state["extra"]), weights_only=True)
    return extra


def _raise_interruption(error: BaseException) -> None:
    """Raise Ctrl-C, or what else a signal handler raised here: torch makes a failure of all that it meets."""
    if not isinstance(error, CheckpointException):
        return
    own = error.failures.get(0 if _alone() else dist.get_rank())
    if own is not None and not isinstance(own[0], Exception):
        raise own[0]


def _reasons(error: OSError | CheckpointException | json.JSONDecodeError) -> str:
    """Return the reasons of an error in one line: torch's own text has the tracebacks of all ranks."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, json.JSONDecodeError):
        return f"{_DATA} is no JSON: {error}"
    ranks: dict[str, list[str]] = {}
    for rank, (exc, _) in sorted(error.failures.items()):
        reason = " ".join(f"{type(exc).__name__}: {exc}".split()).rstrip(".")
        ranks.setdefault(reason, []).append(str(rank))
    return "; ".join(f"{reason} (rank {', '.join(where)})" for reason, where in ranks.items())


def _on_first(service: DataShardService, doing: Doing, ask: Callable[[], str]) -> str:
    """Return on every rank what rank 0 finds."""
    lockstep = service.session.lockstep
    return ask() if lockstep is None else together(lockstep.peers, doing, lambda: None, ask)


def _check_ranks(service: Any, model: Any) -> None:
    """Raise unless these are a service and a model, and all ranks of the job write to one place."""
    if not isinstance(model, nn.Module):
        raise InvalidArgument(
            f"model must be a torch.nn.Module, not {type(model).__name__}: give the model itself, then its "
            f"optimizer"
        )
    if not isinstance(service, DataShardService):
        own = isinstance(getattr(service, "service", None), DataShardService)
        remedy = "give loader.service" if own else "give that of the loader, as loader.service"
        raise InvalidArgument(f"service must be a DataShardService, not {type(service).__name__}: {remedy}")
    ranks = 1 if _alone() else dist.get_world_size()
    if ranks > 1 and any(hasattr(parameter, "_fsdp_flattened") for parameter in model.parameters()):
        raise InvalidArgument(
            "torch loads no checkpoint of FullyShardedDataParallel (FSDP1) that several ranks have saved: "
            "shard the model with torch.distributed.fsdp.fully_shard, or save it with a tool of your own, "
            "and loader.state_dict() with it"
        )
    lockstep = service.session.lockstep
    agreeing = 1 if lockstep is None else lockstep.peers.size
    if 1 < ranks != agreeing:
        raise InvalidArgument(
            f"this job has {ranks} ranks, and {agreeing} of them step(s) with this service: make the loader "
            "first, with synchronous=True and over all ranks. Ranks with models of their own, and "
            "model-parallel ones, save by torch.save or torch.distributed.checkpoint, and with them "
            "service.state_dict()"
        )


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


@contextmanager
def _silent_when_alone() -> Iterator[None]:
    """Leave out torch's warning that this process saves or loads alone: it is meant to."""
    with warnings.catch_warnings():
        if _alone():
            warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)", UserWarning)
        yield


def _checkpoints(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if _NAME.fullmatch(entry.name))
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise CheckpointError(f"the checkpoints in '{folder}' cannot be listed: {exc.strerror}") from exc


def _newest(folder: Path) -> str:
    return max(_checkpoints(folder), default="")


def _prepare(folder: Path, last: str | None) -> str:
    """Return where to write the next checkpoint; `last` is the one before it, None where not known."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise CheckpointError(f"checkpoints cannot be written to '{folder}': {exc.strerror}") from exc
    newest = _newest(folder)
    if last is not None and newest != last:
        raise CheckpointError(_overtaken(folder / newest))
    return f"{int(newest or 0) + 1:08d}.{uuid.uuid4().hex}{_PARTIAL}"


def _overtaken(other: Path) -> str:
    return (
        f"'{other}' was saved by another incarnation of this job, since this one loaded or saved its last: "
        "start all ranks again from it, as torchrun does by itself"
    )


def _finish(partial: Path, target: Path, data: dict[str, str], keep: int, known: dict[str, str]) -> str:
    """Declare a checkpoint complete; only then remove older ones, and what was left half written."""
    try:
        (partial / _DATA).write_text(json.dumps(data))
        for path in (*partial.iterdir(), partial):
            sync(path)
        _declare(str(partial), target, known)
        sync(target.parent)
    except OSError as exc:
        raise _give_up(partial, target, exc.strerror or str(exc)) from exc
    for left in target.parent.glob("*" + _PARTIAL):
        shutil.rmtree(left, ignore_errors=True)  # its writer may be at it still, and will fail
    for old in _checkpoints(target.parent)[: -max(1, keep)]:
        try:
            shutil.rmtree(target.parent / old)
        except OSError as exc:
            raise CheckpointError(
                f"the older checkpoint '{target.parent / old}' cannot be removed: {exc.strerror or exc}. "
                f"'{target}' is saved"
            ) from exc
    return ""


def _declare(partial: str, target: Path, known: dict[str, str]) -> None:
    """Give a checkpoint its name, and note that it is this job's own."""
    folder, name, path = str(target.parent), target.name, str(target)
    try:
        os.rename(partial, path)
    except OSError as exc:
        if target.exists():
            raise CheckpointError(_overtaken(target)) from exc
        raise
    except BaseException:  # a signal's handler: Python calls it when the system call is over
        known[folder] = name
        raise
    known[folder] = name


def _give_up(partial: Path, named: Path, reason: str) -> CheckpointError:
    """Remove what a checkpoint has on the disk, which may be full of it. Returns the error that says why."""
    newest = _newest(partial.parent)
    if not partial.exists() and newest >= partial.name.partition(".")[0]:
        return CheckpointError(_overtaken(partial.parent / newest))  # which removed it
    shutil.rmtree(partial, ignore_errors=True)  # once torch raises, all ranks have ended writing
    return CheckpointError(f"the checkpoint '{named}' cannot be written: {reason}")
