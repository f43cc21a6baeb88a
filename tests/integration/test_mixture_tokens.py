"""Mixtures whose weights are shares of tokens: what comes of them, by who counts the tokens by himself."""

from __future__ import annotations

import json
import random
import re
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from master_kit import MasterProcess
from mixture_proof import prove

from edl_torch import ElasticDataLoader, LocalMaster, Mixture, MixtureComponent
from edl_torch.cli.main import main
from edl_torch.cli.status import as_json, as_table
from edl_torch.errors import DatasetConflict, InvalidArgument

WEIGHTS = {"web": 0.5, "code": 0.3, "math": 0.2}
MEANS = {"web": 40, "code": 300, "math": 9}  # about


class Texts:
    """Records of so many tokens each, which tell whose they are."""

    def __init__(self, name: str, count: int) -> None:
        noise = random.Random(name)
        mean = MEANS[name]
        self.name = name
        self.lengths = [noise.randint(mean // 2, 3 * mean // 2) for _ in range(count)]
        self.read: deque[int] = deque()  # none of the data: not as a list of as many as records

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return {"of": self.name, "ids": [0] * self.lengths[index]}

    @property
    def mean(self) -> float:
        return statistics.mean(self.lengths)


def texts(count: int = 60) -> dict[str, Any]:
    return {name: Texts(name, count) for name in MEANS}


def loader(parts: dict[str, Any], length: Any = "ids", **more: Any) -> ElasticDataLoader:
    options: dict[str, Any] = {"weights": WEIGHTS, "num_records": 3000}
    options |= {
        name: more.pop(name) for name in list(more) if name in ("weights", "num_records", "temperature")
    }
    mixed = Mixture(parts, unit="tokens", length=length, **options)
    return ElasticDataLoader(
        mixed, **{"batch_size": 10, "collate_fn": list, "seed": 3, "shuffle": True, **more}
    )


def shares_of(weights: dict[str, float], parts: dict[str, Texts]) -> dict[str, Fraction]:
    """Shares of records that make shares of tokens."""
    each = {name: Fraction(str(weight)) / Fraction(parts[name].mean) for name, weight in weights.items()}
    return {name: of / sum(each.values()) for name, of in each.items()}


def walk(batches: Iterable[list[dict[str, Any]]]) -> list[tuple[str, int]]:
    return [(record["of"], len(record["ids"])) for batch in batches for record in batch]


def tokens_of(found: list[tuple[str, int]]) -> dict[str, float]:
    """The share of all tokens that each component has."""
    tokens: Counter[str] = Counter()
    for name, length in found:
        tokens[name] += length
    return {name: count / tokens.total() for name, count in tokens.items()}


def check_prefixes(found: list[tuple[str, int]], shares: dict[str, Fraction]) -> None:
    counts: Counter[str] = Counter()
    for index, (name, _) in enumerate(found, 1):
        counts[name] += 1
        for one, share in shares.items():  # whole parts of 2**16 are a little off
            assert abs(counts[one] - index * share) < 1 + index / 2**16


def test_shares_are_of_tokens_and_status_and_audit_say_what_came_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = texts()
    with loader(parts, audit_dir=tmp_path) as one:
        found = walk(one)
        status = one.service.session.master.status()
    check_prefixes(found, shares_of(WEIGHTS, parts))
    shares = tokens_of(found)
    assert shares == pytest.approx(WEIGHTS, rel=0.02)
    components = {item.name: item for item in status.datasets[0].components}
    total = sum(item.tokens for item in components.values())
    for name, item in components.items():
        assert item.mean_length == pytest.approx(parts[name].mean)
        assert item.tokens / total == pytest.approx(shares[name], rel=0.02)
    lines = as_table(status).splitlines()
    place = next(n for n, line in enumerate(lines) if "MEAN LENGTH" in line)
    said = {line.split()[1]: line.split()[2:] for line in lines[place + 1 : place + 4]}
    assert {name: round(float(row[1]), 3) for name, row in said.items()} == WEIGHTS
    assert {name: float(row[-1]) for name, row in said.items()} == pytest.approx(shares, rel=0.02)
    assert main(["audit", str(tmp_path)]) in (0, 4)
    words = capsys.readouterr().out
    for name in WEIGHTS:
        of_it = components[name].tokens / total
        assert f"{components[name].tokens:,.0f} tokens ({of_it:.2%} of all, " in words
    assert prove([str(tmp_path)])["records"] == 3000


def test_new_weights_and_those_of_a_schedule_are_of_tokens() -> None:
    parts, later = texts(), {"web": 0.1, "code": 0.8, "math": 0.1}
    with loader(parts, weights=[(0, WEIGHTS), (1000, later)]) as one:
        found = walk(one)
    check_prefixes(found[:1000], shares_of(WEIGHTS, parts))
    assert tokens_of(found[1000:]) == pytest.approx(later, rel=0.04)
    with loader(parts) as one:
        loop = iter(one)
        found = walk([next(loop)])
        start = one.set_weights(later)
        found += walk(loop)
    assert tokens_of(found[start:]) == pytest.approx(later, rel=0.04)


def test_the_command_line_sets_shares_of_tokens(
    start_master: Callable[..., MasterProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    master, parts = start_master(), texts()
    with loader(parts, master_client=master.client()) as one:
        loop = iter(one)
        found = walk([next(loop)])
        assert main(["weights", "--addr", master.address, "web=1", "code=8", "math=1"]) == 0
        said = capsys.readouterr().out
        start = int(said.partition("of tokens from index ")[2].partition(" ")[0])
        found += walk(loop)
    assert tokens_of(found[start:]) == pytest.approx({"web": 0.1, "code": 0.8, "math": 0.1}, rel=0.04)


def test_mean_lengths_are_registered_and_others_are_refused_or_begin_anew() -> None:
    master, parts = LocalMaster(), texts()
    with loader(parts, master_client=master) as one:
        loop = iter(one)
        found = walk([next(loop)])
        with (
            loader(parts, {"web": 41, "code": "ids", "math": "ids"}, master_client=master) as two,
            pytest.raises(DatasetConflict, match=r"component 'web': mean length registered 39.*, asked 41"),
        ):
            next(iter(two))
        one.stepped()
        token = one.state_dict()
    twice = {name: 2 * part.mean for name, part in parts.items()}
    with loader(parts, {**twice, "code": parts["code"].mean / 2}) as one:  # by which code is worth a quarter
        one.load_state_dict(token)
        found += walk(one)
        (status,) = one.service.session.master.status().datasets
    assert len(found) == 3000
    assert status.segment > 1
    expected = {"web": 0.5, "code": 0.3 * 4, "math": 0.2}
    assert tokens_of(found[10:]) == pytest.approx({n: w / 1.9 for n, w in expected.items()}, rel=0.04)


@pytest.mark.parametrize("kind", ["field", "function", "column", "number"])
def test_a_mean_is_taken_of_256_records_the_same_ones_everywhere(kind: str, tmp_path: Path) -> None:
    parts = texts(5000)
    for name, part in parts.items():
        pq.write_table(pa.table({"n": part.lengths, "of": [name] * 5000}), tmp_path / f"{name}.parquet")
    files = {name: str(tmp_path / f"{name}.parquet") for name in parts}
    data, length = {
        "field": (parts, "ids"),
        "function": (parts, lambda record: len(record["ids"])),
        "column": (files, "n"),
        "number": (parts, {name: part.mean for name, part in parts.items()}),
    }[kind]
    master = LocalMaster()
    with loader(data, length, master_client=master) as one, loader(data, length, master_client=master) as two:
        next(iter(one))
        next(iter(two))  # has taken the same
        components = master.status().datasets[0].components
    means = {item.name: item.mean_length for item in components}
    for name, part in parts.items():
        assert means[name] == pytest.approx(part.mean, rel=0.06)
        assert (means[name] == part.mean) is (kind == "number")
        if kind in ("field", "function"):
            sample = list(part.read)[:256]
            assert sorted({*sample}) == sample
            assert means[name] == statistics.mean(part.lengths[index] for index in sample)


def test_a_record_that_cannot_be_read_is_left_out_of_the_mean() -> None:
    class Torn(Texts):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 7:
                raise ValueError("torn")
            return super().__getitem__(index)

    parts = texts() | {"math": Torn("math", 60)}
    with loader(parts, on_bad_record="quarantine", max_bad_records=1, num_records=100) as one:
        next(iter(one))
        components = one.service.session.master.status().datasets[0].components
    lengths = [length for index, length in enumerate(parts["math"].lengths) if index != 7]
    assert {item.name: item.mean_length for item in components}["math"] == statistics.mean(lengths)


def test_without_weights_shares_go_by_size_and_a_temperature_by_tokens() -> None:
    parts = texts()
    with loader(parts, weights=None) as one:
        assert Counter(name for name, _ in walk(one)) == dict.fromkeys(parts, 1000)
    with loader(parts, weights=None, temperature=1e9) as one:
        assert tokens_of(walk(one)) == pytest.approx(dict.fromkeys(parts, 1 / 3), rel=0.02)


def test_what_a_function_of_lengths_raises_names_component_and_record() -> None:
    def broken(record: Any) -> float:
        raise RuntimeError("no tokenizer")

    with pytest.raises(RuntimeError, match="no tokenizer") as raised:
        ElasticDataLoader(Mixture({"web": [1, 2]}, unit="tokens", length=broken), 1)
    assert raised.value.__notes__ == ["That is length= of record 0 of 'list', component 'web'"]


def test_one_that_has_left_needs_no_length() -> None:
    parts = texts()
    with loader(parts, weights=WEIGHTS | {"math": 0}) as one:
        loop = iter(one)
        found = walk([next(loop)])
        one.stepped()
        token = one.state_dict()
    with loader(parts | {"math": None}, weights=WEIGHTS | {"math": 0}) as one:
        one.load_state_dict(token)
        found += walk(one)
    assert len(found) == 3000
    assert tokens_of(found) == pytest.approx({"web": 5 / 8, "code": 3 / 8}, rel=0.02)


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (None, "unit='tokens' takes length="),
        (7, "the length of 'code' is 7: give its mean length, a number above 0, by name"),
        ({"web": 1, "code": 2}, "length= is by component: none of math"),
        ({"web": 1, "code": 2, "math": 3, "chat": 4}, "chat: no component"),
        *(
            ({"web": wrong, "code": 2, "math": 3}, f"the length of 'web' is {wrong!r}")
            for wrong in (0, -3, float("nan"), float("inf"), True, None)
        ),
        *(
            ({"web": wrong, "code": 2, "math": 3}, "the length of 'web' is ")
            for wrong in (10**400, np.array([3.0]), torch.tensor([3]), b"7")
        ),
        ("tokens", "component 'code', has no field 'tokens': it has of, ids. Give another, or a function"),
        ("of", None),
        (lambda record: -1, "has the length -1"),
        (lambda record: float("nan"), "has the length nan"),
        (lambda record: None, "has the length None"),
        (lambda record: True, "has the length True"),
        (lambda record: 10**400, "has the length 1000"),
        (lambda record: 1.5e308, "its 60 records that were read have inf together"),
        (lambda record: np.array([512]), "'code': each record has an array of one number as its length"),
        (lambda record: torch.tensor([512]), "'code': each record has an array of one number as its length"),
        (lambda record: np.zeros((1, 512)), r"has an array of 2 dimensions .* which of \(1, 512\) it is"),
        (lambda record: 0, "component 'code' has no mean length: its 60 records that were read have 0"),
    ],
)
def test_lengths_that_are_none_are_refused(length: Any, said: str | None) -> None:
    if said is None:  # a text has a length, too
        loader(texts(), length).close()
        return
    with pytest.raises(InvalidArgument, match=said):
        loader(texts(), length)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"unit": "words"}, "unit is 'words': give 'records' or 'tokens'"),
        ({"length": "ids"}, "without it leave length out"),
        ({"unit": "tokens", "length": "ids", "weights": {"web": 1}}, "code, math: no weight"),
    ],
)
def test_units_that_are_none_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Mixture(texts(), **more)


