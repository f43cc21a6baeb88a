"""Elastic, exact dataset sharding for PyTorch: see `DataShardService` and `ElasticDataLoader`.

Names are imported when they are first used, so that a master never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl_torch import errors as errors
    from edl_torch import readers as readers
    from edl_torch import testing as testing
    from edl_torch.client.grpc.client import MasterClient as MasterClient
    from edl_torch.client.grpc.client import build_channel as build_channel
    from edl_torch.client.service import DataShardService as DataShardService
    from edl_torch.data.checkpoint import load_checkpoint as load_checkpoint
    from edl_torch.data.checkpoint import save_checkpoint as save_checkpoint
    from edl_torch.data.dataset import ImageDataset as ImageDataset
    from edl_torch.data.dataset import ShardedDataset as ShardedDataset
    from edl_torch.data.loader import ElasticDataLoader as ElasticDataLoader
    from edl_torch.data.mixture import Mixture as Mixture
    from edl_torch.data.mixture import MixtureComponent as MixtureComponent
    from edl_torch.elasticdl.client import ElasticDLMasterClient as ElasticDLMasterClient
    from edl_torch.master.embedded import LocalMaster as LocalMaster
    from edl_torch.readers.base import AbstractDataReader as AbstractDataReader
    from edl_torch.shard import Shard as Shard
    from edl_torch.shard import Task as Task
    from edl_torch.shard import TaskType as TaskType

__version__ = "0.1.0"

_HOMES = {
    "AbstractDataReader": "edl_torch.readers.base",
    "DataShardService": "edl_torch.client.service",
    "ElasticDLMasterClient": "edl_torch.elasticdl.client",
    "ElasticDataLoader": "edl_torch.data.loader",
    "ImageDataset": "edl_torch.data.dataset",
    "LocalMaster": "edl_torch.master.embedded",
    "MasterClient": "edl_torch.client.grpc.client",
    "Mixture": "edl_torch.data.mixture",
    "MixtureComponent": "edl_torch.data.mixture",
    "Shard": "edl_torch.shard",
    "ShardedDataset": "edl_torch.data.dataset",
    "Task": "edl_torch.shard",
    "TaskType": "edl_torch.shard",
    "build_channel": "edl_torch.client.grpc.client",
    "load_checkpoint": "edl_torch.data.checkpoint",
    "save_checkpoint": "edl_torch.data.checkpoint",
}

__all__ = [*_HOMES]


_PUBLIC_MODULES = ("errors", "readers", "testing")  # `import edl_torch` is enough to name them


def __getattr__(name: str) -> Any:
    if name in _PUBLIC_MODULES:
        return import_module(f"{__name__}.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PUBLIC_MODULES})
