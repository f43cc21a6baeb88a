"""Leased shards for torchtitan: a dataloader for any number of ranks, and a trainer that ends with its data.

Importing it imports torchtitan. Batches count when torchtitan's optimizers have stepped on them; which
records those are, and what all ranks agree on, is the business of `ElasticDataLoader(synchronous=True)`.
Which ranks need the same rows (tensor, context, pipeline parallelism) torchtitan says by their `dp_rank`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist

from edl_torch.data.loader import ElasticDataLoader
from edl_torch.data.ranks.process_group import ProcessGroupPeers
from edl_torch.errors import InvalidArgument
from edl_torch.integrations.adapter import ModelPosition, needed_by, records_read

with needed_by("torchtitan"):
    import tyro
    from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError
    from torchtitan.components.loss import IGNORE_INDEX
    from torchtitan.trainer import Trainer

__all__ = ["ElasticLoader", "TitanTrainer", "next_tokens"]

Batch = tuple[dict[str, Any], torch.Tensor]

# Its parts have other shapes on other meshes, so that they cannot be compared.
_ONE_MODEL = "torchtitan loads its parts and the data position from one checkpoint"


def next_tokens(
    record: Sequence[int] | Mapping[str, Sequence[int]], *, tokenizer: Any, seq_len: int
) -> Batch:
    """Make a training row of a record that is a sequence of token ids: each token's label is the next one.

    Of a table's row with one column that is taken. Shorter records are filled up to `seq_len` with tokens
    whose labels are ignored. Raises InvalidArgument for one that has more than `seq_len + 1` tokens or less
    than 2: a record is one row.
    """
    if isinstance(record, Mapping):
        if len(record) != 1:
            raise InvalidArgument(
                f"a record has the columns {', '.join(record)}: which of them has the tokens? Give row=…"
            )
        (record,) = record.values()
    tokens = torch.as_tensor(record, dtype=torch.int64)
    if tokens.ndim != 1 or not 2 <= len(tokens) <= seq_len + 1:
        raise InvalidArgument(
            f"a record of shape {tuple(tokens.shape)} is no row of 2 to {seq_len + 1} tokens, which is what "
            f"training.seq_len={seq_len} takes: cut the data into rows beforehand, or give row=…"
        )
    missing = seq_len + 1 - len(tokens)
    inputs = torch.nn.functional.pad(tokens[:-1], (0, missing))
    # The document's positions, by which torchtitan masks attention: none sees what comes after it.
    return {"input": inputs, "positions": torch.arange(seq_len)}, torch.nn.functional.pad(
        tokens[1:], (0, missing), value=IGNORE_INDEX
    )


class ElasticLoader(BaseDataLoader):  # type: ignore[misc]
    """A torchtitan dataloader over leased shards, which resumes at any data-parallel degree.

    Its batches end with the last record of the last epoch. Every batch has `local_batch_size` rows, and every
    rank takes the same number of whole steps: what is missing is filled with rows whose labels are all
    ignored, so that they weigh nothing. An epoch ends with a step. Ranks of one `dp_rank` (tensor, context
    and pipeline parallelism) get the same rows. The position in a checkpoint is one text for all ranks.

    `attach` must be called before the first batch, as `TitanTrainer` does.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """What to read, and how. `dataset` is a path or address that a reader knows, where `data` is not
        given."""

        data: Annotated[Any, tyro.conf.Suppress] = None
        """A reader or a map-style dataset."""

        row: Annotated[Callable[..., Any], tyro.conf.Suppress] = next_tokens
        """Function of a record, `tokenizer=` and `seq_len=` that returns a dict with the tokens as "input",
        and the labels."""

        num_epochs: int = 1
        """How often every record is read."""

        shuffle: bool = True
        """Shuffle as well as the reader can; see ElasticDataLoader."""

        shuffle_window: int | None = None
        """Number of shards whose records are mixed, for readers whose reads are whole blocks."""

        seed: int = 0
        """Of the order of records."""

        dataset_name: str = "training"
        """The name of the data at the master."""

        records_per_shard: int | None = None
        """Size of a shard, which is what is leased. By default the master chooses."""

        audit_dir: str | None = None
        """Where each rank writes down what was trained on, for `edl-torch audit`."""

        num_workers: int = 0
        """Number of worker processes for data loading."""

        persistent_workers: bool = False
        """Keep workers alive between epochs. Only valid when num_workers > 0."""

        pin_memory: bool = False
        """Copy tensors to CUDA pinned memory before returning them."""

        prefetch_factor: int | None = None
        """Number of batches loaded in advance by each worker. Only valid when num_workers > 0."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        workers = config.num_workers
        self._rows = local_batch_size
        self._loader = ElasticDataLoader(
            config.dataset if config.data is None else config.data,
            local_batch_size,
            transform=partial(config.row, tokenizer=tokenizer, seq_len=seq_len),
            num_epochs=config.num_epochs,
            shuffle=config.shuffle,
            shuffle_window=config.shuffle_window,
            seed=config.seed,
            dataset_name=config.dataset_name,
            records_per_shard=config.records_per_shard,
            audit_dir=config.audit_dir,
            synchronous=_peers(dp_world_size, dp_rank, pin_memory=config.pin_memory),
            num_workers=workers,
            persistent_workers=workers > 0 and config.persistent_workers,
            pin_memory=config.pin_memory,
            prefetch_factor=config.prefetch_factor if workers else None,
            lookahead="manual",
        )
        self._attached = False
        self._position = ModelPosition(self._loader)
        self._unstepped = 0  # batches of the step that is being gathered; the same on every rank
        self._waiting = 0  # of them, with records or not, the ones that are read and not trained on

    def __repr__(self) -> str:
        return f"<ElasticLoader of {self._loader!r}>"

    @property
    def loader(self) -> ElasticDataLoader:
        """The loader of the records."""
        return self._loader

    def attach(self, optimizers: torch.optim.Optimizer) -> None:
        """Let batches count when `optimizers`, torchtitan's container of all, has stepped on them."""
        optimizers.register_step_pre_hook(lambda *_: self.pass_on(self._waiting))
        self._loader.attach(optimizers, one_model=_ONE_MODEL)
        optimizers.register_step_post_hook(self._stepped)
        self._attached = True

    def pass_on(self, count: int = 1) -> None:
        """Note that the trainer goes on to train on the oldest batches that it has read."""
        for _ in range(min(count, self._waiting)):
            self._waiting -= 1
            self._loader.passed_on()

    def _stepped(self, *_: object) -> None:
        self._unstepped = 0

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches to the end of the last epoch. All ranks iterate at the same points.

        The last step of an epoch is filled up until the optimizers step: for loops that step.
        """
        if not self._attached:
            raise InvalidArgument(
                "ElasticLoader does not know the optimizers: make the trainer with TitanTrainer.Config(…), "
                "or call trainer.dataloader.attach(trainer.optimizers) before trainer.train()"
            )
        self._position.begin()  # torchtitan loads before it iterates: else there was no checkpoint
        for _ in self._loader.epochs():
            yield from self._epoch()

    def _epoch(self) -> Iterator[Batch]:
        inputs: dict[str, Any] = {}
        labels = torch.empty(0)
        for batch in self._loader:
            inputs, labels = self._whole(*batch)
            if not records_read(self._loader):  # other ranks have some for this step, and this one has none
                labels = _ignored(labels)
            self._unstepped += 1
            self._waiting += 1
            yield dict(inputs), labels
        while self._unstepped:
            self._unstepped += 1
            yield dict(inputs), _ignored(labels)
        self._loader.passed_on()  # torchtitan asks for more, and there is none

    def _whole(self, inputs: dict[str, Any], labels: torch.Tensor) -> Batch:
        """Fill a batch up to its number of rows with copies of its first row that have no labels."""
        missing = self._rows - len(labels)
        if not missing:
            return inputs, labels
        filled = {name: _repeat_first(value, missing) for name, value in inputs.items()}
        return filled, torch.cat([labels, _ignored(labels[:1].expand(missing, *labels.shape[1:]))])

    def state_dict(self) -> dict[str, Any]:
        """The data position after the last step. All ranks call it at the same points, and get the same."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go back to a position, that of a job of another size too; a token of None is the beginning."""
        self._position.load(state_dict)


