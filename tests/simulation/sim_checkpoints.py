"""Checkpoints of a simulated job: a folder, and the steps of `data.checkpoint` over a real trainer.

Saving and loading are played step by step, in that module's order. Each step is a `point` where the process
may be stopped, killed or delayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sim_model import BrokenPromise
from sim_session import SimSession
from sim_weights import Judge, Weights

from edl_torch.errors import CheckpointError
from edl_torch.trainer.vocabulary import Procedure

FOLDER = "checkpoints"
KEEP = 2
Point = Callable[[str], Procedure[None]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a complete one holds."""

    weights: Weights
    token: str
    data: int


@dataclass(slots=True)
class Folder:
    """Complete checkpoints by number, and partial ones; on a file system that all incarnations share.

    The judge is of the data that the job has now.
    """

    judge: Judge
    complete: dict[int, Checkpoint] = field(default_factory=dict)
    partial: set[object] = field(default_factory=set)
    saved: int = 0

    @property
    def newest(self) -> int:
        """Its number; 0 where there is none."""
        return max(self.complete, default=0)

    def prepare(self, last: int | None) -> int:
        """The number of the next one. Raises CheckpointError where `last` is not the newest any more."""
        if last is not None and self.newest != last:
            raise CheckpointError(f"{self.newest} was saved by another incarnation")
        return self.newest + 1

    def begin(self) -> object:
        """A partial one."""
        partial = object()
        self.partial.add(partial)
        return partial

    def finish(self, number: int, partial: object, checkpoint: Checkpoint, by: str) -> None:
        """Rename it; then the partial and the old ones go."""
        if partial not in self.partial:
            raise CheckpointError(f"the partial folder of {number} is gone")
        if number in self.complete:
            raise CheckpointError(f"{number} was saved by another incarnation")
        self.judge.same(checkpoint.weights, checkpoint.token, f"checkpoint {number}, saved by {by}")
        self.complete[number] = checkpoint
        self.partial.clear()
        self.saved += 1
        for old in sorted(self.complete)[:-KEEP]:
            del self.complete[old]

    def read(self, number: int) -> Checkpoint:
        """Raises CheckpointError for one that is gone."""
        if number not in self.complete:
            raise CheckpointError(f"the files of {number} are gone")
        return self.complete[number]


def save(folder: Folder, session: SimSession, weights: Weights, point: Point) -> Procedure[None]:
    """`save_checkpoint`: the model first, the token last."""
    yield from point("save")
    number = folder.prepare(_known(session))
    partial = folder.begin()
    yield from point("save: prepared")
    captured = weights.copy()
    yield from point("save: written")
    session.look("token", weights.parameters)
    token = yield from session.trainer.position.snapshot()
    yield from point("save: token taken")
    checkpoint = Checkpoint(captured, token, folder.judge.data)
    folder.finish(number, partial, checkpoint, session.id)
    session.checkpoints[FOLDER] = str(number)
    yield from point("saved")


def load(folder: Folder, session: SimSession, point: Point, *, forgets: bool) -> Procedure[Weights]:
    """`load_checkpoint`: a look at the history first. Returns the model as the call leaves it.

    Whoever `forgets` goes back to the token alone, with `load_state_dict`.
    """
    yield from point("load")
    yield from session.trainer.position.note_history()
    yield from point("load: looked")
    number = folder.newest
    session.checkpoints[FOLDER] = str(number)
    yield from point("load: newest found")
    if not number:
        yield from session.restore(None)
        return folder.judge.nothing()
    checkpoint = folder.read(number)
    yield from point("load: read")
    yield from session.restore(checkpoint.token)
    if checkpoint.data == folder.judge.data:
        weights = checkpoint.weights.copy()
        folder.judge.same(weights, checkpoint.token, f"checkpoint {number}, loaded by {session.id}")
        if forgets:
            weights = folder.judge.nothing()
            weights.forgot = True
    elif session.description.data_changed:
        weights = folder.judge.on_these_data(checkpoint.weights.parameters.copy())
    else:
        raise BrokenPromise(f"{session.id} went back to checkpoint {number}, which is of other data")
    session.model.restored()
    session.look("restored", weights.parameters)
    yield from point("loaded")
    return weights


def _known(session: SimSession) -> int | None:
    last = session.checkpoints.get(FOLDER)
    return None if last is None else int(last)
