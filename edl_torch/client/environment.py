"""What the environment says about the master and about this trainer."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from edl_torch.errors import InvalidArgument
from edl_torch.protocols import DOORS, OURS
from edl_torch.system.address import parse_address

MASTER_TIMEOUT_S = 600.0
TORCHRUN_TIMEOUT_S = 30.0  # a master beside an agent that is gone does not come back: the workers restart


def master_address_from_env(env: Mapping[str, str] = os.environ) -> str | None:
    """The master's `host:port`, or None where one process trains alone and an embedded master will do.

    `EDL_MASTER_ADDR` first; then `MASTER_ADDR`, but only with a port, because torchrun puts the host of its
    own rendezvous there. Raises InvalidArgument for an unusable address, and for several ranks without any.
    """
    given = env.get("EDL_MASTER_ADDR", "").strip()
    if given:
        return _checked(given)
    borrowed = env.get("MASTER_ADDR", "").strip()
    with suppress(InvalidArgument):
        parse_address(borrowed, least_port=1)
        return borrowed
    if _world_size(env) > 1:
        raise InvalidArgument(
            f"WORLD_SIZE is {env['WORLD_SIZE']}, so several trainers share the data, but no master is "
            "named: start `edl-torch master --addr HOST:PORT` once, and give every trainer "
            "EDL_MASTER_ADDR=HOST:PORT in its environment"
        )
    return None


def finds_master_through_torchrun(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is torchrun's, and nobody has named a master."""
    return bool(env.get("TORCHELASTIC_RUN_ID", "").strip()) and not env.get("EDL_MASTER_ADDR", "").strip()


def master_protocol_from_env() -> str:
    """`EDL_MASTER_PROTOCOL`: "edl_torch", or that of another project's master."""
    protocol, known = os.environ.get("EDL_MASTER_PROTOCOL", "").strip() or OURS, (OURS, *DOORS)
    if protocol not in known:
        raise InvalidArgument(f"EDL_MASTER_PROTOCOL is {protocol!r}: it must be one of {', '.join(known)}")
    return protocol


def page_address_from_env() -> str | None:
    """`EDL_HTTP`: where a master of this job serves its page; None where it is not set."""
    return os.environ.get("EDL_HTTP", "").strip() or None


def master_timeout_from_env(env: Mapping[str, str] = os.environ) -> float:
    """`EDL_MASTER_TIMEOUT_S`: how long a master may be away. Raises InvalidArgument.

    Else 600 s, and 30 s for a master that torchrun's workers have started.
    """
    text = env.get("EDL_MASTER_TIMEOUT_S", "").strip()
    default = TORCHRUN_TIMEOUT_S if finds_master_through_torchrun(env) else MASTER_TIMEOUT_S
    try:
        seconds = float(text or default)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise InvalidArgument(f"EDL_MASTER_TIMEOUT_S is {text!r}: it must be a number of seconds, 0 or more")
    return seconds


def default_worker_id(env: Mapping[str, str] = os.environ) -> str:
    """The trainer's name, else one made of host, rank and process."""
    made = f"{socket.gethostname()}-{env.get('RANK') or 0}-{os.getpid()}"
    return trainer_name_from_env(env) or made


def trainer_name_from_env(env: Mapping[str, str] = os.environ) -> str | None:
    """This trainer's name: `EDL_TRAINER`, else `WORKER_ID`, as ElasticDL sets it; None without."""
    return env.get("EDL_TRAINER", "").strip() or env.get("WORKER_ID") or None


def _checked(address: str) -> str:
    try:
        parse_address(address, least_port=1)
    except InvalidArgument as exc:
        raise InvalidArgument(f"EDL_MASTER_ADDR: {exc}") from exc
    return address


def _world_size(env: Mapping[str, str]) -> int:
    text = env.get("WORLD_SIZE", "").strip() or "1"
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"WORLD_SIZE is {text!r}: it must be the number of trainers") from None
