"""Steps that torch computes in other ways on a GPU decide when a batch counts, and learn what they should."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_kit import Graphs, Learner, side_stream
from torch import nn

from edl_torch import ElasticDataLoader
from edl_torch.audit.verdict import audit

RECORDS, BATCH, EPOCHS = 40, 4, 2
INFINITE_AT = 3  # the batch whose loss overflows
HALF = {"cpu": torch.bfloat16, "cuda": torch.float16}
VECTORS = torch.randn(RECORDS, 8, generator=torch.Generator().manual_seed(0))

Make = Callable[[Any], torch.optim.Optimizer]
EVERYWHERE: dict[str, Make] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "SGD, fused": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
    "Adam, foreach": lambda weights: torch.optim.Adam(weights, lr=0.01, foreach=True),
    "AdamW, fused": lambda weights: torch.optim.AdamW(weights, lr=0.01, fused=True),
}
ON_A_GPU: dict[str, Make] = {
    "Adam, capturable": lambda weights: torch.optim.Adam(weights, lr=0.01, eps=1e-4, capturable=True),
    "AdamW, fused and capturable": lambda weights: torch.optim.AdamW(
        weights, lr=torch.tensor(0.01, device="cuda"), fused=True, capturable=True
    ),
}


def new_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch)[:, 0] - batch.sum(1)).square().mean()
    return loss


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def check_same(ours: nn.Module, theirs: nn.Module, rtol: float = 1e-3) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=rtol / 100)


def check_proven(folder: Path) -> None:
    (verdict,) = audit([folder])
    assert verdict.proven, verdict


def vectors(folder: Path | None = None) -> ElasticDataLoader:
    return ElasticDataLoader(VECTORS, BATCH, num_epochs=EPOCHS, shuffle=True, audit_dir=folder)


def numbers(folder: Path) -> ElasticDataLoader:
    """Records that are their numbers."""
    return ElasticDataLoader(torch.arange(RECORDS), BATCH, num_epochs=EPOCHS, shuffle=True, audit_dir=folder)


def check_optimizer(device: torch.device, make: Make, folder: Path) -> None:
    """After each step its batch counts; in the end the model is that of a loop without the package."""
    model = new_model(device)
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = make(model.parameters()), make(plain.parameters())
    with vectors(folder) as loader:
        loader.attach(optimizer, one_model="the other one is a reference")
        done = 0
        for _epoch in loader.epochs():
            for batch in loader:
                there = batch.to(device)
                assert loader.progress().acknowledged == done
                step(model, optimizer, there)
                done += BATCH
                assert loader.progress().acknowledged == done
                step(plain, plain_optimizer, there)
    check_same(model, plain, rtol=1e-4)
    check_proven(folder)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_each_step_of_an_optimizer_counts_its_batch(device: torch.device, name: str, tmp_path: Path) -> None:
    check_optimizer(device, EVERYWHERE[name], tmp_path)


@pytest.mark.parametrize("name", ON_A_GPU)
def test_so_does_one_that_can_be_captured(gpu: torch.device, name: str, tmp_path: Path) -> None:
    check_optimizer(gpu, ON_A_GPU[name], tmp_path)


@pytest.mark.parametrize("given", [True, False], ids=["given", "not given"])
@pytest.mark.parametrize("fused", [None, True])
def test_a_step_that_a_scaler_skips_counts_where_the_scaler_was_given(
    device: torch.device, fused: bool | None, given: bool
) -> None:
    """Else its batch waits for the next step."""
    model = new_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler(device.type, init_scale=64.0)
    with ElasticDataLoader(VECTORS, BATCH) as loader:
        loader.attach(optimizer, scaler=scaler if given else None)
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            with torch.autocast(
                device.type, dtype=torch.float16 if device.type == "cuda" else torch.bfloat16
            ):
                loss = loss_of(model, batch.to(device))
            scaler.scale(loss * (torch.inf if number == INFINITE_AT else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            waiting = BATCH if number == INFINITE_AT and not given else 0
            assert loader.progress().acknowledged == (number + 1) * BATCH - waiting
    assert scaler.get_scale() == 32.0


@pytest.mark.timeout(500)
@pytest.mark.parametrize("what", ["the model", "the step", "both"])
def test_a_compiled_step_counts_its_batch(device: torch.device, what: str, tmp_path: Path) -> None:
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    torch._dynamo.reset()
    model = new_model(device)
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = EVERYWHERE["SGD"](model.parameters()), EVERYWHERE["SGD"](plain.parameters())
    called = model if what == "the step" else torch.compile(model, backend=backend)
    if what != "the model":
        optimizer.step = torch.compile(optimizer.step, backend=backend)  # type: ignore[method-assign]
    with ElasticDataLoader(
        VECTORS, 6, num_epochs=EPOCHS, audit_dir=tmp_path
    ) as loader:  # 6 batches and 4 records
        loader.attach(optimizer, one_model="the other one is a reference")
        done = 0
        for _epoch in loader.epochs():
            for batch in loader:
                there = batch.to(device)
                step(called, optimizer, there)
                done += len(batch)
                assert loader.progress().acknowledged == done
                step(plain, plain_optimizer, there)
    check_same(model, plain)
    check_proven(tmp_path)


def test_a_step_that_is_captured_in_the_loop_counts_when_it_is_replayed(
    device: torch.device, graphs: Graphs, tmp_path: Path
) -> None:
    """Three batches to warm up, the graph with the fourth in hand, and from then on replays."""
    learner = Learner(RECORDS, device)
    static = torch.zeros(BATCH, dtype=torch.int64, device=device)

    def body() -> None:
        learner.loss(static).backward()  # type: ignore[no-untyped-call]
        learner.optimizer.step()

    replay: Callable[[], object] | None = None
    with numbers(tmp_path) as loader:
        loader.attach(learner.optimizer)
        done = 0
        for _epoch in loader.epochs():
            for batch in loader:
                if done < 3 * BATCH:
                    with side_stream(device):
                        learner.learn(batch)
                else:
                    static.copy_(batch)
                    replay = replay or graphs.capture(learner.optimizer, body)
                    assert loader.progress().acknowledged == done
                    replay()
                    loader.stepped()
                done += BATCH
                assert loader.progress().acknowledged == done
    assert learner.learnt == [EPOCHS] * RECORDS
    (verdict,) = audit([tmp_path])
    assert (verdict.delivered, verdict.exact) == (True, True), verdict  # PROVEN needs steps that are seen


def test_a_graph_that_was_captured_before_the_loop_learns_what_steps_would(
    gpu: torch.device, tmp_path: Path
) -> None:
    """With an optimizer that has state, and warmed up on a stream of its own, as torch's notes say."""
    model, static = new_model(gpu), torch.zeros(BATCH, 8, device=gpu)
    plain = copy.deepcopy(model)
    make = ON_A_GPU["Adam, capturable"]
    optimizer, plain_optimizer = make(model.parameters()), make(plain.parameters())
    with vectors(tmp_path) as loader:
        with side_stream(gpu):
            for _ in range(3):
                step(model, optimizer, static)
        loader.attach(optimizer)  # nothing may look at the model while it is captured
        optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss_of(model, static).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        for _ in range(3):
            step(plain, plain_optimizer, torch.zeros_like(static))
        for _epoch in loader.epochs():
            for batch in loader:
                static.copy_(batch, non_blocking=True)
                graph.replay()
                loader.stepped()
                step(plain, plain_optimizer, batch.to(gpu))
        assert loader.progress().acknowledged == EPOCHS * RECORDS
    check_same(model, plain)


