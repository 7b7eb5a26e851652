"""The collector over scripted engines: what it asks, what it keeps, what a failure costs."""

import asyncio
import math
import random
from types import SimpleNamespace

import pytest
import torch

import megatron_drmas.workflows  # noqa: F401  registers
from megatron_drmas.config.schema import AgentConfig, EnvironmentConfig, RolloutConfig, TeamConfig, WorkflowConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.environments.base import Environment
from megatron_drmas.rollout.client import EngineTimeout, PolicyClient
from megatron_drmas.rollout.collate import collate
from megatron_drmas.rollout.collector import Collector, Sampling, _TrajectoryContext
from megatron_drmas.rollout.control_tokens import Mask, MaskedText
from megatron_drmas.rollout.engine_messages import Sample
from megatron_drmas.team.team import Team
from megatron_drmas.team.tool import tool
from megatron_drmas.team.trajectory import Outcome, TrajectoryFailure
from megatron_drmas.team.workflow import WORKFLOWS

QUESTIONS = [Question(str(i), f"question {i}", ("x",)) for i in range(4)]
SAMPLING = Sampling(1.0, 1.0, "test")


class Engine:
    """Answers a request with `reply(request)` after a random while."""

    def __init__(self, reply, seed=0, delay_s=0.003):
        self.reply, self.random, self.delay_s = reply, random.Random(seed), delay_s
        self.submits, self.done, self.arrived = [], [], asyncio.Event()

    async def submit(self, requests):
        self.submits.append(requests)
        for request in requests:
            asyncio.get_running_loop().call_later(self.random.random() * self.delay_s, self._finish, request)

    def _finish(self, request):
        self.done.append(self.reply(request))
        self.arrived.set()

    async def poll(self, timeout_s):
        try:
            await asyncio.wait_for(self.arrived.wait(), timeout_s)
        except TimeoutError:
            return []
        self.arrived.clear()
        done, self.done = self.done, []
        return done


class Letters:
    """A tokenizer whose tokens are characters."""

    def render_prompt(self, messages):
        return MaskedText(messages[-1]["content"], Mask({}))

    def encode_prompts(self, prompts):
        return [[ord(c) for c in prompt.text] for prompt in prompts]

    def text(self, ids):
        return "".join(map(chr, ids))


class World(Environment):
    """Pays 1 for the answer x; the query "fail" finds a broken server."""

    @tool("search")
    async def retrieve(self, query):
        await asyncio.sleep(0.001)
        if query == "fail":
            raise TrajectoryFailure("retrieval", "500")
        return ["passage"]

    @tool("supports")
    async def supports(self, passages, question):
        return "x" in passages

    async def reward(self, question, outcome):
        return float(outcome.answer == "x")


def reply(text):
    ids = [ord(c) for c in text]
    return lambda request: Sample(request.key, ids, [-0.5] * len(ids), "stop", [(3, len(ids))])


PROMPT = "{{ question }} {{ history | map(attribute='query') | join(',') }}"
SEARCH_TOKENS = 7  # tells a script that the Search agent asks
TEAM = Team.from_config(
    TeamConfig(
        WorkflowConfig(name="search"),
        {
            "verifier": AgentConfig(policy="v", prompt=PROMPT, tag="verify", choices=["yes", "no"]),
            "search": AgentConfig(policy="s", prompt=PROMPT, tag="search", max_response_tokens=SEARCH_TOKENS),
            "answer": AgentConfig(policy="s", prompt=PROMPT, tag="answer"),
        },
    )
)


def script(query="q", answer="x"):
    """A Verifier that says yes once it sees a query, and the other two."""

    def verifier(request):
        return reply("<verify>yes</verify>" if chr(request.prompt_ids[-1]) == query[-1] else "<verify>no</verify>")(request)

    def rest(request):
        return reply(f"<search>{query}</search>" if request.max_tokens == SEARCH_TOKENS else f"<answer>{answer}</answer>")(
            request
        )

    return verifier, rest


