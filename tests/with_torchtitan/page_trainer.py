"""Run the configuration of docs/torchtitan.md in the current folder, on the CPU, with short rows.

    python page_trainer.py

Attention is torch's plain causal one, for torchtitan's has no backward pass on the CPU.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpu_device  # noqa: F401  first: torchtitan looks for a device when it is imported
import torch
from titan_trainer import NoTokenizer
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import config_registry

PAGE = Path(__file__).parents[2] / "docs" / "torchtitan.md"


def changes() -> Iterator[tuple[str, str]]:
    """What each part of the page's diff replaces, and by what."""
    (block,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    for part in block.split("@@\n"):
        lines = part.splitlines(keepends=True)
        yield tuple("".join(line[1:] for line in lines if line[0] != left_out) for left_out in "+-")


def page_config() -> Any:
    """torchtitan's own function with the page's changes."""
    source = inspect.getsource(config_registry.llama3_debugmodel)
    for before, after in changes():
        assert source.count(before) == 1, "the page shows what torchtitan does not have"
        source = source.replace(before, after)
    names: dict[str, Any] = dict(vars(config_registry))
    exec(source, names)
    return names["llama3_debugmodel"]()


def main() -> None:
    """Train to the end of the data."""
    torch.set_num_threads(1)
    FlexAttention._compiled_flex_attn = staticmethod(causal_attention)
    config = page_config()
    config.training.seq_len = 16
    config.training.local_batch_size = 4
    config.training.global_batch_size = 8
    config.training.disable_cuda_graphs = True
    config.tokenizer = NoTokenizer.Config()
    config.optimizer.implementation = "for-loop"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    config.checkpoint.enable = True
    config.dump_folder = os.getcwd()
    trainer = config.build()
    trainer.train()
    progress = trainer.dataloader.loader.progress()
    print(trainer.step, progress.acknowledged, progress.finished)
    trainer.close()


def causal_attention(q: Any, k: Any, v: Any, *, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    """What FlexAttention computes where each row is one document."""
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
    )
    return out, SimpleNamespace(lse=None)


if __name__ == "__main__":
    main()
