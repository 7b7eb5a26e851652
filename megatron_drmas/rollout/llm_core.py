"""vLLM as an engine's thread sees it: requests in, samples out, and weights that change in between.  No concurrency here."""

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from megatron_drmas.devices import DEVICES
from megatron_drmas.rollout.engine_messages import EngineError, EngineSettings, Request, Sample
from megatron_drmas.rollout.vllm_settings import engine_args
from megatron_drmas.weight_sync.errors import WeightSyncError
from megatron_drmas.weight_sync.extension import register_back_ends
from megatron_drmas.weight_sync.manifest import Manifest
from megatron_drmas.weight_sync.transport import TRANSPORTS


class LLMCore:
    """A loaded model, the requests it is working on, and the state of its weights.

    Attributes:
        paused: an update is on, or its weights are incomplete: `step` must not be called.
        incomplete: why the weights must not be used; None when they may.
        asleep: the memory of the KV cache is given up, and perhaps that of the weights.
        counts: see `Engine.stats`.
    """

    def __init__(self, settings: EngineSettings):
        self.incomplete: str | None = None
        self.asleep = False
        self.counts: dict[str, float] = defaultdict(int)
        self._settings = settings
        self._manifest = Manifest.of_folder(settings.model, settings.dtype)
        self._stop_ids = list(settings.stop_ids)
        register_back_ends()
        self._llm = LLMEngine.from_engine_args(engine_args(settings))
        self.vocab_size: int = self._llm.model_config.get_vocab_size()
        self.max_model_len: int = self._llm.model_config.max_model_len
        self._running: set[int] = set()
        self._updating = False
        self._version = 0
        self._llm.set_weight_version("0")
        if not TRANSPORTS[settings.transport].joins:
            self.init_transfer({})

    @property
    def kv_cache_tokens(self) -> int:
        cache = self._llm.vllm_config.cache_config
        return cache.num_gpu_blocks * cache.block_size

    @property
    def bytes(self) -> dict[str, int]:
        """On each of the engine's devices: weights, cache (and whatever else the engine takes to generate)."""
        size = self._settings.engine
        weights = self._manifest.bytes // size.tensor
        return {"weights": weights, "cache": DEVICES[self._settings.device].cache_bytes(size, weights)}

    @property
    def running(self) -> bool:
        """Whether any admitted request has not finished."""
        return bool(self._running)

    @property
    def paused(self) -> bool:
        return self._updating or self.asleep or self.incomplete is not None

    def admit(self, requests: Iterable[Request]) -> list[Sample]:
        """Put requests into the batch, in their order.

        Returns:
            The ones that cannot be served, with their error.
        """
        refused = []
        for request in requests:
            self.counts["requests"] += 1
            error = self._objection(request)
            if error is None:
                try:
                    self._llm.add_request(
                        str(request.key), tokens_input(request.prompt_ids.tolist()), self._sampling_params(request)
                    )
                except VLLMValidationError as invalid:
                    error = str(invalid)
            if error is None:
                self._running.add(request.key)
            else:
                refused.append(self._failed(request.key, error, "refused"))
        return refused

    def step(self) -> list[Sample]:
        """Compute one batch.

        Returns:
            The requests that finished with it.
        """
        began = time.monotonic()
        finished = [self._sample(output) for output in self._llm.step() if output.finished]
        self._running.difference_update(sample.key for sample in finished)
        self.counts["steps"] += 1
        self.counts["step_s"] += time.monotonic() - began
        return finished

    def init_transfer(self, info: dict) -> None:
        """Join the transfer group."""
        self._on_workers("init_weight_transfer_engine", init_info=info)

    def begin_update(self) -> None:
        """Pause, and expect every tensor; an update that was not finished is aborted."""
        if self._updating:
            self._on_workers("finish_weight_update")
            self._abort("the update was aborted")
        self._manifest.restart()
        self._on_workers("start_weight_update")
        self._updating = True

    def load_bucket(self, info: dict) -> None:
        """Check and load some tensors; a failure ends the update."""
        if not self._updating:
            raise WeightSyncError("load_bucket without begin_update")
        began = time.monotonic()
        try:
            self._manifest.admit(info["names"], info["dtype_names"], info["shapes"])
        except WeightSyncError as error:
            self._on_workers("finish_weight_update")
            self._abort(str(error))
            raise
        try:
            self._on_workers("update_weights", update_info=info)
        except Exception as error:
            self._abort(str(error))
            raise
        self.counts["update_s"] += time.monotonic() - began

    def finish_update(self, version: int) -> None:
        """Use the new weights, if all have come."""
        if not self._updating:
            raise WeightSyncError("finish_update without begin_update")
        self._on_workers("finish_weight_update")
        missing = self._manifest.missing()
        if missing:
            error = f"{len(missing)} tensors did not come: {', '.join(missing[:5])}"
            self._abort(error)
            raise WeightSyncError(error)
        self._updating, self.incomplete = False, None
        self.set_version(version)
        self.reset_prefix_cache()

    def weight_digests(self) -> dict[str, str]:
        return self._on_workers("weight_digests")[0]

    def reset_prefix_cache(self) -> None:
        """Forget all keys and values; running requests start over with their prompts and what they have sampled."""
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM kept blocks of the prefix cache")

    def sleep(self, keep_weights: bool) -> None:
        """See `Engine.sleep`.  A device without a sleep mode keeps its memory; what would be lost is not used there either."""
        if not self._settings.sleep or self._running:
            why = f"{len(self._running)} requests are in flight" if self._running else "it was built without sleep=True"
            raise EngineError(f"engine of policy {self._settings.name!r} cannot sleep: {why}")
        if DEVICES[self._settings.device].sleeps:
            self._llm.sleep(level=1 if keep_weights else 2)
        self.asleep = True
        if not keep_weights:
            self.incomplete = "lost when it fell asleep"

    def wake_weights(self) -> None:
        if DEVICES[self._settings.device].sleeps:
            self._llm.wake_up(tags=["weights"])

    def wake_cache(self) -> None:
        if self.incomplete is not None:
            raise EngineError(
                f"engine of policy {self._settings.name!r} cannot wake: its weights are incomplete ({self.incomplete})"
            )
        if DEVICES[self._settings.device].sleeps:
            self._llm.wake_up(tags=["kv_cache"])
        self.asleep = False

    def shutdown(self) -> None:
        self._llm.engine_core.shutdown()

    def set_version(self, version: int) -> None:
        self._version = version
        self._llm.set_weight_version(str(version))

    def _abort(self, reason: str) -> None:
        self._updating = False
        if self._manifest.started:
            self.incomplete = reason

    def _on_workers(self, method: str, **arguments: Any) -> list[Any]:
        return self._llm.collective_rpc(method, kwargs=arguments)

    def _objection(self, request: Request) -> str | None:
        ids = request.prompt_ids
        if not len(ids):
            return "the prompt is empty"
        if len(ids) >= self.max_model_len:
            return f"the prompt has {len(ids)} tokens; engine.max_model_len={self.max_model_len} leaves no room for a response"
        least, most = ids.min(), ids.max()
        if least < 0 or most >= self.vocab_size:
            return f"the prompt has token id {least if least < 0 else most}; the vocabulary has {self.vocab_size}"
        if request.key in self._running:
            return f"key {request.key} is in flight already"
        return None

    def _sampling_params(self, request: Request) -> SamplingParams:
        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            max_tokens=request.max_tokens,
            logprobs=0,
            flat_logprobs=True,
            stop_token_ids=self._stop_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _sample(self, output: RequestOutput) -> Sample:
        key, completion = int(output.request_id), output.outputs[0]
        sample = Sample(
            key,
            completion.token_ids,
            completion.logprobs.logprobs,
            completion.finish_reason,
            [(int(span.version), span.end - span.start) for span in completion.weight_versions or []],
        )
        self.counts["prompt_tokens"] += len(output.prompt_token_ids)
        self.counts["cached_tokens"] += output.num_cached_tokens
        tokens = len(sample.token_ids)
        self.counts["generated_tokens"] += tokens
        if len(sample.logprobs) != tokens:
            return self._failed(key, f"the engine returned {len(sample.logprobs)} log-probs for {tokens} tokens")
        if completion.finish_reason not in ("stop", "length"):
            return self._failed(key, f"the engine ended the response with {completion.finish_reason!r}")
        finite = np.isfinite(sample.logprobs)
        if not finite.all():
            position = int(finite.argmin())
            value = sample.logprobs[position]
            return self._failed(key, f"the engine returned log-prob {value} at token {position} of the response")
        if sum(tokens for _, tokens in sample.weight_versions) != len(sample.token_ids):
            spans = sample.weight_versions
            return self._failed(key, f"the engine names the weights {spans} (version, tokens) of {len(sample.token_ids)} tokens")
        return sample

    def _failed(self, key: int, error: str, reason: str = "error") -> Sample:
        self.counts["errors"] += 1
        return Sample(key, np.empty(0), np.empty(0), reason, [], error)
