"""An `ElasticDataLoader` under a DeepSpeed engine, by `prepare(engine, loader)`.

It does not import DeepSpeed: it changes an engine that it is given (0.19). When a batch counts is told to the
loader by the steps of that engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edl_torch.data.loader import ElasticDataLoader
from edl_torch.errors import CheckpointError, InvalidArgument

__all__ = ["PreparedLoader", "prepare"]

_KEY = "edl_torch"  # of the data position in a checkpoint's client state


def prepare(engine: Any, loader: ElasticDataLoader) -> PreparedLoader:
    """Prepare a loader for an engine, and the engine for the loader. All ranks do it, before the first batch.

    From now on a batch counts when the engine has stepped on it; `engine.backward` gives each record of each
    rank the same weight; `engine.save_checkpoint` saves the data position too, and `engine.load_checkpoint`
    goes back to it, or to the beginning where there is no checkpoint.

    Raises InvalidArgument for a pipeline engine, and for a loader that is not synchronous where the engine
    trains on several ranks.
    """
    if engine.dp_world_size > 1 and not loader.synchronous:
        raise InvalidArgument(
            f"DeepSpeed trains one model on {engine.dp_world_size} ranks: make the ElasticDataLoader with "
            f"synchronous=True"
        )
    loader.attach(engine)
    return PreparedLoader(engine, loader)


class PreparedLoader:
    """The batches of an `ElasticDataLoader` for a DeepSpeed engine; made by `prepare`.

    An epoch ends with a step: where its batches end in the midst of an accumulation, the last one comes again
    until the engine steps, and has no weight.
    """

    def __init__(self, engine: Any, loader: ElasticDataLoader) -> None:
        self._engine = engine
        self._loader = loader
        self._last: Any = None  # batch, to fill up an accumulation with
        self._filling = False
        backward, save, load = engine.backward, engine.save_checkpoint, engine.load_checkpoint

        def weighed(loss: Any, *args: Any, **kwargs: Any) -> Any:
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
                _name_latest(Path(save_dir), tag)
            return saved

        def load_with_position(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            path, state = load(*args, **kwargs)
            loader.load_state_dict(_position(path, state, module_only=kwargs.get("load_module_only", False)))
            return path, state

        engine.backward = weighed
        engine.save_checkpoint = save_with_position
        engine.load_checkpoint = load_with_position

    def __repr__(self) -> str:
        return f"<PreparedLoader {self._loader!r}>"

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
        engine, steps = self._engine, self._engine.global_steps
        is_open = False
        for batch in self._loader:
            self._last, steps = batch, engine.global_steps
            yield batch
            is_open = engine.global_steps == steps
        try:
            while is_open:
                self._filling, micro_steps = True, engine.micro_steps
                yield self._last
                if engine.micro_steps == micro_steps:
                    return  # a loop that steps when it likes: no number of batches would make it
                is_open = engine.global_steps == steps
        finally:
            self._filling, self._last = False, None

    def _weigh(self, loss: Any) -> Any:
        """Let records weigh what those of a whole batch do: DeepSpeed divides by ranks and batches."""
        loader = self._loader
        share = 0.0 if self._filling else loader.weight / loader.service.batch_size
        return loader.weigh(loss, count=share)


def _name_latest(folder: Path, tag: str) -> None:
    """Name the checkpoint that is to be loaded. DeepSpeed empties the file first, and may die there."""
    partial = folder / "latest.partial"
    partial.write_text(tag)
    partial.replace(folder / "latest")


def _position(path: str | None, state: Mapping[str, Any] | None, *, module_only: bool) -> Any:
    if path is None or module_only:
        return None
    if not state or _KEY not in state:
        raise CheckpointError(
            f"{path} has no data position: it was saved without prepare(engine, loader). Where it is only a "
            f"model to begin with, give load_checkpoint() load_module_only=True"
        )
    return state[_KEY]
