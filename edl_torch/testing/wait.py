"""Waiting in tests without sleeping blindly."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], *, timeout_s: float = 10.0, poll_s: float = 0.01, what: str = ""
) -> T:
    """Call `condition` until it returns something true, and return that.

    Looks every `poll_s` seconds. After `timeout_s` seconds raises AssertionError, which names `what`
    (default: the condition) and the last value seen. An exception of the condition is not caught.

        address = wait_until(lambda: path.exists() and path.read_text(), timeout_s=5)
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(
                f"not within {timeout_s:g} s: {what or condition}; the last value: {value!r}"
            )
        time.sleep(poll_s)
