"""How many bytes a policy's processes take, by kind: pure arithmetic, without a process or a device.

Formulas of weights, gradients and optimizer follow Megatron-Core 0.16's buffers (`DistributedDataParallel` with fp32
gradients, its distributed optimizer); those of activations count the tensors that autograd saves in a layer, for the local
layers of this package (checked against `saved_tensors_hooks` in the tests) and for Transformer Engine's fused ones
(Korthikanti et al., arXiv 2205.05198, for a gated MLP, grouped queries and flash attention; untested here).
"""

from dataclasses import dataclass, fields, replace

from checkpoints_conv.families.spec import ModelSpec
from megatron_drmas.algorithm.minibatch import PATHS
from megatron_drmas.config.schema import ParallelConfig, PolicyConfig
from megatron_drmas.devices import DEVICES

GIB = 2**30
SIZES = {"fp32": 4, "bf16": 2, "fp8": 2, "fp8_emulated": 4}  # bytes of an actor's weights and activations
ENGINE_SIZES = {"float32": 4, "bfloat16": 2}
LOGIT_ROWS = 1024  # tokens whose logits exist at once (`linear_token_logprobs`)
LOGIT_SCRATCH = 3 / 32  # of the logits, in fp32 (`token_logprob.BLOCKS`)
CPU_PROCESS_BYTES = int(0.5 * GIB)  # private memory of a process after it has imported torch, Megatron or vLLM
CUDA_CONTEXT_BYTES = GIB  # an estimate: the context, its kernels and cuBLAS's workspace
NCCL_BYTES = GIB // 4  # an estimate: the buffers of a process that communicates


@dataclass(frozen=True)
class Bytes:
    """Bytes on one device by kind; `context` is what a process takes before it holds anything."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    kv_cache: int = 0
    context: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, kind.name) for kind in fields(self))

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(**{kind.name: getattr(self, kind.name) + getattr(other, kind.name) for kind in fields(self)})

    def __mul__(self, times: int) -> "Bytes":
        return Bytes(**{kind.name: times * getattr(self, kind.name) for kind in fields(self)})

    @property
    def largest(self) -> str:
        """The kind that takes most."""
        return max((kind.name for kind in fields(self)), key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class Packed:
    """A micro-batch by its sizes: tokens in it, slots that attention gathers, tokens that are predicted from.

    `masked` is the number of (query, key) pairs under an explicit mask, which branches of a trie have.
    """

    tokens: int
    queries: int
    keys: int
    predicted: int
    masked: int = 0

    @classmethod
    def largest(cls, tokens: int, longest: int, shared: bool) -> "Packed":
        """The most that a micro-batch of at most `tokens` has, whose rows have up to `longest`.

        A trie's paths gather up to `PATHS` times its tokens, and its branches attend under masks.
        """
        return cls(tokens, tokens, PATHS * tokens if shared else tokens, tokens, tokens * longest if shared else 0)


@dataclass(frozen=True)
class ActorShape:
    """What the bytes of an actor's ranks follow from.

    Args:
        precision: `precision.mode`.
        distributed: whether the optimizer's state is cut over the data-parallel ranks.
        fused: Transformer Engine's layers, else the local ones.
        reference: whether a copy of the first weights is kept (`algorithm.loss.kl_coef`).
    """

    spec: ModelSpec
    parallel: ParallelConfig
    precision: str
    distributed: bool = True
    recompute: bool = False
    fused: bool = False
    reference: bool = False

    @classmethod
    def of(cls, spec: ModelSpec, policy: PolicyConfig, precision: str, device: str, reference: bool = False) -> "ActorShape":
        """A policy's actor on a device; a recompute that is left open counts as false."""
        fused = DEVICES[device].accelerated and precision != "fp8_emulated"
        return cls(spec, policy.parallel, precision, policy.optimizer.distributed, bool(policy.recompute), fused, reference)

    @property
    def size(self) -> int:
        return SIZES[self.precision]


