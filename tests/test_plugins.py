"""One file outside the package brings a transport, an estimator, a tool, an environment and a workflow; a run uses them all."""

import asyncio
import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from megatron_drmas.algorithm.advantages import compute_advantages
from megatron_drmas.algorithm.estimators import ESTIMATORS
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import compose_config
from megatron_drmas.config.schema import EnvironmentConfig
from megatron_drmas.config.setting import EXTENSIONS
from megatron_drmas.data.questions import Question
from megatron_drmas.environments.base import ENVIRONMENTS
from megatron_drmas.rollout.collate import collate
from megatron_drmas.team.team import Team
from megatron_drmas.team.tool import TOOLS
from megatron_drmas.team.trajectory import Trajectory, Turn
from megatron_drmas.team.workflow import WORKFLOWS
from megatron_drmas.validate import validate
from megatron_drmas.weight_sync.synchronize import EngineCalls, SenderCalls, synchronize
from megatron_drmas.weight_sync.transport import TRANSPORTS, Route, choose_transport
from megatron_drmas.weight_sync.verify import digest

PLUGIN = '''
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_drmas.algorithm.estimators import register_estimator
from megatron_drmas.config.schema import EnvironmentConfig
from megatron_drmas.config.setting import setting
from megatron_drmas.environments.base import Environment, register_environment
from megatron_drmas.team.tool import register_tool, tool
from megatron_drmas.team.trajectory import Outcome
from megatron_drmas.team.workflow import Workflow, register_workflow
from megatron_drmas.weight_sync.sender import BucketSender
from megatron_drmas.weight_sync.transport import Transport, register_transport
from megatron_drmas.weight_sync.verify import digest

MAIL = Path(__file__).parent / "mail"


class FileSender(BucketSender):
    """A bucket is a safetensors file."""

    sent = 0

    def _send(self, bucket):
        MAIL.mkdir(exist_ok=True)
        path = MAIL / f"{id(self)}_{self.sent}.safetensors"
        self.sent += 1
        tensors = {name: tensor.detach().to(self._dtype or tensor.dtype, copy=True) for name, tensor in bucket}
        if self._verify:
            self.digests |= {name: digest(tensor) for name, tensor in tensors.items()}
        save_file(tensors, path)
        return {"path": str(path)}

    def close(self):
        """Files stay, for the test to count."""


@register_transport("files")
class FileTransport(Transport):
    @classmethod
    def objection(cls, route):
        return None if route.device == "cpu" else "files are for CPUs"

    @classmethod
    def engine_class(cls):
        from vllm.distributed.weight_transfer.base import (
            WeightTransferEngine,
            WeightTransferInitInfo,
            WeightTransferUpdateInfo,
        )

        @dataclass
        class UpdateInfo(WeightTransferUpdateInfo):
            names: list[str]
            dtype_names: list[str]
            shapes: list[list[int]]
            path: str

        class FileEngine(WeightTransferEngine):
            init_info_cls, update_info_cls = WeightTransferInitInfo, UpdateInfo

            def init_transfer_engine(self, init_info):
                pass

            def start_weight_update(self):
                pass

            def receive_weights(self, update_info):
                self.model.load_weights(load_file(update_info.path).items())

            def finish_weight_update(self):
                pass

            def shutdown(self):
                pass

        return FileEngine

    def sender(self, tensors, bucket_bytes, dtype, publish, verify):
        return FileSender(tensors, bucket_bytes, dtype, publish, verify)


@register_estimator("alternate")
def alternate(scores, batch, config):
    """Every other row is good."""
    return 1.0 - 2.0 * (torch.arange(len(scores)) % 2).float()


@register_tool("length", timeout_s=1.0)
async def length(text: str) -> int:
    return len(text)


@register_environment("echo")
class Echo(Environment):
    @dataclass
    class Config(EnvironmentConfig):
        bonus: float = setting("What any answer earns", 0.5, minimum=0)

    @tool("shout")
    async def shout(self, question, text: str) -> str:
        return f"{text} {question.answers[0]}".upper()

    async def reward(self, question, outcome):
        return self.config.bonus + (outcome.answer in question.answers)

    def success(self, question, outcome, reward):
        return reward > self.config.bonus


@register_workflow("ask_and_measure")
class AskAndMeasure(Workflow):
    agents = {"solver": ("question", "shouted")}
    tools = ("length", "shout")
    answering = ("solver",)

    async def run(self, context, question):
        shouted = await context.tool("shout", text=question.text)
        turn = await context.call("solver", question=question.text, shouted=shouted)
        return Outcome(turn.content, {"length": await context.tool("length", text=turn.text)})
'''
RECIPE = """
defaults:
  - schema
  - policy@policies.qwen2: tiny
  - algorithm: dr_mas
  - precision: fp32
  - _self_
name: borrowed
plugins: [everything.py]
steps: 1
questions_per_step: 2
group_size: 2
policies:
  qwen2: {model: "???"}
team:
  workflow: {name: ask_and_measure}
  agents:
    sam: {role: solver, policy: qwen2, tag: answer, prompt: "answerer question: {{ question }} answerer:"}
environment: {name: echo, bonus: 0.25}
algorithm: {advantage: {estimator: alternate}}
cluster: {transport: files}
data: {train: "???", eval: "???"}
rollout: {max_prompt_tokens: 96, max_response_tokens: 8}
"""
QUESTION = Question("0", "who ?", ("bo",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The plug-in and its recipe; what it registers is gone afterwards."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "everything.py").write_text(PLUGIN)
    (folder / "borrowed.yaml").write_text(RECIPE)
    registries = (ENVIRONMENTS, EXTENSIONS[EnvironmentConfig], ESTIMATORS, TOOLS, TRANSPORTS, WORKFLOWS)
    before = [dict(registry) for registry in registries]
    yield folder
    for registry, names in zip(registries, before):
        registry.clear()
        registry.update(names)
    sys.modules.pop("everything", None)


@pytest.fixture(scope="module")
def config(folder):
    return compose_config("borrowed", ["policies.qwen2.model=m", "data.train=t", "data.eval=e"], folder)


def test_the_configuration_is_valid_and_the_names_are_known(config):
    assert validate(config, files=False, machine=False) == []


@pytest.mark.parametrize(
    "override, problem",
    [
        ("environment.bonus=-1", "environment.bonus = -1.0: is too small"),
        ("environment.bonus=much", "environment.bonus = 'much': is not a number"),
        ("environment.bonnus=1", "did you mean environment.bonus"),
    ],
)
def test_the_settings_that_the_environment_brings_are_checked(folder, override, problem):
    with pytest.raises(ConfigError, match=problem):
        settings = ["policies.qwen2.model=m", "data.train=t", "data.eval=e", override]
        validate(compose_config("borrowed", settings, folder), files=False, machine=False)


def test_the_team_uses_the_tools_and_the_environment(config):
    environment = ENVIRONMENTS["echo"](config.environment)

    class Context:
        async def call(self, role, question, shouted):
            assert shouted == "WHO ? BO"
            return Turn("sam", "qwen2", 0, [], [0], [0], [0.0], 8, "stop", [(0, 1)], "it is bo", "bo")

        async def tool(self, name, **arguments):
            return await environment.call_tool(name, QUESTION, arguments)

    outcome = asyncio.run(Team.from_config(config.team).workflow.run(Context(), QUESTION))
    reward = asyncio.run(environment.reward(QUESTION, outcome))
    assert reward == 1.25 and environment.success(QUESTION, outcome, reward) and not environment.success(QUESTION, outcome, 0.25)
    assert outcome.info == {"length": 8}


def test_the_estimator_gives_the_advantages(config):
    turn = Turn("sam", "qwen2", 0, [], [5], [7, 8], [-0.1, -0.2], 8, "stop", [(0, 2)], "bo", "bo")
    group = [Trajectory(QUESTION, 0, sample, [turn], reward=float(sample)) for sample in range(3)]
    batch = collate(group, ("sam",), ("qwen2",), {"sam"})
    advantages = compute_advantages(batch, config.algorithm)
    assert advantages[batch.response_offsets[:-1]].tolist() == [1.0, -1.0, 1.0]


def test_the_transport_brings_every_tensor_once(config, folder):
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{index}": torch.randn(3, index + 1, generator=generator) for index in range(5)}
    transport = choose_transport(config.cluster.transport, Route("cpu", False, 1), "qwen2")()
    sender = transport.sender(iter(tensors.items()), 100, torch.bfloat16, publish=True, verify=True)
    loaded: list[tuple[str, torch.Tensor]] = []

    async def answer(function, *args):
        return function(*args)

    def end():
        sender.close()
        return sender.digests

    senders = [
        SenderCalls("rank 0", partial(answer, lambda verify: None), partial(answer, sender.next_bucket), partial(answer, end))
    ]
    engine = EngineCalls(
        "engine 0",
        partial(answer, lambda: None),
        partial(answer, lambda info: loaded.extend(load_file(info["path"]).items())),
        partial(answer, lambda version: None),
        partial(answer, lambda: {name: digest(tensor) for name, tensor in loaded}),
    )
    stats = asyncio.run(synchronize(senders, [engine], 1, 10.0, verify=True))
    assert stats.verified and stats.buckets > 1 and sorted(name for name, _ in loaded) == sorted(tensors)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_step_is_trained_with_all_of_them(folder, tiny_team, tmp_path, repository):
    command = [sys.executable, "-m", "megatron_drmas.train", "--config-dir", str(folder), "--config-name", "borrowed"]
    overrides = [f"policies.qwen2.model={tiny_team}/qwen2", f"output_dir={tmp_path}", "evaluation.before=false"]
    overrides += [f"data.{part}={tiny_team}/{part}.jsonl" for part in ("train", "eval")] + ["evaluation.after=false"]
    done = subprocess.run(
        [*command, *overrides], cwd=repository, capture_output=True, text=True, env={**os.environ, "RAY_ADDRESS": ""}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "borrowed" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in lines if line["kind"] == "step"]
    assert step["agents"]["sam"]["advantage_std"] == 1.0 and step["workflow"]["length"] > 0 and step["reward"] >= 0.25
    assert list((folder / "mail").iterdir()), "the weights went through files"
