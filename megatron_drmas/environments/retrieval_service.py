"""The retrieval server as a supervised child process of the run."""

import asyncio
import ctypes
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast
from urllib.parse import urlsplit

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.setting import setting
from megatron_drmas.environments.base import ServiceFailure
from megatron_drmas.environments.corpus import MAX_TOPK, CorpusError, check_corpus
from megatron_drmas.environments.encoder import encoder_objection

PR_SET_PDEATHSIG = 1
NAME = "retrieval server"
DYING_S = 1.0  # how long a server that has dropped a connection may take to be gone
MAX_PAUSE_S = 30.0  # before a server is started again; the first time there is none


@dataclass
class RetrievalConfig:
    """Where a search team's passages come from."""

    url: str | None = setting("A running server; null: the run starts one over `corpus`", None)
    corpus: str | None = setting('JSON lines {"id", "contents"}', None)
    encoder: str | None = setting("sentence-transformers folder for dense retrieval over `corpus`; null: BM25", None)
    query_prefix: str | None = setting('"query: " for E5; null: what the encoder says', None)
    passage_prefix: str | None = setting('"passage: " for E5; null: what the encoder says', None)
    topk: int = setting("Passages for a query", 3, minimum=1)
    timeout_s: float = setting("Seconds that a query may take, with everything that is tried again", 60.0, minimum=0.1)
    concurrency: int = setting("Requests at once, each of the queries that agents make in the same moment", 64, minimum=1)
    restarts: int = setting("How often the run restarts its own server when it has died or answers nothing in time", 5, minimum=0)
    order: str = setting("Order of the passages in a prompt", "best_first", choices={"best_first": "", "best_last": ""})


class RetrievalService:
    """Serves a corpus on loopback for as long as the run lives.

    Args:
        settings: its corpus, its encoder if it has one, and how often it may be started again.
        log: file for the server's complaints.
        start_timeout_s: how long it may take to answer.
        restarted: called with the name and the reason when it is restarted.
        host: address to listen on.
    """

    def __init__(
        self,
        settings: RetrievalConfig,
        log: Path,
        start_timeout_s: float,
        restarted: Callable[[str, str], None],
        host: str = "127.0.0.1",
    ):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.url = ""
        self._log = log
        self._start_timeout_s = start_timeout_s
        self._restarted = restarted
        self._restarts, self._max_restarts = 0, settings.restarts
        self._recovering = asyncio.Lock()
        options = {
            "--corpus": settings.corpus,
            "--host": host,
            "--encoder": settings.encoder,
            "--query-prefix": settings.query_prefix,
            "--passage-prefix": settings.passage_prefix,
        }
        self._arguments = [f"{name}={value}" for name, value in options.items() if value is not None]
        self._process = self._start()

    def _start(self) -> subprocess.Popen:
        with self._log.open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "megatron_drmas.environments.retrieval_server", *self._arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                preexec_fn=die_with_parent,
                start_new_session=True,  # a Ctrl-C in the terminal is the run's to handle
            )

    async def ready(self) -> str:
        """The server's address, once it answers.

        Raises:
            ServiceFailure: it ended or said nothing in time.
        """
        try:
            line = await asyncio.wait_for(
                asyncio.to_thread(cast(IO[bytes], self._process.stdout).readline), self._start_timeout_s
            )
        except TimeoutError as error:
            self._kill()
            raise ServiceFailure(
                f"{NAME}: not ready after {self._start_timeout_s:g} s (cluster.start_timeout_s); log: {self._log}"
            ) from error
        if not line:
            raise ServiceFailure(f"{NAME}: ended with code {self._process.wait()} before it was ready; log: {self._log}")
        self.url = line.decode().strip()
        return self.url

    async def recover(self, url: str, problem: str, hung: bool) -> str:
        """The address of a server that lives: one that has died or hangs is started again, after a pause that doubles.

        Args:
            url: the server that did not answer.
            problem: what happened instead.
            hung: it has let a query wait too long.

        Raises:
            ServiceFailure: it has been started again as often as it may.
        """
        async with self._recovering:
            if url != self.url:  # another query has been here
                return self.url
            code = await asyncio.to_thread(self._ended)
            if code is None and not hung:
                return url
            problem = problem if code is None else f"it ended with code {code}"
            while True:
                if self._restarts == self._max_restarts:
                    raise ServiceFailure(
                        f"{NAME}: {problem}, and it was started again {self._restarts} times "
                        f"(environment.retrieval.restarts); log: {self._log}"
                    )
                self._restarted(NAME, problem)
                self._kill()
                if self._restarts:
                    await asyncio.sleep(min(2.0 ** (self._restarts - 1), MAX_PAUSE_S))
                self._restarts += 1
                self._process = self._start()
                try:
                    return await self.ready()
                except ServiceFailure as failure:
                    problem = str(failure).removeprefix(f"{NAME}: ").removesuffix(f"; log: {self._log}")

    def stop(self) -> None:
        """End the server."""
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._kill()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ended(self) -> int | None:
        """The exit code of a server that is dead, or dying."""
        try:
            return self._process.wait(DYING_S)
        except subprocess.TimeoutExpired:
            return None


def check_retrieval(retrieval: RetrievalConfig, files: bool) -> None:
    """Check the settings of retrieval.

    Args:
        files: also look at the corpus and the encoder.

    Raises:
        ConfigError: the first setting that cannot work.
    """
    if not retrieval.url and not retrieval.corpus:
        raise ConfigError(
            "environment.retrieval.corpus", None, "has no value", "give a corpus, or environment.retrieval.url of a server"
        )
    if retrieval.url and not _is_address(retrieval.url):
        raise ConfigError("environment.retrieval.url", retrieval.url, "is not an address", "give one such as http://HOST:8000")
    if retrieval.topk > MAX_TOPK:
        raise ConfigError(
            "environment.retrieval.topk", retrieval.topk, "is more than an answer holds", f"give at most {MAX_TOPK}"
        )
    if retrieval.url and retrieval.encoder:
        problem = "the server at url ranks as it was started to"
        raise ConfigError("environment.retrieval.encoder", retrieval.encoder, problem, "leave one of the two out")
    objection = encoder_objection(Path(retrieval.encoder)) if files and retrieval.encoder else None
    if objection:
        raise ConfigError("environment.retrieval.encoder", retrieval.encoder, objection, "give a sentence-transformers folder")
    if files and not retrieval.url and retrieval.corpus:
        try:
            check_corpus(retrieval.corpus)
        except CorpusError as error:
            raise ConfigError("environment.retrieval.corpus", retrieval.corpus, str(error), "correct the file") from error
        except OSError as error:
            raise ConfigError(
                "environment.retrieval.corpus", retrieval.corpus, str(error.strerror), 'give JSON lines {"id", "contents"}'
            ) from error


def die_with_parent() -> None:
    """For `subprocess.Popen(preexec_fn=…)`: the child is killed when the driver ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not re.search(r"\s", url)
    except ValueError:  # a port beyond 65535, brackets around no address
        return False
