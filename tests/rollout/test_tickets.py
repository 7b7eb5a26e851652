"""Whatever sampling and publishing take: a token is at most k updates old, and every question that is drawn is trained on."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.data.sampler import QuestionSampler
from megatron_drmas.rollout.tickets import Tickets

QUESTIONS, SIZE = 3, 7  # of a ticket, of the data
POLICIES = 3


class Failed(Exception):
    pass


class Clock:
    """A loop's tasks take turns; how many turns something takes is drawn."""

    def __init__(self, seed, longest):
        self._random, self._longest = random.Random(seed), longest

    async def pause(self):
        for _ in range(self._random.randint(0, self._longest)):
            await asyncio.sleep(0)


async def run(seed, staleness, updates, in_turn=False, extra=0, fail_at=None, start=0, state=None, delays=0):
    """Train `updates`; the questions of each, and the tickets' states before each and at the end, as the saver holds them.

    Args:
        extra: most of the questions that are replaced, as by dynamic sampling, once the first have been sampled.
    """
    clock, publishing, replaced = Clock(seed + delays, 12), Clock(seed + delays + 1, 5), random.Random(seed + delays)
    versions = [start] * POLICIES  # that each policy's engines serve
    sampling = set()
    together = 0

    async def collect(update, draw):
        nonlocal together
        sampling.add(update)
        together = max(together, len(sampling))
        drawn, tokens = [], {}
        for part in (QUESTIONS, replaced.randint(0, extra)):
            for question in draw(part):
                drawn.append(question)
                tokens[question] = []
                for policy in range(POLICIES):
                    await clock.pause()
                    tokens[question].append(versions[policy])
                if (update, question) == fail_at:
                    raise Failed
        sampling.remove(update)
        return drawn, tokens

    tickets = Tickets(QuestionSampler(SIZE, seed), start, updates, staleness, in_turn)
    if state:
        tickets.load_state_dict(state)
    trained, states = [], [tickets.state_dict()]
    async with tickets.running(collect):
        for update in range(start, updates):
            drawn, tokens = await tickets.take()
            for of_policies in tokens.values():
                assert all(update - staleness <= version <= update for version in of_policies)
            trained.append(drawn)
            await publishing.pause()  # the update
            if in_turn:
                await tickets.settle()
            for policy in random.Random(seed + update).sample(range(POLICIES), POLICIES):  # engines follow one after another
                await publishing.pause()
                versions[policy] = update + 1
            tickets.published(update + 1)
            if not in_turn:
                tickets.admit()
            states.append(tickets.state_dict())
    assert not in_turn or together == 1
    return trained, states


def questions(seed, count):
    return QuestionSampler(SIZE, seed).draw(count)


@given(st.integers(0, 999), st.integers(0, 4), st.integers(1, 9), st.booleans())
def test_tokens_are_at_most_k_updates_old_and_tickets_are_the_questions_in_their_order(seed, staleness, updates, in_turn):
    trained, _ = asyncio.run(run(seed, staleness, updates, in_turn))
    assert [question for ticket in trained for question in ticket] == questions(seed, QUESTIONS * updates)


@given(st.integers(0, 999), st.integers(1, 4), st.integers(2, 9))
def test_replacements_are_the_tickets_own_and_none_is_drawn_twice_or_lost(seed, staleness, updates):
    trained, states = asyncio.run(run(seed, staleness, updates, extra=2))
    assert sorted(q for ticket in trained for q in ticket) == sorted(questions(seed, states[-1]["cursor"]))


@given(st.integers(0, 999), st.integers(0, 3), st.integers(1, 8), st.lists(st.integers(0, 8), max_size=3), st.integers(0, 2))
def test_a_run_that_goes_on_from_any_step_trains_on_the_same_questions(seed, staleness, updates, kills, extra):
    """A kill, wherever it comes, goes back to a state of a whole step, which is written while the next step draws.

    Open tickets are sampled again, with other delays and other replacements: what is drawn is trained on once, or still to be.
    """
    trained, state, start = [], None, 0
    for life, end in enumerate([*sorted(min(kill, updates) for kill in kills), updates]):
        begun = (state or {}).get("open", {})
        tickets, states = asyncio.run(run(seed, staleness, updates, extra=extra, start=start, state=state, delays=life))
        for update, drawn in begun.items():
            assert tickets[int(update) - start][:QUESTIONS] == drawn[:QUESTIONS]
        trained += [question for ticket in tickets[: end - start] for question in ticket]
        start, state = end, states[end - start]
    assert sorted(trained + state.get("returned", [])) == sorted(questions(seed, state["cursor"]))


def test_without_staleness_nothing_is_drawn_before_it_is_asked_for():
    async def steps():
        sampler = QuestionSampler(SIZE, 0)
        tickets = Tickets(sampler, 0, 3)

        async def collect(update, draw):
            return draw(QUESTIONS)

        async with tickets.running(collect):
            for update in range(3):
                assert tickets.state_dict() == {"cursor": QUESTIONS * update}
                await tickets.take()
                tickets.published(update + 1)

    asyncio.run(steps())


def test_a_ticket_that_failed_is_raised_where_it_is_taken_and_the_rest_is_abandoned():
    with pytest.raises(Failed):
        asyncio.run(run(3, 2, 5, fail_at=(1, questions(3, 6)[4])))
    assert asyncio.run(run(3, 2, 5))[0]


def test_a_run_that_goes_back_trains_on_the_questions_since_then_again():
    async def steps():
        tickets = Tickets(QuestionSampler(SIZE, 0), 0, 9, staleness=2)

        async def collect(update, draw):
            return draw(QUESTIONS)

        async def train(updates):
            trained = []
            for update in updates:
                trained.append(await tickets.take())
                tickets.published(update + 1)
                states.append(tickets.state_dict())
            return trained

        states = []
        async with tickets.running(collect):
            first = await train(range(5))
            tickets.admit()
            await tickets.abandon()
            tickets.rewind(2, states[1])
            return first[2:], await train(range(2, 5))

    before, after = asyncio.run(steps())
    assert before == after
