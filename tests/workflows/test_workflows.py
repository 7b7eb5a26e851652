"""The order of the turns, with scripted agents."""

import asyncio
import json

import pytest

import megatron_drmas.workflows  # noqa: F401  registers
from megatron_drmas.config.schema import WorkflowConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.team.trajectory import Turn
from megatron_drmas.team.workflow import WORKFLOWS, Workflow, register_workflow
from tests.scripted import ScriptedTools

QUESTION = Question("0", "who?", ("x",))


class Script(ScriptedTools):
    """A context whose agents say what a script tells them; None is a malformed output."""

    def __init__(self, lines, use_turn_rewards, declared):
        self.use_turn_rewards, self.turns, self.declared = use_turn_rewards, [], declared
        self.lines = {agent: list(contents) for agent, contents in lines.items()}
        self.calls, self.queries, self.histories = [], [], []

    async def call(self, agent, **variables):
        assert set(variables) == set(self.declared[agent]), "templates are checked against what the workflow declares"
        self.calls.append(agent)
        self.histories.append(list(variables.get("history", [])))
        content = self.lines[agent].pop(0)
        self.turns.append(
            Turn(agent, "p", len(self.calls) - 1, [], [0], [0], [0.0], 8, "stop", [(0, 1)], content or "garbage", content)
        )
        return self.turns[-1]

    async def together(self, calls):
        return [await call for call in calls]

    async def retrieve(self, query):
        self.queries.append(query)
        return [f"about {query}"]

    async def grade(self, answer):
        return float(answer in QUESTION.answers)

    def supports(self, passages):
        return any(gold in passage.split() for gold in QUESTION.answers for passage in passages)


def run(name, lines, use_turn_rewards=False, **config):
    script = Script(lines, use_turn_rewards, WORKFLOWS[name].agents)
    outcome = asyncio.run(WORKFLOWS[name](WorkflowConfig(name=name, **config)).run(script, QUESTION))
    return script, outcome


def test_search_goes_on_until_the_verifier_says_yes():
    script, outcome = run("search", {"verifier": ["no", "yes"], "search": ["x"], "answer": ["y"]})
    assert script.calls == ["verifier", "search", "verifier", "answer"]
    assert outcome.answer == "y" and script.queries == ["x"]
    assert script.histories[-1][0].passages == ["about x"]


def test_a_malformed_verdict_counts_as_no():
    script, outcome = run("search", {"verifier": [None, "yes"], "search": ["x"], "answer": ["y"]})
    assert script.calls == ["verifier", "search", "verifier", "answer"] and outcome.answer == "y"


def test_a_malformed_query_finds_nothing():
    script, _ = run("search", {"verifier": ["no", "yes"], "search": [None], "answer": ["y"]})
    assert script.queries == [] and script.histories[-1] == []


def test_a_verifier_that_never_says_yes_gives_no_answer():
    script, outcome = run("search", {"verifier": ["no"] * 4, "search": ["a", "b", "c"], "answer": []}, max_turns=4)
    assert outcome.answer is None and script.calls.count("verifier") == 4 and "answer" not in script.calls


def test_a_malformed_answer_is_no_answer():
    assert run("search", {"verifier": ["yes"], "search": [], "answer": [None]})[1].answer is None


def test_only_the_first_query_is_the_search_agents():
    lines = {"verifier": ["no", "no", "no", "yes"], "search": ["a"], "follow_up": ["b", "c"], "answer": ["y"]}
    script, outcome = run("search_follow_up", lines)
    assert [agent for agent in script.calls if agent != "verifier"] == ["search", "follow_up", "follow_up", "answer"]
    assert outcome.answer == "y"
    script, _ = run("search_follow_up", {**lines, "verifier": ["no", "yes"]})
    assert "follow_up" not in script.calls


@pytest.mark.parametrize("history", [0, 1, 2])
def test_history_shows_the_latest_turns(history):
    script, _ = run("search", {"verifier": ["no", "no", "yes"], "search": ["a", "b"], "answer": ["y"]}, history=history)
    assert [step.query for step in script.histories[-1]] == ["a", "b"][2 - history :]


def test_math_stops_at_the_first_approval():
    script, outcome = run("math", {"solver": ["s1", "s2"], "verifier": ["reject", "approve"]}, max_turns=5)
    assert script.calls == ["solver", "verifier"] * 2 and outcome.answer == "s2" and outcome.info["approved"]


