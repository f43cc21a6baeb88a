"""What a loader hands on to its service, and to the session behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edl_torch.data.loop.loader_methods import ServiceMethods


class Recorder:
    """Notes each call, with its arguments; returns the name of what was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.epoch = 3
        self.finished = False

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any, **named: Any) -> str:
            self.calls.append((name, *arguments, *named.items()))
            return name

        return called


class Loader(ServiceMethods):
    def __init__(self) -> None:
        self.service_behind, self.elastic, self.position = Recorder(), Recorder(), Recorder()
        self.session = SimpleNamespace(passes=self.elastic, run=lambda answer: answer)
        self.service_behind.session, self.service_behind.position = self.session, self.position
        self.dataset = SimpleNamespace(service=self.service_behind)
        self._weights, self._statistics = Recorder(), Recorder()  # type: ignore[assignment]
        self.notice = SimpleNamespace(seen=False)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda loader: loader.attach("sgd"), ("attach", "sgd", ("scaler", None), ("one_model", ""))),
        (
            lambda loader: loader.attach("sgd", scaler="amp", one_model="averaged"),
            ("attach", "sgd", ("scaler", "amp"), ("one_model", "averaged")),
        ),
        (lambda loader: loader.detach("sgd"), ("detach", "sgd")),
        (lambda loader: loader.stepped(), ("report_batch_done",)),
        (lambda loader: loader.state_dict(), ("state_dict",)),
        (lambda loader: loader.load_state_dict({"a": 1}), ("load_state_dict", {"a": 1})),
        (lambda loader: loader.progress(), ("progress",)),
    ],
)
def test_calls_go_to_the_service(call: Any, expected: tuple[Any, ...]) -> None:
    loader = Loader()
    call(loader)
    assert loader.service_behind.calls == [expected]


def test_what_is_about_the_batch_in_hand_goes_to_its_pass() -> None:
    loader = Loader()
    assert loader.service is loader.service_behind
    assert loader.epoch == 3
    assert loader.records == "records_in_hand"
    loader.give_back()
    loader.give_back(window=True)
    assert loader.elastic.calls == [
        ("records_in_hand",),
        ("give_back", ("window", False)),
        ("give_back", ("window", True)),
    ]


@pytest.mark.parametrize("records", [2, 0, None], ids=["a batch", "a padding batch", "none is left"])
def test_a_wrapper_passes_on_what_it_has_read(records: int | None) -> None:
    loader = Loader()
    batch = None if records is None else SimpleNamespace(records=records)
    loader.session.passed_on = lambda: batch
    loader.passed_on()
    assert loader._weights.calls == [("step", records)] * (records is not None)
    assert loader._statistics.calls == [("let_go",)] + [("keep",)] * (records == 0)
    assert loader.position.calls == [("agree_again",)] * (records is None)


@pytest.mark.parametrize(("seen", "finished"), [(True, False), (False, True), (True, True)])
def test_epochs_end_when_all_is_trained_on_or_the_job_is_to_end(seen: bool, finished: bool) -> None:
    loader = Loader()
    epochs = loader.epochs()
    assert [next(epochs), next(epochs)] == [3, 3]
    loader.notice.seen, loader.service_behind.finished = seen, finished
    assert list(epochs) == []
