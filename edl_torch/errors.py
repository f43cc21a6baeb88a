"""Every error that the package raises on purpose.

The messages say what went wrong, with which thing, and how to fix it. Each class can be rebuilt from its
message alone: a DataLoader carries a worker's exception to the trainer in exactly that form.
"""

from __future__ import annotations


class EdlError(Exception):
    """The root of all errors of edl_torch."""


class InvalidArgument(EdlError, ValueError):
    """An argument, option or variable has a value that cannot be used."""


class ForeignLoop(InvalidArgument):
    """A framework iterates a loader in a way that would count wrongly. The message names what does it right.

    Raised with the first batch, not with the iterator, where Lightning would hide it by an error of its own.
    """


class LimitExceeded(EdlError, ValueError):
    """More was asked of a master than it keeps or does for one caller."""


class AccessDenied(EdlError, PermissionError):
    """The master does not let this caller in, or is not the one that the caller trusts."""


class UnknownDataset(EdlError):
    """The master has no dataset of this name and the call does not describe one."""


class DatasetConflict(EdlError):
    """A dataset is registered under this name already, with another identity."""


class StaleLease(EdlError):
    """The lease was taken back, or belongs to another ledger, lineage or session; nothing was changed."""


class SessionLost(StaleLease):
    """The master does not know the session (any more): it was released, or never registered."""


class JournalWentBack(StaleLease):
    """The master's journal is older than what its trainers were told: it lends nothing until all start again
    from a checkpoint."""


class TokenError(EdlError, ValueError):
    """A checkpoint token is damaged, of an unknown version, or of another dataset."""


class TooManyBadRecords(EdlError):
    """More records are in quarantine than the dataset may have: the job has failed."""


class AccountingError(EdlError):
    """Samples and positions disagree: something between reader and batch drops or adds samples."""


class ConcurrentIteration(EdlError, RuntimeError):
    """Iterators over the same data are in each other's way: a newer one has ended this one, or one of the
    same thread holds what this one waits for."""


class ServiceClosed(EdlError, RuntimeError):
    """The service was closed before this call."""


class LoaderWorkerDied(EdlError, RuntimeError):
    """A DataLoader worker was killed or crashed; the message names the records that it was at."""


class MasterUnavailable(EdlError, ConnectionError):
    """The master did not answer within `master_timeout_s`. It is never an end of the data."""


class Unsupported(EdlError):
    """The master speaks a protocol that cannot express this call; the message says what to do instead."""


class PeerFailed(EdlError, RuntimeError):
    """Another synchronous rank cannot go on, or is gone: all start again from a checkpoint."""


class CheckpointError(EdlError):
    """A checkpoint cannot be written or read."""


class MasterStartError(EdlError):
    """The master cannot start: port in use, bad address, unusable state folder."""


class JournalError(EdlError):
    """The journal cannot be written, so that the master stops before it says what it could not keep; or a
    command cannot read it."""


class IntegrationUnavailable(EdlError, ImportError):
    """An integration needs a package that is not installed."""


class ReaderError(EdlError):
    """A reader cannot be made, or cannot read its source."""


class ReaderUnavailable(ReaderError):
    """A reader needs a package that is not installed."""


class DataFormatError(ReaderError, ValueError):
    """A file that describes a dataset (JSON, CSV, XML, list) is not what the reader expects."""


class SourceUnavailable(ReaderError):
    """The data cannot be reached now: a network, a server, a device. No record is to blame for it."""


class SourceChanged(ReaderError):
    """The data was changed since the dataset was registered: its records are not those of before."""


class BadRecord(ReaderError):
    """One record cannot be read: missing or broken file, undecodable image, failing transform."""


class OutputError(EdlError):
    """Data cannot be written: the target exists, cannot be made, or the disk is full; nothing was left."""


class AuditError(EdlError):
    """An audit log cannot be written, is missing or damaged, or does not belong to the others."""
