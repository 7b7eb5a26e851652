"""The table of metrics: what a run logs, in which unit, how it is reduced, and where it is shown.

A row's name is the tag of its TensorBoard scalar, with {policy}, {agent} and the like for what a run names itself.  The
console, TensorBoard, the report, summary.json, the alarms and the reductions over ranks, micro-batches and updates read
their lists of names here; `docs/metrics.md` is this table.
"""

from typing import Any

from megatron_drmas.observability.metric import Chart, Limit, Metric, Reduction

# Reductions that the trainer makes once a step
CALL_MEAN, CALL_SHARE = "mean over calls", "share of calls"
TRAJECTORY_MEAN, TRAJECTORY_SHARE = "mean over trajectories", "share of trajectories"
QUESTION_MEAN = "mean over a question's answers, then over questions"
BACK = Chart(front=False)
SHARE_OF_CALLS = Chart(bounds=(0.0, 0.1))
TEAMTR, REFERENCE = "with `algorithm.loss.name=teamtr`", "with `algorithm.loss.kl_coef` above 0"
GRAD_NORM_LIMIT = Limit(above=5.0, far_above=20.0, floor=1e-3)


def _update(
    key: str,
    title: str,
    unit: str,
    reduction: str,
    description: str,
    agent: Chart = BACK,
    policy: Chart = BACK,
    summary: str = "",
    **more: Any,
) -> tuple[Metric, Metric]:
    """A metric of an update, of each agent's tokens and of all tokens of a policy."""
    return (
        Metric(f"agent/{{agent}}/{key}", title, unit, reduction, description, agent, **more),
        Metric(f"policy/{{policy}}/{key}", title, unit, reduction, description, policy, summary=summary, **more),
    )


