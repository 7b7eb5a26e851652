"""A mathematics question is graded on what the answering agent's parser accepted."""

import asyncio

import pytest

from megatron_drmas.config.schema import AgentConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.environments.grading import GraderConfig
from megatron_drmas.environments.math import MathConfig, MathEnvironment
from megatron_drmas.team.team import Agent
from megatron_drmas.team.trajectory import Outcome

QUESTION = Question("0", "how many?", ("12", "\\frac{1}{2}"))


@pytest.fixture(scope="module")
def reward():
    loop = asyncio.new_event_loop()
    environment = MathEnvironment(MathConfig(name="math", grader=GraderConfig(workers=1, timeout_s=60.0, memory_mib=1024)))
    loop.run_until_complete(environment.__aenter__())
    yield lambda answer: loop.run_until_complete(environment.reward(QUESTION, Outcome(answer)))
    loop.run_until_complete(environment.__aexit__(None, None, None))
    loop.close()


@pytest.mark.parametrize(
    "parser, output, earned",
    [
        ("boxed", "so \\boxed {12}", 1.0),
        ("boxed", "\\boxed{0.5} it is", 1.0),
        ("boxed", "12", 0.0),
        ("boxed", "\\boxed{13}", 0.0),
        ("boxed", "\\boxed{12} no, \\boxed{", 0.0),
        ("tag", "so <answer>12</answer>", 1.0),
        ("tag", "<answer>\\boxed{12}</answer>", 1.0),
        ("tag", "<answer>$\\frac12$</answer>", 1.0),
        ("tag", "<answer>13</answer>", 0.0),
        ("tag", "\\boxed{12} <answer>13</answer>", 0.0),
        ("tag", "<answer>12", 0.0),
        ("tag", "\\boxed{12}", 0.0),
        ("text", "12", 1.0),
        ("text", " 12.\n", 1.0),
        ("text", "It is \\boxed{12}", 1.0),
        ("text", "13", 0.0),
        ("text", "It is \\boxed{12", 0.0),
        ("boxed", "<think> try \\boxed{12} but", 0.0),
        ("boxed", "<think>13</think> \\boxed{12}", 1.0),
        ("text", "<think>12", 0.0),
        ("text", "<think>13</think>12", 1.0),
    ],
)
def test_every_answering_parser_s_content_is_graded(reward, parser, output, earned):
    content = Agent("solver", AgentConfig(policy="p", prompt="", parser=parser, tag="answer")).parse(output)
    assert reward(content) == earned


def test_no_answer_earns_nothing(reward):
    assert reward(None) == 0.0
