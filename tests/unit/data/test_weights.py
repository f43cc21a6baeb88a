"""Weighed losses and scaled gradients are those of the mean over all that was backpropagated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from edl_torch.data import weights as module
from edl_torch.data.weights import Weights
from edl_torch.errors import InvalidArgument, PeerFailed
from edl_torch.testing import ThreadPeers


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros((), dtype=torch.float64))


def sgd(*parameters: nn.Parameter) -> Optimizer:
    return SGD(list(parameters), lr=0.1)


def backward(weights: Weights, slope: float, *parameters: nn.Parameter, count: Any = None) -> None:
    """Backpropagate a mean loss whose gradient is `slope` for each parameter."""
    weights.weigh(sum((slope * p for p in parameters), torch.zeros(())), count).backward()


def train(weights: Weights, own: int, slope: float, *parameters: nn.Parameter, count: Any = None) -> None:
    """One batch."""
    weights.step(own)
    backward(weights, slope, *parameters, count=count)


def test_a_mean_loss_becomes_a_sum() -> None:
    weights = Weights()
    assert repr(weights) == "<Weights own=0 batch=0>"
    assert weights.own == 0, "there is no batch yet"
    weights.step(3)
    assert weights.weigh(torch.tensor(2.0, dtype=torch.float64)) == 6.0


def test_gradients_are_means_over_the_records_of_the_window() -> None:
    weights, p, unused = Weights(), parameter(), parameter()
    optimizer = sgd(p, unused)
    train(weights, 2, 3.0, p)
    train(weights, 6, 5.0, p)
    weights.scale(optimizer)
    assert p.grad == (2 * 3 + 6 * 5) / 8
    assert unused.grad is None


# Several optimizers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [True, False])
def test_each_of_two_optimizers_is_scaled_and_a_parameter_of_both_once(at_once: bool) -> None:
    weights, p, shared, q = Weights(), parameter(), parameter(), parameter()
    one, two = sgd(p, shared), sgd(shared, q)
    for _ in range(2):
        one.zero_grad()
        two.zero_grad()
        train(weights, 8, 4.5, p, shared, q)
        if at_once:
            weights.scale(one, two)
        else:
            weights.scale(one)
            weights.scale(two)
        assert (p.grad, shared.grad, q.grad) == (4.5, 4.5, 4.5)


def test_optimizers_that_step_at_different_times_have_windows_of_their_own() -> None:
    p, q = parameter(), parameter()
    often, rarely = sgd(p), sgd(q)
    weights = Weights(attached=lambda: [often, rarely])
    for number, slope in enumerate((1.0, 2.0, 4.0), 1):
        often.zero_grad()
        train(weights, number, slope, p, q)
        weights.scale(often)
        assert p.grad == slope
    weights.scale(rarely)
    assert float(q.grad) == pytest.approx((1 * 1 + 2 * 2 + 3 * 4) / 6, rel=1e-15)


def test_a_generator_that_learns_from_some_batches_only() -> None:
    """The discriminator's losses do not reach it; it learns from every third batch."""
    p, q = parameter(), parameter()
    discriminator, generator = sgd(p), sgd(q)
    weights = Weights(attached=lambda: [discriminator, generator])
    for number in range(1, 7):
        weights.step(number)
        discriminator.zero_grad()
        backward(weights, 2.0, p)
        backward(weights, 4.0, p)  # of the same records: they count once
        weights.scale(discriminator)
        assert p.grad == 6.0
        if number % 3 == 0:
            generator.zero_grad()
            backward(weights, 5.0, p, q)
            weights.scale(generator)
            assert q.grad == 5.0


def test_a_second_call_before_the_step_does_nothing() -> None:
    weights, p = Weights(), parameter()
    optimizer = sgd(p)
    train(weights, 4, 3.0, p)
    weights.scale(optimizer)
    weights.scale(optimizer)
    assert p.grad == 3.0


