"""What travels between the driver and an engine: plain data that imports neither torch nor vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_drmas.config.schema import EngineConfig


@dataclass
class EngineSettings:
    """One engine.

    Attributes:
        name: of the policy, for errors.
        model: Hugging Face folder of the initial weights.
        stop_ids: token ids that end a response; see `ChatTokenizer`.
        engine: its size and layout.
        dtype: of weights and KV cache: float32 | bfloat16.
        seed: vLLM's own; requests carry theirs.
        deterministic: samples depend on the submit they came with and on nothing before; see `Engine`.
        device: cpu | cuda.
        threads: of the CPU kernels; must equal OMP_NUM_THREADS, which decides.
        transport: name of what brings the weights, on both sides: see `weight_sync.transport`.
        sleep: the engine can give its GPU memory back between generations.
    """

    name: str
    model: str
    stop_ids: Sequence[int]
    engine: EngineConfig = field(default_factory=EngineConfig)
    dtype: str = "float32"
    seed: int = 0
    deterministic: bool = False
    device: str = "cpu"
    threads: int = 1
    transport: str = "shm"
    sleep: bool = False


@dataclass(slots=True)
class Request:
    """One prompt to continue.

    Attributes:
        key: identifies the request among all that are in flight.
        prompt_ids: token ids, int32, non-empty.
        seed: of this request's own random stream; the response does not depend on what else is in the batch.
        temperature: 0 is greedy.
        top_p: in (0, 1].
        max_tokens: longest response.
    """

    key: int
    prompt_ids: np.ndarray
    seed: int
    temperature: float
    top_p: float
    max_tokens: int

    def __post_init__(self) -> None:
        self.prompt_ids = np.asarray(self.prompt_ids, np.int32)


@dataclass(slots=True)
class Sample:
    """A finished request.

    Attributes:
        key: of the request.
        token_ids: sampled ids, int32, the stop token included.
        logprobs: float32, the log-probability of each under the distribution it was drawn from: after temperature and
            top-p; a greedy request's are at temperature 1.
        finish_reason: stop | length; error: the engine's; refused: the request cannot be served by any engine.
        weight_versions: which weights sampled the response, as in `Turn`; an update while the request ran adds a span.
        error: why there is no usable response; the lists are empty then.
    """

    key: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    weight_versions: list[tuple[int, int]]
    error: str | None = None

    def __post_init__(self) -> None:
        self.token_ids = np.asarray(self.token_ids, np.int32)
        self.logprobs = np.asarray(self.logprobs, np.float32)  # exact: engines compute them in float32; None becomes NaN


class EngineError(RuntimeError):
    """An engine that cannot serve: its thread died, or it holds incomplete weights.  Names the engine and the cause."""
