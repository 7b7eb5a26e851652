"""What is started again and how often; and which rank is named when several that work together fail."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from megatron_drmas.cluster import supervision, whereabouts
from megatron_drmas.cluster.process import ProcessFailure, ProcessLost, ProcessSilent
from megatron_drmas.cluster.supervision import Restarts, RestartsExhausted, on_all_ranks
from megatron_drmas.cluster.whereabouts import Doing, Whereabouts, answer_questions, ask, describe

TOKEN = b"t" * whereabouts.TOKEN_BYTES
IN_COLLECTIVE, AT_WORK = Doing("all_reduce", True), Doing("pack_rows (packing.py:9)", False)


def test_restarts_are_counted_by_engine_and_end_with_the_name():
    restarts = Restarts(2)
    for engine in ("engine 0", "engine 1"):
        for _ in range(2):
            restarts.engine(engine, "died")
    with pytest.raises(RestartsExhausted, match=r"engine 1: died; it was started again 2 times \(cluster.restarts\)"):
        restarts.engine("engine 1", "engine 1: died")
    with pytest.raises(RestartsExhausted, match="0 times"):
        Restarts(0).team(3, "actor 1: died")


def test_three_returns_without_a_new_step_end_the_run_and_progress_forgives():
    restarts = Restarts(99)
    for done in (5, 4, 5, 6, 6, 5):
        restarts.team(done, "actor 1: died")
    with pytest.raises(RestartsExhausted, match="actor 1: died; .* 3 times and never came beyond step 6"):
        restarts.team(6, "actor 1: died")


class Rank:
    def __init__(self, number, doing):
        self.name, self._doing = f"actor {number}", doing

    async def doing(self):
        return self._doing


def failed(*ranks):
    """What is raised for ranks given as (seconds, result or error, what it does)."""

    async def call(seconds, result):
        await asyncio.sleep(seconds)
        if isinstance(result, Exception):
            raise result
        return result

    async def main():
        calls = [call(seconds, result) for seconds, result, _ in ranks]
        return await on_all_ranks([Rank(number, doing) for number, (*_, doing) in enumerate(ranks)], "update", calls)

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    for name, seconds in {"GRACE_S": 0.1, "ASK_EVERY_S": 0.01, "SILENT_S": 0.1}.items():
        monkeypatch.setattr(supervision, name, seconds)


PEER = ProcessFailure("actor 0: update failed: RuntimeError: Connection closed by peer")
LATE = ProcessSilent("actor 0: update did not end in 9 s")


@pytest.mark.parametrize(
    "ranks, named",
    [
        ([(0, PEER, None), (0.05, ProcessLost("actor 1: died during update"), None)], "^actor 1: died"),
        ([(0, PEER, None), (9, 0, AT_WORK)], "^actor 1: stuck in pack_rows .*; 1 other rank waits for it"),
        ([(9, 0, IN_COLLECTIVE), (9, 0, None), (9, 0, IN_COLLECTIVE)], "^actor 1: no answer for 0.1 s during update"),
        ([(0, LATE, IN_COLLECTIVE), (0, LATE, AT_WORK), (0, LATE, IN_COLLECTIVE)], "^actor 1: stuck .*2 other ranks wait"),
        ([(0, LATE, IN_COLLECTIVE), (0, LATE, IN_COLLECTIVE)], "a collective hangs, .* actor 0 in all_reduce; actor 1 in"),
    ],
)
def test_the_rank_at_fault_is_named_and_can_be_replaced(ranks, named):
    with pytest.raises(ProcessLost, match=named):
        failed(*ranks)


def test_an_exception_of_the_program_is_no_lost_process():
    with pytest.raises(ProcessFailure, match="ValueError") as raised:
        failed((0, ProcessFailure("actor 0: update failed: ValueError: x"), AT_WORK), (0, 7, AT_WORK))
    assert not isinstance(raised.value, ProcessLost)
    assert failed((0.02, 1, AT_WORK), (0, 2, AT_WORK)) == [1, 2]


def test_a_process_says_what_its_main_thread_does_to_who_knows_the_token():
    port = answer_questions("127.0.0.1", TOKEN)
    where = Whereabouts("node", None, "127.0.0.1", port)
    found = []
    asking = threading.Thread(target=lambda: found.append(asyncio.run(ask(where, TOKEN))))
    asking.start()
    asking.join()
    assert "join (" in found[0].place or "wait" in found[0].place
    assert asyncio.run(ask(where, b"x" * len(TOKEN))) is None


def test_a_frame_of_a_collective_waits_and_names_who_called_it():
    scope = {}
    exec(compile("def all_reduce(inner):\n    return inner()", "/x/torch/distributed/distributed_c10d.py", "exec"), scope)
    exec(compile("def update(inner):\n    return inner()", "/x/megatron_drmas/actor/policy_actor.py", "exec"), scope)
    frame = scope["update"](lambda: scope["all_reduce"](sys._getframe))
    assert describe(frame) == Doing(
        "all_reduce (distributed/distributed_c10d.py:2), called by update (actor/policy_actor.py:2)", True
    )


def test_a_stopped_process_answers_nothing_and_its_whole_group_is_killed():
    code = (
        "import os, subprocess, sys, time\n"
        "from megatron_drmas.cluster.whereabouts import answer_questions\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"print(answer_questions('127.0.0.1', {TOKEN!r}), child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    port, child = map(int, process.stdout.readline().split())
    where = Whereabouts("node", process.pid, "127.0.0.1", port)
    assert "<module>" in asyncio.run(ask(where, TOKEN)).place
    os.kill(process.pid, signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    assert asyncio.run(ask(where, TOKEN, 0.3)) is None
    reaping = threading.Thread(target=process.wait)
    reaping.start()
    began = time.monotonic()
    whereabouts._kill_group_here(process.pid)
    assert time.monotonic() - began < whereabouts.ENDING_TIMEOUT_S
    reaping.join()
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # until init has reaped it
            os.kill(child, 0)
            time.sleep(0.05)
