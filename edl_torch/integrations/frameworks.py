"""Frameworks whose loops do more with a loader than to go through it, and what does it right: one row each.

They are told by the module that asks for an iterator or a length. Nothing of them is imported here, so that a
loader can ask before any adapter is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any, NoReturn

from edl_torch.errors import EdlError, ForeignLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """How a framework without its adapter is told, and the remedy."""

    remedy: str
    iterates: tuple[str, ...] = ()  # modules, or packages, that iterate a bare loader by themselves
    trainer: str = ""  # the module of what asks by way of others
    adapted: str = ""  # attribute that such a trainer has when it is used with its adapter, with dots
    manager: tuple[str, str] = ("", "")  # module and class of what decides which steps count


FRAMEWORKS = (
    Framework(
        iterates=("lightning.pytorch", "pytorch_lightning"),
        remedy="Lightning's loop ends epochs by a length, reads ahead, and keeps no position that is its "
        "model's. Train on an ElasticDataLoader, and give it to callbacks=[ElasticCallback(loader)] of "
        "edl_torch.integrations.lightning; validate on a plain DataLoader over other data",
    ),
    Framework(
        iterates=("accelerate",),
        remedy="accelerator.prepare() makes another loader of its dataset, which reads ahead, drops the "
        "position, and deals out or repeats records by rank. Train on prepare(accelerator, loader) of "
        "edl_torch.integrations.accelerate, with an ElasticDataLoader that accelerator.prepare() has not "
        "seen",
    ),
    Framework(
        iterates=("ray.train.torch.train_loop_utils",),
        remedy="Ray's prepare_data_loader() reads one batch ahead, so that batches would count before they "
        "are trained on. Leave it out, or give move_to_device=False: the records are shared out without it. "
        "Move each batch in the loop, to ray.train.torch.get_device()",
    ),
    Framework(
        trainer="transformers.trainer",
        adapted="elastic_loader",
        remedy="a transformers Trainer fixes the steps of an epoch before it reads, skips batches when it "
        "resumes, and saves no data position: records would be lost or repeated. Declare class MyTrainer("
        "ElasticTrainer, Trainer), with edl_torch.integrations.transformers.ElasticTrainer, and give it "
        "elastic_loader=ElasticDataLoader(…), not train_dataset=; evaluate on a dataset of torch's own",
    ),
    Framework(
        trainer="deepspeed.runtime.engine",
        remedy="deepspeed.initialize(training_data=) makes a plain DataLoader of a dataset, which deals out "
        "records by rank. Leave training_data out: train on prepare(engine, loader) of "
        "edl_torch.integrations.deepspeed, with an ElasticDataLoader",
    ),
    Framework(
        trainer="torchtitan.trainer",
        adapted="dataloader.attach",
        remedy="torchtitan reads all batches of a step before it trains on them, so that batches would count "
        "too early: give dataloader=ElasticLoader.Config(…) to a TitanTrainer.Config, both of "
        "edl_torch.integrations.torchtitan",
    ),
    Framework(
        manager=("torchft.manager", "Manager"),
        remedy="a torchft Manager decides which steps count: call attach_manager(loader, manager) of "
        "edl_torch.integrations.torchft before the loop; evaluate on a plain DataLoader",
    ),
)
_TRAINERS = {framework.trainer: framework for framework in FRAMEWORKS if framework.trainer}
_MANAGERS = {framework.manager: framework for framework in FRAMEWORKS if framework.manager[0]}


def check_asked_by(frame: FrameType, what: str) -> None:
    """Raise ForeignLoop where `frame`, which begins to iterate `what`, is of such a framework."""
    check_no_trainer(frame)
    check_module(frame.f_globals.get("__name__", ""), what)


def raising(error: EdlError) -> Iterator[Any]:
    """Return an iterator that raises `error` in place of the first batch.

    Frameworks tear down what they have set up when `iter()` raises, and may hide its error by one of their
    own.
    """
    return map(_raise, [error])


def _raise(error: EdlError) -> NoReturn:
    raise error


def check_module(module: str, what: str) -> None:
    """Raise ForeignLoop where `module`, which begins to iterate `what`, is of such a framework."""
    for framework in FRAMEWORKS:
        for prefix in framework.iterates:
            if module == prefix or module.startswith(f"{prefix}."):
                raise ForeignLoop(f"{what} is iterated by {prefix} itself: {framework.remedy}")


def check_no_trainer(frame: FrameType | None) -> None:
    """Raise ForeignLoop where a framework's trainer without its adapter is at work, around `frame`."""
    if sys.modules.keys().isdisjoint(_TRAINERS):
        return
    while frame is not None:
        framework = _TRAINERS.get(frame.f_globals.get("__name__", ""))
        if framework is not None:
            if framework.adapted and _has(frame.f_locals.get("self"), framework.adapted):
                return
            raise ForeignLoop(framework.remedy)
        frame = frame.f_back


def check_no_manager(frame: FrameType | None) -> None:
    """Raise ForeignLoop where the loop at `frame`, or what calls it, has a manager in its hands.

    That is a variable of one of them, or an attribute of one.
    """
    for (module, name), framework in _MANAGERS.items():
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and any(_holds(scope, kind) for scope in _scopes(frame)):
            raise ForeignLoop(framework.remedy)


def _scopes(frame: FrameType | None) -> Iterator[Mapping[str, Any]]:
    modules = dict[int, Mapping[str, Any]]()  # each once; locals are made anew as they are asked for
    while frame is not None:
        yield frame.f_locals
        modules[id(frame.f_globals)] = frame.f_globals
        frame = frame.f_back
    yield from modules.values()


def _holds(scope: Mapping[str, Any], kind: type) -> bool:
    for value in tuple(scope.values()):
        if isinstance(value, ModuleType):
            continue
        # By type(): `isinstance` asks a lazy object for its class, which loads it.
        if any(issubclass(type(one), kind) for one in (value, *getattr(value, "__dict__", {}).values())):
            return True
    return False


def _has(value: Any, path: str) -> bool:
    """Whether there is an attribute of an attribute."""
    for name in path.split("."):
        value = getattr(value, name, None)
    return value is not None