def test_a_graph_of_the_model_alone_needs_no_word(gpu: torch.device, tmp_path: Path) -> None:
    """The optimizer steps by itself, and is seen."""
    model = new_model(gpu)
    called = torch.cuda.make_graphed_callables(model, (torch.zeros(BATCH, 8, device=gpu),))
    optimizer = EVERYWHERE["SGD"](model.parameters())
    with vectors(tmp_path) as loader:
        loader.attach(optimizer, one_model="the other one is a reference")
        done = 0
        for _epoch in loader.epochs():
            for batch in loader:
                step(called, optimizer, batch.to(gpu))
                done += BATCH
                assert loader.progress().acknowledged == done
    check_proven(tmp_path)


def test_a_checkpoint_of_a_model_on_the_device_goes_on_exactly(device: torch.device, tmp_path: Path) -> None:
    def loader_of() -> ElasticDataLoader:
        numbers = torch.arange(RECORDS)
        return ElasticDataLoader(
            numbers, BATCH, num_epochs=EPOCHS, shuffle=True, audit_dir=tmp_path / "audit"
        )

    first, second = Learner(RECORDS, device), Learner(RECORDS, device)
    with numbers(tmp_path / "audit") as loader:
        loader.attach(first.optimizer)
        for number, batch in enumerate(loader):
            first.learn(batch)
            if number == 6:
                state = {"weight": first.weight.detach(), "data": loader.state_dict()}
                torch.save(state, tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", map_location=device)
    with numbers(tmp_path / "audit") as loader:
        loader.attach(second.optimizer)
        second.weight.data.copy_(saved["weight"])
        loader.load_state_dict(saved["data"])
        for _epoch in loader.epochs():
            for batch in loader:
                second.learn(batch)
    assert second.learnt == [EPOCHS] * RECORDS
    check_proven(tmp_path / "audit")
