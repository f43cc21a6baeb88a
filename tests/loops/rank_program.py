"""A loop of synchronous ranks as a value; `rank_job` runs it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loop_program import Data, Value

DATA = Data()


class Poison(StrEnum):
    """The loss of a padding batch."""

    NONE = ""
    NAN = "nan"
    INF = "inf"

    def __repr__(self) -> str:
        return f"Poison.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Ranks(Value):
    """Steps count from 0 over the whole job, the same on every rank. All optimizers step at a pass's end.

    Attributes:
        every: for each optimizer, after how many batches it steps.
        leave: all ranks leave their loop in this step, before they look at the batch.
        trained: they leave it after the backward pass of that batch.
        flush: ranks that left their loop step on what they have gathered; else their windows go on.
        lookahead: a wrapper reads so many batches ahead, and says which it passes on. Without `flush`, as it
            does not say that its loop was left, and ranks reduce gradients at the step here.
        failed: (step, rank): there `report_batch_done(err_msg=…)` takes the place of training.
        save: the step after which a token and the model are saved.
        heirs: so many ranks go on from what was saved; 0: nobody does.
    """

    size: int = 2
    data: Data = DATA
    every: tuple[int, ...] = (1,)
    attached: bool = True
    weighed: bool = True  # loader.weigh and loader.scale_gradients
    poison: Poison = Poison.NONE
    leave: int = -1
    trained: bool = False
    flush: bool = True
    lookahead: int = 0
    failed: tuple[tuple[int, int], ...] = ()
    save: int = -1
    heirs: int = 0
    reduced: bool = True  # gradients over all ranks, as DDP does it
    forgets_model: bool = False  # heirs load the token, and not the model
    in_process: bool = True
