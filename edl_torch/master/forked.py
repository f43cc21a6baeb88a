"""Processes forked from one that serves or has served with grpc.aio, as loader workers beside a master are.

What grpc.aio leaves behind joins, when it is collected, a thread that no child has, over and over: a child
whose garbage collector found it would never do anything else.
"""

from __future__ import annotations

import gc
import os
from functools import cache


@cache  # fork handlers are the process's, and cannot be taken back
def keep_children_alive() -> None:
    """From now on children of this process leave alone what their parent had thrown away."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)
