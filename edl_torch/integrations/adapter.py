"""What adapters have in common: a framework that is missing, loaders that do not fit, a model's position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from edl_torch.errors import IntegrationUnavailable, InvalidArgument

if TYPE_CHECKING:
    from edl_torch.data.loader import ElasticDataLoader


@contextmanager
def needed_by(extra: str) -> Iterator[None]:
    """Raise IntegrationUnavailable where what the body imports is not installed; `extra` brings it."""
    try:
        yield
    except ModuleNotFoundError as exc:
        raise IntegrationUnavailable(
            f"edl_torch.integrations.{extra} needs {extra} and what it imports ({exc.name} is missing): "
            f"pip install 'edl-torch[{extra}]'"
        ) from exc


def read_ahead(loader: ElasticDataLoader, lookahead: int | Literal["manual"] = "manual") -> None:
    """Let a framework read ahead of the loop, and say by `loader.passed_on()` which batch that gets.

    A pass over the loader that is open ends. `lookahead` takes back how it was before.
    """
    loader.service.session.set_lookahead(None if lookahead == "manual" else lookahead)


def records_read(loader: ElasticDataLoader) -> int:
    """Return the records of the batch that was read last, and that no loop has got yet; 0 for padding, which
    the caller weighs."""
    batches = loader.service.session.trainer.state.batches
    loader.service.session.do(batches.weigh_padding, batches.ahead[-1])
    return batches.ahead[-1].records


def check_synchronous(loader: ElasticDataLoader, ranks: int, trains: str) -> None:
    """Raise InvalidArgument for a loader of one rank where one model trains on several."""
    if ranks > 1 and not loader.synchronous:
        raise InvalidArgument(f"{trains}: make the ElasticDataLoader with synchronous=True")


class ModelPosition:
    """Where a model is in its data: at a position that was loaded with it, or at the beginning."""

    def __init__(self, loader: ElasticDataLoader) -> None:
        self._loader = loader
        self._is_known = False
        self._is_left = False  # the loop was left, perhaps with batches that no step has learnt from

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go to a position, or to the beginning."""
        self._loader.load_state_dict(state)
        self._is_known, self._is_left = True, False

    def leave(self) -> None:
        """Note that what is not in the model is to come again."""
        self._is_left = True

    def end(self) -> None:
        """Note that all of it is in the model after all."""
        self._is_left = False

    def begin(self) -> bool:
        """Go to the model's position before a pass. Returns whether the data were moved."""
        if self._is_known and not self._is_left:
            return False
        self.load(self._loader.state_dict() if self._is_known else None)
        return True
