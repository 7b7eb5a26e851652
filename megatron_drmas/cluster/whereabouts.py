"""Where a process of the run is, and what it is doing: answered by a thread of its own, also while its work keeps it busy.

A process that is stopped, or whose machine is gone, answers nothing.  One that waits for other ranks says so, which tells a rank
that is stuck from those that wait for it.
"""

import asyncio
import contextlib
import hmac
import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType

import psutil
import ray

TOKEN_BYTES = 32
ANSWER_TIMEOUT_S = 10.0  # of a thread that needs the interpreter for an instant
ENDING_TIMEOUT_S = 50.0  # for a killed group to be gone, and its memory with it
ENDING_POLL_S = 0.1
WAITING = (
    "torch/distributed/",
    "megatron/core/pipeline_parallel/",
    "megatron/core/tensor_parallel/",
    "megatron/core/distributed/",
)
OURS = ("megatron_drmas/", "checkpoints_conv/")


@dataclass(frozen=True)
class Whereabouts:
    """Of one process.

    Attributes:
        node: Ray's id of its machine.
        group: process group, of which it is the leader; None where it leads none.
        host, port: where its thread answers.
    """

    node: str
    group: int | None
    host: str
    port: int


@dataclass(frozen=True)
class Doing:
    """What a process's main thread does.

    Attributes:
        place: innermost function, its file and line; and the innermost of this repository's, where that is another.
        waits: it is in a collective, or otherwise waits for another rank.
    """

    place: str
    waits: bool


def answer_questions(host: str, token: bytes) -> int:
    """Start the thread that tells who knows the token what the main thread is doing; returns its port."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    main = threading.main_thread().ident

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(ANSWER_TIMEOUT_S)
                if hmac.compare_digest(connection.recv(TOKEN_BYTES, socket.MSG_WAITALL), token):
                    doing = describe(sys._current_frames()[main]) if main is not None else Doing("", False)
                    connection.sendall(json.dumps([doing.place, doing.waits]).encode())

    threading.Thread(target=serve, name="whereabouts", daemon=True).start()
    return int(listener.getsockname()[1])


def describe(frame: FrameType) -> Doing:
    """What a thread with this innermost frame does."""
    frames: list[FrameType] = []
    inner: FrameType | None = frame
    while inner is not None:
        frames.append(inner)
        inner = inner.f_back
    own = next((each for each in frames if any(part in each.f_code.co_filename for part in OURS)), frame)
    place = _place(frame) if own is frame else f"{_place(frame)}, called by {_place(own)}"
    return Doing(place, any(part in frame.f_code.co_filename for part in WAITING))


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno})"


async def ask(where: Whereabouts, token: bytes, timeout_s: float = ANSWER_TIMEOUT_S) -> Doing | None:
    """What a process is doing; None if it does not answer."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(where.host, where.port)
            try:
                writer.write(token)
                return Doing(*json.loads(await reader.read()))
            finally:
                writer.close()
    except (OSError, ValueError, TypeError):  # TimeoutError is an OSError
        return None


async def kill_group(where: Whereabouts) -> None:
    """Kill a process with all that it has started, stopped ones too, and wait until they are gone."""
    if where.group is None:
        return
    if where.node == ray.get_runtime_context().get_node_id():
        await asyncio.to_thread(_kill_group_here, where.group)
        return
    on_its_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(where.node, soft=False)
    task = ray.remote(_kill_group_here).options(num_cpus=0, scheduling_strategy=on_its_node)
    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # its node is gone, and it with it
        ref = task.remote(where.group)
        await asyncio.wait_for(asyncio.wrap_future(ref.future()), ENDING_TIMEOUT_S + ANSWER_TIMEOUT_S)


def _kill_group_here(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + ENDING_TIMEOUT_S
    while _alive(group) and time.monotonic() < deadline:
        time.sleep(ENDING_POLL_S)


def _alive(group: int) -> bool:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