@pytest.mark.parametrize("number", [np.int64(3), np.float32(3), torch.tensor(3), Fraction(3)])
def test_numbers_of_any_kind_are_lengths(number: Any) -> None:
    given = {
        "web": number,
        "code": lambda record: number,
        "math": lambda record: np.zeros(len(record["ids"])),
    }
    parts = texts()
    with loader(parts, given) as one:
        next(iter(one))
        components = one.service.session.master.status().datasets[0].components
    assert [item.mean_length for item in components] == [3, parts["math"].mean, 3]


def test_texts_of_one_token_are_arrays_of_one_number_like_others() -> None:
    def one_of_three(record: dict[str, Any]) -> Any:
        return np.zeros(1 if len(record["ids"]) % 3 == 0 else 2)

    loader(texts(), one_of_three).close()


def test_a_temperature_makes_shares_of_any_sizes_or_says_which_is_too_small() -> None:
    parts = texts()
    given = {"web": 1e308, "code": 1e308, "math": 1e308}
    with loader(parts, given, weights=None, temperature=0.01) as one:
        assert Counter(name for name, _ in walk(one)) == dict.fromkeys(parts, 1000)
    with pytest.raises(InvalidArgument, match=r"temperature=0\.01 leaves nothing to math"):
        loader(parts, given | {"math": 1}, weights=None, temperature=0.01)


