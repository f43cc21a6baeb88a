"""Lets torchtitan take the CPU for its device: import it before torchtitan.

torchtitan asks its device for a name, a memory and statistics of it, which `torch.cpu` does not have.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed


class _Cpu:
    """What torchtitan asks of the module of a device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, _: Any) -> str:
        return "cpu"

    def get_device_properties(self, _: Any) -> Any:
        return SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, _: Any) -> dict[str, int]:
        return {}

    def empty_cache(self) -> None:
        """It has none."""

    reset_peak_memory_stats = empty_cache


torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda _: _Cpu()
if not hasattr(torch.distributed, "set_timeout"):  # which torchtitan has of a torch to come
    torch.distributed.set_timeout = lambda *_: None
