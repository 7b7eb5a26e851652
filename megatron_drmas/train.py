"""Dr. MAS: the whole algorithm in one loop.

    python -m megatron_drmas.train [--config-name NAME] [key=value …]

Each step draws questions, lets the team run its workflow several times on each, turns the returns into advantages that
are normalized with each agent's own statistics (arXiv 2602.08847), gives every policy the rows its agents produced, and
brings the engines to the new weights.
"""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.run_lock import RunLock, RunLockLost

if TYPE_CHECKING:
    from megatron_drmas.checkpointing import Checkpoints
    from megatron_drmas.cluster.signals import StopRequest


async def run(config: RunConfig) -> None:
    """`train`, alone in the run's folder, and until a signal asks it to stop.

    Raises:
        SystemExit: it was asked to stop; says what it can continue from.
        ConfigError: another process has the folder; or as `train`.
        RunLockLost: another process took the folder.
    """
    from megatron_drmas.checkpointing import Checkpoints
    from megatron_drmas.cluster.signals import StopRequest

    run_dir = Path(config.output_dir) / config.name
    with RunLock(run_dir) as lock:
        checkpoints = Checkpoints(run_dir / "checkpoints", config.checkpoint.keep)
        checkpoints.discard_partial()
        stop = StopRequest()
        try:
            await train(config, checkpoints, stop, lock.confirm)
        except asyncio.CancelledError:
            if not stop.aborted:
                raise
            checkpoints.discard_partial()
            saved = checkpoints.resumable()
            rest = f"{continuing(config)} from {saved[-1]}" if saved else "nothing was saved yet"
            sys.exit(f"stopped at once by {stop.requested}; {rest}")