def test_parameters_that_an_optimizer_gets_later_belong_to_its_window() -> None:
    weights, p, late = Weights(), parameter(), parameter()
    optimizer = sgd(p)
    for _ in range(3):
        train(weights, 2, 1.0, p)
        weights.scale(optimizer)
        optimizer.zero_grad()
    optimizer.add_param_group({"params": [late]})
    train(weights, 4, 3.0, p, late)
    weights.scale(optimizer)
    assert (p.grad, late.grad) == (3.0, 3.0)


def test_an_optimizer_that_nobody_knew_of_is_refused_where_its_window_is_not_known() -> None:
    weights, p, q = Weights(), parameter(), parameter()
    known, stranger = sgd(p), sgd(q)
    for _ in range(2):
        train(weights, 2, 1.0, p, q)
        weights.scale(known)
    with pytest.raises(InvalidArgument, match=r"SGD are scaled for the first time.*loader\.attach"):
        weights.scale(stranger)


# What is not in the gradients ---------------------------------------------------------------------------


def test_a_batch_that_was_not_backpropagated_does_not_count() -> None:
    weights, p = Weights(), parameter()
    optimizer = sgd(p)
    weights.step(8)  # and the loop breaks, or skips it
    weights.step(8)
    weights.weigh(p * 2.0)  # looks at the loss, and skips it
    train(weights, 8, 1.0, p)
    weights.scale(optimizer)
    assert p.grad == 1.0


def test_a_batch_that_was_taken_out_does_not_count() -> None:
    batches: Any = SimpleNamespace(discarded=0)
    weights, p = Weights(batches=batches), parameter()
    optimizer = sgd(p)
    train(weights, 8, 7.0, p)
    optimizer.zero_grad(set_to_none=False)
    batches.discarded += 1
    assert weights.own == 0
    train(weights, 8, 1.0, p)
    assert weights.own == 8
    weights.scale(optimizer)
    assert p.grad == 1.0


def test_a_long_window_counts_all_of_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 2)
    weights, p = Weights(), parameter()
    for own in (2, 4, 6, 8, 10):
        train(weights, own, 3.0, p)
    weights.scale(sgd(p))
    assert p.grad == 3.0


def test_gradients_that_were_thrown_away_do_not_count() -> None:
    p = parameter()
    optimizer = sgd(p)
    weights = Weights(attached=lambda: [optimizer])
    train(weights, 8, 7.0, p)
    optimizer.zero_grad()
    train(weights, 2, 1.0, p)
    train(weights, 2, 2.0, p)
    weights.scale(optimizer)
    assert p.grad == 1.5


def test_a_parameter_that_a_batch_does_not_reach_counts_it_all_the_same() -> None:
    """As an expert that no sample was sent to: the mean is over all of them."""
    p, expert = parameter(), parameter()
    optimizer = sgd(p, expert)
    weights = Weights(attached=lambda: [optimizer])
    train(weights, 6, 1.0, p)
    train(weights, 2, 4.0, p, expert)
    weights.scale(optimizer)
    assert expert.grad == 1.0


def test_a_new_beginning_forgets_the_window() -> None:
    weights, p = Weights(), parameter()
    train(weights, 100, 1.0, p)
    p.grad = None
    weights.restart()
    assert weights.own == 0, "there is no batch in hand"
    train(weights, 2, 1.0, p)
    weights.scale(sgd(p))
    assert p.grad == 1.0


def test_losses_that_were_not_weighed_are_refused() -> None:
    weights, p = Weights(), parameter()
    weights.step(2)
    p.backward()
    with pytest.raises(InvalidArgument, match=r"loader\.weigh\(loss\)"):
        weights.scale(sgd(p))


# A denominator of the loop's own ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_a_count_is_what_the_loss_was_divided_by(kind: Callable[[int], Any]) -> None:
    weights, p = Weights(), parameter()
    optimizer = sgd(p)
    train(weights, 4, 10.0, p, count=kind(1))
    train(weights, 4, 1.0, p, count=kind(3))
    train(weights, 4, torch.nan, p, count=kind(0))  # every token was ignored: 0 / 0
    weights.scale(optimizer)
    assert p.grad == 13 / 4


