"""A team: its agents with their prompts and parsers, its workflow, and the agent→policy map."""

from dataclasses import dataclass
from typing import Any

from megatron_drmas.config.schema import AgentConfig, TeamConfig
from megatron_drmas.team.parsing import PARSERS, after_reasoning
from megatron_drmas.team.prompts import render_prompt
from megatron_drmas.team.workflow import WORKFLOWS, Workflow


@dataclass(frozen=True)
class Agent:
    """A role: a prompt, a parser, and the policy that serves it."""

    name: str
    config: AgentConfig

    def messages(self, **variables: Any) -> list[dict[str, str]]:
        """The chat messages of one call."""
        messages = [{"role": "user", "content": render_prompt(self.config.prompt, **variables)}]
        if self.config.system:
            messages.insert(0, {"role": "system", "content": self.config.system})
        return messages

    def parse(self, text: str, prompt_end: str = "") -> str | None:
        """The content of an output, or None if it is malformed or its reasoning is not finished.

        Args:
            text: the output.
            prompt_end: how the prompt ends; see `parsing.after_reasoning`.
        """
        answer = after_reasoning(text, prompt_end)
        return None if answer is None else PARSERS[self.config.parser](answer, self.config)


@dataclass(frozen=True)
class Team:
    """The agents in the order of the configuration, which numbers them in `TurnBatch`."""

    agents: dict[str, Agent]
    workflow: Workflow

    def of_role(self, role: str) -> Agent:
        """The agent that a workflow calls by a role."""
        return next(agent for agent in self.agents.values() if (agent.config.role or agent.name) == role)

    @classmethod
    def from_config(cls, config: TeamConfig) -> "Team":
        """Build a validated configuration's team."""
        agents = {name: Agent(name, agent) for name, agent in config.agents.items()}
        return cls(agents, WORKFLOWS[config.workflow.name](config.workflow))