def collect(engines, samples=2, lockstep=False, config=None, timeout_s=5.0, use_turn_rewards=False, team=TEAM, take=None):
    """Everything that is collected, or what `take` makes of the collector; and the engines."""

    async def run():
        built = {
            name: [each if isinstance(each, Engine) else Engine(each, seed=i) for i, each in enumerate(group)]
            for name, group in engines.items()
        }
        clients = {name: PolicyClient(name, group, timeout_s, lockstep) for name, group in built.items()}
        for client in clients.values():
            client.POLL_S = 0.05
            await client.__aenter__()
        collector = Collector(
            team,
            World(EnvironmentConfig(name="world")),
            clients,
            {name: Letters() for name in built},
            config or RolloutConfig(),
            seed=5,
        )
        try:
            if take is not None:
                return await take(collector), built
            return await collector.collect(QUESTIONS, samples, SAMPLING, use_turn_rewards), built
        finally:
            for client in clients.values():
                await client.__aexit__(None, None, None)

    return asyncio.run(run())


def test_trajectories_keep_the_sampled_ids_and_come_in_order():
    verifier, rest = script()
    trajectories, _ = collect({"v": [verifier], "s": [rest]})
    assert [(t.group, t.sample) for t in trajectories] == [(g, s) for g in range(4) for s in range(2)]
    for trajectory in trajectories:
        assert trajectory.failure is None and trajectory.reward == 1.0
        assert [turn.agent for turn in trajectory.turns] == ["verifier", "search", "verifier", "answer"]
        for turn in trajectory.turns:
            assert "".join(map(chr, turn.token_ids)) == turn.text and turn.weight_versions == [(3, len(turn.text))]


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_stream_yields_what_collect_returns_each_trajectory_once_and_whole_groups(lockstep):
    verifier, rest = script()

    async def streamed(collector):
        return [trajectory async for trajectory in collector.stream(QUESTIONS, 3, SAMPLING)]

    async def grouped(collector):
        return [group async for group in collector.groups(QUESTIONS, 3, SAMPLING)]

    def outputs(trajectories):
        return {(t.group, t.sample): [turn.text for turn in t.turns] for t in trajectories}

    whole, _ = collect({"v": [verifier], "s": [rest]}, 3, lockstep)
    stream, _ = collect({"v": [verifier], "s": [rest]}, 3, lockstep, take=streamed)
    groups, _ = collect({"v": [verifier], "s": [rest]}, 3, lockstep, take=grouped)
    assert len(stream) == len(whole) and outputs(stream) == outputs(whole)
    assert all([t.sample for t in group] == [0, 1, 2] and len({t.group for t in group}) == 1 for group in groups)
    assert outputs(t for group in groups for t in group) == outputs(whole)


def test_a_trajectory_comes_before_slower_ones_have_finished_and_closing_ends_those():
    verifier, rest = script()

    async def first_two(collector):
        async def call_tool(name, question, arguments):
            if question is not QUESTIONS[2]:
                await asyncio.sleep(3600)
            return ["passage"]

        collector.environment.call_tool = call_tool
        stream = collector.stream(QUESTIONS, 2, SAMPLING)
        found = [await asyncio.wait_for(anext(stream), 5) for _ in range(2)]
        before = len(asyncio.all_tasks())
        await stream.aclose()
        return {trajectory.group for trajectory in found}, before - len(asyncio.all_tasks())

    (groups, ended), _ = collect({"v": [verifier], "s": [rest]}, take=first_two)
    assert groups == {2} and ended >= 6, "the six that wait for their tool"


def test_a_request_s_seed_depends_on_its_place_and_nothing_else():
    verifier, rest = script()

    def seeds(lockstep):
        _, engines = collect({"v": [verifier], "s": [rest]}, lockstep=lockstep)
        return sorted(request.seed for engine in (*engines["v"], *engines["s"]) for share in engine.submits for request in share)

    free = seeds(False)
    assert free == seeds(True) and len(set(free)) == len(free)


def test_calls_made_together_travel_together():
    verifier, rest = script()
    _, engines = collect({"v": [verifier], "s": [rest]}, samples=16)
    assert len(engines["v"][0].submits[0]) == 64


