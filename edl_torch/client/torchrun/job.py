"""What torchrun tells a worker about its job, read from the environment.

Reads variables, the process tree and the agent's command line; opens nothing, and must not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from edl_torch.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A worker's view of its job, in torchrun's own words.

    Attributes:
        run_id: `--rdzv-id`.
        rank: of this worker in this incarnation; it may have another one in the next.
        world_size: number of workers.
        node: of this agent among the agents.
        nodes: number of agents, in this incarnation.
        least_nodes, most_nodes: of agents in any incarnation, as torchrun was told; else 1.
        host, port: of the job's store.
        agents_store: whether an agent keeps that store, else the worker of rank 0 does.
        agent: the process that started this worker, and starts the next one.
        log_dir: a folder of this agent alone that lives as long as it does, where it has one.
    """

    run_id: str
    rank: int
    world_size: int
    node: int
    nodes: int
    least_nodes: int
    most_nodes: int
    host: str
    port: int
    agents_store: bool
    agent: int
    log_dir: Path | None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Job:
        """Read it. Raises InvalidArgument that names the variable which is not as torchrun sets it."""
        env = os.environ if environ is None else environ
        run_id = _text(env, "TORCHELASTIC_RUN_ID")
        agent = _agent(run_id)
        least, most = _nodes(_arguments(agent), env)
        return cls(
            run_id=run_id,
            rank=_number(env, "RANK"),
            world_size=_number(env, "WORLD_SIZE"),
            node=_number(env, "GROUP_RANK"),
            nodes=_number(env, "GROUP_WORLD_SIZE"),
            least_nodes=least,
            most_nodes=most,
            host=_text(env, "MASTER_ADDR"),
            port=_number(env, "MASTER_PORT"),
            agents_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            agent=agent,
            log_dir=_log_dir(env.get("TORCHELASTIC_ERROR_FILE", "")),
        )


def _text(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "").strip()
    if not value:
        raise InvalidArgument(
            f"{name} is not set, though TORCHELASTIC_RUN_ID is: start this program with torchrun, or name "
            "the master in EDL_MASTER_ADDR"
        )
    return value


def _number(env: Mapping[str, str], name: str) -> int:
    value = _text(env, name)
    if not (value.isascii() and value.isdigit()):
        raise InvalidArgument(f"{name} is {value!r}: torchrun sets it to a number")
    return int(value)


def _log_dir(error_file: str) -> Path | None:
    """torchrun tells each worker of a file `DIR/attempt_N/LOCAL_RANK/error.json`; DIR is the agent's own."""
    path = Path(error_file)
    if not (path.is_absolute() and path.parent.parent.name.startswith("attempt_")):
        return None
    folder = path.parents[2]
    return folder if os.access(folder, os.W_OK) else None


def _nodes(arguments: Sequence[str], env: Mapping[str, str]) -> tuple[int, int]:
    """`--nnodes=LEAST:MOST`, or the variable for it. torchrun does not tell its workers; 1 without."""
    given = env.get("PET_NNODES", "1")
    for argument, following in pairwise((*arguments, "")):
        name, equals, value = argument.partition("=")
        if name == "--nnodes":
            given = value if equals else following
            break
    ends = [end.strip() for end in given.split(":")]
    if not all(end.isascii() and end.isdigit() for end in ends):
        return 1, 1
    return int(ends[0]), int(ends[-1])


def _arguments(pid: int) -> list[str]:
    """The command line of a process; empty where it cannot be read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _agent(run_id: str) -> int:
    """The parent, or, behind shells that torchrun was told to start, the first that is none of the job's."""
    pid = os.getppid()
    mark = f"TORCHELASTIC_RUN_ID={run_id}".encode()
    try:
        while mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            status = Path(f"/proc/{pid}/stat").read_text()
            pid = int(status.rpartition(")")[2].split()[1])
    except (OSError, ValueError):  # no /proc, or another user's process
        return pid
    return pid
