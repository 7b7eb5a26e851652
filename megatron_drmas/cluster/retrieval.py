"""The retrieval server as a child process of the run."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Optional

from megatron_drmas.cluster.host import die_with_parent
from megatron_drmas.cluster.process import ProcessFailure
from megatron_drmas.config.schema import RetrievalConfig


class RetrievalService:
    """Serves a corpus on loopback for as long as the run lives.

    Args:
        settings: its corpus, and its encoder if it has one.
        log: file for the server's complaints.
        host: address to listen on.
    """

    def __init__(self, settings: RetrievalConfig, log: Path, host: str = "127.0.0.1"):
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self.url: Optional[str] = None
        options = {
            "--corpus": settings.corpus,
            "--host": host,
            "--encoder": settings.encoder,
            "--query-prefix": settings.query_prefix,
            "--passage-prefix": settings.passage_prefix,
        }
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_drmas.environments.retrieval_server", *given],
                stdout=subprocess.PIPE, stderr=errors, preexec_fn=die_with_parent,
                start_new_session=True,  # a Ctrl-C in the terminal is the run's to handle
            )

    async def ready(self, timeout_s: float) -> str:
        """The server's address, once it answers.

        Raises:
            ProcessFailure: it ended or said nothing in time.
        """
        started = time.monotonic()
        try:
            line = await asyncio.wait_for(asyncio.to_thread(self._process.stdout.readline), timeout_s)
        except asyncio.TimeoutError as error:
            self.stop()
            raise ProcessFailure(f"retrieval server: not ready after {time.monotonic() - started:.0f} s; log: {self._log}") from error
        if not line:
            raise ProcessFailure(f"retrieval server: ended with code {self._process.wait()}; log: {self._log}")
        self.url = line.decode().strip()
        return self.url

    def stop(self) -> None:
        """End the server."""
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