def test_collections_at_once_share_the_places_and_change_no_seed_of_each_other():
    """As an evaluation does beside a rollout."""
    verifier, rest = script()
    running, most = 0, 0

    async def both(collector):
        alone = collector._run

        async def counted(*args):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await alone(*args)
            running -= 1

        collector._run = counted
        return await asyncio.gather(
            collector.collect(QUESTIONS, 3, SAMPLING), collector.collect(QUESTIONS, 1, SAMPLING.at("evaluation"))
        )

    def seeds(engines):
        return {request.seed for group in engines.values() for engine in group for part in engine.submits for request in part}

    (trajectories, beside), engines = collect({"v": [verifier], "s": [rest]}, config=RolloutConfig(max_in_flight=5), take=both)
    assert (len(trajectories), len(beside), most) == (12, 4, 5)
    _, engines_alone = collect({"v": [verifier], "s": [rest]}, 3)
    assert seeds(engines_alone) < seeds(engines)


@pytest.mark.parametrize("replicas", [1, 2])
def test_lockstep_gives_the_engines_the_same_batches_whatever_the_timing(replicas):
    verifier, rest = script()

    def batches(delay_s):
        engines = {
            name: [Engine(each, seed=int(delay_s * 1e4) + i, delay_s=delay_s) for i in range(replicas)] for name, each in scripts
        }
        collect(engines, lockstep=True)
        return [
            [[(r.seed, r.prompt_ids.tolist()) for r in share] for share in engine.submits]
            for group in engines.values()
            for engine in group
        ]

    scripts = (("v", verifier), ("s", rest))
    assert batches(0.001) == batches(0.008)


PLANNERS = Team.from_config(
    TeamConfig(
        WorkflowConfig(name="orch_workers"),
        {
            "orchestrator": AgentConfig(policy="v", prompt="plan {{ question }}", parser="tags", tag="strategy"),
            "worker": AgentConfig(policy="s", prompt="{{ strategy }} {{ question }}", parser="text"),
            "synthesizer": AgentConfig(policy="v", prompt="{{ solutions | join }}", tag="answer"),
        },
    )
)


def plan(request):
    """One to three strategies, whichever the seed says; then the answer."""
    if chr(request.prompt_ids[0]) == "p":
        return reply("".join(f"<strategy>{number}</strategy>" for number in range(1 + request.seed % 3)))(request)
    return reply("<answer>x</answer>")(request)


def test_calls_side_by_side_keep_their_order_whatever_the_timing():
    def turns(lockstep, delay_s):
        engines = {"v": [Engine(plan, seed=int(delay_s * 1e4))], "s": [Engine(reply("s"), seed=1, delay_s=delay_s)]}
        trajectories, built = collect(engines, samples=4, lockstep=lockstep, team=PLANNERS)
        assert all(trajectory.reward == 1.0 for trajectory in trajectories)
        return [
            [(turn.index, turn.agent, "".join(map(chr, turn.prompt_ids))) for turn in trajectory.turns]
            for trajectory in trajectories
        ], built

    free, built = turns(False, 0.008)
    assert {len(of) for of in free} == {3, 4, 5} and all([index for index, *_ in of] == list(range(len(of))) for of in free)
    seeds = [request.seed for group in built.values() for share in group[0].submits for request in share]
    assert len(set(seeds)) == len(seeds) == sum(map(len, free))
    assert turns(True, 0.001)[0] == turns(True, 0.008)[0] == free


def test_lockstep_waits_for_every_branch():
    """A round has the calls of all trajectories and of all their branches: plans, then all workers, then all answers."""

    def batches(delay_s):
        engines = {"v": [Engine(plan, delay_s=delay_s)], "s": [Engine(reply("s"), seed=int(delay_s * 1e4), delay_s=delay_s)]}
        trajectories, _ = collect(engines, samples=4, lockstep=True, team=PLANNERS)
        workers = sum(turn.agent == "worker" for trajectory in trajectories for turn in trajectory.turns)
        assert [len(share) for share in engines["v"][0].submits] == [16, 16] and [
            len(share) for share in engines["s"][0].submits
        ] == [workers]
        return [[request.seed for request in share] for group in engines.values() for share in group[0].submits]

    assert batches(0.001) == batches(0.008)


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_branch_that_fails_costs_its_trajectory_when_the_others_have_ended(lockstep):
    def worker(request):
        return Sample(request.key, [], [], "error", [], "nan") if chr(request.prompt_ids[0]) == "1" else reply("s")(request)

    trajectories, _ = collect({"v": [plan], "s": [worker]}, samples=4, lockstep=lockstep, team=PLANNERS)
    for trajectory in trajectories:
        planned = trajectory.turns[0].text.count("<strategy>")
        assert (trajectory.failure == "engine") == (planned > 1)
        assert len(trajectory.turns) == (planned if planned > 1 else 3)


