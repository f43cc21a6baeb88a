"""The end of a `DataShardService`, also of one that nobody closes."""

from __future__ import annotations

import atexit
import logging
import os
from contextlib import suppress

from edl_torch.client.optimizers import Optimizers
from edl_torch.client.position import SessionPosition
from edl_torch.client.session import Session
from edl_torch.errors import EdlError

log = logging.getLogger("edl_torch.client")


class ServiceEnd:
    """The end of a service, which comes with its `close`, at exit, or, where it was garbage-collected, before
    another service is made: the loop may have had its last batch then."""

    def __init__(
        self,
        session: Session,
        optimizers: Optimizers,
        position: SessionPosition,
        *,
        owns_master: bool,
    ) -> None:
        self.came = False
        self._session, self._optimizers, self._position = session, optimizers, position
        self._owns_master = owns_master
        self._pid = os.getpid()
        atexit.register(self.come)

    @property
    def is_ours(self) -> bool:
        """Whether this process has made the service, and not one that it was forked from."""
        return os.getpid() == self._pid

    def put_off(self) -> None:
        """For finalisers, which may run in any place: note that the end is due."""
        if not self.came:
            self._session.let_go_of_data()
            _put_off.append(self)

    def come(self) -> None:
        """Give back what was not trained on and leave the master; the first time, and in our process."""
        if self.came or not self.is_ours:
            return
        self.came = True
        atexit.unregister(self.come)
        try:
            with suppress(EdlError):  # of what is closed here nobody needs a number
                self._say_what_was_not_read()
            self._session.close()
        finally:
            self._optimizers.close()
            if self._owns_master:
                self._session.master.close()
            for loader in list(self._session.loaders):
                loader.end_workers()
        self._session.warn_of_what_went_back()  # where the loop made no call since

    def _say_what_was_not_read(self) -> None:
        """Log epochs that nobody can read any more: the master goes with this process, and no token was
        taken or loaded, though a loop had come to the end of one, and it was none over `epochs()`."""
        session, position = self._session, self._position
        is_last = self._owns_master and session.master.in_process and not position.was_used
        if is_last and session.joined and session.trainer.state.batches.ended:
            status = position.progress()
            if status.epoch < status.num_epochs:
                log.warning(
                    "dataset %s: %d of %d epochs (num_epochs) were not read: one `for batch in loader` reads "
                    "one epoch, and `for epoch in loader.epochs():` around it reads all",
                    *(status.dataset, status.num_epochs - status.epoch, status.num_epochs),
                )


_put_off: list[ServiceEnd] = []  # of services that were garbage-collected


def close_what_was_put_off() -> None:
    """End the services that were garbage-collected. Logs what goes wrong: nobody has them any more."""
    while True:
        try:
            end = _put_off.pop()
        except IndexError:
            return
        try:
            end.come()
        except Exception:
            log.exception("a loader that was not closed could not be")