def test_math_takes_the_last_solution_when_loops_run_out_and_does_not_review_it():
    script, outcome = run("math", {"solver": ["s1", "s2"], "verifier": [None]}, max_turns=2)
    assert script.calls == ["solver", "verifier", "solver"]
    assert outcome.answer == "s2" and outcome.info == {"loops": 2, "approved": False} and len(script.histories[-1]) == 1


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_call_is_made_only_if_what_it_says_can_change_the_outcome(name):
    """Of every run over contents that a parser may return: some other content of the last call would have ended it otherwise."""
    words = {"answers": ["x", "y", None], "picks": ["1", "2", None], "plans": ['["a"]', None], "queries": ["q"]}
    of_agent = {"aggregator": "picks", "orchestrator": "plans", "search": "queries", "follow_up": "queries"}
    said = {
        agent: [*WORKFLOWS[name].verdicts.get(agent, words[of_agent.get(agent, "answers")])] for agent in WORKFLOWS[name].agents
    }
    ends = {}  # what was said, call by call -> the answer

    def explore(contents):
        """Every continuation of a run that began with these contents."""
        script = Branch(contents, said, WORKFLOWS[name].agents)
        workflow = WORKFLOWS[name](WorkflowConfig(name=name, max_turns=WORKFLOWS[name].min_turns + 1, width=2))
        try:
            outcome = asyncio.run(workflow.run(script, QUESTION))
        except NextCall as call:
            for content in said[call.agent]:
                explore([*contents, content])
        else:
            ends[tuple(contents)] = (script.calls[-1], outcome.answer)

    explore([])
    for contents, (agent, _) in ends.items():
        others = {answer for other, (_, answer) in ends.items() if other[: len(contents) - 1] == contents[:-1]}
        assert len(others) > 1, f"{contents}: the last call, of {agent}, changes nothing"


class NextCall(Exception):
    def __init__(self, agent):
        self.agent = agent


class Branch(ScriptedTools):
    """A context that plays contents in the order of the calls and stops at the first call beyond them."""

    use_turn_rewards = False

    def __init__(self, contents, said, declared):
        self.contents, self.said, self.declared, self.calls = contents, said, declared, []

    async def call(self, agent, **variables):
        if len(self.calls) == len(self.contents):
            raise NextCall(agent)
        content = self.contents[len(self.calls)]
        self.calls.append(agent)
        return Turn(agent, "p", len(self.calls) - 1, [], [0], [0], [0.0], 8, "stop", [(0, 1)], content or "garbage", content)

    async def together(self, calls):
        calls = list(calls)
        try:
            return [await call for call in calls]
        finally:
            for call in calls:
                call.close()

    async def retrieve(self, query):
        return [f"about {query}"]

    def run_tests(self, code):
        return {"passed": int(code == "y"), "total": 1, "problem": "wrong"}

    def chance(self, name):
        return 0.0

    def supports(self, passages):
        return True


@pytest.mark.parametrize(
    "name, lines, judged",
    [
        ("math", {"solver": ["s1"], "verifier": ["approve"]}, [-1, 1]),
        ("math", {"solver": ["s1", "s2"], "verifier": ["reject", "reject"]}, [-1, -1, -1]),
        ("eval_opt", {"generator": ["s1", "s2"], "evaluator": ["incorrect", "correct"]}, [-1, -1, -1, 1]),
        ("search", {"verifier": ["no", "yes"], "search": ["q"], "answer": ["x"]}, [-1, -1, 1, -1]),
        ("search", {"verifier": ["no", None], "search": ["q"]}, [-1, -1, -1]),
        ("voting", {"voter": ["x", "y"], "aggregator": ["2"]}, [-1, -1, -1]),
    ],
)
def test_the_return_judges_the_verdict_that_led_to_it_and_no_other(name, lines, judged):
    """A pick of two candidates accepts nothing, and a rejected solution is not the one that is returned."""
    script, _ = run(name, lines, max_turns=2, width=2)
    assert [turn.verdict for turn in script.turns] == judged


def test_eval_opt_answers_the_last_critique():
    script, outcome = run("eval_opt", {"generator": ["s1", "s2", "s3"], "evaluator": ["incorrect", None]}, max_turns=2)
    assert script.calls == ["generator", "evaluator"] * 2 + ["generator"]
    assert outcome.answer == "s3" and not outcome.info["accepted"] and [len(h) for h in script.histories] == [0, 0, 1, 1, 2]
    script, outcome = run("eval_opt", {"generator": ["s1"], "evaluator": ["correct"]}, max_turns=3)
    assert script.calls == ["generator", "evaluator"] and outcome.answer == "s1" and outcome.info["accepted"]


