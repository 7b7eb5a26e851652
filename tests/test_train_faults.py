"""Whole runs whose retrieval server fails: the result is the undisturbed one's, or the run stops and says why."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import psutil
import pytest

from megatron_drmas.config.load import compose_config
from megatron_drmas.data.questions import load_questions
from megatron_drmas.evaluate import evaluate_team
from megatron_drmas.observability.health import UnhealthyRun
from megatron_drmas.team.trajectory import Trajectory

SMALL = (
    "steps=3",
    "questions_per_step=4",
    "group_size=4",
    "evaluation.before=false",
    "evaluation.after=false",
    "checkpoint.every=2",
    "checkpoint.export=false",
    "deterministic=true",
)
SERVER = "megatron_drmas.environments.retrieval_server"


@pytest.fixture(scope="module")
def train(tiny_team, tmp_path_factory, repository):
    """Run the command, and `fault(process)` after its first step; the exit code, what it said, and its folder."""
    output_dir = tmp_path_factory.mktemp("runs")

    def run(name, *overrides, fault=None):
        command = [
            sys.executable,
            "-m",
            "megatron_drmas.train",
            f"name={name}",
            f"output_dir={output_dir}",
            f"variables.tiny_team={tiny_team}",
        ]
        folder, said = output_dir / name, output_dir / f"{name}.log"
        with open(said, "w") as log:
            process = subprocess.Popen(
                [*command, *SMALL, *overrides],
                cwd=repository,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RAY_ADDRESS": ""},
            )
            while process.poll() is None:
                time.sleep(0.02)
                if fault and steps(folder):
                    fault(process)
                    fault = None
        return process.returncode, said.read_text(), folder

    return run


@pytest.fixture(scope="module")
def undisturbed(train):
    code, said, folder = train("undisturbed")
    assert code == 0, said
    return folder


def steps(folder):
    """What each step measured, without its times."""
    path = folder / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {
        line["step"]: {key: line[key] for key in ("reward", "agents", "policies", "health")}
        for line in lines
        if line["kind"] == "step"
    }


def kill_server(process):
    (server,) = (child for child in psutil.Process(process.pid).children(recursive=True) if SERVER in child.cmdline())
    server.kill()


@contextlib.contextmanager
def remote_server(tiny_team, repository):
    """A server behind a proxy; yields its address, and a function that turns every n-th answer, from then on, into HTML."""
    command = [sys.executable, "-m", SERVER, "--corpus", str(tiny_team / "corpus.jsonl")]
    behind = subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, text=True)
    address, lies, asked = behind.stdout.readline().strip(), [], []

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(body)
            kind, answer = "text/html", b"<html>Please log in</html>"
            if not lies or len(asked) % lies[0]:
                request = urllib.request.Request(f"{address}/retrieve", body, {"Content-Type": "application/json"})
                kind, answer = "application/json", urllib.request.urlopen(request).read()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}", lies.append
    finally:
        proxy.shutdown()
        proxy.server_close()
        behind.kill()
        behind.wait()


@pytest.mark.parametrize("failed, counts", [(10, False), (9, True)])
def test_an_evaluation_that_lost_half_of_its_trajectories_does_not_count(tmp_path, failed, counts):
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps({"question": f"q{i}", "answer": "a"}) + "\n" for i in range(20)))
    config = compose_config("search_hetero", [f"data.eval={tmp_path / 'eval.jsonl'}", "evaluation.greedy=false"])

    class Collector:
        async def collect(self, questions, samples, sampling):
            failures = ["retrieval"] * failed + [None] * (20 - failed)
            return [
                Trajectory(each, group, 0, failure=failures[group], failure_detail="gone") for group, each in enumerate(questions)
            ]

        def __init__(self):
            self.tokenizers = {}

    log = SimpleNamespace(
        evaluated=lambda *_: False,
        phase=lambda _: contextlib.nullcontext(),
        contained=lambda _: contextlib.nullcontext(),
        log_evaluation=lambda *found: logged.append(found),
    )
    logged = []
    questions = load_questions(config.data.eval, "data.eval")
    work = evaluate_team(SimpleNamespace(config=config, collector=Collector()), log, questions, 0)
    if counts:
        asyncio.run(work)
        assert logged[0][0].trajectories == 20 and logged[0][0].masked == {"retrieval": failed}
    else:
        with pytest.raises(
            UnhealthyRun, match="the sampled evaluation after 0 steps does not count: 10 of 20 trajectories were masked"
        ):
            asyncio.run(work)
        assert not logged


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_while_a_checkpoint_is_written_goes_on_from_the_one_before(train, undisturbed, tmp_path):
    """On a disk on which each of a checkpoint's files takes two seconds."""
    (tmp_path / "slow_disk.py").write_text(
        "import os, time\n"
        "fsync = os.fsync\n"
        "def slow(file):\n"
        "    time.sleep(2.0 * os.readlink(f'/proc/self/fd/{file}').endswith('.distcp'))\n"
        "    fsync(file)\n"
        "os.fsync = slow\n"
    )
    checkpoints = undisturbed.with_name("killed_writing") / "checkpoints"

    def kill(process):
        while not (list(checkpoints.glob(".partial_step_000002/*/*.distcp")) and (checkpoints / "step_000001").exists()):
            assert process.poll() is None and not (checkpoints / "step_000002").exists()
            time.sleep(0.02)
        process.kill()

    _, _, folder = train("killed_writing", "checkpoint.every=1", f"plugins=[{tmp_path / 'slow_disk.py'}]", fault=kill)
    assert [path.name for path in checkpoints.glob("step_*")] == ["step_000001"]
    code, said, _ = train("killed_writing")
    assert code == 0 and steps(folder) == steps(undisturbed), said
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_000002", "step_000003"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_server_that_fails_changes_no_bit_or_stops_the_run(train, undisturbed, tiny_team, repository):
    code, said, folder = train("killed", fault=kill_server)
    assert code == 0 and steps(folder) == steps(undisturbed)
    assert json.loads((folder / "summary.json").read_text())["restarts"] == {"retrieval server": 1}
    assert "restart: retrieval server (it ended with code -9)" in said

    code, said, folder = train("never_again", "environment.retrieval.restarts=0", fault=kill_server)
    assert code == 1 and "train: retrieval server: it ended with code -9" in said and "Traceback" not in said
    assert (folder / "checkpoints" / "step_000001").is_dir(), "the step that was done is not lost"

    with remote_server(tiny_team, repository) as (url, lie):
        code, said, folder = train("flapping", f"environment.retrieval.url={url}", fault=lambda _: lie(2))
        assert code == 0 and steps(folder) == steps(undisturbed)
        assert f"retrieval at {url}/retrieve: lists of queries, return_scores=false" in said

    with remote_server(tiny_team, repository) as (url, lie):
        remote = (f"environment.retrieval.url={url}", "environment.retrieval.timeout_s=3")
        code, said, folder = train("lying", *remote, fault=lambda _: lie(1))
        assert code == 1 and list(steps(folder)) == [1] and "Traceback" not in said
        assert "train: step 2 is not trained on: " in said and "answered 200 with text/html that is not JSON" in said
        assert "then the same command continues from step_000001" in said
        assert "step 2 is not trained on" in (folder / "report.html").read_text()

    code, said, folder = train("lying")  # its own server now
    assert code == 0 and steps(folder) == steps(undisturbed)


@pytest.mark.slow
def test_a_grader_that_cannot_start_ends_the_run_by_its_name(train):
    one_agent = ("team=math_single", "team.agents.solver.policy=qwen2", "~policies.llama", "~policy@policies.llama")
    code, said, folder = train(
        "grader", *one_agent, "environment.name=math", "~environment.retrieval", "environment.grader.memory_mib=16"
    )
    assert (
        code == 1
        and "train: a grading worker did not start with environment.grader.memory_mib=16" in said
        and "Traceback" not in said
    )
    assert json.loads((folder / "summary.json").read_text())["status"].startswith("failed: GraderError")
