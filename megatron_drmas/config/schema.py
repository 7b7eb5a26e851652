"""The typed configuration of a run, as Hydra composes it from configs/.

Every class here is one section of the YAML; the top is `RunConfig`.  `config.load` composes it,
`megatron_drmas.validate` checks what can be checked before any process starts.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from megatron_drmas.config.algorithm import AlgorithmConfig


@dataclass
class ParallelConfig:
    """Megatron layout of one policy's actor: tensor x pipeline x data ranks, one process each."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sequence: bool = False  # sequence parallelism; needs tensor > 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule, counted in optimizer steps."""

    lr: float = 1e-6
    min_lr: float = 0.0
    decay: str = "constant"  # constant | linear | cosine
    warmup_steps: int = 0
    decay_steps: int = 0  # 0: the whole run
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    distributed: bool = True  # Megatron's distributed optimizer

    def schedule_steps(self, optimizer_steps: int) -> int:
        """Optimizer steps over which the learning rate decays, in a run of so many."""
        return self.decay_steps or optimizer_steps


@dataclass
class EngineConfig:
    """vLLM engines of one policy."""

    replicas: int = 1
    tensor: int = 1
    max_model_len: int = 2048
    max_num_seqs: int = 256
    kv_cache_mib: int = 256  # CPU: size of the KV cache
    gpu_memory_utilization: float = 0.5  # GPU: share of device memory the engine may take


@dataclass
class PolicyConfig:
    """One set of weights: its checkpoint, its Megatron actor and its vLLM engines."""

    model: str = MISSING  # Hugging Face folder
    trainable: bool = True
    template_options: dict[str, Any] = field(default_factory=dict)  # variables of the chat template, e.g. enable_thinking
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    micro_batch_tokens: int = 8192  # tokens of packed sequences in one micro-batch
    recompute: bool = False  # keep only each layer's input and compute the rest again in the backward pass


@dataclass
class Fp8Config:
    """Transformer Engine FP8; see `megatron_drmas.actor.precision`."""

    recipe: str = "blockwise"  # delayed | tensorwise | blockwise
    margin: int = 0  # delayed: scales are divided by 2^margin
    amax_history_len: int = 1024  # delayed: uses that a scale looks back on
    bf16_first_layers: int = 0  # transformer layers kept out of FP8, at the start
    bf16_last_layers: int = 0  # and at the end


@dataclass
class PrecisionConfig:
    """Number formats of the actors and of the engines' weights."""

    mode: str = "bf16"  # fp32 | bf16 | fp8 | fp8_emulated
    rollout: str = "bfloat16"  # dtype of the engines: float32 | bfloat16
    fp8: Fp8Config = field(default_factory=Fp8Config)


@dataclass
class AgentConfig:
    """A role: the policy that speaks for it, its prompt, and the tag its output must carry."""

    policy: str = MISSING
    role: Optional[str] = None  # what the workflow calls it by; none: its own name
    system: Optional[str] = None  # system message
    prompt: str = MISSING  # Jinja template of the user message; the workflow's docstring lists its variables
    parser: str = "tag"  # registered in megatron_drmas.team.parsing: tag | tags | boxed | text
    tag: Optional[str] = None  # <tag>…</tag> that the output must hold exactly once
    choices: list[str] = field(default_factory=list)  # the tag's allowed contents; empty: any text
    trainable: bool = True
    max_response_tokens: Optional[int] = None  # default: rollout.max_response_tokens


@dataclass
class WorkflowConfig:
    """Who speaks when."""

    name: str = MISSING  # a name registered in megatron_drmas.workflows
    max_turns: int = 4
    history: int = 4  # how many past turns a prompt shows
    width: int = 3  # calls that run at the same time: voting's candidates, orch_workers' strategies at most
    options: dict[str, Any] = field(default_factory=dict)  # settings of this workflow alone; its `Options` declares them


@dataclass
class TeamConfig:
    workflow: WorkflowConfig = field(default_factory=WorkflowConfig)
    agents: dict[str, AgentConfig] = field(default_factory=dict)


@dataclass
class RetrievalConfig:
    """Where a search team's passages come from."""

    url: Optional[str] = None  # a running server; none: the run starts one over `corpus`
    corpus: Optional[str] = None  # JSON lines {"id", "contents"}
    encoder: Optional[str] = None  # sentence-transformers folder for dense retrieval over `corpus`; none: BM25
    query_prefix: Optional[str] = None  # "query: " for E5; none: what the encoder says
    passage_prefix: Optional[str] = None  # "passage: " for E5
    topk: int = 3
    timeout_s: float = 60.0  # what a query may take, with everything that is tried again
    concurrency: int = 64  # requests at once, each of the queries that agents make in the same moment
    restarts: int = 5  # how often the run starts its own server again, when it has died or answers nothing in time
    order: str = "best_first"  # best_first | best_last: order of the passages in a prompt


