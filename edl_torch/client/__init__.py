"""The trainer's side: how it reaches a master, and what it keeps account of.

Importing this package settles how grpc treats forks, because grpc looks only once, when it starts.
"""

import logging
import os

_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"

# Loader workers are forked from the trainer and never use grpc. With its fork handlers on, grpc complains at
# every fork under load (unset), or the children hang in them while a stream is open (1).
if os.environ.get(_FORK_SUPPORT, "").lower() in ("1", "yes", "true"):
    logging.getLogger(__name__).warning(
        "%s=%s would make forked loader workers hang: set to 0", _FORK_SUPPORT, os.environ[_FORK_SUPPORT]
    )
os.environ[_FORK_SUPPORT] = "0"
