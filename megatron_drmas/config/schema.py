"""The typed configuration of a run, as Hydra composes it from configs/.

Every class here is one section of the YAML; the top is `RunConfig`.  `config.load` composes it,
`megatron_drmas.validate` checks what can be checked before any process starts.
"""

from dataclasses import dataclass, field
from typing import Any

from megatron_drmas.config.algorithm import AlgorithmConfig
from megatron_drmas.config.setting import setting

MIN_TEMPERATURE = 0.01  # vLLM samples at this one where it is asked for less


@dataclass
class ParallelConfig:
    """Megatron layout of one policy's actor: tensor x pipeline x data ranks, one process each."""

    tensor: int = setting("Tensor-parallel ranks; must divide the model's attention groups", 1, minimum=1)
    pipeline: int = setting("Pipeline stages", 1, minimum=1)
    data: int = setting("Data-parallel replicas", 1, minimum=1)
    sequence: bool = setting("Sequence parallelism; needs tensor > 1", False)

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule, counted in optimizer steps."""

    lr: float = setting("Learning rate after the warm-up", 1e-6, minimum=0)
    min_lr: float = setting("Learning rate at the end of the decay", 0.0, minimum=0)
    decay: str = setting(
        "How the learning rate falls after the warm-up", "constant", choices={"constant": "", "linear": "", "cosine": ""}
    )
    warmup_steps: int = setting("Optimizer steps over which the learning rate rises from 0", 0, minimum=0)
    decay_steps: int = setting("Optimizer steps over which it falls; 0: the whole run", 0, minimum=0)
    beta1: float = setting("AdamW's decay of the gradient's mean", 0.9, minimum=0, below=1)
    beta2: float = setting("AdamW's decay of the gradient's square", 0.999, minimum=0, below=1)
    eps: float = setting("AdamW's epsilon", 1e-8, above=0)
    weight_decay: float = setting("AdamW's weight decay", 0.01, minimum=0)
    grad_clip: float = setting("Largest norm of a step's gradient; 0: no limit", 1.0, minimum=0)
    distributed: bool = setting("Megatron's distributed optimizer: its state is cut over the data-parallel ranks", True)

    def schedule_steps(self, optimizer_steps: int) -> int:
        """Optimizer steps over which the learning rate decays, in a run of so many."""
        return self.decay_steps or optimizer_steps


@dataclass
class EngineConfig:
    """vLLM engines of one policy."""

    replicas: int | None = setting("Engines of the policy; null: as many as its pool of GPUs holds", 1, minimum=1)
    tensor: int = setting("Tensor-parallel workers of each engine", 1, minimum=1)
    max_model_len: int = setting("Longest prompt with its response, in tokens", 2048, minimum=1)
    max_num_seqs: int = setting("Requests that an engine computes at once", 256, minimum=1)
    kv_cache_mib: int = setting("Size of the KV cache in MiB; on CPUs", 256, minimum=1)
    gpu_memory_utilization: float = setting(
        "Share of the device's memory that an engine may take; on GPUs", 0.5, above=0, maximum=1
    )


@dataclass
class PolicyConfig:
    """One set of weights: its checkpoint, its Megatron actor and its vLLM engines."""

    model: str = setting("Hugging Face folder of the weights that the run begins with")
    trainable: bool = setting("Whether the policy learns; a frozen one has engines only", True)
    template_options: dict[str, Any] = setting("Variables of the chat template, such as enable_thinking", dict)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    actor_pool: str | None = setting("Pool that the actor trains in; null: the only one", None)
    engine_pool: str | None = setting("Pool that the engines generate in; null: the only one", None)
    micro_batch_tokens: int | None = setting(
        "Tokens of packed sequences in one micro-batch, at most; null: as many as memory holds, up to 16,384", None, minimum=1
    )
    packing: str = setting(
        "How a micro-batch holds its rows",
        "auto",
        choices={
            "auto": "trie on CPUs, none on GPUs",
            "trie": "tokens that rows begin with are computed once; not yet run on GPUs",
            "none": "each row by itself",
        },
    )
    recompute: bool | None = setting(
        "Keep only each layer's input and compute the rest again in the backward pass; null: where memory does not hold it all",
        None,
    )

    def shares_beginnings(self, accelerated: bool) -> bool:
        """Whether tokens that rows begin with are packed once, on a device that is accelerated or not.

        So are experts': their routing, which neither balances load nor drops tokens, is that of each token alone.
        """
        return not accelerated if self.packing == "auto" else self.packing == "trie"


@dataclass
class Fp8Config:
    """Transformer Engine FP8; see `megatron_drmas.actor.precision`."""

    recipe: str = setting(
        "How FP8 scales are chosen",
        "blockwise",
        choices={"delayed": "from earlier uses", "tensorwise": "from the tensor itself", "blockwise": "from each block"},
    )
    margin: int = setting("delayed: scales are divided by 2^margin", 0)
    amax_history_len: int = setting("delayed: uses that a scale looks back on", 1024, minimum=1)
    bf16_first_layers: int = setting("Transformer layers kept out of FP8, at the start", 0, minimum=0)
    bf16_last_layers: int = setting("And at the end", 0, minimum=0)


@dataclass
class PrecisionConfig:
    """Number formats of the actors and of the engines' weights."""

    mode: str = setting(
        "Number format of the actors",
        "bf16",
        choices={
            "fp32": "",
            "bf16": "",
            "fp8": "Transformer Engine, Hopper and newer",
            "fp8_emulated": "the same roundings on any machine",
        },
    )
    rollout: str = setting("Number format of the engines", "bfloat16", choices={"float32": "", "bfloat16": ""})
    fp8: Fp8Config = field(default_factory=Fp8Config)