@pytest.mark.parametrize(
    "pick, answer", [("2", "x"), ("1", "y"), ("3", None), ("4", None), ("0", None), ("-1", None), (None, None)]
)
def test_voting_takes_the_picked_candidate_and_no_other(pick, answer):
    """The third candidate is malformed; there is no fourth."""
    script, outcome = run("voting", {"voter": ["y", "x", None], "aggregator": [pick]})
    assert script.calls == ["voter"] * 3 + ["aggregator"] and outcome.answer == answer


def test_there_is_nothing_to_pick_among_malformed_candidates():
    script, outcome = run("voting", {"voter": [None] * 3})
    assert script.calls == ["voter"] * 3 and outcome.answer is None


@pytest.mark.parametrize("strategies, workers", [(["a"], 1), (["a", "b", "c"], 3), (["a", "b", "c", "d"], 3)])
def test_a_worker_solves_by_each_strategy(strategies, workers):
    script, outcome = run(
        "orch_workers", {"orchestrator": [json.dumps(strategies)], "worker": ["w"] * workers, "synthesizer": ["x"]}
    )
    assert script.calls == ["orchestrator"] + ["worker"] * workers + ["synthesizer"] and outcome.answer == "x"


def test_a_plan_without_strategies_gives_no_answer():
    script, outcome = run("orch_workers", {"orchestrator": [None]})
    assert script.calls == ["orchestrator"] and outcome.answer is None


def test_single_is_one_call():
    script, outcome = run("single", {"solver": ["s"]})
    assert script.calls == ["solver"] and outcome.answer == "s"


@pytest.mark.parametrize(
    "name, lines, earned",
    [
        ("math", {"solver": ["z", "x"], "verifier": ["reject", "approve"]}, [0, 1, 1, 1]),
        ("math", {"solver": ["x", "z"], "verifier": ["reject", "approve"]}, [1, 0, 0, 0]),
        ("math", {"solver": [None, "z", "x"], "verifier": [None, "reject", "approve"]}, [0, 0, 0, 1, 1, 1]),
        ("search", {"verifier": ["no", "yes"], "search": ["x"], "answer": ["x"]}, [1, 1, 1, 1]),
        ("search", {"verifier": ["no", "yes"], "search": ["z"], "answer": ["x"]}, [1, 0, 0, 1]),
        ("search", {"verifier": ["no", "no", "yes"], "search": ["x", None], "answer": ["z"]}, [1, 1, 0, 0, 1, 0]),
        ("search", {"verifier": ["yes"], "search": [], "answer": [None]}, [0, 0]),
        ("single", {"solver": ["x"]}, [1]),
        ("eval_opt", {"generator": ["z", "x"], "evaluator": ["incorrect", "correct"]}, [0, 1, 1, 1]),
        ("eval_opt", {"generator": ["x", "z"], "evaluator": ["incorrect", "correct"]}, [1, 0, 0, 0]),
        ("voting", {"voter": ["z", "x", None], "aggregator": ["2"]}, [0, 1, 0, 1]),
        ("voting", {"voter": ["z", "x", None], "aggregator": ["1"]}, [0, 1, 0, -1]),
        ("voting", {"voter": ["z", "z", None], "aggregator": ["1"]}, [0, 0, 0, 0]),
        ("orch_workers", {"orchestrator": ['["a", "b"]'], "worker": ["x", "z"], "synthesizer": ["x"]}, [0.5, 1, 0, 1]),
    ],
)
def test_what_a_call_earns_by_itself(name, lines, earned):
    """In the order of the calls; "x" is the answer.  None of it is looked at unless asked for."""
    script, _ = run(name, lines, use_turn_rewards=True, max_turns=sum(map(len, lines.values())))
    assert [turn.reward for turn in script.turns[: len(earned)]] == earned
    script, _ = run(name, lines, max_turns=sum(map(len, lines.values())))
    assert not any(turn.reward for turn in script.turns)


def test_a_solution_that_nobody_reviews_earns_its_grade():
    script, _ = run("math", {"solver": ["z", "x"], "verifier": ["reject"]}, use_turn_rewards=True, max_turns=2)
    assert [turn.reward for turn in script.turns] == [0, 1, 1]


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="search"):
        register_workflow("search")(Workflow)
