"""An `ElasticDataLoader` under a DeepSpeed engine, by `prepare(engine, loader)`.

It does not import DeepSpeed: it changes an engine that it is given (0.19). When a batch counts is told to the
loader by the steps of that engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edl_torch.data.loader import ElasticDataLoader
from edl_torch.errors import AccountingError, CheckpointError, InvalidArgument
from edl_torch.integrations.adapter import check_synchronous
from edl_torch.integrations.engines import check_steps
from edl_torch.system.whole_files import whole_file

__all__ = ["EngineLoader", "prepare"]

_KEY = "edl_torch"  # of the data position in a checkpoint's client state
_UNPREPARED = "edl_torch_unprepared"
# The shards of its third stage are others on another number of ranks, so that they cannot be compared.
_ONE_MODEL = "DeepSpeed loads its shards and the data position from one checkpoint"


def prepare(engine: Any, loader: ElasticDataLoader) -> EngineLoader:
    """Prepare a loader for an engine, and the engine for the loader. All ranks do it, before the first batch.

    From now on a batch counts when the engine has stepped on it; `engine.backward` gives each record of each
    rank the same weight; `engine.save_checkpoint` saves the data position too, and `engine.load_checkpoint`
    goes back to it, or to the beginning where there is no checkpoint. An engine that was prepared for another
    loader is so no more.

    Raises InvalidArgument for a pipeline engine, for a loader that is not synchronous where the engine trains
    on several ranks, and for one of several engines of which one accumulates gradients.
    """
    check_steps(engine)
    ranks: int = engine.dp_world_size
    check_synchronous(loader, ranks, f"DeepSpeed trains one model on {ranks} ranks")
    loader.attach(engine, one_model=_ONE_MODEL if engine.zero_optimization_stage() == 3 else "")
    engines = loader.service.session.gradients.optimizers()
    if len(engines) > 1 and any(each.gradient_accumulation_steps() > 1 for each in engines):
        raise InvalidArgument(
            "several engines train on one loader, and one of them accumulates gradients: the batch that "
            "fills up its last accumulation of an epoch would count for the others. Let each have "
            "gradient_accumulation_steps of 1"
        )
    return EngineLoader(engine, loader)


class EngineLoader:
    """The batches of an `ElasticDataLoader` for a DeepSpeed engine; made by `prepare`.

    An epoch ends with a step: where its batches end in the midst of an accumulation, the last one comes again
    until the engine steps, and has no weight.
    """

    def __init__(self, engine: Any, loader: ElasticDataLoader) -> None:
        self._engine = engine
        self._loader = loader
        self._last: Any = None  # batch, to fill up an accumulation with
        self._filling = False
        self._gathering_for: int | None = None  # the engine's step that has gradients already
        self._gathered = False  # the batch in hand is in them
        backward = _unprepared(engine.backward)
        save = _unprepared(engine.save_checkpoint)
        load = _unprepared(engine.load_checkpoint)
        load_arguments = inspect.signature(load)

        def weighed(loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._gathering_for, self._gathered = engine.global_steps, not self._filling
            return backward(self._weigh(loss), *args, **kwargs)

        def save_with_position(
            save_dir: str,
            tag: Any = None,
            client_state: Mapping[str, Any] | None = None,
            save_latest: bool = True,
            **kwargs: Any,
        ) -> Any:
            state = {**(client_state or {}), _KEY: loader.state_dict()}
            tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
            later = engine.checkpoint_engine.is_decoupled()  # then DeepSpeed says when it is whole
            saved = save(save_dir, tag, client_state=state, save_latest=save_latest and later, **kwargs)
            if save_latest and not later and engine.global_rank == 0:
                with whole_file(Path(save_dir, "latest")) as file:  # DeepSpeed empties it, and may die there
                    file.write(tag.encode())
            return saved

        def load_with_position(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            if self._is_gathering:
                raise _in_the_midst("load_checkpoint() was called")
            path, state = load(*args, **kwargs)
            self._gathering_for = None
            module_only = load_arguments.bind(*args, **kwargs).arguments.get("load_module_only", False)
            loader.load_state_dict(_position(path, state, module_only=module_only))
            return path, state

        _set_prepared(engine, "backward", weighed, backward)
        _set_prepared(engine, "save_checkpoint", save_with_position, save)
        _set_prepared(engine, "load_checkpoint", load_with_position, load)

    def __repr__(self) -> str:
        return f"<EngineLoader {self._loader!r}>"

    def __len__(self) -> int:
        """Batches of an epoch, as far as they can be told; see `ElasticDataLoader`."""
        return len(self._loader)

    @property
    def loader(self) -> ElasticDataLoader:
        """The loader of the records."""
        return self._loader

    def epochs(self) -> Iterator[int]:
        """Go through the epochs that are left: see `ElasticDataLoader.epochs`."""
        return self._loader.epochs()

    def __iter__(self) -> Iterator[Any]:
        if self._is_gathering and self._gathered:
            raise _in_the_midst("a loop was left")
        engine, steps = self._engine, self._engine.global_steps
        is_open = False
        for batch in self._loader:
            self._last, steps = batch, engine.global_steps
            self._gathered = False
            yield batch
            is_open = engine.global_steps == steps
        self._gathered = False  # nothing that was read comes again
        try:
            while is_open:
                self._filling, micro_steps = True, engine.micro_steps
                yield self._last
                if engine.micro_steps == micro_steps:
                    return  # a loop that steps when it likes: no number of batches would make it
                is_open = engine.global_steps == steps
        finally:
            self._filling, self._last = False, None

    @property
    def _is_gathering(self) -> bool:
        """Whether gradients wait for the engine's next step."""
        steps: int = self._engine.global_steps
        return self._gathering_for == steps

    def _weigh(self, loss: Any) -> Any:
        """Let records weigh what those of a whole batch do: DeepSpeed divides by ranks and batches."""
        loader = self._loader
        share = 0.0 if self._filling else loader.weight / loader.service.batch_size
        return loader.weigh(loss, count=share)


def _unprepared(method: Any) -> Any:
    """Return a method of an engine as it was before it was prepared for an earlier loader."""
    return getattr(method, _UNPREPARED, method)


def _set_prepared(engine: Any, name: str, method: Any, unprepared: Any) -> None:
    setattr(method, _UNPREPARED, unprepared)
    setattr(engine, name, method)


def _in_the_midst(what: str) -> AccountingError:
    return AccountingError(
        f"{what} in the midst of an accumulation: batches that come again are in the engine's gradients "
        f"already. Do so after a step, where engine.was_step_applied(); from here a new process can go on "
        f"from the checkpoint"
    )


def _position(path: str | None, state: Mapping[str, Any] | None, *, module_only: bool) -> Any:
    if path is None or module_only:
        return None
    if not state or _KEY not in state:
        raise CheckpointError(
            f"{path} has no data position: it was saved without prepare(engine, loader). Where it is only a "
            f"model to begin with, give load_checkpoint() load_module_only=True"
        )
    return state[_KEY]