@dataclass
class GraderConfig:
    """Worker processes that grade answers which code must parse."""

    workers: int = 1
    timeout_s: float = 10.0
    memory_mib: int = 2048


@dataclass
class EnvironmentConfig:
    name: str = MISSING  # a name registered in megatron_drmas.environments
    normalization: str = "squad"  # squad | unicode: what exact match ignores; see megatron_drmas.environments.exact_match
    options: dict[str, Any] = field(default_factory=dict)  # of a plug-in's environment: those that its class declares as `Options`
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    grader: GraderConfig = field(default_factory=GraderConfig)


@dataclass
class DataConfig:
    """Questions as JSON lines or parquet; see `megatron_drmas.data.questions` for the columns."""

    train: str = MISSING
    eval: Optional[str] = None
    eval_limit: Optional[int] = None  # the first so many
    eval_holdout: int = 0  # without `eval`: how many questions of `train` to keep out of training and evaluate on
    shuffle: bool = True


@dataclass
class RolloutConfig:
    """Sampling while training."""

    temperature: float = 1.0
    top_p: float = 1.0  # training takes no other: it computes log-probs over the whole vocabulary
    max_prompt_tokens: int = 1024
    max_response_tokens: int = 256
    timeout_s: float = 600.0  # an engine that returns nothing for so long is an error
    max_in_flight: int = 1024  # trajectories running at once


@dataclass
class EvaluationConfig:
    """When and how the team is evaluated."""

    every: int = 0  # steps; 0: only before and after
    before: bool = True
    after: bool = True
    temperature: float = 0.6
    top_p: float = 0.95
    samples: int = 1  # n of avg@n and pass@n
    greedy: bool = True  # evaluate greedily too


@dataclass
class CheckpointConfig:
    every: int = 10  # steps; the last step is always saved; 0: only the last
    keep: int = 2
    export: bool = True  # write every policy as a Hugging Face folder at the end


@dataclass
class LoggingConfig:
    """What is kept of the team's trajectories, as `observability.records.TrajectoryRecord`s."""

    trajectories_per_step: Optional[int] = 8  # spread over the questions, one of each failure first; null: all; 0: none
    trajectories_per_evaluation: Optional[int] = 1000  # in each mode; null: all; 0: none
    token_ids: bool = False  # also token ids and the log-probability of every response token


@dataclass
class ShareConfig:
    """Shares, above 0 and up to 1, at which the run warns and at which it stops; null: never."""

    warn: Optional[float] = None
    stop: Optional[float] = None


@dataclass
class HealthConfig:
    """When a step is not fit to be learned from.  Shares are of the whole step, and of every agent in it."""

    masked: ShareConfig = field(default_factory=lambda: ShareConfig(0.2, 0.5))  # trajectories cut short by a failure; `stop`: at once, untrained
    truncated: ShareConfig = field(default_factory=lambda: ShareConfig(0.5))  # responses that reached their limit
    invalid: ShareConfig = field(default_factory=lambda: ShareConfig(0.5))  # outputs that could not be parsed
    zero_advantage: ShareConfig = field(default_factory=lambda: ShareConfig(0.95))  # rows of learning agents without an advantage
    found_nothing: ShareConfig = field(default_factory=lambda: ShareConfig(0.5, 1.0))  # queries without a passage; of the whole step only
    patience: int = 20  # steps in a row at another `stop`, or without any advantage and any success, that stop the run
    least_calls: int = 8  # an agent that a step has fewer calls of is not judged by itself


@dataclass
class ClusterConfig:
    """Processes and their shares of the machine."""

    device: str = "auto"  # auto | cpu | cuda
    nodes: int = 1
    gpus_per_node: int = 0
    transport: str = "auto"  # of weights from actors to engines; auto: the first of ipc, nccl, shm that serves the placement
    colocate: bool = True  # actors and engines take turns on the same GPUs
    actor_threads: int = 1
    engine_threads: int = 1
    start_timeout_s: float = 300.0
    sync_timeout_s: float = 120.0
    step_timeout_s: float = 1800.0


@dataclass
class RunConfig:
    name: str = MISSING
    seed: int = 0
    steps: int = MISSING
    questions_per_step: int = MISSING
    group_size: int = MISSING
    output_dir: str = "outputs"
    resume: str = "auto"  # auto | never
    deterministic: bool = False
    plugins: list[str] = field(default_factory=list)  # Python files or modules of one's own; see docs/plugins.md
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
    variables: dict[str, Any] = field(default_factory=dict)  # values that a recipe's own YAML interpolates
