"""For programs that tests start: import it before torch, and call `over` when all is imported.

Else the garbage collector looks through all of torch again and again, at the imports and at the end of the
interpreter: a third of the processor's time that both take.
"""

from __future__ import annotations

import gc

gc.disable()


def over() -> None:
    """The collector comes back, and leaves alone what is there."""
    gc.freeze()
    gc.enable()
