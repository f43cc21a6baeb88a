"""A text that must not be seen: it shows nothing, and a pickle holds it only on its way to a child process.

It must not know what it protects, or where it comes from.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from typing import Any


class Secret:
    """Wraps a secret; `reveal()` is the only way to it.

    `repr`, `str` and `format` show `<secret>`. While multiprocessing starts a child (spawn, forkserver) a
    pickle carries the text, through the pipe to that child; every other pickle, on a disk or a wire, is
    without it, and `reveal()` of its copy gives None.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str | None = None) -> None:
        self._text = text

    def reveal(self) -> str | None:
        """The text; None where there is none, or the pickle left it out."""
        return self._text

    def hide_in(self, text: str) -> str:
        """`text` with `<secret>` in the place of this secret."""
        return text.replace(self._text, repr(self)) if self._text else text

    def __reduce__(self) -> tuple[Any, ...]:
        return Secret, (self._text if get_spawning_popen() is not None else None,)

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: Any) -> Secret:
        return self

    def __repr__(self) -> str:
        return "<secret>"


def cause_without_secrets(error: BaseException, hide: Callable[[str], str]) -> BaseException | None:
    """`error`, for `raise … from`, unless its traceback, with all that led to it, says what `hide` hides.

    HTTP requests that errors carry are taken out: their headers have tokens, and pickles of errors have all.
    """
    for link in _all_that_led_to(error):
        for name in {"request", "response"} & vars(link).keys():
            setattr(link, name, None)
    text = "".join(traceback.format_exception(error))
    return error if hide(text) == text else None


def _all_that_led_to(error: BaseException) -> list[BaseException]:
    """The error itself, its cause and context, and theirs."""
    found = [error]
    for link in found:
        found += [e for e in (link.__cause__, link.__context__) if e is not None and e not in found]
    return found