def test_weights_of_tokens_are_judged_as_shares_of_records() -> None:
    """`b` is one record in 101, and less than a token in a million."""
    parts = {"a": Texts("web", 60), "b": Texts("math", 60)}
    with loader(parts, {"a": 100000.0, "b": 1.0}, weights={"a": 1, "b": 1e-7}, num_records=1010) as one:
        assert Counter(name for name, _ in walk(one)) == {"web": 1000, "math": 10}
    for wrong in ({"a": 0, "b": 0}, {"a": -1, "b": 1}, {"a": 1}, [(5, {"a": 1, "b": 1})]):
        with pytest.raises(InvalidArgument, match="weight"):
            Mixture(parts, wrong, unit="tokens", length="ids")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="of all weights"):
        Mixture(parts, {"a": 1, "b": 1e-7})


def test_a_share_of_tokens_that_is_less_than_a_record_in_a_million_is_refused() -> None:
    parts = texts() | {"math": MixtureComponent(texts()["math"], max_passes=3)}
    with pytest.raises(
        InvalidArgument, match=r"the weight of 'web' is .* of all records, less than a record"
    ):
        loader(parts, {"web": 1e9, "code": 1, "math": 1})


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "mixtures.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"## Shares of tokens\n\n```python\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name, tokens in {"web": 10, "code": 100}.items():
        pq.write_table(pa.table({"num_tokens": [tokens] * 50}), tmp_path / "data" / f"{name}.parquet")
    made: dict[str, Any] = {"Mixture": Mixture}
    exec(block, made)
    tokens = Counter[str]()
    with ElasticDataLoader(made["mixture"], 10) as one:
        for batch in islice(one, 200):
            for (name, _), length in zip(one.records, batch["num_tokens"].tolist(), strict=True):
                tokens[name.partition(":")[0]] += length
    assert tokens["web"] / tokens.total() == pytest.approx(0.7, abs=0.01)


