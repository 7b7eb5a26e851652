"""An engine that serves many coroutines: token ids in, sampled ids and their log-probs out."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from megatron_drmas.rollout.engine_messages import EngineError, EngineSettings, Request, Sample
from megatron_drmas.rollout.engine_stream import listen
from megatron_drmas.rollout.vllm_settings import check_environment

if TYPE_CHECKING:
    from megatron_drmas.rollout.llm_core import LLMCore


class Engine:
    """vLLM in this process, on one thread of its own, with continuous batching.

    The thread takes commands between steps; the methods may be called from any event loop.  All requests of one `submit`
    enter the batch before the next step.  With `settings.deterministic`, a submit is admitted only when the engine is
    empty, and finds the prefix cache empty too: the composition of every batch, and with it every bit of the samples,
    depends on that submit and the weights alone.  It costs what later requests would have added to running batches, and
    what they would have shared with earlier ones.

    Weights change between `begin_update` and `finish_update`; generation is paused meanwhile.  Requests in flight go on
    afterwards with the new weights: their keys and values are computed anew.  An update that fails after some of it was
    loaded leaves the engine unusable until a complete one succeeds; one that fails before leaves the old weights.

    A process with an engine must not hold anything else that uses torch: vLLM seeds it and disables
    `torch.set_num_threads`.  GPU engines (device cuda, tensor > 1, sleep mode, transfers ipc and nccl) follow vLLM's
    documentation and are untested here.
    """

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        self._core: LLMCore
        self._thread: threading.Thread | None = None
        # What the thread has to do: requests to admit, a command and its answer, or None to end.
        self._inbox: queue.SimpleQueue[list[Request] | tuple[Callable[[], Any], Future] | None] = queue.SimpleQueue()
        self._backlog: list[list[Request]] = []  # submits that wait for an empty engine
        self._lock = threading.Lock()  # of what follows
        self._finished: list[Sample] = []
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future] | None = None
        self._death: BaseException | None = EngineError("it was never started")

    def start(self) -> dict:
        """Load the model; returns when requests can be submitted.

        Returns:
            start_s, vocab_size, max_model_len, kv_cache_tokens, bytes (see `LLMCore.bytes`).

        Raises:
            ValueError: the process's environment or the model folder does not suit; the message says what to change.
        """
        began = time.monotonic()
        check_environment(self.settings)
        ready: Future[dict] = Future()
        self._thread = threading.Thread(target=self._serve, args=(ready,), name=f"engine-{self.settings.name}", daemon=True)
        self._thread.start()
        facts = ready.result()
        return {**facts, "start_s": time.monotonic() - began}

    async def submit(self, requests: list[Request]) -> None:
        """Hand requests over; returns at once.

        Raises:
            EngineError: the engine has died or its weights are incomplete.
        """
        self._check_usable()
        self._put(requests)

    async def poll(self, timeout_s: float) -> list[Sample]:
        """All samples finished since the last poll; waits for the first, or returns [] after `timeout_s`.

        Raises:
            EngineError: the engine has died or its weights are incomplete.
            RuntimeError: another poll is waiting.
        """
        self._check_usable()
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._waiter is not None:
                raise RuntimeError(f"engine {self.settings.name!r} is polled twice at once")
            if self._finished:
                return self._take()
            arrived = loop.create_future()
            self._waiter = (loop, arrived)
        try:
            await asyncio.wait([arrived], timeout=timeout_s)
        finally:
            with self._lock:
                self._waiter = None
        self._check_usable()
        with self._lock:
            return self._take()

    async def listen(self, host: str, token: bytes) -> int:
        """Serve requests and samples over one connection (`engine_stream`) as well.

        Args:
            token: that a client has to know.

        Returns:
            The port.
        """
        return await listen(self, host, token)

    async def init_transfer(self, info: dict) -> None:
        """Join the transfer group, for a back end that needs it (nccl: address, port, ranks)."""
        await self._on_thread(lambda: self._core.init_transfer(info))

    async def begin_update(self) -> None:
        """Pause, and expect every tensor of the model; an update that was not finished is aborted."""
        await self._on_thread(lambda: self._core.begin_update())

    async def load_bucket(self, info: dict) -> None:
        """Load tensors.

        Args:
            info: the back end's update info: names, dtype_names, shapes and where the data is.

        Raises:
            WeightSyncError: names the tensor that is unknown, came twice, or has the wrong shape or dtype.
        """
        await self._on_thread(lambda: self._core.load_bucket(info))

    async def finish_update(self, version: int) -> None:
        """Forget all cached prefixes and go on with the new weights.

        Args:
            version: what samples report from now on.

        Raises:
            WeightSyncError: names the tensors that did not come.
        """
        await self._on_thread(lambda: self._core.finish_update(version))

    async def weight_digests(self) -> dict[str, str]:
        """Digest of every loaded tensor by HF name; see `weight_sync.verify`."""
        return await self._on_thread(lambda: self._core.weight_digests())

    async def reset_prefix_cache(self) -> None:
        """Forget all cached keys and values; running requests compute theirs anew."""
        await self._on_thread(lambda: self._core.reset_prefix_cache())

    async def sleep(self, keep_weights: bool) -> None:
        """Give up the device's memory; requests are refused until the engine is awake.  Needs `settings.sleep`.

        Args:
            keep_weights: keep them in host memory; otherwise they are lost, and a complete update must follow.

        Raises:
            EngineError: requests are in flight, or the engine cannot sleep.
        """
        await self._on_thread(lambda: self._core.sleep(keep_weights))

    async def wake_weights(self) -> None:
        """Take the memory of the weights again; an update may follow."""
        await self._on_thread(lambda: self._core.wake_weights())

    async def wake_cache(self) -> None:
        """Take the memory of the KV cache, last, and serve again.

        Raises:
            EngineError: the weights were lost, and no update has brought them back.
        """
        await self._on_thread(lambda: self._core.wake_cache())

    async def set_version(self, version: int) -> None:
        """Let samples report `version`: an update that changed nothing."""
        await self._on_thread(lambda: self._core.set_version(version))

    async def stats(self) -> dict:
        """Since the start: requests, errors, prompt_tokens, cached_tokens, generated_tokens, steps, step_s, update_s."""
        return await self._on_thread(lambda: dict(self._core.counts))

    def shutdown(self) -> None:
        """End the thread and free the model; requests in flight are dropped."""
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()

    async def _on_thread(self, work: Callable[[], Any]) -> Any:
        answer: Future = Future()
        self._put((work, answer))
        return await asyncio.wrap_future(answer)

    def _put(self, item: "list[Request] | tuple[Callable[[], Any], Future]") -> None:
        with self._lock:
            self._check_alive()
            self._inbox.put(item)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._dead() from self._death

    def _dead(self) -> EngineError:
        return EngineError(f"engine of policy {self.settings.name!r} does not run: {self._death!r}")

    def _check_usable(self) -> None:
        self._check_alive()
        if self._core.asleep:
            raise EngineError(f"engine of policy {self.settings.name!r} is asleep")
        if self._core.incomplete is not None:
            raise EngineError(
                f"engine of policy {self.settings.name!r} holds incomplete weights ({self._core.incomplete}); "
                "send a complete update"
            )

    def _take(self) -> list[Sample]:
        samples, self._finished = self._finished, []
        return samples

    # The rest runs on the thread.

    def _serve(self, ready: "Future[dict]") -> None:
        try:
            from megatron_drmas.rollout.llm_core import LLMCore

            self._core = core = LLMCore(self.settings)
            facts = {
                "vocab_size": core.vocab_size,
                "max_model_len": core.max_model_len,
                "kv_cache_tokens": core.kv_cache_tokens,
                "bytes": core.bytes,
            }
        except BaseException as error:
            ready.set_exception(error)
            return
        self._death = None
        ready.set_result(facts)
        try:
            while self._obey():
                self._admit(core)
                if core.running and not core.paused:
                    self._deliver(core.step())
            core.shutdown()
            self._die(EngineError("it was shut down"))
        except BaseException as error:
            self._die(error)

    def _obey(self) -> bool:
        """Take all that is in the inbox, waiting for something when there is nothing else to do; False to end."""
        wait = self._core.paused or not (self._core.running or self._backlog)
        while True:
            try:
                item = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if item is None:
                return False
            if isinstance(item, list):
                self._backlog.append(item)
            else:
                work, answer = item
                try:
                    answer.set_result(work())
                except Exception as error:
                    answer.set_exception(error)

    def _admit(self, core: "LLMCore") -> None:
        """Take up submits: all that wait, or, where batches must be reproducible, the next once the engine is empty."""
        while self._backlog and not (self.settings.deterministic and core.running):
            if self.settings.deterministic:
                core.reset_prefix_cache()
            self._deliver(core.admit(self._backlog.pop(0)))

    def _deliver(self, samples: list[Sample]) -> None:
        if samples:
            with self._lock:
                self._finished += samples
                self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            loop, arrived = self._waiter
            loop.call_soon_threadsafe(lambda: None if arrived.done() else arrived.set_result(None))

    def _die(self, error: BaseException) -> None:
        with self._lock:
            self._death = error
            self._wake()
            while not self._inbox.empty():
                item = self._inbox.get()
                if isinstance(item, tuple):
                    item[1].set_exception(self._dead())
