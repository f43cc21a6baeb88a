"""What one rank of a synchronous job knows of where all ranks stand.

Ranks that step together hold copies of one model, so what one of them trains on is in all. It decides nothing
about batches, and does not know torch.
"""

from __future__ import annotations

from edl_torch.client.peers import Doing, Peers, together
from edl_torch.errors import InvalidArgument


class Lockstep:
    """The state that a session shares with its `peers`."""

    def __init__(self, peers: Peers, dataset: str) -> None:
        self.peers = peers
        self._dataset = dataset
        self._finished: bool | None = None

    def __repr__(self) -> str:
        return f"<Lockstep rank={self.peers.rank}/{self.peers.size} finished={self._finished}>"

    @property
    def holds_leases(self) -> bool:
        """Whether this rank takes part at the master: of ranks that hold one model in parts, one does."""
        return self.peers.parts is None or self.peers.parts.holds

    @property
    def begun(self) -> bool:
        """Whether the ranks have loaded a checkpoint or the beginning together, or found themselves there."""
        return self._finished is not None

    @property
    def finished(self) -> bool:
        """Whether every record of every epoch has its outcome, as the ranks last agreed.

        The same on every rank, and no call: who leaves the loop over epochs must not leave it alone. Raises
        InvalidArgument before the ranks have begun.
        """
        if self._finished is None:
            raise InvalidArgument(
                f"synchronous ranks begin where their model does, and dataset {self._dataset!r} may be "
                "anywhere: call load_state_dict() on every rank, after the loader is made and before the "
                "first pass, with what was saved with the model, or with None for the beginning of the data"
            )
        return self._finished

    def agreed(self, *, finished: bool) -> None:
        """Note what the ranks have agreed on."""
        self._finished = finished

    def same_on_all(self, doing: Doing, text: str, what: str) -> None:
        """Raise InvalidArgument, on every rank that differs, unless `text` is the same on every rank."""
        first = together(self.peers, doing, lambda: None, lambda: text)

        def compare() -> None:
            if text != first:
                raise InvalidArgument(f"{what} of rank {self.peers.rank} differs from that of rank 0")

        together(self.peers, doing, compare, str)
