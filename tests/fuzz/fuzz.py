"""Coverage-guided fuzzing with atheris: `make fuzz`, or

    python tests/fuzz/fuzz.py calls|state [-max_total_time=60] [options of libFuzzer] [corpus folders]

`calls` attacks the servicer, its conversion and the dispatcher between the calls of an honest trainer;
`state` decodes damaged tokens and rows of a journal. A crash leaves a file `crash-…`, which given as an
argument is run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys

import atheris

with atheris.instrument_imports(include=["edl_torch"]):
    import hostile
    import test_fuzz_master as state

    from edl_torch.core import persistence
    from edl_torch.core.token import Token
    from edl_torch.errors import EdlError, TokenError

DAMAGE = (LookupError, TypeError, ValueError, EdlError)  # what `DurableState` takes for damage


class Provided:
    """Choices of atheris."""

    def __init__(self, data: bytes) -> None:
        self.provider = atheris.FuzzedDataProvider(data)

    def below(self, stop: int) -> int:
        return int(self.provider.ConsumeIntInRange(0, stop - 1))

    def raw(self) -> bytes:
        return bytes(self.provider.ConsumeBytes(self.below(60)))


def calls(data: bytes) -> None:
    choices = Provided(data)
    asyncio.run(hostile.attack(choices, 1 + choices.below(30)))


def decode(data: bytes) -> None:
    choices = Provided(data)
    match choices.below(3):
        case 0:
            text(choices)
        case 1:
            token(choices)
        case _:
            rows(choices)


def text(choices: Provided) -> None:
    with contextlib.suppress(TokenError):
        Token.decode(choices.provider.ConsumeUnicode(4096))


def token(choices: Provided) -> None:
    dispatcher = state.begun()
    value = json.loads(dispatcher.token("d"))
    for _ in range(1 + choices.below(4)):
        value = hostile.damaged(value, choices)
    before = persistence.dump(dispatcher)
    try:
        dispatcher.go_back("d", json.dumps(value))
    except EdlError:
        assert persistence.dump(dispatcher) == before
        return
    state.goes_on(dispatcher)


def rows(choices: Provided) -> None:
    value = json.loads(json.dumps([[list(key), row] for key, row in persistence.dump(state.begun()).items()]))
    for _ in range(1 + choices.below(4)):
        value = hostile.damaged(value, choices)
    with contextlib.suppress(*DAMAGE):
        persistence.load(state.as_rows(value), ledger_id="x", now=0.0)


TARGETS = {"calls": calls, "state": decode}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(__doc__)
    logging.disable(logging.CRITICAL)  # names of the hostile
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