def layer_parameters(spec: ModelSpec, tensor: int = 1) -> int:
    """Parameters of one transformer layer on one of `tensor` ranks: attention and MLP are cut, norms and routers are not.

    q + 2 kv and the output projection: h (2 q + 2 kv) / tensor; a gated MLP: 3 h f / tensor, one for each expert.
    """
    attention = spec.hidden * (2 * spec.q_size + 2 * spec.kv_size) + (spec.qkv_bias and spec.q_size + 2 * spec.kv_size)
    mlp = 3 * spec.hidden * (spec.experts * spec.expert_ffn if spec.experts else spec.ffn)
    whole = 2 * spec.hidden + (2 * spec.head_dim if spec.qk_norm else 0) + spec.experts * spec.hidden
    return (attention + mlp) // tensor + whole


def embedding_parameters(spec: ModelSpec, tensor: int = 1) -> int:
    """Parameters of the embedding, or of the output layer, on one rank, with Megatron's padding of the vocabulary."""
    return spec.padded_vocab(tensor) // tensor * spec.hidden


def stage_parameters(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> int:
    """Parameters of one rank of a pipeline stage.

    The first stage has the embedding, the last the final norm and the output layer; where those are tied, one rank that is
    both holds one of them, and over several stages each holds a copy.
    """
    first, last = stage == 0, stage == parallel.pipeline - 1
    embeddings = first + (last and not (first and spec.tied))
    layers = spec.layers // parallel.pipeline * layer_parameters(spec, parallel.tensor)
    return layers + embeddings * embedding_parameters(spec, parallel.tensor) + (spec.hidden if last else 0)


def state_bytes(shape: ActorShape, stage: int = 0) -> Bytes:
    """Weights, gradients and optimizer of one rank, as they are between updates.

    Gradients are an fp32 buffer: 4 bytes a parameter.  AdamW's moments take 8, and 4 more the fp32 main weights of a bf16
    model; divided by the data-parallel ranks where the optimizer is distributed.
    """
    parameters = stage_parameters(shape.spec, shape.parallel, stage)
    optimizer = parameters * (8 if shape.size == 4 else 12)
    if shape.distributed:
        optimizer = -(-optimizer // shape.parallel.data)
    return Bytes(weights=shape.size * parameters, gradients=4 * parameters, optimizer=optimizer)


def layer_activation_bytes(shape: ActorShape, packed: Packed) -> int:
    """What autograd saves in one layer for one micro-batch, on one rank, when nothing is computed again.

    Of a token, with projections q, kv and MLP width f (h: hidden), in elements:
    local layers: each of two norms its input (fp32), its normalized input and its output: 3 h; the rotary angles 4 d;
    the gathered queries and the attention's output: q each, for every query slot; keys and values: kv each, for every key slot;
    the output projection's input: q; the gated MLP: 5 f.
    Transformer Engine's: 4 h + 2 q + 2 kv + 3 f.
    Tensor parallelism divides what belongs to heads and to f, sequence parallelism also what belongs to h between them.
    """
    spec, tensor, size = shape.spec, shape.parallel.tensor, shape.size
    q, kv = spec.q_size / tensor, spec.kv_size / tensor
    rows = packed.tokens / (tensor if shape.parallel.sequence else 1)  # of what is outside the tensor-parallel parts
    if shape.fused:
        inputs, attention = 4 * spec.hidden * rows * size, packed.tokens * (2 * q + 2 * kv) * size
    else:
        # Norms keep their input in fp32; sequence parallelism gathers a linear layer's input again in the backward pass.
        inputs = 2 * spec.hidden * rows * (4 + 2 * size)
        attention = (packed.tokens * (q + 4 * spec.head_dim) + 2 * packed.queries * q + 2 * packed.keys * kv) * size
        attention += packed.masked * size + packed.queries * spec.heads / tensor * 4
    if spec.qk_norm:
        attention += packed.tokens * (q + kv) * ((2 if shape.fused else 1) * size + 4)
    width = (3 if shape.fused else 5) * size
    if spec.experts:
        # Each of a token's experts has its input and its output besides; the router's logits are fp32.
        chosen = spec.experts_per_token * rows * (tensor if shape.parallel.sequence else 1)
        mlp = chosen * (width * spec.expert_ffn / tensor + 2 * spec.hidden * size) + packed.tokens * spec.experts * 12
    else:
        mlp = packed.tokens * width * spec.ffn / tensor
    rounded = 0
    if shape.precision == "fp8_emulated":  # rounded copies of the weights
        rounded = layer_parameters(spec, tensor) * size
    return int(inputs + attention + mlp + rounded)


def activation_bytes(shape: ActorShape, packed: Packed, stage: int = 0, micro_batches: int | None = None) -> int:
    """The most that the saved activations of a pipeline stage take on one rank.

    1F1B holds min(m, p - i) of m micro-batches on stage i of p (Narayanan et al., arXiv 2104.04473).  With recompute each
    layer keeps its input, and one layer at a time all of it.  On top of it, the gradient that passes one layer's MLP.
    """
    flying = shape.parallel.pipeline - stage
    if micro_batches is not None:
        flying = min(flying, micro_batches)
    layers = shape.spec.layers // shape.parallel.pipeline
    layer = layer_activation_bytes(shape, packed)
    rows = packed.tokens // (shape.parallel.tensor if shape.parallel.sequence else 1)
    inputs = rows * shape.spec.hidden * shape.size
    width = shape.spec.experts_per_token * shape.spec.expert_ffn if shape.spec.experts else shape.spec.ffn
    passing = 2 * inputs + 2 * packed.tokens * width // shape.parallel.tensor * shape.size
    if shape.recompute:
        return flying * layers * inputs + layer + passing
    saved = flying * layers * layer
    chooses = not shape.fused and not shape.parallel.sequence and shape.precision != "fp8_emulated"
    if chooses and not shape.spec.experts and stage == shape.parallel.pipeline - 1:
        # The last layer's MLP sees predicted tokens only (`ChosenTokensLayer`).
        mlp = 5 * shape.spec.ffn // shape.parallel.tensor * shape.size + shape.spec.hidden * (4 + 2 * shape.size)
        saved -= flying * max(0, packed.tokens - packed.predicted) * mlp
    return saved + passing


def logit_bytes(shape: ActorShape, packed: Packed, stage: int = 0) -> int:
    """Logits of a chunk of tokens with their scratch, the final hidden states, and the output layer's gradient; last stage only.

    Logits exist for 1,024 tokens at a time: 1,024 V / tensor, V padded.  The weight's gradient is fp32.
    """
    if stage != shape.parallel.pipeline - 1:
        return 0
    rows, columns = min(LOGIT_ROWS, packed.predicted), shape.spec.padded_vocab(shape.parallel.tensor) // shape.parallel.tensor
    logits = rows * columns * (shape.size + int(4 * LOGIT_SCRATCH))
    hidden = packed.predicted * shape.spec.hidden * (4 + 4 * shape.size)  # the final norm's, the product's input, its gradient
    return logits + hidden + columns * shape.spec.hidden * 4


def update_bytes(shape: ActorShape, packed: Packed, stage: int = 0, micro_batches: int | None = None) -> Bytes:
    """One rank at the peak of an update, without its context."""
    extra = stage_parameters(shape.spec, shape.parallel, stage) * shape.size if shape.reference else 0
    return state_bytes(shape, stage) + Bytes(
        weights=extra, activations=activation_bytes(shape, packed, stage, micro_batches), logits=logit_bytes(shape, packed, stage)
    )


def offloaded_bytes(shape: ActorShape, stage: int = 0) -> int:
    """Host memory of a rank whose weights and optimizer are off its device; gradients are not copied, but made again."""
    state = state_bytes(shape, stage)
    return state.weights + state.optimizer


def checkpoint_bytes(shape: ActorShape) -> int:
    """Weights and optimizer of all ranks, once: what a checkpoint holds, and the copies that it is written from."""
    whole = replace(shape, distributed=False)
    stages = (offloaded_bytes(whole, stage) for stage in range(shape.parallel.pipeline))
    return shape.parallel.tensor * sum(stages)


def token_cache_bytes(spec: ModelSpec, tensor: int, size: int) -> int:
    """Keys and values of one token on one of an engine's workers: 2 · layers · kv / tensor elements."""
    return 2 * spec.layers * spec.kv_size // tensor * size


def engine_weight_bytes(spec: ModelSpec, tensor: int, size: int) -> int:
    """Weights of one of an engine's workers; a tied output layer is held once."""
    return size * stage_parameters(spec, ParallelConfig(tensor=tensor), 0)


def context_bytes(device: str, communicates: bool) -> int:
    """What a process takes before it holds anything: on GPUs device memory, on CPUs that of what it imported."""
    if not DEVICES[device].placed:
        return CPU_PROCESS_BYTES
    return CUDA_CONTEXT_BYTES + (NCCL_BYTES if communicates else 0)
