"""New questions for those whose trajectories all return the same (DAPO's dynamic sampling, arXiv 2503.14476)."""

from collections.abc import Awaitable, Callable

from megatron_drmas.data.questions import Question
from megatron_drmas.rollout.collector import Sampling
from megatron_drmas.team.trajectory import NO_SIGNAL, Trajectory


async def collect_with_signal(
    collect: Callable[[list[Question], Sampling], Awaitable[list[Trajectory]]],
    draw: Callable[[int], list[Question]],
    questions: int,
    draws: int,
    sampling: Sampling,
) -> list[Trajectory]:
    """Trajectories of `questions` questions, those without signal replaced by new questions up to `draws` - 1 times.

    A question has signal when its trajectories, failures aside, do not all return the same.  The last draw's questions
    stay as they are, so a step has `questions` unmasked questions however hard or easy they are.

    Args:
        collect: runs the team on questions.
        draw: the next so many questions of the data.

    Returns:
        All trajectories, groups numbered through; those of a replaced question have failure `NO_SIGNAL`.
    """
    trajectories: list[Trajectory] = []
    wanted = questions
    for number in range(draws):
        groups = max((trajectory.group for trajectory in trajectories), default=-1) + 1
        drawn = await collect(draw(wanted), sampling if number == 0 else sampling.at(f"draw{number}"))
        returns: dict[int, set[float]] = {}
        for trajectory in drawn:
            trajectory.group += groups
            if trajectory.failure is None:
                returns.setdefault(trajectory.group, set()).add(trajectory.reward)
        trajectories += drawn
        with_signal = {group for group, values in returns.items() if len(values) > 1}
        wanted -= len(with_signal)
        if wanted == 0 or number == draws - 1:
            break
        for trajectory in drawn:
            if trajectory.group not in with_signal and trajectory.failure is None:
                trajectory.failure, trajectory.failure_detail = NO_SIGNAL, "all returns of the question are equal"
    return trajectories
