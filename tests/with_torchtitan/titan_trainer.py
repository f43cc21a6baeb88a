"""Torchtitan jobs on the CPU, whose model counts how often it has learnt each record.

    python titan_trainer.py

Each line of its input is a `Job` as JSON. Its ranks are forked, so that torchtitan is imported once, into a
process group of their own; its number is printed, and how they ended. The trainer, its loop, its optimizers,
its checkpointer and FSDP are torchtitan's own.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cpu_device  # noqa: F401  first: torchtitan looks for a device when it is imported
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.protocols import BaseModel
from torchtitan.protocols.model_spec import ModelSpec

from edl_torch.integrations.torchtitan import ElasticLoader, TitanTrainer


@dataclass(frozen=True, kw_only=True)
class Job:
    """One incarnation of a job."""

    folder: str
    world: int
    records: int
    store_port: int = 0
    epochs: int = 2
    batch_size: int = 2
    accumulate: int = 1
    num_workers: int = 0
    interval: int = 3
    step_s: float = 0.0
    tp: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def models(self) -> int:
        """Ranks with data of their own."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))


class Numbers(torch.utils.data.Dataset):
    """Record `n` is the row of one token `n`, and its label."""

    def __init__(self, records: int) -> None:
        self.records = records

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, number: int) -> int:
        return number


def row(number: int, *, tokenizer: Any, seq_len: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One label is the record's number, and not always the same one; the input is only looked up."""
    labels = torch.full((seq_len,), IGNORE_INDEX)
    labels[number % seq_len] = number
    return {"input": torch.full((seq_len,), number), "positions": torch.arange(seq_len)}, labels


class Memory(BaseModel):
    """A count for each record, and their sum. Stages of a pipeline have the one or the other."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        records: int

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Nothing to take over."""

        def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
            return self.records, 1

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.counts: Any = torch.nn.Parameter(torch.zeros(config.records))
        self.total: Any = torch.nn.Parameter(torch.zeros(1))

    def forward(self, seen: torch.Tensor, positions: Any = None) -> torch.Tensor:
        if self.counts is not None:
            seen = whole(self.counts)[seen]
        return seen if self.total is None else seen + whole(self.total)

    def _init_self_parameters(self) -> None:
        for parameter in self.parameters(recurse=False):
            torch.nn.init.zeros_(parameter)


def whole(parameter: Any) -> torch.Tensor:
    """A parameter whose parts tensor-parallel ranks hold; each of them has its whole gradient."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor(grad_placements=[Replicate()])
    return parameter


class Learnt(BaseLoss):
    """A sum whose gradient is -1 for each valid label of a record: SGD at rate 1 counts it once."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        self.fn = None

    def __call__(self, pred: Any, labels: Any, global_valid_tokens: Any = None, **_: Any) -> Any:
        assert global_valid_tokens > 0, "a step of nothing but padding"
        return -(pred * (labels != IGNORE_INDEX)).sum(), {}


class Optimizers(OptimizersContainer):
    """With SGD, which torchtitan's own does not have."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        return {"SGD": torch.optim.SGD}[name]


class NoTokenizer(BaseTokenizer):
    """Records are tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        pass

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    decode = get_vocab_size = encode


def parallelize(model: Any, *, parallel_dims: Any, **_: Any) -> Any:
    """Shard the counts over all ranks, with gradients that add up, as torchtitan's models have it."""
    tp = parallel_dims.get_optional_mesh("tp")
    if tp is not None:
        for name, parameter in list(model.named_parameters()):
            parts = distribute_tensor(parameter, tp, [Shard(0) if len(parameter) > 1 else Replicate()])
            setattr(model, name, torch.nn.Parameter(parts))
    if parallel_dims.world_size == 1:
        return model  # a plain one, as on a lone GPU
    fully_shard(model, mesh=parallel_dims.get_mesh(["fsdp"]))
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    return model


class Schedule(Schedule1F1B):
    """Takes microbatches, as that of a torch to come."""

    def step(self, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, **options: Any) -> None:
        self._stage.has_backward = True
        self._stage.clear_runtime_states()
        self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, **options)


def pipeline(model: Any, *, parallel_dims: Any, training: Any, parallelism: Any, **other: Any) -> Any:
    """The counts are the first stage, their sum is the second."""
    mesh = parallel_dims.get_mesh("pp")
    number, is_last = mesh.get_local_rank(), mesh.get_local_rank() == 1
    setattr(model, "counts" if is_last else "total", None)
    model = other["parallelize_fn"](model, parallel_dims=parallel_dims)
    stage = PipelineStage(model, number, 2, other["device"], group=mesh.get_group("pp"))
    microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    loss = other["loss_fn"]
    schedule = Schedule(
        stage, microbatches, loss_fn=lambda *what, **more: loss(*what, **more)[0], scale_grads=False
    )
    return schedule, [model], not is_last, is_last


def config_of(job: Job) -> TitanTrainer.Config:
    """The configuration, as a registry of torchtitan would have it."""
    memory = ModelSpec(
        name="memory",
        flavor="tiny",
        model=Memory.Config(records=job.records),
        parallelize_fn=parallelize,
        pipelining_fn=pipeline,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    sgd = ParamGroupConfig(pattern=".*", optimizer_name="SGD", optimizer_kwargs={"lr": 1.0})
    return TitanTrainer.Config(
        model_spec=memory,
        dump_folder=job.folder,
        tokenizer=NoTokenizer.Config(),
        loss=Learnt.Config(),
        optimizer=Optimizers.Config(param_groups=[sgd], implementation="for-loop"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=job.batch_size,
            global_batch_size=job.batch_size * job.models * job.accumulate,
            seq_len=4,
            max_norm=1e9,
            steps=10_000,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor",
            tensor_parallel_degree=job.tp,
            context_parallel_degree=job.cp,
            pipeline_parallel_degree=job.pp,
            pipeline_parallel_microbatch_size=1,
        ),
        metrics=MetricsProcessor.Config(log_freq=1000),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=job.interval, last_save_model_only=False, keep_latest_k=0
        ),
        dataloader=ElasticLoader.Config(
            data=Numbers(job.records),
            row=row,
            num_epochs=job.epochs,
            seed=5,
            num_workers=job.num_workers,
            records_per_shard=6,
            audit_dir=str(Path(job.folder, "audit")),
        ),
    )


def run(job: Job, rank: int) -> int:
    """One rank: what torchtitan.train does, and the counts at the end."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.store_port),
    }
    trainer = config_of(job).build()
    folder = Path(job.folder)

    def stepped(*_: object) -> None:
        if rank == 0:
            with (folder / "steps").open("a") as steps:
                steps.write(".")
        time.sleep(job.step_s)

    trainer.optimizers.register_step_post_hook(stepped)
    trainer.train()
    trainer.close()
    dist.destroy_process_group()
    return 0


def lead(job: Job) -> int:
    """Fork the ranks; 0 when all of them ended well."""
    os.setpgid(0, 0)
    children = []
    for rank in range(job.world):
        child = os.fork()
        if child == 0:
            try:
                status = run(job, rank)
                atexit._run_exitfuncs()
            except BaseException:  # noqa: BLE001  a fork does not go on in its parent's program
                traceback.print_exc()
                status = 1
            os._exit(status)
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    return int(any(ends))


def main() -> None:
    """Run one job after the other."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        leader = os.fork()
        if leader == 0:
            os._exit(lead(Job(**json.loads(line))))
        print(leader, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