async def train(
    config: RunConfig, checkpoints: "Checkpoints", stop: "StopRequest", confirm: Callable[[Callable[[], None]], None]
) -> None:
    """Run a validated configuration to its end, or on from its last checkpoint.

    Args:
        checkpoints: of the run's folder.
        stop: ends the run after a step, or cancels it.
        confirm: called before anything of a step is written; where that must not be, calls its argument and raises.

    Raises:
        ConfigError: the run folder's checkpoint belongs to a run that was configured differently.
        ProcessFailure: an actor, an engine or the retrieval server failed.
        UnhealthyRun: going on would waste the run's time or ruin what it has learned (`config.HealthConfig`).
    """
    from megatron_drmas.algorithm.advantages import compute_advantages
    from megatron_drmas.algorithm.update_metrics import merge_metrics, stage_metrics
    from megatron_drmas.checkpointing import Saver
    from megatron_drmas.cluster.cluster import Cluster
    from megatron_drmas.config.load import to_dict
    from megatron_drmas.data.question_sets import load_question_sets
    from megatron_drmas.data.sampler import QuestionSampler
    from megatron_drmas.evaluate import evaluate_team
    from megatron_drmas.observability.health import UnhealthyRun, count_causes, refusal
    from megatron_drmas.observability.run_log import RunLog, closing_summary, finished_summary
    from megatron_drmas.rollout.collate import collate
    from megatron_drmas.rollout.collector import Sampling
    from megatron_drmas.rollout.dynamic_sampling import collect_with_signal
    from megatron_drmas.step_record import merge_stages, step_record, trajectory_records

    sets = load_question_sets(config.data)
    questions = sets.train
    sampler = QuestionSampler(len(questions), config.seed, config.data.shuffle)
    sampling = Sampling(config.rollout.temperature, config.rollout.top_p, "training")
    agents, policies = tuple(config.team.agents), tuple(config.policies)
    learning = learning_agents(config)
    stages = [(learning, sampling)]
    if config.algorithm.sequential:
        stages = [({name}, sampling.at(name)) for name in agents if name in learning]

    run_dir = Path(config.output_dir) / config.name
    resumed = checkpoints.latest(to_dict(config)) if config.resume == "auto" else None
    folder, state, changes = resumed or (None, {"step": 0}, {})
    done = state["step"]

    finished = finished_summary(run_dir, config.steps) if done >= config.steps else None
    if finished:
        print("nothing left to do:", *closing_summary(run_dir, finished), sep="\n")
        return

    resume_step = done if resumed else None
    with RunLog(run_dir, to_dict(config), config.name, config.seed, config.steps, resume_step, health=config.health) as log:
        if folder and folder != checkpoints.complete()[-1]:
            log.note(f"the run had stopped itself for its health: continues from {folder.name}, the newest healthy checkpoint")
        async with (
            Cluster(config, log.phase, log.note, log.log_restart) as cluster,
            Saver(checkpoints, cluster.save, log, sampler, to_dict(config), done) as saver,
        ):
            if folder:
                with log.phase("load checkpoint"):
                    sampler.load_state_dict(state["sampler"])
                    await cluster.load(folder)
            with log.phase("first weight sync"):
                await cluster.sync_weights(done * len(stages), verify=True)
            checkpoints.clear(after=done)  # only now: the run has come as far as starting
            log.started()
            tokenizers = cluster.collector.tokenizers
            log.log_changes(changes)
            saver.updated(done)
            await evaluate_team(cluster, log, sets.evaluation, done)
            stop.polite(log.note)

            for step in range(done + 1, config.steps + 1):
                metrics: dict[str, Any] = {}
                tokens_before, sampled = cluster.generated_tokens, []
                for number, (learners, stream) in enumerate(stages, 1):
                    with log.phase("generate"):
                        trajectories = await collect_with_signal(
                            lambda drawn, stream: cluster.collector.collect(
                                drawn, config.group_size, stream, config.algorithm.reward.use_turn_rewards
                            ),
                            lambda count: [questions[index] for index in sampler.draw(count)],
                            config.questions_per_step,
                            config.algorithm.dynamic_sampling_draws,
                            stream.at(step),
                        )
                    problem = refusal(trajectories, config.health, f"step {step} is not trained on")
                    if problem:
                        confirm(log.abandon)
                        refused = trajectory_records(trajectories, config, tokenizers, refused=True)
                        log.log_refused(step, problem, count_causes(trajectories), refused)
                        raise UnhealthyRun(problem)
                    with log.phase("advantages"):
                        batch = collate(trajectories, agents, policies, learners)
                        batch.advantages = compute_advantages(batch, config.algorithm)
                        sampled.append((trajectories, batch))
                    with log.phase("update"):
                        saver.updating()
                        metrics = merge_metrics(metrics, stage_metrics(await cluster.update(batch, step), batch))
                    with log.phase("weight_sync"):
                        await cluster.sync_weights((step - 1) * len(stages) + number, verify=step == done + 1)

                confirm(log.abandon)
                trajectories, batch = merge_stages(sampled)
                problem = log.log_step(step_record(step, trajectories, batch, metrics, cluster.generated_tokens - tokens_before))
                with log.contained("trajectories"):
                    log.log_trajectories(step, trajectory_records(trajectories, config, tokenizers, batch))
                saver.updated(step)
                last = step == config.steps
                if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
                    await saver.save()
                if problem and not last:
                    raise UnhealthyRun(problem)
                if not stop.requested:
                    await stop.unless_requested(evaluate_team(cluster, log, sets.evaluation, step))
                if stop.requested:
                    await saver.save()
                    sys.exit(f"stopped by {stop.requested} after step {step}; {continuing(config)} from there")
            stop.polite(None)

            if config.checkpoint.export:
                with log.phase("export"):
                    await cluster.export(run_dir / "hf")


def continuing(config: RunConfig) -> str:
    """What continues from the checkpoint that a stopped run leaves: with resume=never the same command would begin again."""
    return "the same command continues" if config.resume == "auto" else "the same command without resume=never continues"


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
        from megatron_drmas.cluster.cluster import FAILURES
        from megatron_drmas.observability.health import UnhealthyRun
        from megatron_drmas.observability.history import HistoryError

        try:
            asyncio.run(run(config))
        except (UnhealthyRun, RunLockLost, HistoryError, *FAILURES) as failure:
            sys.exit(f"train: {failure}")

    try:
        return run_command("python -m megatron_drmas.train", command, validate, check)
    except KeyboardInterrupt:
        print("train: stopped by SIGINT before it had begun", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