def test_replicas_share_the_load():
    verifier, rest = script()
    _, engines = collect({"v": [verifier, verifier], "s": [rest]}, samples=8)
    assert all(engine.submits for engine in engines["v"])


def test_a_retrieval_failure_costs_its_trajectory_only():
    _verifier, rest = script(query="fail")
    trajectories, _ = collect({"v": [lambda r: reply("<verify>no</verify>")(r)], "s": [rest]})
    assert {t.failure for t in trajectories} == {"retrieval"}
    assert len(collate(trajectories, ("verifier", "search", "answer"), ("v", "s"), {"verifier"})) == 0


def rewarded(monkeypatch, value, **hooks):
    """Trajectories of a world that returns `value`."""

    async def reward(self, question, outcome):
        return value

    for name, function in {"reward": reward, **hooks}.items():
        monkeypatch.setattr(World, name, function)
    verifier, rest = script()
    return collect({"v": [verifier], "s": [rest]})[0]


@pytest.mark.parametrize("value", [-0.35, 0, 7.5, True, -3e38, 1e-300, torch.tensor(0.25), "1.5"])
def test_any_finite_reward_is_one_and_success_is_a_positive_one(monkeypatch, value):
    for trajectory in rewarded(monkeypatch, value):
        assert trajectory.failure is None and trajectory.reward == float(value) and type(trajectory.reward) is float
        assert trajectory.success is (float(value) > 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, None, "right", [1.0], torch.ones(2), 10**400])
def test_a_reward_that_is_no_finite_number_masks_its_trajectory_and_names_environment_and_question(monkeypatch, value):
    for trajectory in rewarded(monkeypatch, value):
        assert trajectory.failure == "reward" and trajectory.reward == 0.0 and not trajectory.success
        assert (
            "environment 'world'" in trajectory.failure_detail
            and f"question '{trajectory.question.id}'" in trajectory.failure_detail
        )


def test_a_workflow_s_own_reward_is_held_to_the_same(monkeypatch):
    async def run(self, context, question):
        return Outcome("x", reward=math.nan)

    monkeypatch.setattr(WORKFLOWS["search"], "run", run)
    for trajectory in rewarded(monkeypatch, 1.0):
        assert trajectory.failure == "reward" and "workflow 'search'" in trajectory.failure_detail


def test_an_environment_says_itself_what_a_success_is(monkeypatch):
    done = rewarded(monkeypatch, 0.4, success=lambda self, question, outcome, reward: reward > 0.5 or question.id == "2")
    assert {trajectory.question.id: trajectory.success for trajectory in done} == {"0": False, "1": False, "2": True, "3": False}


@pytest.mark.parametrize(
    "sample",
    [lambda r: Sample(r.key, [], [], "error", [], error="NaN"), lambda r: Sample(r.key, [65], [float("nan")], "stop", [(0, 1)])],
)
def test_an_engine_s_nan_costs_its_trajectory_only(sample):
    calls = []

    def verifier(request):
        calls.append(request)
        return sample(request) if len(calls) == 1 else reply("<verify>yes</verify>")(request)

    trajectories, _ = collect({"v": [verifier], "s": [script()[1]]})
    assert sorted(t.failure or "" for t in trajectories) == [""] * 7 + ["engine"]
    assert all(t.reward == 1.0 for t in trajectories if t.failure is None)