@dataclass
class AgentConfig:
    """A role: the policy that serves it, its prompt, and the tag its output must carry."""

    policy: str = setting("The policy that generates the agent's turns")
    role: str | None = setting("What the workflow calls it by; null: its own name", None)
    system: str | None = setting("System message; null: none", None)
    prompt: str = setting("Jinja template of the user message; the workflow's docstring lists its variables")
    parser: str = setting("How its output is read", "tag", registry="parser")
    tag: str | None = setting("<tag>...</tag> that the output must hold exactly once", None)
    choices: list[str] = setting("The tag's allowed contents; empty: any text", list)
    trainable: bool = setting("Whether the agent's turns are learned from", True)
    max_response_tokens: int | None = setting("Longest response in tokens; null: rollout.max_response_tokens", None, minimum=1)


@dataclass
class WorkflowConfig:
    """Which agent is called when."""

    name: str = setting("The order of the agents' turns", registry="workflow")
    max_turns: int = setting("Rounds that the workflow makes at most; see its docstring", 4, minimum=1)
    history: int = setting("How many past rounds a prompt shows", 4, minimum=0)
    width: int = setting("Calls that run at the same time: voting's candidates, orch_workers' strategies at most", 3, minimum=1)
    options: dict[str, Any] = setting("Settings of this workflow alone; its `Options` declares them", dict)


@dataclass
class TeamConfig:
    """Which agent plays which role, and which is called when."""

    workflow: WorkflowConfig = field(default_factory=WorkflowConfig)
    agents: dict[str, AgentConfig] = field(default_factory=dict)


@dataclass
class EnvironmentConfig:
    """The task that the team works on.  An environment may bring settings of its own: see `Environment.Config`."""

    name: str = setting("The task: its tools and its reward", registry="environment")
    options: dict[str, Any] = setting("Settings of a plug-in's environment; its `Options` declares them", dict)


@dataclass
class DataConfig:
    """Questions as JSON lines or parquet; see `megatron_drmas.data.questions` for the columns."""

    train: str = setting("File of the training questions")
    eval: str | None = setting("File of the evaluation questions; null: see eval_holdout", None)
    eval_limit: int | None = setting("Evaluate on the first so many; null: all", None, minimum=1)
    eval_holdout: int = setting(
        "Without `eval`: how many questions of `train` to keep out of training and evaluate on", 0, minimum=0
    )
    shuffle: bool = setting("Draw the training questions in a random order, another one in each epoch", True)


@dataclass
class RolloutConfig:
    """Sampling while training."""

    temperature: float = setting("Sampling temperature while training", 1.0, minimum=MIN_TEMPERATURE)
    top_p: float = setting("Training takes only 1: it computes log-probs over the whole vocabulary", 1.0, above=0, maximum=1)
    max_prompt_tokens: int = setting("Longest prompt; a longer one loses its oldest history", 1024, minimum=1)
    max_response_tokens: int = setting("Longest response", 256, minimum=1)
    timeout_s: float = setting("Seconds of silence after which an engine that has requests is an error", 600.0, minimum=1)
    max_in_flight: int = setting("Trajectories that run at once", 1024, minimum=1)


@dataclass
class EvaluationConfig:
    """When and how the team is evaluated."""

    every: int = setting("Training steps between evaluations; 0: only before and after", 0, minimum=0)
    before: bool = setting("Evaluate before the first step", True)
    after: bool = setting("Evaluate after the last step", True)
    temperature: float = setting("Sampling temperature", 0.6, minimum=MIN_TEMPERATURE)
    top_p: float = setting("Nucleus that is sampled from", 0.95, above=0, maximum=1)
    samples: int = setting("n of avg@n and pass@n", 1, minimum=1)
    greedy: bool = setting("Evaluate greedily too", True)


@dataclass
class CheckpointConfig:
    """When a run is saved."""

    every: int = setting("Training steps between checkpoints; the last step is always saved; 0: only the last", 10, minimum=0)
    keep: int = setting("Checkpoints that are kept, in addition to the newest healthy one", 2, minimum=1)
    export: bool = setting("Write every policy as a Hugging Face folder at the end", True)