def test_json_has_tokens() -> None:
    with loader(texts(), num_records=100) as one:
        next(iter(one))
        said = json.loads(as_json(one.service.session.master.status()))
    for item in said["datasets"][0]["components"]:
        assert item["tokens"] == item["given"] * item["mean_length"] > 0


# Means that change, and components that leave ------------------------------------------------------------


def test_who_has_left_keeps_its_mean_and_its_tokens_stay_in_all_figures() -> None:
    parts, master = texts(), LocalMaster()
    gone = parts | {"math": None}
    with loader(parts, weights=WEIGHTS, records_per_shard=20, master_client=master) as one:
        loop = iter(one)
        for _ in range(100):
            next(loop)
        one.stepped()
        before = {item.name: item for item in master.status().datasets[0].components}["math"]
        token = one.state_dict()
    for on_its_master in (True, False):
        again = master if on_its_master else LocalMaster()
        with loader(gone, weights=WEIGHTS | {"math": 0}, records_per_shard=20, master_client=again) as one:
            if not on_its_master:
                one.load_state_dict(token)
            next(iter(one))
            after = {item.name: item for item in again.status().datasets[0].components}["math"]
            assert (after.mean_length, after.size) == (before.mean_length, 0)
            assert after.tokens == before.tokens > 0
            one.stepped()
            later = one.state_dict()
        with loader(gone, weights=WEIGHTS | {"math": 0}, records_per_shard=20) as one:
            one.load_state_dict(later)  # a token of it after it had left knows it, too
            next(iter(one))
            (status,) = one.service.session.master.status().datasets
            assert status.components[1].tokens == before.tokens


