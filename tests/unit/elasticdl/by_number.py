"""ElasticDL's messages by field number, written and read by hand: nothing of our stubs takes part.

Protobuf's wire format: a key is (number << 3 | kind); kind 0 is a varint, kind 2 a length and bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

TRAINING, EVALUATION, PREDICTION, WAIT, TRAIN_END_CALLBACK = 1, 2, 3, 4, 5
NONE = 0


def varint(number: int) -> bytes:
    number &= 2**64 - 1  # negative numbers take ten bytes
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at


def number_field(key: int, number: int | bool) -> bytes:
    return varint(key << 3) + varint(int(number)) if number else b""


def bytes_field(key: int, data: bytes | str) -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return varint(key << 3 | 2) + varint(len(data)) + data


def packed(key: int, numbers: Iterable[int]) -> bytes:
    data = b"".join(map(varint, numbers))
    return bytes_field(key, data) if data else b""


def fields(data: bytes) -> dict[int, list[int | bytes]]:
    """Every field by its number; anything but kinds 0 and 2 is no message of that protocol."""
    found: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        value: int | bytes
        if key & 7 == 0:
            value, at = read_varint(data, at)
        else:
            assert key & 7 == 2, f"kind {key & 7} of field {key >> 3}"
            length, at = read_varint(data, at)
            value, at = data[at : at + length], at + length
            assert len(value) == length
        found.setdefault(key >> 3, []).append(value)
    return found


def one(found: Mapping[int, list[int | bytes]], key: int, default: int | bytes) -> int | bytes:
    (value,) = found.get(key, [default])
    return value


def signed(number: int, bits: int = 64) -> int:
    number &= 2**64 - 1
    return number - 2**64 if number >= 2 ** (bits - 1) else number


def read_map(entries: Iterable[int | bytes]) -> dict[bytes, int | bytes]:
    return {one(e, 1, b""): one(e, 2, 0) for e in map(fields, entries)}  # type: ignore[arg-type, misc]


@dataclass
class WireTask:
    """A `Task`."""

    task_id: int = 0
    name: str = ""
    start: int = 0
    end: int = 0
    indices: list[int] = field(default_factory=list)
    type: int = NONE
    config: dict[str, str] = field(default_factory=dict)
    model_version: int = 0

    @property
    def numbers(self) -> list[int]:
        """The records that are meant, as ElasticDL's `RecordIndexService` takes them."""
        return self.indices or list(range(self.start, self.end))

    @property
    def is_end(self) -> bool:
        return self.type == NONE and not self.name and self.start == self.end == 0

    @property
    def epoch(self) -> int:
        return int(self.config["epoch"])

    def encode(self) -> bytes:
        shard = bytes_field(1, self.name) if self.name else b""
        shard += number_field(2, self.start) + number_field(3, self.end) + packed(4, self.indices)
        return (
            number_field(1, self.task_id)
            + bytes_field(2, shard)
            + number_field(3, self.model_version)
            + number_field(4, self.type)
        )

    @classmethod
    def decode(cls, data: bytes) -> WireTask:
        task = fields(data)
        assert set(task) <= {1, 2, 3, 4, 5}, sorted(task)
        shard = fields(one(task, 2, b""))  # type: ignore[arg-type]
        assert set(shard) <= {1, 2, 3, 4}, sorted(shard)
        indices: list[int] = []
        at, data = 0, one(shard, 4, b"")  # type: ignore[assignment]
        while at < len(data):
            number, at = read_varint(data, at)
            indices.append(signed(number))
        return cls(
            task_id=signed(one(task, 1, 0), 32),  # type: ignore[arg-type]
            name=one(shard, 1, b"").decode(),  # type: ignore[union-attr]
            start=signed(one(shard, 2, 0)),  # type: ignore[arg-type]
            end=signed(one(shard, 3, 0)),  # type: ignore[arg-type]
            indices=indices,
            type=one(task, 4, 0),  # type: ignore[arg-type]
            config={k.decode(): v.decode() for k, v in read_map(task.get(5, ())).items()},  # type: ignore[union-attr]
            model_version=one(task, 3, 0),  # type: ignore[arg-type]
        )


def get_task_request(worker_id: int, task_type: int = NONE) -> bytes:
    return number_field(1, worker_id) + number_field(2, task_type)


def result_request(task_id: int, err_message: str = "", counters: Mapping[str, int] | None = None) -> bytes:
    entries = (
        bytes_field(3, bytes_field(1, key) + number_field(2, count))
        for key, count in (counters or {}).items()
    )
    error = bytes_field(2, err_message) if err_message else b""
    return number_field(1, task_id) + error + b"".join(entries)


def params_request(
    *,
    batch_size: int,
    num_epochs: int,
    dataset_size: int,
    shuffle: bool = False,
    shuffle_shards: bool = False,
    num_minibatches_per_shard: int = 0,
) -> bytes:
    values = (batch_size, num_epochs, dataset_size, shuffle, shuffle_shards, num_minibatches_per_shard)
    return b"".join(number_field(key, value) for key, value in enumerate(values, 1))