def _peers(dp_world_size: int, dp_rank: int, *, pin_memory: bool) -> ProcessGroupPeers:
    """All ranks of the job; those with one `dp_rank` hold one model in parts. A call of all ranks."""
    if dist.get_world_size() == dp_world_size:
        return ProcessGroupPeers()
    coordinates: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(coordinates, dp_rank)
    parts: list[list[int]] = [[] for _ in range(dp_world_size)]
    for rank, coordinate in enumerate(coordinates):
        parts[coordinate].append(rank)
    return ProcessGroupPeers(parts=parts, pin_memory=pin_memory)


def _ignored(labels: torch.Tensor) -> torch.Tensor:
    return torch.full_like(labels, IGNORE_INDEX)


def _repeat_first(value: Any, missing: int) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.cat([value, value[:1].expand(missing, *value.shape[1:])])
    return [*value, *[value[0]] * missing]


class TitanTrainer(Trainer):  # type: ignore[misc]
    """A torchtitan trainer over an `ElasticLoader`, whose last checkpoint is that of the end of the data.

    It bears the number of the step that there were no data for. For a trainer of your own put this class in
    front of it: `class MyTrainer(TitanTrainer, FluxTrainer)`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """As torchtitan's."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.dataloader.attach(self.optimizers)

    def forward_backward_step(self, *, labels: Any, **named: Any) -> torch.Tensor:
        """Train on a batch, or on those that a pipeline takes at once."""
        self.dataloader.pass_on(len(labels) if isinstance(labels, list) else 1)
        loss: torch.Tensor = super().forward_backward_step(labels=labels, **named)
        return loss

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Train on as many batches as make a step."""
        try:
            super().train_step(data_iterator)
        except DataloaderExhaustedError:
            self.checkpointer.save(self.step, last_step=True)
            raise
