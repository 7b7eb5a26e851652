"""What the terminal shows: little, in a log file; and the memory of the process tree."""

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from megatron_drmas.observability.memory import MemorySampler, tree_bytes
from megatron_drmas.observability.progress import PLAIN_EVERY_S, Progress, closing_lines

MIB = 2**20


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("step_seconds", [0.5, 7.0, 100.0])
def test_a_log_file_gets_a_line_now_and_then(step_seconds):
    clock, out = Clock(), io.StringIO()
    progress = Progress("team", 100, Console(file=out), clock)
    progress.phase("start engines")
    progress.started(8.0, {"start engines": 8.0})
    before = out.getvalue().count("\n")
    for step in range(1, 101):
        for phase in ("generate", "update"):
            progress.phase(phase)
        clock.now += step_seconds
        progress.step({"step": step, "reward": 0.5, "success": 0.5}, step_seconds)
    progress.close()
    lines = out.getvalue().splitlines()[before:]
    assert 1 <= len(lines) <= 100 * step_seconds / PLAIN_EVERY_S + 1
    assert lines[-1].startswith("step 100/100") and "0:00:00 left" in lines[-1]
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_one_live_line_that_goes_away():
    out = io.StringIO()
    progress = Progress("team", 4, Console(file=out, force_terminal=True, width=120))
    progress.phase("generate")
    progress.step({"step": 1, "reward": None, "success": 0.0}, 2.0)
    progress.note("warning: [bold]not markup[/bold]")
    progress._bars.refresh()
    assert "team · generate" in out.getvalue() and "1/4" in out.getvalue() and "0:00:06 left" in out.getvalue()
    progress.close()
    assert "[bold]not markup[/bold]" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")


def test_the_last_lines_say_what_was_learned_and_where_things_lie():
    sampled = {"questions": 300, "reward": {"before": -0.25, "after": 1.5}, "success": {"before": 0.25, "after": 0.7}}
    greedy = {"questions": 300, "reward": {"before": None, "after": 1.0}, "success": {"before": None, "after": 0.75}}
    summary = {
        "name": "team",
        "status": "finished",
        "step": 4,
        "steps": 4,
        "evaluation": {"sampled": sampled, "greedy": greedy, "other": None},
    }
    assert closing_lines(summary, {"report": "out/report.html"}) == [
        "team: finished after 4 of 4 steps",
        "reward, sampled: -0.250 → 1.500 (+1.750) on 300 held-out questions",
        "success, sampled: 0.250 → 0.700 (+0.450) on 300 held-out questions",
        "report  out/report.html",
    ]


def test_figures_that_are_the_same_share_a_line():
    found = {"questions": 8, "reward": {"before": 0.25, "after": 0.5}, "success": {"before": 0.25, "after": 0.5}}
    summary = {"name": "team", "status": "finished", "step": 4, "steps": 4, "evaluation": {"greedy": found}}
    assert closing_lines(summary, {})[1:] == ["reward and success, greedy: 0.250 → 0.500 (+0.250) on 8 held-out questions"]


CHILD = """
import os, sys
block = bytearray(os.urandom(1)) * (96 * 2**20)
if sys.argv[1] == "fork" and os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("mode", ["alone", "fork"])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells how pages are shared")
def test_memory_of_children_counts_and_shared_pages_count_once(mode):
    before = tree_bytes(os.getpid())
    with subprocess.Popen([sys.executable, "-c", CHILD, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        grown = tree_bytes(os.getpid()) - before
        sampler = MemorySampler(interval_s=0.01)
        while not sampler.peak_bytes:
            sampler._stop.wait(0.01)
        child.stdin.close()
    sampler.stop()
    assert 90 * MIB < grown < 160 * MIB
    assert sampler.peak_bytes > before + 80 * MIB
    assert tree_bytes(os.getpid()) < before + grown - 45 * MIB, "the child's pages are gone"


def test_a_process_that_is_gone_counts_nothing():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    assert tree_bytes(child.pid) == 0
