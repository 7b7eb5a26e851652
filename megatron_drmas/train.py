"""Dr. MAS: the whole algorithm in one loop.

    python -m megatron_drmas.train [--config-name NAME] [key=value …]

Each step draws questions, lets the team run its workflow several times on each, turns the returns into advantages that
are normalized with each agent's own statistics (arXiv 2602.08847), gives every policy the rows its agents produced, and
brings the engines to the new weights.
"""

import asyncio
import sys
from functools import partial
from pathlib import Path

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.run_lock import RunLockLost


async def train(config: RunConfig) -> None:
    """Run a validated configuration to its end, or on from its last checkpoint.

    Raises:
        As `training_run.open_run`.
    """
    from megatron_drmas.algorithm.advantages import compute_advantages
    from megatron_drmas.algorithm.teamtr import certify
    from megatron_drmas.rollout.collate import collate
    from megatron_drmas.rollout.collector import Sampling
    from megatron_drmas.rollout.dynamic_sampling import collect_with_signal
    from megatron_drmas.rollout.tickets import Draw
    from megatron_drmas.step_record import Stage
    from megatron_drmas.team.trajectory import Trajectory
    from megatron_drmas.training_run import TrainingRun, open_run

    algorithm, agents, policies = config.algorithm, tuple(config.team.agents), tuple(config.policies)
    sampling = Sampling(config.rollout.temperature, config.rollout.top_p, "training")
    learning = learning_agents(config)
    updates = [(learning, sampling)]  # of a step: who learns, from which random numbers
    if algorithm.sequential:
        updates = [({name}, sampling.at(name)) for name in agents if name in learning]

    async def collect(run: TrainingRun, update: int, draw: Draw) -> list[Trajectory]:
        """The trajectories of one update's ticket."""
        step, stage = divmod(update, len(updates))
        questions, draws, (_, stream) = config.questions_per_step, algorithm.dynamic_sampling_draws, updates[stage]
        return await collect_with_signal(run.collect, partial(run.questions, draw), questions, draws, stream.at(step + 1))

    async with open_run(config, len(updates), collect) as run:
        for step in run.steps:
            async with run.surviving():
                stages = []
                for learners, _ in updates:
                    with run.log.phase("generate"):
                        trajectories = await run.tickets.take()
                    run.refuse_unhealthy(step, trajectories)
                    with run.log.phase("advantages"):
                        batch = collate(trajectories, agents, policies, learners)
                        batch.advantages = compute_advantages(batch, algorithm)
                    ages = await run.before_update(batch)
                    with run.log.phase("update"):
                        run.saver.updating()
                        metrics = certify(await run.cluster.update(batch, step), batch)
                    with run.log.phase("weight_sync"):
                        await run.sync_weights(step)
                    stages.append(Stage(trajectories, batch, metrics, ages))
                await run.finish_step(step, stages)


def learning_agents(config: RunConfig) -> set[str]:
    """The agents whose policies are trained on what they say.

    Raises:
        ConfigError: there is none.
    """
    learning = {name for name, agent in config.team.agents.items() if agent.trainable and config.policies[agent.policy].trainable}
    if not learning:
        problem = "no agent learns: each, or its policy, is not trainable"
        raise ConfigError("team.agents", list(config.team.agents), problem, "let one learn, or use megatron_drmas.evaluate")
    return learning


def check(config: RunConfig) -> None:
    """What a run checks before it starts, beyond what every command does.

    Raises:
        ConfigError: no agent learns, or the run folder's checkpoint belongs to a run that was configured differently.
    """
    from megatron_drmas.checkpointing import Checkpoints
    from megatron_drmas.config.load import to_dict

    learning_agents(config)
    if config.resume == "auto":
        Checkpoints(Path(config.output_dir) / config.name / "checkpoints", config.checkpoint.keep).latest(to_dict(config))


def main() -> int:
    from megatron_drmas.command import run_command
    from megatron_drmas.validate import validate

    def command(config: RunConfig) -> None:
        from megatron_drmas.checkpointing import CheckpointError
        from megatron_drmas.cluster.cluster import FAILURES
        from megatron_drmas.observability.health import UnhealthyRun
        from megatron_drmas.observability.history import HistoryError

        try:
            asyncio.run(train(config))
        except (UnhealthyRun, RunLockLost, HistoryError, CheckpointError, *FAILURES) as failure:
            sys.exit(f"train: {failure}")

    try:
        return run_command("python -m megatron_drmas.train", command, validate, check)
    except KeyboardInterrupt:
        print("train: stopped by SIGINT before it had begun", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
