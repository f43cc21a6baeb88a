"""Which ranks of a device mesh train on the same batches. It needs no process group, and sends nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edl_torch.errors import InvalidArgument

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def parts_of(mesh: DeviceMesh, dp: str | Sequence[str], world_size: int) -> list[list[int]] | None:
    """The ranks at each coordinate of the dimensions `dp`, which hold one model in parts.

    None where each rank has a coordinate of its own, and so the whole model. Raises InvalidArgument for a
    mesh that does not hold all ranks once, and for names that it has not.
    """
    ranks: list[int] = mesh.mesh.flatten().tolist()
    if sorted(ranks) != list(range(world_size)):
        raise InvalidArgument(
            f"mesh= must hold all {world_size} ranks of the job, each once, and this one holds ranks "
            f"{sorted(ranks)}: give the mesh that init_device_mesh() made, not a part of it"
        )
    dimensions = _dimensions(mesh, dp)
    if len(dimensions) == mesh.ndim:
        return None
    others = [dimension for dimension in range(mesh.ndim) if dimension not in dimensions]
    each = math.prod(mesh.mesh.shape[dimension] for dimension in others)
    parts = mesh.mesh.permute(*dimensions, *others).reshape(-1, each).tolist()
    return None if each == 1 else [sorted(row) for row in parts]


def _dimensions(mesh: DeviceMesh, dp: str | Sequence[str]) -> list[int]:
    named = [dp] if isinstance(dp, str) else list(dp)
    if not named:
        raise InvalidArgument(
            "dp=() names no dimension: give those of mesh= over which ranks read different data. Where all "
            "ranks hold one model in parts, give the mesh a first dimension of size 1"
        )
    names = mesh.mesh_dim_names
    if names is None and mesh.ndim > 1:
        raise InvalidArgument(
            "mesh= has no names for its dimensions: give init_device_mesh() mesh_dim_names, such as "
            "('dp', 'tp')"
        )
    if mesh.ndim == 1 and (names is None or named == ["dp"]):
        return [0]
    unknown = [name for name in named if name not in (names or ())]
    if unknown:
        raise InvalidArgument(
            f"dp={dp!r}: mesh= has no dimension {', '.join(map(repr, unknown))}, but "
            f"{', '.join(map(repr, names or ()))}. Name those over which ranks read different data; of a "
            f"flattened one, those that it is made of"
        )
    if len(set(named)) < len(named):
        raise InvalidArgument(f"dp={dp!r} names a dimension twice")
    return [list(names or ()).index(name) for name in named]