@dataclass
class LoggingConfig:
    """What is kept of the team's trajectories, as `observability.records.TrajectoryRecord`s."""

    trajectories_per_step: int | None = setting(
        "Kept of a step, spread over the questions, one of each failure first; null: all", 8, minimum=0
    )
    trajectories_per_evaluation: int | None = setting("Kept of an evaluation, in each mode; null: all", 1000, minimum=0)
    token_ids: bool = setting("Keep token ids and the log-probability of every response token too", False)


@dataclass
class ShareConfig:
    """Shares, above 0 and up to 1, at which the run warns and at which it stops; null: never."""

    warn: float | None = setting("Share that is warned about; null: never", None, above=0, maximum=1)
    stop: float | None = setting("Share that stops the run; null: never", None, above=0, maximum=1)


@dataclass
class HealthConfig:
    """When a step is not fit to be learned from.  Shares are of the whole step, and of every agent in it."""

    masked: ShareConfig = setting(
        "Trajectories cut short by a failure; `stop`: at once, untrained", lambda: ShareConfig(0.2, 0.5)
    )
    truncated: ShareConfig = setting("Responses that reached their limit", lambda: ShareConfig(0.5))
    invalid: ShareConfig = setting("Outputs that could not be parsed", lambda: ShareConfig(0.5))
    zero_advantage: ShareConfig = setting("Rows of learning agents without an advantage", lambda: ShareConfig(0.95))
    found_nothing: ShareConfig = setting(
        "Tool calls that returned an empty list; of the whole step only", lambda: ShareConfig(0.5, 1.0)
    )
    patience: int = setting(
        "Steps in a row at another `stop` than masked's, or without any advantage while trajectories go unrewarded, "
        "that stop the run",
        20,
        minimum=1,
    )
    min_calls: int = setting("An agent with fewer calls in a step is not judged by itself", 8, minimum=1)


@dataclass
class ClusterConfig:
    """Processes and their shares of the machine."""

    device: str = setting(
        "What actors and engines run on", "auto", choices={"auto": "GPUs where gpus_per_node is not 0", "cpu": "", "cuda": ""}
    )
    nodes: int = setting("Nodes of the allocation", 1, minimum=1)
    gpus_per_node: int = setting(
        "GPUs of each node that the run uses; with device=cpu as many virtual ones, whose memory is an account", 0, minimum=0
    )
    pools: dict[str, int] = setting(
        "GPUs of each named pool, cut from the allocation in this order; empty: one pool of all", dict
    )
    gpu_memory_gib: float | None = setting(
        "Memory of each GPU in GiB; null: what the driver's machine reports, and no limit on virtual ones", None, above=0
    )
    transport: str = setting(
        "Of weights from actors to engines; auto: the first that serves the placement", "auto", registry="transport"
    )
    actor_threads: int | None = setting(
        "CPU threads of each actor rank; null: OMP_NUM_THREADS, or the cores shared by all ranks, which compute at the same time",
        None,
        minimum=1,
    )
    engine_threads: int | None = setting(
        "CPU threads of each engine; null: OMP_NUM_THREADS, or the cores shared by all engines", None, minimum=1
    )
    start_timeout_s: float = setting("Seconds that the start of Ray, an actor, an engine or a service may take", 300.0, minimum=1)
    sync_timeout_s: float = setting("Seconds that a weight update may take", 120.0, minimum=1)
    step_timeout_s: float = setting("Seconds that an actor's update, checkpoint or export may take", 1800.0, minimum=1)
    restarts: int = setting(
        "How often each engine is started again, and the team goes back to its last checkpoint, when processes fail; 0: never",
        5,
        minimum=0,
    )


@dataclass
class RunConfig:
    """A whole run."""

    name: str = setting("Of the run; its folder is <output_dir>/<name>")
    seed: int = setting("Of everything random", 0, minimum=0, below=2**31)
    steps: int = setting("Training steps", minimum=1)
    questions_per_step: int = setting("Questions of a step", minimum=1)
    group_size: int = setting("Trajectories on each question", minimum=2)
    output_dir: str = setting("Folder of run folders", "outputs")
    resume: str = setting(
        "Whether to continue from the run folder's last checkpoint",
        "auto",
        choices={"auto": "if there is one", "never": "begin again"},
    )
    deterministic: bool = setting(
        "Same configuration, same bits, at the price of idle engines; a resumed run equals an undisturbed one "
        "where algorithm.staleness is 0",
        False,
    )
    plugins: list[str] = setting("Python files or modules of one's own; see docs/plugins.md", list)
    policies: dict[str, PolicyConfig] = field(default_factory=dict)
    team: TeamConfig = field(default_factory=TeamConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    variables: dict[str, Any] = setting("Values that a recipe's own YAML interpolates", dict)

    def longest_row(self, policy: str) -> int:
        """Tokens that a prompt of one of the policy's agents may have together with its response."""
        agents = [agent for agent in self.team.agents.values() if agent.policy == policy]
        return self.rollout.max_prompt_tokens + max(
            agent.max_response_tokens or self.rollout.max_response_tokens for agent in agents
        )
