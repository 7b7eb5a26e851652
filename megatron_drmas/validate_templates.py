"""Whether the policies' chat templates can render what a team says, in ids that the models know.

The team's workflow is rehearsed: it runs with outputs made up in place of the models', so that every agent's prompt is
rendered with the variables that the workflow really gives it.
"""

import asyncio
import logging
import traceback
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any, get_origin

import numpy as np

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.schema import PolicyConfig, RunConfig
from megatron_drmas.data.questions import Question
from megatron_drmas.environments.base import ENVIRONMENTS
from megatron_drmas.rollout.tokenizer import EXPRESSION_ERRORS, ChatError, ChatTokenizer
from megatron_drmas.team.team import Agent, Team
from megatron_drmas.team.tool import Tool
from megatron_drmas.team.trajectory import Outcome, TrajectoryFailure, Turn

logger = logging.getLogger(__name__)
MAX_CALLS = 64  # of a rehearsal
MADE_UP = {list: ["1"], dict: {}, bool: False, int: 1, float: 1.0, type(None): None}  # results of tools; others return "1"


def check_templates(config: RunConfig) -> None:
    """Render every prompt of a team as its policy would see it.

    Raises:
        ConfigError: a policy's tokenizer, chat template or `template_options`, or an agent's prompt or system message,
            cannot work.
    """
    team = Team.from_config(config.team)
    chats = {name: load_chat(f"policies.{name}", policy) for name, policy in config.policies.items()}
    for agent, prompts in rehearse(team, ENVIRONMENTS[config.environment.name].tools()).items():
        role = team.agents[agent]
        lengths = []
        for messages in prompts:
            try:
                lengths.append(chats[role.config.policy].check_prompt(messages))
            except ChatError as error:
                raise _of_agent(role, error, config.policies[role.config.policy]) from error
        if min(lengths) > config.rollout.max_prompt_tokens:
            raise ConfigError(
                "rollout.max_prompt_tokens",
                config.rollout.max_prompt_tokens,
                f"the prompt of agent {agent!r} has {min(lengths)} tokens before there is a question in it",
                "raise it",
            )
        for key in ("system", "prompt"):
            written = {"role": "user", "content": getattr(role.config, key) or ""}
            spelled = " ".join(sorted(set(chats[role.config.policy].spelled(written))))
            if spelled:
                logger.warning(
                    "team.agents.%s.%s spells control tokens of its policy (%s): they are plain text to the model",
                    agent,
                    key,
                    spelled,
                )


def load_chat(prefix: str, policy: PolicyConfig) -> ChatTokenizer:
    """A policy's tokenizer; what deserves a look is logged.

    Args:
        prefix: the policy's key in the configuration, for messages.
        policy: names the folder and the options.

    Raises:
        ConfigError: the tokenizer, the chat template or an option cannot work.
    """
    try:
        chat = ChatTokenizer(policy.model, policy.template_options)
    except ChatError as error:
        if error.option is None:
            raise ConfigError(f"{prefix}.model", policy.model, error.problem, error.remedy) from error
        key, value = f"{prefix}.template_options.{error.option}", policy.template_options[error.option]
        raise ConfigError(key, value, error.problem, error.remedy) from error
    for notice in chat.notices:
        logger.warning("%s: %s", prefix, notice)
    return chat


def rehearse(team: Team, tools: dict[str, Tool]) -> dict[str, list[list[dict[str, str]]]]:
    """The messages of every call that a workflow makes: with agents who take their first choice, with agents who take their
    last, with agents who take their last at first, and with agents whose outputs cannot be parsed.

    Args:
        tools: of the environment, by name.

    Raises:
        ConfigError: a prompt cannot be rendered with its variables, or the workflow raises.
    """
    prompts: dict[str, list[list[dict[str, str]]]] = defaultdict(list)
    for choices in ([0], [-1], [-1, 0], []):
        context = _Rehearsal(team, tools, choices, prompts)
        try:
            asyncio.run(team.workflow.run(context, Question("rehearsal", "?", ("?",))))
        except (_Enough, TrajectoryFailure):
            pass
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            at = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"raised {type(error).__name__}: {error} ({Path(at.filename).name} line {at.lineno}) with made-up outputs"
            raise ConfigError("team.workflow.name", team.workflow.config.name, problem, "correct the workflow") from error
    return prompts


class _Enough(Exception):
    """Ends a rehearsal that would run forever."""


class _Rehearsal:
    """The `Context` of a workflow whose agents' outputs are made up: by turns each takes one of `choices`."""

    use_turn_rewards = True

    def __init__(self, team: Team, tools: dict[str, Tool], choices: list[int], prompts: dict[str, list[list[dict[str, str]]]]):
        self._team, self._tools, self._choices, self._prompts = team, tools, choices, prompts
        self._calls: Counter = Counter()

    async def call(self, role: str, **variables: Any) -> Turn:
        """A turn of made-up output; ConfigError where the prompt cannot be rendered."""
        if self._calls.total() == MAX_CALLS:
            raise _Enough
        agent = self._team.of_role(role)
        try:
            messages = agent.messages(**variables)
        except EXPRESSION_ERRORS as error:
            raise ConfigError(f"team.agents.{agent.name}.prompt", None, f"cannot be rendered: {error}", "correct it") from error
        self._prompts[agent.name].append(messages)
        text, index = self._output(agent), self._calls.total()
        self._calls[agent.name] += 1
        return Turn(
            agent=agent.name,
            policy=agent.config.policy,
            index=index,
            messages=messages,
            prompt_ids=np.empty(0),
            token_ids=np.empty(0),
            logprobs=np.empty(0),
            limit=1,
            finish_reason="stop",
            weight_versions=[(0, 1)],
            text=text,
            content=agent.parse(text),
        )

    async def together(self, calls: Iterable[Awaitable[Turn]]) -> list[Turn]:
        return [await call for call in calls]

    async def tool(self, name: str, **arguments: Any) -> Any:
        """Something of the type that the tool says it returns."""
        kind = self._tools[name].hints.get("return")
        return MADE_UP.get(get_origin(kind) or kind or str, "1")

    async def grade(self, answer: str | None) -> float:
        return 0.0

    def chance(self, name: str) -> float:
        return 0.0

    async def reward(self, outcome: Outcome) -> float:
        return 0.0

    def _output(self, agent: Agent) -> str:
        if not self._choices:
            return ""
        choice = self._choices[self._calls[agent.name] % len(self._choices)]
        content = agent.config.choices[choice] if agent.config.choices else "1"
        return f"<{agent.config.tag}>{content}</{agent.config.tag}>" if agent.config.tag else f"\\boxed{{{content}}}"


def _of_agent(agent: Agent, error: ChatError, policy: PolicyConfig) -> ConfigError:
    key = "system" if agent.config.system else "prompt"
    problem = f"policy {agent.config.policy!r} ({policy.model}) cannot take it: {error.problem}"
    return ConfigError(f"team.agents.{agent.name}.{key}", agent.config.system, problem, error.remedy)