def test_the_status_of_a_mixture_whose_whole_share_has_left_is_shown() -> None:
    """`a` has it all to the end, and then leaves: nothing is behind the end, so no weights change."""
    parts, master = {"a": Texts("web", 60), "b": Texts("math", 60)}, LocalMaster()
    options: dict[str, Any] = {"num_records": 200, "master_client": master}
    with loader(parts, weights={"a": 1, "b": 1}, **options) as one:
        loop = iter(one)
        next(loop)
        one.set_weights({"a": 1, "b": 0})
        for _ in loop:
            pass
    for b in (9.0, parts["b"].mean):
        with loader({"a": None, "b": parts["b"]}, {"b": b}, weights={"a": 0, "b": 1}, **options) as one:
            assert not list(one)
            status = master.status()
    rows = [line.split()[1:] for line in as_table(status).splitlines() if line.startswith("training")]
    assert ["a", f"{parts['a'].mean:.1f}", "1"] in [row[:3] for row in rows]
    # One whose length is not known has no figures, and shares of the others are not divided by nothing.
    (dataset,) = status.datasets
    unknown = replace(dataset.components[0], mean_length=0.0)
    status = replace(status, datasets=(replace(dataset, components=(unknown, dataset.components[1])),))
    rows = [line.split()[1:] for line in as_table(status).splitlines() if line.startswith("training")]
    assert ["a", "-", "-", "-", "-", "-"] in rows
    assert ["b", f"{parts['b'].mean:.1f}", "0"] in [row[:3] for row in rows]


@pytest.mark.parametrize("goes_on", ["on its master", "from a token"])
@pytest.mark.parametrize("weights", [None, {"a": 0.5, "b": 0.5}])
def test_with_other_means_the_weights_of_the_program_begin_where_it_stands(
    weights: dict[str, float] | None, goes_on: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where these are the same parts as before, as by size; with the same means the call's stay."""
    parts, master = {"a": Texts("web", 60), "b": Texts("math", 60)}, LocalMaster()

    def begun(means: dict[str, float], **more: Any) -> ElasticDataLoader:
        return loader(parts, means, weights=weights, num_records=1000, records_per_shard=20, **more)

    with begun({"a": 40, "b": 10}, master_client=master) as one:
        loop = iter(one)
        next(loop)
        one.set_weights({"a": 0.2, "b": 0.8})
        for _ in range(19):
            next(loop)
        one.stepped()
        token = one.state_dict()
    for means, is_new in (({"a": 40, "b": 10}, False), ({"a": 40, "b": 80}, True)):
        again = master if goes_on == "on its master" else LocalMaster()
        with begun(means, master_client=again) as one, caplog.at_level("WARNING"):
            if goes_on == "from a token":
                caplog.clear()
                one.load_state_dict(token)
                assert ("this program gives other weights than the checkpoint's" in caplog.text) is is_new
            walk(islice(one, 20))
            components = again.status().datasets[0].components
        shares = {item.name: round(item.share, 3) for item in components}
        if not is_new:  # those of the call: of records 1 to 16
            assert shares == {"a": 0.059, "b": 0.941}
        elif weights is None:
            assert shares == {"a": 0.5, "b": 0.5}
        else:
            assert shares == {"a": 0.667, "b": 0.333}
