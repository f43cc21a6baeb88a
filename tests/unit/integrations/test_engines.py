"""Engines that step by themselves, with an optimizer's hooks."""

from __future__ import annotations

import gc

import pytest

from edl_torch.errors import InvalidArgument
from edl_torch.integrations.engines import EngineSteps, check_not_hidden, is_engine


class Engine:
    """One that accumulates two micro-batches."""

    def __init__(self) -> None:
        self.global_steps = self.micro_steps = 0

    def gradient_accumulation_steps(self) -> int:
        return 2

    def step(self) -> None:
        self.micro_steps += 1
        self.global_steps += self.micro_steps % 2 == 0


def watch(engine: Engine, told: list[str], name: str = "") -> EngineSteps:
    steps = EngineSteps(engine)
    steps.register_step_pre_hook(lambda *_: told.append(f"{name}before"))
    return steps.register_step_post_hook(lambda *_: told.append(f"{name}after"))


def test_the_hook_after_a_step_comes_at_the_end_of_an_accumulation() -> None:
    engine, told = Engine(), list[str]()
    watch(engine, told)
    for _ in range(4):
        engine.step()
    assert told == ["before", "before", "after"] * 2


def test_an_engine_steps_as_before_once_its_hooks_are_removed_as_often_as_they_were_registered() -> None:
    engine, told = Engine(), list[str]()
    steps = watch(engine, told)
    steps.remove()
    gc.collect()
    steps.remove()
    engine.step()
    assert told == []
    assert "step" not in vars(engine)


def test_others_that_watch_it_go_on() -> None:
    engine, told = Engine(), list[str]()
    first, _ = watch(engine, told, "1 "), watch(engine, told, "2 ")
    first.remove()
    engine.step()
    assert told == ["2 before"]


def test_what_is_no_engine_is_told_from_one_in_wrappers() -> None:
    assert not is_engine(object())
    check_not_hidden(object())
    wrapper = type("Wrapper", (), {"optimizer": Engine()})()
    with pytest.raises(InvalidArgument, match=r"prepare\(engine, loader\)"):
        check_not_hidden(object(), wrapper)
