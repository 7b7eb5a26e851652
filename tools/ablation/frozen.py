"""All variants on identical rollouts of frozen policies: what a normalization does to the gradient, and nothing else."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from megatron_drmas.algorithm.advantages import compute_advantages
from megatron_drmas.algorithm.agent_statistics import agent_statistics
from megatron_drmas.batch import TurnBatch
from megatron_drmas.cluster.cluster import Cluster
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.data.questions import Question, load_questions
from megatron_drmas.rollout.collate import collate
from megatron_drmas.rollout.collector import Sampling
from megatron_drmas.team.team import Team
from tools.ablation.variants import VARIANTS, Variant


def mean_squared_advantages(batch: TurnBatch) -> dict[str, float]:
    """E[A^2] over each agent's calls, by agent; only of agents that were called."""
    rows = batch.filled("advantages")[batch.response_offsets[:-1]]
    return {
        name: rows[batch.agent == index].square().mean().item()
        for index, name in enumerate(batch.agents)
        if (batch.agent == index).any()
    }


def lemma_factors(batch: TurnBatch) -> dict[str, dict[str, float]]:
    """Each agent's calls, calls that are alone on their question, and the factor of a group baseline."""
    return {name: values for name, values in zip(batch.agents, agent_statistics(batch)) if values["calls"]}


class FrozenStudy:
    """Measures variants without training: the learning rate is 0, so every update leaves the weights as they are.

    Args:
        cluster: entered, with learning rate 0.
    """

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.config: RunConfig = cluster.config
        self.questions = load_questions(self.config.data.train, "data.train")
        self.agents, self.policies = tuple(self.config.team.agents), tuple(self.config.policies)

    async def batch(self, number: int, max_turns: int) -> TurnBatch:
        """The rows of rollout `number` of the team with at most `max_turns` turns."""
        workflow = replace(self.config.team.workflow, max_turns=max_turns)
        self.cluster.collector.team = Team.from_config(replace(self.config.team, workflow=workflow))
        sampling = Sampling(self.config.rollout.temperature, self.config.rollout.top_p, f"frozen/{number}")
        trajectories = await self.cluster.collector.collect(self._draw(number), self.config.group_size, sampling)
        return collate(trajectories, self.agents, self.policies, set(self.agents))

    async def rarest_turns(self, candidates: list[int], batches: int) -> tuple[int, dict[int, dict]]:
        """The limit of turns under which some agent's lemma factor is largest, and the factors of every candidate."""
        factors: dict[int, dict] = {}
        for turns in candidates:
            of_batches = [lemma_factors(await self.batch(number, turns)) for number in range(batches)]
            factors[turns] = _mean_by_agent(of_batches)
        largest = {
            turns: max((values.get("baseline_inflation", 0.0) for values in agents.values()), default=0.0)
            for turns, agents in factors.items()
        }
        return max(largest, key=lambda turns: (largest[turns], turns)), factors

    async def compare(self, max_turns: int, batches: int, advance: Callable[[], None]) -> dict[str, dict]:
        """Gradient norms by policy and E[A^2] by agent of every variant, on the same batches.

        Args:
            advance: called after each measurement, `batches` x variants times.
        """
        norms: dict[str, defaultdict] = {name: defaultdict(list) for name in VARIANTS}
        squares: dict[str, defaultdict] = {name: defaultdict(list) for name in VARIANTS}
        for number in range(batches):
            batch = await self.batch(number, max_turns)
            for name, variant in VARIANTS.items():
                measured = await self._measure(batch, variant, number)
                for policy, metrics in measured.items():
                    norms[name][policy].append(metrics["grad_norm"])
                for agent, square in mean_squared_advantages(batch).items():
                    squares[name][agent].append(square)
                advance()
        return {
            name: {
                "grad_norm": {policy: {"mean": fmean(values), "max": max(values)} for policy, values in norms[name].items()},
                "squared_advantage": {agent: fmean(values) for agent, values in squares[name].items()},
            }
            for name in VARIANTS
        }

    async def _measure(self, batch: TurnBatch, variant: Variant, step: int) -> dict[str, dict]:
        algorithm = replace(self.config.algorithm, advantage=variant.advantage)
        batch.advantages = compute_advantages(batch, algorithm)
        return await self.cluster.update(batch, step)

    def _draw(self, number: int) -> list[Question]:
        count = self.config.questions_per_step
        return [self.questions[(number * count + i) % len(self.questions)] for i in range(count)]


def _mean_by_agent(batches: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for batch in batches:
        for agent, statistics in batch.items():
            for key, value in statistics.items():
                values[agent][key].append(value)
    return {agent: {key: fmean(numbers) for key, numbers in of_agent.items()} for agent, of_agent in values.items()}
