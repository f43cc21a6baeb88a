"""A synchronous rank whose collectives are nccl's. Several, a GPU each: test_process_group.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_kit import Learner
from torch.nn.parallel import DistributedDataParallel

from edl_torch import ElasticDataLoader
from edl_torch.audit.verdict import audit
from edl_torch.data.ranks.parts_group import Packed, Unpacking
from edl_torch.data.ranks.process_group import ProcessGroupPeers

RECORDS, BATCH, EPOCHS = 40, 4, 2


@pytest.fixture
def ranks(device: torch.device) -> Iterator[torch.device]:
    """The device of the only rank of a job, over nccl on a GPU."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    yield device
    dist.destroy_process_group()


class Called(torch.nn.Module):
    """A learner whose call is its loss: what DDP wraps has to be called."""

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        self.learner = learner
        self.weight = learner.weight

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        return self.learner.loss(records) / len(records)  # the mean, as a rank has it


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_rank_under_ddp_learns_each_record_once(
    ranks: torch.device, accumulate: int, tmp_path: Path
) -> None:
    """Each gradient is the mean over all records of its window."""
    learner = Learner(RECORDS, ranks)
    model = DistributedDataParallel(Called(learner))
    with ElasticDataLoader(
        torch.arange(RECORDS),
        BATCH,
        num_epochs=EPOCHS,
        shuffle=True,
        synchronous=True,
        pin_memory=ranks.type == "cuda",
        audit_dir=tmp_path,
    ) as loader:
        loader.attach(learner.optimizer)
        loader.load_state_dict(None)
        for _epoch in loader.epochs():
            window = 0
            for number, batch in enumerate(loader, 1):
                loader.weigh(model(batch.to(ranks, non_blocking=True))).backward()
                window += loader.weight
                if number % accumulate == 0 or number == len(loader):
                    loader.scale_gradients(learner.optimizer)
                    with torch.no_grad():
                        learner.weight.grad *= window  # type: ignore[operator]
                        learner.weight.grad.round_()  # type: ignore[union-attr]
                    learner.optimizer.step()
                    learner.optimizer.zero_grad()
                    window = 0
        assert loader.progress().acknowledged == EPOCHS * RECORDS
    assert learner.learnt == [EPOCHS] * RECORDS
    (verdict,) = audit([tmp_path])
    assert verdict.proven, verdict


def test_a_batch_that_is_lent_comes_to_the_accelerator(ranks: torch.device) -> None:
    lent = ProcessGroupPeers().lend({"x": torch.arange(3, device=ranks), "name": "a"})
    assert lent["x"].device.type == ranks.type
    assert lent["x"].tolist() == [0, 1, 2]
    assert lent["name"] == "a"


@pytest.mark.parametrize("size", [3, 3000], ids=["small", "large"])
def test_a_batch_for_ranks_with_other_parts_comes_to_the_accelerator(device: torch.device, size: int) -> None:
    sent = torch.arange(size, dtype=torch.float32)
    packed = Packed([sent.to(device), sent])
    unpacking = Unpacking(packed.structure, pin_memory=device.type == "cuda")
    for content, whole in zip(unpacking.contents, packed.contents, strict=True):
        content.copy_(whole)
    there, here = unpacking.value()
    assert (there.device.type, here.device.type) == (device.type, "cpu")
    assert here.is_pinned() == (device.type == "cuda")
    assert torch.equal(there.cpu(), sent)
    assert torch.equal(here, sent)
