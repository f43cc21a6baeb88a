"""Limits of what a master keeps for its callers: more is refused, by name, before anything is changed;
and the form in which names of theirs are shown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from edl_torch.core.calls import LeaseCall, RegisterCall, ReportCall
from edl_torch.errors import LimitExceeded

MESSAGE_BYTES = 64 << 20  # of any call or answer over the wire, on both sides
REASON_CHARS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits, generous for real jobs; no caller's mistake can fill the master's memory."""

    datasets: int = 1_000
    sessions: int = 100_000
    sources: int = 1_000_000
    name_bytes: int = 1_024
    source_name_bytes: int = 4_096
    leases_per_call: int = 4_096
    entries_per_call: int = 100_000
    token_slices: int = 1_000_000
    token_bytes: int = MESSAGE_BYTES - 4_096  # beside it there are names in a message
    quarantine: int = 100_000
    quarantine_bytes: int = MESSAGE_BYTES // 2  # of a token; the other half is for slices
    reason_chars: int = REASON_CHARS

    def check_register(self, call: RegisterCall, *, datasets: int, sessions: int) -> None:
        """Raise LimitExceeded for names that are too long, and for one session or dataset too many.

        `datasets` and `sessions` count what there would be.
        """
        self._check_names(session=call.session, worker_id=call.worker_id, dataset=call.registration.name)
        _check("trainers", sessions, self.sessions, "stop those that are not needed")
        _check("datasets", datasets, self.datasets, "start a master for each job")
        mixed = (component.sources for component in call.registration.components or ())
        sources = [*(call.registration.sources or ()), *chain.from_iterable(mixed)]
        self.check_sources(len(sources))
        longest = max((len(source.name.encode("utf-8", "replace")) for source in sources), default=0)
        _check("bytes of a source's name", longest, self.source_name_bytes, "use shorter paths")

    def check_lease(self, call: LeaseCall) -> None:
        """Raise LimitExceeded for a call that asks for too many leases."""
        if call.count > self.leases_per_call:
            raise _exceeded("leases a call", call.count, self.leases_per_call, "ask more often, for less")

    def check_entries(self, what: str, entries: int) -> None:
        """Raise LimitExceeded for a call with too many parts; asked before these are looked at."""
        if entries > self.entries_per_call:
            raise _exceeded(f"{what} in one call", entries, self.entries_per_call, "send several calls")

    def check_slices(self, slices: int) -> None:
        """Raise LimitExceeded for a token with more begun slices than any job of a master's trainers has."""
        _check("slices of a token", slices, self.token_slices, "lease fewer ahead of the checkpoint")

    def check_sources(self, sources: int) -> None:
        """Raise LimitExceeded for a dataset of too many parts; asked before these are looked at."""
        _check("sources of a dataset", sources, self.sources, "join small files, or split the dataset")

    def check_stream(self, session: str, *, streams: int) -> None:
        """Raise LimitExceeded for one stream too many; `streams` counts what there would be."""
        self._check_names(session=session)
        _check("trainers' streams", streams, self.sessions, "stop those that are not needed")

    def check_quarantine(self, dataset: str, *, records: int, size: int) -> None:
        """Raise LimitExceeded where quarantine would outgrow its place in a token.

        `records` is what there would be, `size` the bytes of a token that they would take.
        """
        _check(f"records of {dataset!r} in quarantine", records, self.quarantine, "repair the data")
        what = f"bytes of a token for records of {dataset!r} in quarantine"
        _check(what, size, self.quarantine_bytes, "repair the data")

    def check_token(self, token: str) -> None:
        """Raise LimitExceeded for a token that no message could carry."""
        # A character is a byte in tokens that were made here.
        _check("bytes of a token", len(token), self.token_bytes, "lease fewer ahead of the checkpoint")

    def with_short_reasons(self, call: ReportCall) -> ReportCall:
        """Return the report with its reasons as they are kept."""
        short = tuple(replace(failure, reason=self.shorten(failure.reason)) for failure in call.failures)
        return replace(call, failures=short)

    def shorten(self, reason: str) -> str:
        return shortened(reason, self.reason_chars)

    def _check_names(self, **names: str) -> None:
        for what, name in names.items():
            _check(f"bytes of {what}", len(name.encode("utf-8", "replace")), self.name_bytes, "shorten it")


def shortened(reason: str, most: int = REASON_CHARS) -> str:
    """So much of a reason as is kept of it, and a sign where that is not all."""
    return reason if len(reason) <= most else f"{reason[:most]}…"


def _check(what: str, value: int, most: int, remedy: str) -> None:
    if value > most:
        raise _exceeded(what, value, most, remedy)


def _exceeded(what: str, value: int, most: int, remedy: str) -> LimitExceeded:
    return LimitExceeded(f"{value:,} {what}: this master takes {most:,} at most; {remedy}")


def printable(text: str) -> str:
    """`text` with everything that is not printable escaped, such as line ends and terminal sequences."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