# fmt: off
METRICS: tuple[Metric, ...] = (
    Metric("team/reward", "Reward", "return", TRAJECTORY_MEAN,
        "Return of a trajectory; those that dynamic sampling replaced count, those cut short by a failure do not",
        Chart("mean over trajectories", bounds=(0.0, 0.0)), console=True),
    Metric("team/success", "Success", "share of trajectories", TRAJECTORY_SHARE,
        "The environment calls the trajectory a success (`Environment.success`; by default its return is positive)",
        Chart(bounds=(0.0, 1.0)), console=True),
    Metric(
        "team/trajectories", "Trajectories", "count", Reduction.SUM, "Trajectories sampled, those masked and replaced included"),
    Metric("team/tokens_generated", "Tokens generated", "tokens", Reduction.SUM, "Response tokens that the engines returned"),
    Metric("team/tokens_trained", "Tokens trained", "tokens", Reduction.SUM, "Response tokens of the updates"),
    Metric("workflow/{key}", "Workflow", "its own", TRAJECTORY_MEAN,
        "A number that the workflow put into `Outcome.info`; a truth value counts as 0 or 1",
        Chart("mean over trajectories", bounds=(0.0, 0.0)),
        when="where the workflow reports any"),
    Metric("agent/{agent}/reward", "Reward", "return", CALL_MEAN,
        "Return of the trajectory that the call is part of", Chart("mean over the agent's calls")),
    Metric("agent/{agent}/own_reward", "Reward of its own", "reward", CALL_MEAN,
        "What the call earned by itself; 0 unless `algorithm.reward` asks for it"),
    Metric("agent/{agent}/response_length", "Response length", "tokens", CALL_MEAN, "Sampled tokens of a call", Chart(),
        limit=Limit(above=3.0, below=1 / 3, far_above=5.0, far_below=0.2, floor=4.0)),
    Metric("agent/{agent}/invalid_rate", "Invalid outputs", "share of calls", CALL_SHARE,
        "Outputs that the agent's parser refused", SHARE_OF_CALLS),
    Metric("agent/{agent}/truncated_rate", "Responses cut off", "share of calls", CALL_SHARE,
        "Responses that reached their limit of tokens", SHARE_OF_CALLS),
    Metric("agent/{agent}/masked_rate", "Masked", "share of the trajectories that call it", TRAJECTORY_SHARE,
        "Trajectories cut short by a failure that is not the team's", SHARE_OF_CALLS),
    Metric("agent/{agent}/zero_advantage_rate", "Without an advantage", "share of the rows that learn", CALL_SHARE,
        "Rows whose advantage is 0", SHARE_OF_CALLS),
    Metric("agent/{agent}/calls", "Calls", "count", Reduction.SUM, "Calls of trajectories that ended"),
    Metric("agent/{agent}/calls_per_trajectory", "Calls per trajectory", "calls", TRAJECTORY_MEAN,
        "Calls, over the trajectories that ended", Chart()),
    Metric("agent/{agent}/age", "Age", "updates", "mean over tokens",
        "Updates by which the weights that sampled a token are older than those that train on it; at most algorithm.staleness",
        Chart()),
    Metric("agent/{agent}/age_max", "Age, maximum", "updates", Reduction.TOKEN_MAX, "The oldest of the agent's tokens"),
    Metric("agent/{agent}/context_age_max", "Age of context, maximum", "updates", Reduction.TOKEN_MAX,
        "The oldest token that a trajectory had sampled by the end of one of the agent's calls, whatever policy sampled it"),
    Metric("agent/{agent}/single_calls", "Single calls", "count", Reduction.SUM,
        "Calls that are their agent's only one on their question: Dr. MAS gives them advantage 0"),
    Metric("agent/{agent}/return_mean", "Return, mean", "return", CALL_MEAN, "The agent's mean that Dr. MAS subtracts"),
    Metric("agent/{agent}/return_std", "Return, standard deviation", "return", "over calls, 1/n",
        "The agent's standard deviation that Dr. MAS divides by"),
    Metric("agent/{agent}/advantage_std", "Advantage, standard deviation", "advantage", "over calls, 1/n",
        "Spread of the calls' advantages", Chart()),
    Metric("agent/{agent}/advantage_mean", "Advantage, mean", "advantage", CALL_MEAN, "Mean of the calls' advantages", Chart()),
    Metric("agent/{agent}/baseline_inflation", "Inflation under a group baseline", "factor",
        "mean over calls on questions whose returns differ",
        "By how much a group baseline would multiply the agent's squared advantage (Dr. MAS, lemma 4.2)",
        Chart("of the squared advantage", bins="max"), when="where returns differ", limit=Limit(most=3.0)),
    Metric("agent/{agent}/baseline_inflation_max", "Inflation under a group baseline, largest", "factor",
        "largest of the questions", "The largest factor of any question; at most the group's size - 1",
        when="where returns differ"),
    *_update("loss", "Loss", "loss", Reduction.TOKEN_SUM, "The loss that was differentiated; of an agent: its tokens' part",
        policy=Chart()),
    *_update("entropy", "Entropy", "nats per token", Reduction.TOKEN_MEAN,
        "Entropy of the policy's next-token distribution", Chart(bounds=(0.0, 0.0)), Chart(bounds=(0.0, 0.0)),
        limit=Limit(above=3.0, below=0.1, far_above=5.0, far_below=0.05, floor=0.02)),
    *_update("gradient_mass", "Gradient mass", "sum of |d loss / d log-prob|", Reduction.TOKEN_SUM,
        "How hard the update pulls; of an agent: its part of the update", Chart("the agent's part of the update")),
    *_update("clip_fraction", "Clipped tokens", "share of tokens", Reduction.TOKEN_MEAN,
        "Tokens whose gradient the clip removed, or limited to that of a ratio of e^20", policy=Chart(bounds=(0.0, 0.01))),
    *_update("prob_ratio", "Trainer/engine probability", "ratio", Reduction.TOKEN_MEAN,
        "exp |log-prob of the trainer - of the engine| of a sampled token; 1: they agree",
        Chart("mean token ratio − 1", bounds=(0.0, 1e-5), bins="max", minus=1.0, front=False),
        Chart("mean token ratio − 1", bounds=(0.0, 1e-5), bins="max", minus=1.0), limit=Limit(most=1.05),
        summary="max_prob_ratio"),
    *_update("logprob_diff_mean", "Trainer/engine log-prob difference, mean", "nats", Reduction.TOKEN_MEAN,
        "|log-prob of the trainer - of the engine| of a sampled token"),
    *_update("logprob_diff_max", "Trainer/engine log-prob difference", "nats", Reduction.TOKEN_MAX,
        "The largest of the same differences", Chart("largest, log axis", log=True, bins="max", front=False),
        Chart("largest, log axis", log=True, bins="max"), summary="max_logprob_diff"),
    *_update("chi_square", "Chi-square, trainer to engine", "none", Reduction.TOKEN_MEAN,
        "(probability of the trainer / of the engine)^2 - 1 of a sampled token"),
    *_update("corrected_fraction", "Corrected tokens", "share of tokens", Reduction.TOKEN_MEAN,
        "Tokens whose importance weight `algorithm.loss.mismatch` capped or masked", limit=Limit(most=0.05)),
    *_update("ratio", "Importance ratio", "ratio", Reduction.TOKEN_MEAN,
        "Probability under the policy being trained / before its first update on the batch, at most e^20"),
    *_update("kl_old", "KL to the policy before the updates", "nats per token", Reduction.TOKEN_MEAN,
        "k3 estimate of KL(old || trained)"),
    *_update("kl_reference", "KL to the reference", "nats per token", Reduction.TOKEN_MEAN,
        "KL to the policy that the run began with, as `algorithm.loss.kl_estimator` estimates it", when=REFERENCE),
    *_update("tokens", "Tokens", "tokens", Reduction.SUM, "Response tokens of the updates"),
    Metric("policy/{policy}/grad_norm", "Gradient norm", "L2 norm", Reduction.STEP_MEAN,
        "Norm of the gradient before clipping", Chart("before clipping, log axis", log=True, bins="max")),
    Metric("policy/{policy}/grad_norm_max", "Gradient norm, largest", "L2 norm", Reduction.STEP_MAX,
        "Norm of the gradient before clipping", limit=GRAD_NORM_LIMIT),
    Metric("policy/{policy}/shared_tokens", "Tokens shared", "share of the rows' tokens", Reduction.UPDATE_MEAN,
        "Tokens that are computed once for several rows that begin alike",
        Chart("share of the rows' tokens computed once for several", bounds=(0.0, 0.1))),
    Metric("policy/{policy}/lr", "Learning rate", "per optimizer step", Reduction.LAST, "Learning rate of the schedule",
        Chart(bounds=(0.0, 0.0))),
    Metric("policy/{policy}/optimizer_steps", "Optimizer steps", "count", Reduction.SUM, "Optimizer steps that were made"),
    Metric("policy/{policy}/skipped", "Optimizer steps skipped", "count", Reduction.SUM,
        "Optimizer steps that were not made because the gradient was not finite"),
    Metric("policy/{policy}/certificate", "Improvement certified", "return", Reduction.SUM,
        "TeamTR's lower bound on the improvement by the step's updates", when=TEAMTR),
    Metric("agent/{agent}/grad_norm", "Gradient norm", "L2 norm", Reduction.STEP_MEAN,
        "Norm of the gradient of the agent's update before clipping",
        Chart("before clipping, log axis", log=True, bins="max", front=False), when=TEAMTR),
    Metric("agent/{agent}/grad_norm_max", "Gradient norm, largest", "L2 norm", Reduction.STEP_MAX,
        "Norm of the gradient of the agent's update before clipping", when=TEAMTR, limit=GRAD_NORM_LIMIT),
    Metric("agent/{agent}/message_kl", "KL per message", "nats per message", "estimate after the update",
        "KL of the agent's update; `algorithm.loss.trust_region.delta` ends it", when=TEAMTR),
    Metric("agent/{agent}/message_kl_bound", "KL per message, bound", "nats per message", "estimate after the update",
        "The KL that the certificate counts with", when=TEAMTR),
    Metric("agent/{agent}/beta", "Weight of the KL", "factor", "after the update",
        "TeamTR's adaptive weight of the KL term", when=TEAMTR),
    Metric("agent/{agent}/surrogate_gain", "Surrogate gain", "return", TRAJECTORY_MEAN,
        "Improvement that the clipped surrogate sees in the agent's update", when=TEAMTR),
    Metric("agent/{agent}/certificate", "Improvement certified", "return", "after the update",
        "TeamTR's lower bound on the improvement by the agent's update", when=TEAMTR),
    Metric("health/masked", "Masked", "share of trajectories", TRAJECTORY_SHARE,
        "Trajectories cut short by a failure that is not the team's", event="trajectories were masked"),
    Metric("health/truncated", "Truncated", "share of calls", CALL_SHARE, "Responses that reached their limit of tokens",
        event="responses reached their limit"),
    Metric("health/invalid", "Invalid", "share of calls", CALL_SHARE, "Outputs that could not be parsed",
        event="outputs could not be parsed"),
    Metric("health/zero_advantage", "Zero advantage", "share of the rows that learn", CALL_SHARE,
        "Rows whose advantage is 0", event="rows have advantage 0"),
    Metric("health/found_nothing", "Found nothing", "share of queries", "share of queries",
        "Queries that a tool answered with an empty list", event="queries found nothing"),
    Metric("alarm/{metric}/{who}", "Alarm", "the metric's", "each",
        "The value that raised an alarm, of an agent, a policy or the team", when="where there is one"),
    Metric("masked/{cause}", "Masked trajectories", "count", Reduction.SUM, "Trajectories left out of the update, by cause",
        when="where there are any"),
    Metric("skipped/{policy}", "Optimizer steps skipped", "count", Reduction.SUM,
        "The same count as policy/{policy}/skipped", when="where there are any"),
    Metric("time/step", "Seconds per step", "seconds", Reduction.SUM,
        "Wall-clock time of the step and of the evaluation before it", Chart(" ", bounds=(0.0, 0.0))),
    Metric("time/background/{work}", "Seconds in the background", "seconds", Reduction.SUM,
        "Wall-clock time of work beside the phases that ended in the step: checkpoints being written, evaluations",
        when="where there is any"),
    Metric(
        "time/{phase}", "Seconds of a phase", "seconds", Reduction.SUM, "Wall-clock time of a phase; other: outside every phase"),
    Metric("throughput/tokens_per_second", "Tokens per second", "tokens per second",
        "tokens generated / seconds of generation", "Speed of generation; the tokens of an evaluation beside it do not count",
        Chart("of generation", bounds=(0.0, 0.0))),
    Metric("memory/peak_memory_gib", "Peak memory", "GiB", "largest so far",
        "Memory of the run's process tree, shared pages counted once", tensorboard=False),
    Metric("evaluation/{mode}/reward", "Reward", "return", QUESTION_MEAN, "Return of a trajectory on evaluation questions",
        Chart(bounds=(0.0, 0.0)), console=True),
    Metric("evaluation/{mode}/success", "Success", "share", QUESTION_MEAN, "The environment calls the trajectory a success",
        Chart(bounds=(0.0, 1.0)), console=True),
    Metric("evaluation/{mode}/pass_at_k", "pass@k", "share of questions", "share of the questions with all k answers",
        "At least one of a question's k answers was a success"),
    Metric(
        "evaluation/{mode}/by_source/{source}/reward", "Reward", "return", QUESTION_MEAN, "The same of one data source or hop"),
    Metric(
        "evaluation/{mode}/by_source/{source}/success", "Success", "share", QUESTION_MEAN, "The same of one data source or hop"),
)
# fmt: on

LINE_KEYS = {"agent": "agents", "policy": "policies"}  # scope -> its key in a step's line of metrics.jsonl


def of_scope(scope: str) -> dict[str, Metric]:
    """Key -> metric, in the table's order."""
    return {metric.key: metric for metric in METRICS if metric.scope == scope}


FIGURES = tuple(metric.key for metric in METRICS if metric.scope == "team" and metric.console)  # of steps and evaluations
HEALTH = {metric.key: metric.event for metric in METRICS if metric.event}
LOSS_SUMS = tuple(key for key, row in of_scope("policy").items() if row.reduction in (Reduction.TOKEN_MEAN, Reduction.TOKEN_SUM))
UPDATE_REDUCTIONS = {key: Reduction(row.reduction) for key, row in of_scope("policy").items()}


def metric_of(tag: str) -> Metric | None:
    """The first row that a TensorBoard tag fits; None: the table has none."""
    return next((metric for metric in METRICS if metric.matches(tag)), None)
