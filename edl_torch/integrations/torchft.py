"""Leased shards for torchft: a batch counts when a commit of its quorum has put it into the model.

It does not import torchft: it changes a manager that it is given (0.2). Of a manager it needs things that are
not public: the number of its quorum, the state that it has fetched and not applied, and its group's size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edl_torch.data.loader import ElasticDataLoader
from edl_torch.errors import Unsupported

__all__ = ["ElasticDataLoader", "attach_manager"]

_KEY = "edl_torch"  # of our part of the state that replicas fetch from each other
_ONE_MODEL = "torchft's replicas commit their steps together, and fetch the model where they did not"
_REMEMBERED = 64  # commits: a replica that is further behind has lost its leases


def attach_manager(loader: ElasticDataLoader, manager: Any) -> None:
    """Let batches of `loader` count when `manager`, a `torchft.Manager`, commits the step on them.

    Each replica has a loader and a manager of its own, and the loaders one master. Call it before the first
    quorum, and attach no optimizer to the loader. Batches of a step that was not committed are read again,
    and so are those of a replica that is being healed, or is a spare: they are in no gradient.

    Raises Unsupported for a manager of a replica group of several ranks: what one of them gives back, others
    would have to give back too.
    """
    if manager._group_world_size > 1:
        raise Unsupported(
            f"attach_manager() is for replica groups of one rank, and this one has "
            f"{manager._group_world_size}: let each rank be a replica group of its own"
        )
    _Commits(loader, manager)


class _Commits:
    """Commits of one manager. For the loader it is an optimizer, whose steps are those that were decided.

    The manager refers to it, and so keeps it alive.
    """

    def __init__(self, loader: ElasticDataLoader, manager: Any) -> None:
        self._loader = loader
        self._manager = manager
        self._committed: dict[int, int] = {}  # step -> the quorum that committed it, of the newest steps
        self._quorum_is_ahead = False
        self.param_groups: list[dict[str, Any]] = []  # `weigh` asks an attached optimizer for them
        self._tell: Callable[..., None] = lambda *_: None
        self._should_commit = manager.should_commit
        self._start_quorum = manager.start_quorum
        loader.attach(self, one_model=_ONE_MODEL)
        loader.keep_stepping()  # the others wait for this replica, and may hold what it would wait for
        manager.register_state_dict_fn(_KEY, self._load, self._state)
        manager.should_commit = self.should_commit
        manager.start_quorum = self.start_quorum

    def __repr__(self) -> str:
        return f"<_Commits of {self._loader!r} newest={list(self._committed)[-1:]}>"

    def register_step_post_hook(self, hook: Callable[..., None]) -> _Commits:
        """Call `hook` after each step, when batches that are in no model have gone back."""
        self._tell = hook
        return self

    def remove(self) -> None:
        """Call the hook no more."""
        self._tell = lambda *_: None

    def start_quorum(self, *args: Any, **kwargs: Any) -> None:
        """Begin a step, unless a commit that failed has begun it."""
        begun, self._quorum_is_ahead = self._quorum_is_ahead, False
        if not begun:
            self._start_quorum(*args, **kwargs)

    def should_commit(self, *args: Any, **kwargs: Any) -> bool:
        """Commit the step, or not; the batches that were gathered for it count, or go back."""
        manager = self._manager
        committed: bool = self._should_commit(*args, **kwargs)
        step, quorum = manager.current_step() - committed, manager._quorum_id
        if committed:
            self._note(step, quorum)
        learnt = manager.is_participating() and (committed or self._others_committed(step, quorum))
        if not learnt:
            self._loader.give_back(window=True)
        self._tell(self, (), {})  # what has not gone back counts
        return committed

    def _others_committed(self, step: int, quorum: int) -> bool:
        """Return whether the step that failed here has gone into the model that this replica takes over.

        A failure may be one replica's own: its gradients were in the sum before it failed, the others commit,
        and it fetches their model. The next quorum says so. It is asked for now, before another batch is
        handed out; and again, as after any failure, while there is no group or the model is not here.
        """
        if not self._loader.service.record_count:
            return False  # padding batches: at the end of the data nobody is left to ask
        manager = self._manager
        self._start_quorum()
        self._quorum_is_ahead = True
        manager.wait_quorum()
        while manager.errored():
            self._should_commit()  # it does not: torchft counts failures, and has a limit
            self._start_quorum()
            manager.wait_quorum()
        if manager.current_step() == step:
            return False
        fetched = manager._pending_state_dict
        theirs: dict[int, int] = self._committed if fetched is None else fetched["user"][_KEY]
        return theirs.get(step) == quorum

    def _note(self, step: int, quorum: int) -> None:
        self._committed[step] = quorum
        while len(self._committed) > _REMEMBERED:
            del self._committed[next(iter(self._committed))]

    def _state(self) -> dict[int, int]:
        return dict(self._committed)

    def _load(self, state: dict[int, int]) -> None:
        self._committed = dict(state)
