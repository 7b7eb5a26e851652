"""An engine in a process of its own, since vLLM changes torch for its whole process.

with EngineProcess(settings) as engine:
    engine.call("submit", requests)
"""

import asyncio
import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import torch

from megatron_drmas.rollout.engine import Engine
from megatron_drmas.rollout.engine_messages import EngineSettings, Request, Sample
from megatron_drmas.weight_sync.shm_sender import ShmSender

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
ANSWER_TIMEOUT_S = 240.0  # a start on a busy machine
SHUTDOWN_TIMEOUT_S = 30.0


class EngineProcess:
    """Calls an `Engine`'s methods in a child process; what they raise is raised here."""

    def __init__(self, settings: EngineSettings):
        with tempfile.TemporaryDirectory() as folder, Listener(os.path.join(folder, "socket")) as listener:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine_process", str(listener.address)],
                cwd=Path(__file__).parents[1],
                env={**os.environ, **ENVIRONMENT},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            self._connection = listener.accept()
        self._connection.send(settings)
        try:
            self.facts: dict = self._answer()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: Any) -> None:
        self._connection.close()
        try:
            self.process.wait(timeout=SHUTDOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.wait()

    def call(self, method: str, *arguments: Any) -> Any:
        self._connection.send((method, arguments))
        return self._answer()

    def generate(self, requests: list[Request]) -> list[Sample]:
        """Samples in the order of their requests."""
        self.call("submit", requests)
        return self.collect([request.key for request in requests])

    def collect(self, keys: list[int]) -> list[Sample]:
        found: dict[int, Sample] = {}
        while len(found) < len(keys):
            found |= {sample.key: sample for sample in self.call("poll", 10.0)}
        return [found[key] for key in keys]

    def update(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, bucket_bytes: int = 20_000) -> dict[str, str]:
        """A whole weight update; returns the digests of what was sent."""
        sender = ShmSender(tensors, bucket_bytes, torch.float32, verify=True)
        try:
            self.call("begin_update")
            while (info := sender.next_bucket()) is not None:
                self.call("load_bucket", info)
            self.call("finish_update", version)
        finally:
            sender.close()
        return sender.digests

    def _answer(self) -> Any:
        if not self._connection.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError("the engine's process does not answer")
        error, value = self._connection.recv()
        if error is not None:
            raise error
        return value


def prompt(length: int, start: int = 3) -> list[int]:
    """Distinct prompts of a vocabulary of 235."""
    return [3 + (start * 7 + i * i) % 230 for i in range(length)]


def request(
    key: int, prompt_ids: list[int], seed: int | None = None, temperature: float = 0.7, top_p: float = 1.0, max_tokens: int = 8
) -> Request:
    return Request(key, prompt_ids, key if seed is None else seed, temperature, top_p, max_tokens)


def said(samples: list[Sample]) -> list[tuple]:
    """What can be compared for equality, bit by bit."""
    return [(s.key, s.token_ids.tolist(), s.logprobs.tobytes(), s.finish_reason, s.weight_versions, s.error) for s in samples]


def serve(address: str) -> None:
    """The child: construct and start the engine, then answer calls until the parent goes away."""
    connection = Client(address)
    engine = Engine(connection.recv())
    loop = asyncio.new_event_loop()

    def perform(method: str, arguments: tuple) -> Any:
        result = getattr(engine, method)(*arguments)
        return loop.run_until_complete(result) if inspect.isawaitable(result) else result

    method, arguments = "start", ()
    while True:
        try:
            connection.send((None, perform(method, arguments)))
        except Exception as error:
            connection.send((error, None))
        try:
            method, arguments = connection.recv()
        except EOFError:
            engine.shutdown()
            os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
