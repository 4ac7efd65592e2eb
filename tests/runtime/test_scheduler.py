"""Plans of the scheduler: who enters, what a step runs. Nothing here has a device, a model or a runner."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from specgraph.runtime.memory.pages import PagePool
from specgraph.runtime.requests.request import Request
from specgraph.runtime.requests.sampling import Sampling
from specgraph.runtime.schedule.num_drafts import Choice
from specgraph.runtime.schedule.policy import Policy
from specgraph.runtime.schedule.prefill import prompt_window
from specgraph.runtime.schedule.prompt_shapes import MOST_ROWS, Overhead
from specgraph.runtime.schedule.scheduler import Plan, Scheduler
from specgraph.runtime.schedule.sequences import ActiveSequence, Phase

STATE_ROWS, WIDTH, PAGE = 8, 4, 4
PATIENT = Policy(chunk=16, fair=False, overhead=Overhead(16, 64))
FAIR = dataclasses.replace(PATIENT, fair=True)


def waiting(number: int, length: int = 5, limit: int = 20) -> ActiveSequence:
    prompt = torch.arange(length) + 100 * number
    return ActiveSequence(number, Request(prompt, limit, Sampling(0.0, seed=number)))


class World:
    """A queue, state rows and pages, in which plans are carried out as an engine does, but for the step itself."""

    def __init__(self, policy: Policy, pages: int = 100, **options: Any) -> None:
        self.pages = PagePool(pages, PAGE, 0, reuse=True, weights=[])
        self.scheduler = Scheduler(policy, self.pages, STATE_ROWS, WIDTH, **options)
        self.queue: list[ActiveSequence] = []
        self.running: list[ActiveSequence] = []
        self.free = list(range(STATE_ROWS))

    def plan(self) -> Plan:
        return self.scheduler.plan(self.queue, self.running, self.free)

    def step(self) -> Plan:
        """Plan, and carry it out."""
        plan = self.plan()
        del self.queue[: len(plan.entering)], self.free[: len(plan.entering)]
        for sequence, state_row, reserved, prompt in plan.entering:
            sequence.phase, sequence.state_row = Phase.PREFILL, state_row
            sequence.reserved, sequence.prompt = reserved, prompt
            self.running.append(sequence)
        if plan.prompts:
            prompt_window([(s.state_row, s.prompt, count) for s, count in plan.prompts.items()])
        for sequence in plan.prompts:
            if not sequence.prompt.left:
                sequence.phase = Phase.DECODE
                sequence.tokens_left = sequence.request.limit - sequence.request.prompt.numel() - 1
        self.scheduler.ran(plan, WIDTH)
        return plan

    def leave(self, sequence: ActiveSequence) -> None:
        self.running.remove(sequence)
        self.free = sorted([*self.free, sequence.state_row])
        self.pages.give_back(sequence.reserved)
        self.scheduler.ended()


def numbers(sequences: Any) -> list[int]:
    return [sequence.number for sequence in sequences]


def decoding(world: World, count: int, **options: Any) -> World:
    """A world in which so many sequences decode."""
    world.queue = [waiting(number, **options) for number in range(count)]
    while not world.plan().decoding or world.plan().prompts:
        world.step()
    return world


def test_sequences_enter_in_order_and_their_prompts_run_in_the_same_step() -> None:
    world = World(PATIENT)
    world.queue = [waiting(number) for number in range(STATE_ROWS + 2)]
    plan = world.step()
    assert numbers(entry.sequence for entry in plan.entering) == list(range(STATE_ROWS))
    assert [entry.state_row for entry in plan.entering] == list(range(STATE_ROWS))
    assert list(plan.prompts.values()) == [5] * STATE_ROWS and not plan.decoding
    assert numbers(world.plan().decoding) == list(range(STATE_ROWS)) and not world.plan().entering


def test_a_sequence_without_pages_holds_up_those_behind_it() -> None:
    world = World(PATIENT, pages=6)
    world.queue = [waiting(0), waiting(1), waiting(2, limit=6)]
    assert numbers(entry.sequence for entry in world.step().entering) == [0]
    assert not world.plan().entering, "the third would find pages, but the second came before it"


def test_planning_changes_no_sequence() -> None:
    world = World(PATIENT)
    world.queue = [waiting(0)]
    world.plan()
    assert world.queue[0].phase is Phase.WAITING and world.queue[0].state_row == -1


@pytest.mark.parametrize(("policy", "enters"), [(PATIENT, False), (FAIR, True)], ids=["in a group", "at once"])
def test_who_enters_beside_sequences_that_decode(policy: Policy, enters: bool) -> None:
    world = decoding(World(policy), STATE_ROWS)
    for _ in range(3):  # many sequences end per step, so that groups are large
        for sequence in list(world.running)[:2]:
            world.leave(sequence)
    world.leave(world.running[0])
    world.free = world.free[:1]
    world.queue = [waiting(number) for number in range(20, 24)]
    assert bool(world.plan().entering) is enters


def test_a_long_prompt_is_cut_into_chunks_beside_sequences_that_decode() -> None:
    world = decoding(World(FAIR), 2, limit=60)
    world.queue = [waiting(9, length=40, limit=60)]
    rows = []
    while (plan := world.step()).prompts:
        assert numbers(plan.decoding) == [0, 1]
        rows += plan.prompts.values()
    assert rows == [15, 15, 10], "one less than the chunk, for the token behind it, then the whole rest"


@pytest.mark.parametrize(("policy", "kinds"), [(PATIENT, "pppd"), (FAIR, "dpdpdp")], ids=["patient", "fair"])
def test_prompts_and_decoding_take_turns_where_they_share_no_step(policy: Policy, kinds: str) -> None:
    world = decoding(World(dataclasses.replace(policy, joint=False)), 1, limit=60)
    world.queue = [waiting(9, length=40, limit=60)]
    found = ""
    for _ in kinds:
        plan = world.step()
        assert not (plan.prompts and plan.decoding)
        found += "p" if plan.prompts else "d"
    assert found == kinds


def test_a_sequence_whose_length_the_steps_under_way_will_fill_is_left_out() -> None:
    world = decoding(World(PATIENT), 2)
    world.running[0].tokens_left = 0
    assert numbers(world.plan().decoding) == [1]


def test_k_depends_on_the_number_of_sequences_that_decode() -> None:
    world = decoding(World(dataclasses.replace(PATIENT, drafts={1: None, 2: 1})), 2)
    assert world.plan().choice.drafts == 1
    world.leave(world.running[0])
    assert world.plan().choice.drafts is None


def test_k_is_asked_for_where_somebody_else_chooses_it() -> None:
    asked: list[list[int]] = []
    world = World(PATIENT, choose_drafts=lambda sequences: asked.append(numbers(sequences)) or Choice(2))
    decoding(world, 2)
    assert world.plan().choice.drafts == 2 and asked[-1] == [0, 1]


def test_where_nobody_decodes_a_step_runs_as_many_prompt_tokens_as_one_may() -> None:
    long = dataclasses.replace(PATIENT, chunk=MOST_ROWS)
    world = World(long, pages=STATE_ROWS * 2000)
    world.queue = [waiting(number, length=2000, limit=2100) for number in range(STATE_ROWS)]
    assert MOST_ROWS // 2 < sum(world.plan().prompts.values()) <= MOST_ROWS


def test_shared_pages_are_not_run_again() -> None:
    world = World(PATIENT)
    world.queue = [waiting(0, length=14)]
    world.step()
    world.pages.offer(world.running[0].reserved, world.running[0].request.prompt)
    world.queue = [waiting(0, length=14)]
    plan = world.step()
    assert list(plan.prompts.values()) == [14 - 3 * PAGE]
