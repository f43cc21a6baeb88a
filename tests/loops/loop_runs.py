"""Runs a program as a whole: the loop, and what another service makes of the token that it saved.

Both write one audit. It knows no promise; those are checked on the way.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from loop_interpreter import Interpreter
from loop_program import Program
from loop_settings import count_run

from edl_torch.testing import FakeMaster


def run(program: Program) -> Interpreter:
    """Raises BrokenPromise."""
    print(f"program: {program!r}")
    count_run()
    job = Interpreter(program)
    with tempfile.TemporaryDirectory() as folder:
        job.run(FakeMaster(), Path(folder))
        if program.resume and job.saved is not None:
            calm = replace(
                program, incidents=(), saves_passes=False, counted_epochs=False, take=0, resume=False
            )
            job.heir = Interpreter(calm, forgets_model=program.forgets_model)
            job.heir.saved = job.saved
            job.heir.run(FakeMaster(ledger_id="heir's"), Path(folder))
    return job