def test_a_silent_engine_ends_the_run_and_is_named():
    class Silent(Engine):
        async def submit(self, requests):
            pass

    with pytest.raises(EngineTimeout, match="policy 'v'"):
        collect({"v": [Silent(None)], "s": [script()[1]]}, timeout_s=0.2)


def test_a_dead_engine_ends_the_run_with_its_own_error():
    class Dead(Engine):
        async def poll(self, timeout_s):
            raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        collect({"v": [Dead(reply("x"))], "s": [script()[1]]})


def test_a_long_prompt_loses_its_oldest_history_and_keeps_the_question():
    seen = []

    def verifier(request):
        seen.append("".join(map(chr, request.prompt_ids)))
        return reply("<verify>no</verify>")(request)

    collect({"v": [verifier], "s": [script(query="qqqq")[1]]}, samples=1, config=RolloutConfig(max_prompt_tokens=16))
    assert all(len(prompt) <= 16 and prompt.startswith("question ") for prompt in seen)
    assert any(prompt.endswith("qqqq") for prompt in seen)


def test_a_prompt_that_cannot_fit_masks_the_trajectory():
    verifier, rest = script()
    trajectories, _ = collect({"v": [verifier], "s": [rest]}, config=RolloutConfig(max_prompt_tokens=5))
    assert {t.failure for t in trajectories} == {"prompt_too_long"}


def test_a_role_earns_the_mean_of_what_its_calls_earned():
    verifier, rest = script()
    trajectories, _ = collect({"v": [verifier], "s": [rest]}, use_turn_rewards=True)
    for trajectory in trajectories:  # the verifier is right to say no, and wrong to say yes to a passage without the answer
        assert [turn.reward for turn in trajectory.turns] == [1, 0, 0, 1]
        assert trajectory.role_rewards == {"verifier": 0.5, "search": 0.0, "answer": 1.0}


def test_collated_columns_hold_every_turn_once():
    verifier, rest = script()
    trajectories, _ = collect({"v": [verifier], "s": [rest]})
    first = trajectories[0].turns[0]
    first.weight_versions = [(3, 1), (4, len(first.token_ids) - 1)]
    batch = collate(trajectories, ("verifier", "search", "answer"), ("v", "s"), {"verifier", "answer"})
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    assert len(batch) == len(turns)
    for row, turn in enumerate(turns):
        start, end = batch.offsets[row : row + 2].tolist()
        assert batch.tokens[start:end].tolist() == [*turn.prompt_ids, *turn.token_ids]
        assert batch.agents[batch.agent[row]] == turn.agent and batch.policies[batch.policy[row]] == turn.policy
        assert bool(batch.trainable[row]) == (turn.agent != "search")
        sampled = slice(*batch.response_offsets[row : row + 2].tolist())
        versions = [version for version, tokens in turn.weight_versions for _ in range(tokens)]
        assert batch.weight_versions[sampled].tolist() == versions and len(versions) == len(turn.token_ids)
    last, trajectory = len(batch) - 1, trajectories[-1]
    called = f"question {trajectory.question.id}, sample {trajectory.sample}, call {len(trajectory.turns) - 1} (agent answer)"
    assert batch.row_name(last) == batch.select(torch.tensor([0, last])).row_name(1) == called
    picked = batch.select(batch.agent == 0)
    assert picked.offsets[-1] == len(picked.tokens) and picked.response_offsets[-1] == len(picked.engine_logprobs)


def test_an_environment_sees_what_an_outcome_carries_after_the_bare_answer_was_graded():
    """A grade of the answer alone is not the return of an outcome with `info`; bare answers are graded once."""
    asked = []

    class Counting:
        config = SimpleNamespace(name="counting")

        async def reward(self, question, outcome):
            asked.append(outcome)
            return 1.0 + outcome.info.get("bonus", 0.0)

    context = _TrajectoryContext(
        SimpleNamespace(environment=Counting()), SimpleNamespace(question=SimpleNamespace(id="q")), None, True
    )

    async def grades():
        return [await context.grade("5"), await context.grade("5"), await context.reward(Outcome("5", {"bonus": 0.5}))]

    assert asyncio.run(grades()) == [1.0, 1.0, 1.5] and len(asked) == 2
