"""Both ends of a fork server's socket: the process that Ray starts as a worker, and the server that forks the worker for it.

    driver ── server (has imported) ── worker, worker, …
    driver ── raylet ── client, client, …                 a client and its worker end together

    python forking.py worker SOCKET SCRIPT ARGUMENT…          the client: Python's own modules only, so that it starts at once
    python -m megatron_drmas.cluster.forking serve SOCKET MODULE…

The server ends when its standard input does, and its workers with it.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def request_worker(path: str, command: list[str]) -> int:
    """Have the server fork a worker that does what this process was started for, and wait for its end.

    Args:
        path: of the server's socket.
        command: a Python script and its arguments.

    Returns:
        The worker's exit code; 1 where the server has ended before the worker.
    """
    request = {
        "command": command,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "oom_score": Path("/proc/self/oom_score_adj").read_text(),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [b"0"], [0, 1, 2])
        connection.sendall(json.dumps(request).encode() + b"\n")
        code = connection.recv(1)
    return code[0] if code else 1


class Server:
    """Forks a worker for each connection until standard input ends."""

    def __init__(self, path: Path):
        self._workers: dict[int, socket.socket] = {}  # by process id
        self._selector = selectors.PollSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{path}.new")
        self._listener.listen()
        os.rename(f"{path}.new", path)  # only now: a client that finds it is answered

    def run(self) -> dict[str, Any] | None:
        """Returns a request, in the process that has been forked for it; None in the server, at the end."""
        woken, wakes = socket.socketpair()
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    return None
                if key.fileobj is woken:
                    woken.recv(4096)
                    self._reap()
                if key.fileobj is self._listener:
                    request = self._fork()
                    if request is not None:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for connection in (woken, wakes, self._listener, *self._workers.values()):
                            connection.close()
                        return request
                if key.data in self._workers:  # its client has ended
                    self._selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)

    def _fork(self) -> dict[str, Any] | None:
        connection, _ = self._listener.accept()
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        with connection.makefile("rb") as file:
            content = file.readline()
        if len(streams) != 3 or not content.endswith(b"\n"):  # the client has ended meanwhile
            connection.close()
            for stream in streams:
                os.close(stream)
            return None
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            connection.close()
            _end_with(server)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return json.loads(content)
        for stream in streams:
            os.close(stream)
        self._workers[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, pid)
        return None

    def _reap(self) -> None:
        while self._workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self._workers.pop(pid)
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.send(bytes([os.waitstatus_to_exitcode(status) & 0xFF]))
            connection.close()


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _become(request: dict[str, Any]) -> None:
    """Go on as the process that made the request."""
    os.setpgid(0, 0)  # Ray ends the group of a worker that has died
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    Path("/proc/self/oom_score_adj").write_text(request["oom_score"])
    sys.argv = request["command"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


def preload(modules: list[str]) -> None:
    """Import.

    Raises:
        RuntimeError: it has started threads.
    """
    # Ray reads its worker's variables when it is imported, so that each worker must do it; what asks for it here (vLLM, for an
    # executor that engines do not use) learns that it is not there.
    sys.modules["ray"] = None  # type: ignore[assignment]
    for module in modules:
        importlib.import_module(module)
    del sys.modules["ray"]
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"{threads} threads after importing {', '.join(modules)}: this process cannot be forked")
    gc.collect()
    gc.freeze()  # a collection in a worker would write to, and so copy, what it shares


def serve(path: str, modules: list[str]) -> None:
    """Import, then be a server, and in its forks their workers."""
    try:
        preload(modules)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # threads that the imports have started are not waited for
    request = Server(Path(path)).run()
    if request is not None:
        return _become(request)
    os.unlink(path)
    os.rmdir(os.path.dirname(path))
    os._exit(0)  # nothing of what it imported was used: there is nothing to take down


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        sys.exit(request_worker(sys.argv[2], sys.argv[3:]))
    serve(sys.argv[2], sys.argv[3:])