def test_counts_and_records_are_not_mixed() -> None:
    weights, p = Weights(), parameter()
    train(weights, 4, 1.0, p)
    train(weights, 4, 1.0, p, count=3)
    with pytest.raises(InvalidArgument, match="Give a count always, or never"):
        weights.scale(sgd(p))


def test_losses_of_one_batch_need_one_denominator() -> None:
    weights, p = Weights(), parameter()
    train(weights, 4, 1.0, p, count=3)
    backward(weights, 1.0, p, count=5)
    with pytest.raises(InvalidArgument, match="weighed by 3 and by 5"):
        weights.scale(sgd(p))


@pytest.mark.parametrize("count", [-1, torch.nan, torch.inf, torch.ones(2)])
def test_a_count_that_is_none_is_refused(count: Any) -> None:
    weights, p = Weights(), parameter()
    weights.step(4)
    with pytest.raises(InvalidArgument, match="count is"):
        weights.weigh(p * 1.0, count)


# Padding batches ----------------------------------------------------------------------------------


def net(*, compiled: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    return torch.compile(model, backend="aot_eager") if compiled else model


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "loss_of",
    [
        pytest.param(lambda y: (y - y).sqrt().mean(), id="infinite-derivative"),
        pytest.param(lambda y: (y * torch.inf).mean(), id="infinite"),
        pytest.param(lambda y: (y - torch.inf).log().mean(), id="nan"),
        pytest.param(lambda y: y.mean(), id="finite"),
    ],
)
def test_a_stand_in_gives_every_parameter_a_gradient_of_zero(
    loss_of: Callable[[torch.Tensor], torch.Tensor], compiled: bool
) -> None:
    weights, model = Weights(), net(compiled=compiled)
    scaler = torch.amp.GradScaler("cpu")
    weights.step(0)
    weighed = weights.weigh(loss_of(model(torch.ones(5, 3).double())))
    scaler.scale(weighed).backward()
    assert weighed == 0
    assert weighed.dtype == torch.float64
    gradients = [p.grad for p in model.parameters()]  # type: ignore[attr-defined]
    assert len(gradients) == 4
    for gradient in gradients:
        assert gradient is not None
        assert not gradient.any()


@pytest.mark.parametrize("together", [False, True])
def test_other_losses_beside_a_stand_in_keep_their_gradients(together: bool) -> None:
    """Also those that were computed together with its own."""
    weights, p = Weights(), parameter()
    weights.step(0)
    other = 2.0 * p if together else None
    weights.weigh(torch.inf * p).backward()
    (2.0 * p if other is None else other).backward()
    assert p.grad == 2.0


def test_a_stand_in_is_not_backpropagated_together_with_another_batch() -> None:
    weights, p = Weights(), parameter()
    weights.step(2)
    first = weights.weigh(2.0 * p)
    weights.step(0)
    with pytest.raises(InvalidArgument, match="before the next batch is asked for"):
        (first + weights.weigh(p * torch.inf)).backward()


@pytest.mark.parametrize("first", [0, 3])
def test_nor_together_with_another_loss_of_its_own_batch_whichever_comes_first(first: int) -> None:
    """A batch of which nothing counts for one loss."""
    weights, p = Weights(), parameter()
    weights.step(4)
    losses = [weights.weigh(p * 1.0, count) for count in (first, 3 - first)]
    with pytest.raises(InvalidArgument, match="before the next batch is asked for"):
        (losses[0] + losses[1]).backward()


@pytest.mark.parametrize("then", [lambda weights: weights.step(3), lambda weights: weights.restart()])
def test_a_stand_in_is_not_backpropagated_once_it_is_over(then: Callable[[Weights], None]) -> None:
    weights, p = Weights(), parameter()
    weights.step(0)
    loss = weights.weigh(p * torch.inf)
    then(weights)
    with pytest.raises(InvalidArgument, match="before the next batch is asked for"):
        loss.backward()


