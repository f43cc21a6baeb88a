"""Decisions that an exception from outside has cut off in their middle.

Python runs signal handlers between any two calls of the main thread. What one raises, as Ctrl-C does, may end
a decision there, with its state half changed. Nothing holds it back. Who decides notes before each decision
that one is under way, and after it that it has ended: by its result, or by an error of its own. Whoever finds
one under way, with the lock in hand, has come after a cut, or is called by a handler in the middle of it:
what the state is worth is not known, and the call is refused.
"""

from __future__ import annotations

from traceback import walk_tb

from edl_torch.errors import EdlError


def cut_off(what: str) -> str:
    """Return what to say of a decision that is under way, and that nobody will end any more."""
    return (
        f"{what} was cut off in its middle, by Ctrl-C or by what another signal's handler raised: what it "
        f"changed is not known, and nothing goes on from it. Begin anew from the last checkpoint, with a new "
        f"loader. A handler that sets a flag or calls loader.preempt(), and raises nothing, cuts nothing off"
    )


def is_own(error: BaseException) -> bool:
    """Whether a decision raised this error by itself, and not a handler that came in the middle of it."""
    return isinstance(error, EdlError) and all(
        frame.f_globals["__name__"].startswith("edl_torch.") for frame, _ in walk_tb(error.__traceback__)
    )
