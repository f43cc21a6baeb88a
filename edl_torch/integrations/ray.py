"""A master inside a Ray cluster: a named actor that Ray starts again, and clients that find it by its name.

    with start_master("edl-master", state="/shared/edl-state"):          # in the driver
        TorchTrainer(…).fit()
    service = DataShardService(32, master_client("edl-master"), …)       # in each trainer

Needs the package ray, which is imported when a function is called. It must not know what is trained.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edl_torch.client.grpc.channel import FollowingChannel
from edl_torch.client.grpc.client import MasterClient
from edl_torch.errors import EdlError, InvalidArgument, MasterStartError, MasterUnavailable
from edl_torch.integrations.adapter import needed_by
from edl_torch.rpc.credentials import Credentials

NAME = "edl-master"
START_S = 120.0  # Ray may have to find a node first
ASK_S = 5.0
LOOK_S = 0.5
SWITCH_S = 0.0005  # between threads: the journal's must not wait 5 ms for the interpreter


class MasterActor:
    """The actor. Ray starts it again when its process dies, and its journal brings everything back."""

    def __init__(
        self,
        state: str,
        host: str | None,
        port: int,
        insecure: bool,
        credentials: dict[str, str],
        patience: dict[str, float],
    ) -> None:
        from edl_torch.master.server import ThreadedMaster
        from edl_torch.rpc.credentials import ServerCredentials
        from edl_torch.system.address import HostPort

        sys.setswitchinterval(SWITCH_S)
        here = _ray().util.get_node_ip_address() if host is None else host
        self._master = ThreadedMaster(
            str(HostPort(here, port)),
            state=Path(state),
            insecure=insecure,
            credentials=ServerCredentials.read(**credentials),
            on_failure=lambda _: os._exit(1),  # Ray starts the actor again
            **patience,
        )

    def address(self) -> str:
        """Where it serves, `host:port`."""
        return self._master.address

    def process(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        """Answer who is here and commit."""
        self._master.stop()


class RayMaster:
    """The actor in the driver's hand. Unless it is detached it ends with this, or with the job."""

    def __init__(self, actor: Any, name: str, namespace: str | None, address: str, *, detached: bool) -> None:
        self.name = name
        self.address = address  # at the start; `master_address` says where it is now
        self._actor = actor
        self._namespace = namespace
        self._detached = detached

    def stop(self) -> None:
        """Let it commit, and end the actor for good."""
        stop_master(self.name, namespace=self._namespace)

    def __enter__(self) -> RayMaster:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._detached:
            self.stop()

    def __repr__(self) -> str:
        return f"<RayMaster {self.name!r} {self.address}{' detached' if self._detached else ''}>"


def start_master(
    name: str = NAME,
    *,
    state: str | os.PathLike[str],
    host: str | None = None,
    port: int = 0,
    insecure: bool = False,
    credentials: Mapping[str, str] | None = None,
    lease_timeout_s: float = 30.0,
    grace_s: float = 1.0,
    progress_timeout_s: float = 0.0,
    namespace: str | None = None,
    detached: bool = False,
    actor_options: dict[str, Any] | None = None,
) -> RayMaster:
    """Start the master as the actor `name`, or find the one that there is. Keep what is returned.

    `state` is the folder of its journal. Where Ray may start the actor again on another node, it has to be on
    storage that all nodes share; else keep it on one (`actor_options={"resources": …}`). It listens on the
    address of its node; where other machines can reach that it needs `credentials`, files on the actor's
    node by the names of `ServerCredentials.read` (`token_file`, `tls_cert`, `tls_key`, …), or
    `insecure=True`. `host="127.0.0.1"` keeps it on one machine. A `detached` actor outlives the driver.
    Raises MasterStartError.
    """
    ray = _ray()
    patience = {
        "lease_timeout_s": lease_timeout_s,
        "grace_s": grace_s,
        "progress_timeout_s": progress_timeout_s,
    }
    options: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": 0,
        "lifetime": "detached" if detached else None,
        **(actor_options or {}),
    }
    folder = str(Path(state).absolute())
    actor = (
        ray.remote(MasterActor)
        .options(**options)
        .remote(folder, host, port, insecure, dict(credentials or {}), patience)
    )
    try:
        address: str = ray.get(actor.address.remote(), timeout=START_S)
    except ray.exceptions.GetTimeoutError as error:  # it may be another job's, and only slow: let it live
        raise MasterStartError(
            f"the master's actor {name!r} did not say its address within {START_S:g} s: is there a node with "
            f"room for it, and with what its options ask for ({options})?"
        ) from error
    except ray.exceptions.RayError as error:
        ray.kill(actor)
        cause = getattr(error, "cause", None)
        raise MasterStartError(f"the master's actor {name!r} does not start: {cause or error}") from error
    return RayMaster(actor, name, namespace, address, detached=detached)


def master_address(name: str = NAME, *, namespace: str | None = None) -> str:
    """Where the actor `name` serves now. Raises MasterUnavailable while nobody knows."""
    ray = _ray()
    try:
        actor = ray.get_actor(name, namespace)
        address: str = ray.get(actor.address.remote(), timeout=ASK_S)
    except (ValueError, ray.exceptions.RayError) as error:
        raise MasterUnavailable(
            f"no actor {name!r} of this Ray cluster says where the master is: call "
            f"start_master({name!r}, state=…) in the driver, in the same namespace "
            f"({' '.join(str(error).split())[:200]})"
        ) from error
    return address


def master_client(
    name: str = NAME,
    *,
    namespace: str | None = None,
    worker_id: str | int | None = None,
    master_timeout_s: float = 600.0,
    credentials: Credentials | None = None,
) -> MasterClient:
    """A client of the actor `name`, for a `DataShardService`; it follows the actor wherever Ray restarts it.

    `credentials` default to those of the environment. Raises MasterUnavailable where there is no such actor,
    or one that Ray has not started again within `master_timeout_s`.
    """
    patience_s = iter((master_timeout_s,))  # of the first look; the channel repeats those that follow

    def find() -> str:
        deadline = time.monotonic() + next(patience_s, 0.0)
        while True:
            try:
                return master_address(name, namespace=namespace)
            except MasterUnavailable as error:
                nobody = isinstance(error.__cause__, ValueError)  # Ray knows no actor of the name
                if nobody or time.monotonic() >= deadline:
                    raise
            time.sleep(LOOK_S)

    channel = FollowingChannel(find, credentials)
    return MasterClient(channel, worker_id, master_timeout_s=master_timeout_s)


def stop_master(name: str = NAME, *, namespace: str | None = None) -> None:
    """Let it commit, and end the actor for good."""
    ray = _ray()
    try:
        actor = ray.get_actor(name, namespace)
    except ValueError as error:
        raise InvalidArgument(f"there is no actor {name!r} to stop: {error}") from error
    try:
        ray.get(actor.stop.remote(), timeout=START_S)
    finally:
        ray.kill(actor)


def _ray() -> Any:
    with needed_by("ray"):
        import ray
    if not ray.is_initialized():
        raise EdlError("Ray is not initialised here: call ray.init() first")
    return ray
