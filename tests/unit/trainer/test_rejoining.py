"""A session that was given up takes part anew while calls of before are still on their way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trainer_kit import DATASET, Master, Running, Shell, reports_of

from edl_torch.core.dispatcher import Dispatcher
from edl_torch.errors import JournalWentBack, MasterUnavailable, SessionLost, StaleLease
from edl_torch.trainer.vocabulary import Attend, Call, Joined, Membership, Register, Voided


def begin(shell: Shell) -> None:
    """A first batch is with the loop."""
    shell.begin_elastic()
    assert shell.hand(shell.draw())


def test_only_who_takes_part_anew_registers_by_the_name_alone(master: Master, shell: Shell) -> None:
    registering = shell.start(shell.trainer.registrar.plan()).to(Register)
    assert registering.action == Register(again=False)
    registering.finish()
    master.give_up_all()
    rejoining = shell.start(shell.trainer.registrar.again(shell.state.fence)).to(Register)
    assert rejoining.action == Register(again=True)
    rejoining.finish()


def test_a_session_that_could_not_be_attended_is_attended_at_its_next_use(shell: Shell) -> None:
    """Else nothing keeps it alive, and the master gives it up."""
    registering = shell.start(shell.trainer.registrar.plan()).to(Attend)
    with pytest.raises(MasterUnavailable):
        registering.fail(MasterUnavailable("away"))
    assert shell.state.registered.plan is None
    again = shell.start(shell.trainer.registrar.plan()).to(Attend)
    assert again.finish().size == 64


def test_the_member_that_was_given_up_says_all_that_it_was_answered_before_it_is_forgotten(
    master: Master, shell: Shell
) -> None:
    """The call that found it out may be a repeat of one from before the last answer. If the master's journal
    went back meanwhile, nothing else proves it: the new member was answered nothing yet."""
    begin(shell)
    shell.request()
    earlier = shell.state.fence
    master.give_up_all()
    shell.run(shell.trainer.reporter.flush())
    shell.run(shell.elastic.close(1))
    shell.train_through()
    told = master.of("progress")[0]
    assert shell.state.fence != earlier
    assert (told.fence.member, told.reported) == (earlier.member, reports_of(master)[0].request)
    assert told.asked == master.of("lease")[0].request


def test_a_lease_call_between_a_registration_and_its_answer_is_lent_nothing(
    master: Master, shell: Shell
) -> None:
    """The session throws away what it held when the answer comes: it would never give that lease back."""
    begin(shell)
    master.give_up_all()
    telling = shell.start(shell.elastic.request(1)).to(Register)  # the report finds out
    answer = master.register(shell.session, shell.batch_size)
    late = master.of("lease")[-1]
    with pytest.raises(SessionLost, match="registered again"):
        master.answer(Call(replace(late, request=late.request + 1)))
    telling.answer(answer)
    telling.finish()
    assert master.status.leases == 0
    assert shell.state.inflight.records == 0
    shell.run(shell.elastic.close(1))
    shell.train_through()
    assert master.status.finished
    master.outcomes.check_complete(1)


def test_the_late_answer_of_a_member_before_is_told_with_its_calls(master: Master, shell: Shell) -> None:
    """A master whose journal went back behind that answer is found out by it."""
    begin(shell)
    drawing = shell.start(shell.trainer.leasing.next("main", 1)).to("lease")
    assert isinstance(drawing.action, Call)
    late = master.answer(drawing.action)
    lost = shell.state.fence
    master.give_up_all()
    shell.request()
    drawing.answer(late)
    drawing.finish()
    shell.run(shell.trainer.registrar.again(lost))
    assert master.of("progress")[-1].fence == lost
    assert master.of("progress")[-1].asked == late.request


@pytest.mark.parametrize("in_process", [True, False])
def test_what_becomes_of_the_new_members_first_lease_is_told(master: Master, in_process: bool) -> None:
    """What the old member had to say is thrown away before anybody asks as the new one: a lease that is given
    back in between, and of which the master never hears, is on loan for ever."""
    shell = Shell(master, in_process=in_process, attended=False)
    begin(shell)
    master.give_up_all()
    telling = shell.start(shell.elastic.settle_in_hand())
    assert in_process or telling.is_done
    telling = telling if in_process else shell.start(shell.trainer.reporter.flush())
    telling.to(Register).step()
    telling.to("progress").step()
    assert shell.run(shell.trainer.leasing.look_for_more())
    shell.run(shell.trainer.wanted())
    telling.finish()
    assert master.of("lease")[-1].fence.member == 2
    shell.run(shell.trainer.reporter.flush())
    assert master.status.leases == 0


def test_what_the_loop_had_is_void_and_the_model_has_learnt_from_it(master: Master, shell: Shell) -> None:
    shell.begin_elastic()
    first, second = shell.draw(), shell.draw()
    assert shell.hand(first)
    shell.request()
    assert shell.hand(second)
    master.give_up_all()
    assert shell.run(shell.elastic.more_to_read())
    held = ((second.task, second.slice.skip, second.slice.stop),)
    assert [fact.runs for fact in shell.told(Voided)] == [held]
    assert len(shell.state.batches) == 0
    with pytest.raises(StaleLease, match=r"1 batch\(es\) of dataset 'training': this trainer was cut off"):
        shell.state.check()


def test_in_a_plain_pass_what_was_drawn_may_have_been_trained_on(master: Master, shell: Shell) -> None:
    shell.begin_plain()
    grant = shell.draw()
    master.give_up_all()
    shell.next()
    assert [fact.runs for fact in shell.told(Voided)] == [((grant.task, 0, grant.slice.stop),)]


def test_what_nobody_drew_and_no_step_was_made_on_is_forgotten_too(master: Master, remote: Shell) -> None:
    remote.state.batches.attach()
    begin(remote)
    remote.work()
    assert (remote.state.supply.ready, len(remote.state.batches)) == (1, 1)
    master.give_up_all()
    remote.run(remote.trainer.registrar.again(remote.state.fence))
    assert (remote.state.supply.ready, len(remote.state.batches)) == (0, 0)


class Another(Master):
    """Gives the session up, and is another one when it registers again."""

    def become(self, ledger_id: str, *, knows: bool = True) -> None:
        fresh = Master()
        fresh.dispatcher.ledger_id = ledger_id
        if not knows:
            fresh.dispatcher = Dispatcher(ledger_id=ledger_id)
        self.dispatcher = fresh.dispatcher


@pytest.mark.parametrize(
    ("knows", "message"),
    [
        (True, r"the master of 'training' is another one than before, it keeps ledger M, not L: this"),
        (False, "it does not know this dataset: this trainer's leases are void"),
    ],
)
def test_another_master_is_not_taken_for_the_one_of_before(knows: bool, message: str) -> None:
    master = Another()
    shell = Shell(master, attended=False)
    begin(shell)
    fence = shell.state.fence
    master.become("M", knows=knows)
    with pytest.raises(StaleLease, match=message):
        shell.request()
    assert shell.state.registered.phase is Membership.MEMBER
    assert shell.state.fence == fence
    assert not shell.state.inflight, "what it held is void all the same"
    with pytest.raises(StaleLease, match="this trainer was cut off from the master for too long"):
        shell.state.check()


def test_a_dataset_that_went_back_meanwhile_is_not_joined_again(master: Master, shell: Shell) -> None:
    begin(shell)
    master.dispatcher.go_back(DATASET, None)
    master.give_up_all()
    with pytest.raises(StaleLease, match="'training' was taken back to a checkpoint by another trainer"):
        shell.request()


def registering_again(master: Master, shell: Shell) -> Running[None]:
    begin(shell)
    master.give_up_all()
    return shell.start(shell.trainer.registrar.again(shell.state.fence))


def test_a_master_that_has_forgotten_the_end_of_a_member_went_back(master: Master, shell: Shell) -> None:
    rejoining = registering_again(master, shell).to(Register)
    answer = master.register(shell.session, shell.batch_size)
    with pytest.raises(JournalWentBack, match="member 1 of 'training' was given up, and is back"):
        rejoining.answer(replace(answer, fence=shell.state.fence))


def test_another_rank_that_went_back_moves_this_one(master: Master, shell: Shell) -> None:
    begin(shell)
    lineage = master.dispatcher.go_back(DATASET, None)
    shell.trainer.registrar.join(lineage)
    assert shell.state.fence.lineage == lineage
    assert shell.told(Joined)[-1].fence.lineage == lineage
    assert not shell.state.inflight
    shell.run(shell.elastic.close(1))
    shell.trainer.position.restored()
    assert shell.elastic.read_ahead == 0
    shell.train_through()
    assert master.status.finished


def test_only_so_many_members_of_before_are_remembered(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl_torch.trainer.state.REMEMBERED", 4)
    shell.run(shell.trainer.registrar.plan())
    registered, fence = shell.state.registered, shell.state.fence
    fences = [replace(fence, member=number) for number in range(2, 9)]
    for number, new in enumerate(fences):
        registered.answered(registered.fence, asked=number + 1, reported=number + 10)
        registered.move(new)
    assert registered.known(fences[-1]) == (0, 0)
    assert [registered.known(fence) for fence in fences[:-1]] == [
        (0, 0),
        (0, 0),
        *((number + 1, number + 10) for number in range(3, 7)),
    ]
    registered.answered(fences[-2], asked=99)
    registered.answered(fences[-3], reported=98)
    registered.answered(fences[0], asked=97)
    assert registered.known(fences[-2]) == (99, 16)
    assert registered.known(fences[-3]) == (6, 98)
    assert registered.known(fences[0]) == (0, 0)