def test_a_loop_that_trains_on_padding_batches_is_warned_once() -> None:
    weights = Weights()
    weights.step(3)
    weights.warn_of_padding()
    weights.step(0)
    weights.step(3)
    with pytest.warns(UserWarning, match=r"got a padding batch, which the loop has trained on"):
        weights.warn_of_padding()
    weights.warn_of_padding()


# Several ranks ------------------------------------------------------------------------------------------


@pytest.fixture
def on_ranks() -> Callable[..., list[Any]]:
    """Runs a function on each of two ranks; what they returned or raised."""

    def run(work: Callable[[Weights, int], Any]) -> list[Any]:
        found: list[Any] = [None, None]

        def one(peers: ThreadPeers) -> None:
            try:
                found[peers.rank] = work(Weights(peers), peers.rank)
            except Exception as exc:  # noqa: BLE001  the top of a thread
                found[peers.rank] = exc
            finally:
                peers.leave()

        threads = [threading.Thread(target=one, args=(peers,)) for peers in ThreadPeers.group(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found

    return run


def test_what_a_rank_did_not_train_on_counts_on_none(on_ranks: Callable[..., list[Any]]) -> None:
    def work(weights: Weights, rank: int) -> float:
        p = parameter()
        optimizer = sgd(p)
        train(weights, 4 if rank else 0, 3.0, p)  # rank 0 has a padding batch
        weights.step(8)
        if not rank:
            backward(weights, 5.0, p)  # rank 1 skips the batch
        weights.scale(optimizer)
        assert p.grad is not None
        return float(p.grad)

    found = on_ranks(work)
    assert sum(found) / 2 == pytest.approx((4 * 3 + 8 * 5) / 12, rel=1e-15)


def test_counts_on_one_rank_and_records_on_another_are_refused_on_both(
    on_ranks: Callable[..., list[Any]],
) -> None:
    def work(weights: Weights, rank: int) -> None:
        p = parameter()
        train(weights, 4, 3.0, p, count=7 if rank else None)
        weights.scale(sgd(p))

    assert [type(error) for error in on_ranks(work)] == [InvalidArgument] * 2


def test_what_one_rank_refuses_ends_the_call_on_all(on_ranks: Callable[..., list[Any]]) -> None:
    def work(weights: Weights, rank: int) -> None:
        p = parameter()
        train(weights, 4, 3.0, p, count=3)
        backward(weights, 3.0, p, count=3 + rank)
        weights.scale(sgd(p))

    told, refused = on_ranks(work)
    assert [type(told), type(refused)] == [PeerFailed, InvalidArgument]
    assert str(told).startswith("1 other rank(s) of this job cannot go on")


def test_a_loss_before_the_first_batch_counts_for_nothing() -> None:
    weights, p = Weights(), parameter()
    backward(weights, 3.0, p)
    assert p.grad == 0


def test_batches_after_a_first_call_without_any_are_all_in_the_next_window() -> None:
    weights, p, q = Weights(), parameter(), parameter()
    weights.scale(sgd(p))
    train(weights, 2, 3.0, q)
    train(weights, 6, 5.0, q)
    weights.scale(sgd(q))
    assert q.grad == (2 * 3 + 6 * 5) / 8


def test_a_batch_of_the_last_ones_counts_once_however_late_it_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 2)
    window = module.GradientWindow()
    for backward, (batch, count) in enumerate([(1, 2.0), (2, 3.0), (1, 2.0)]):
        window.add(batch, count, "records", backward)
    assert window.total == 5.0


def test_a_parameter_that_a_second_optimizer_has_too_stays_in_its_window() -> None:
    p, q = parameter(), parameter()
    known = module.GradientWindows()
    for optimizer in (sgd(p), both := sgd(p, q)):
        known.know(optimizer)
    assert [parameters for _, parameters in known.of([both])] == [[p], [q]]
