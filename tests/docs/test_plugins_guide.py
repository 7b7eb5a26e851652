"""The guide's plug-in and recipe, word for word: they are checked, and a trajectory of theirs runs with its tool and reward."""

import asyncio
import re
import subprocess
import sys

import pytest

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import compose_config
from megatron_drmas.config.plugins import import_plugins
from megatron_drmas.data.questions import Question
from megatron_drmas.environments.base import ENVIRONMENTS
from megatron_drmas.team.team import Team
from megatron_drmas.team.tool import TOOLS
from megatron_drmas.team.trajectory import TrajectoryFailure, Turn
from megatron_drmas.team.workflow import WORKFLOWS

QUESTION = Question("0", "what is 2 + 3 ?", ("5",))


@pytest.fixture(scope="module", autouse=True)
def own_registries():
    """What the guide registers is gone for the tests that follow."""
    registries = (ENVIRONMENTS, WORKFLOWS, TOOLS)
    before = [dict(registry) for registry in registries]
    yield
    for registry, names in zip(registries, before):
        registry.clear()
        registry.update(names)
    sys.modules.pop("sums", None)


@pytest.fixture(scope="module")
def guide(repository, tmp_path_factory):
    """A folder with the guide's files."""
    folder = tmp_path_factory.mktemp("guide")
    text = (repository / "docs" / "plugins.md").read_text()
    for language, mark in (("python", "# sums.py"), ("yaml", "# mine/sums.yaml")):
        block = next(block for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) if block.startswith(mark))
        (folder / mark.rpartition("/")[2].removeprefix("# ")).write_text(block)
    (folder / "data.jsonl").write_text('{"question": "2 + 3", "answer": "5"}\n')
    return folder


@pytest.fixture(scope="module")
def config(guide):
    overrides = ["policies.both.model=m", f"data.train={guide}/data.jsonl", f"data.eval={guide}/data.jsonl"]
    return compose_config("sums", overrides, guide)


class Scripted:
    """A context whose agents say what they are told to; tools and grading are real."""

    use_turn_rewards = False

    def __init__(self, environment, **said):
        self.environment, self.said, self.prompts = environment, said, {}

    async def call(self, role, **variables):
        self.prompts[role] = variables
        return Turn(role, "both", len(self.prompts), [], [0], [0], [0.0], 8, "stop", [(0, 1)], self.said[role], self.said[role])

    async def tool(self, name, **arguments):
        return await self.environment.call_tool(name, QUESTION, arguments)


@pytest.mark.parametrize(
    "plan, report, value, reward",
    [("2 + 3", "5", "5", 1.0), ("2 + 3", "10", "5", 0.5), ("2 times", "5", "", 1.0), ("2", "x", "2", 0.0)],
)
def test_the_team_calls_its_tool_and_earns_its_reward(config, plan, report, value, reward):
    environment = ENVIRONMENTS["sums"](config.environment)
    context = Scripted(environment, planner=plan, reporter=report)
    outcome = asyncio.run(Team.from_config(config.team).workflow.run(context, QUESTION))
    assert context.prompts["reporter"] == {"question": QUESTION.text, "value": value}
    assert asyncio.run(environment.reward(QUESTION, outcome)) == pytest.approx(reward)


def test_agents_have_names_of_their_own(config):
    team = Team.from_config(config.team)
    assert team.of_role("planner").name == "ann" and team.of_role("reporter").name == "bob"


def test_the_command_checks_it_and_finds_the_plugin_beside_the_recipe(guide, tmp_path):
    """In a process of its own, in another working directory."""
    import os
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    command = [
        sys.executable,
        "-m",
        "megatron_drmas.train",
        "--config-dir",
        str(guide),
        "--config-name",
        "sums",
        "--print",
        "policies.both.model=m",
        "data.train=t",
        "data.eval=e",
        "environment.options.scale=2",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"{guide}/sums.py" in done.stdout
    wrong = subprocess.run(
        [*command[:-1], "environment.options.scal=2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (
        wrong.returncode == 2
        and "environment.options.scal" in wrong.stderr
        and "did you mean environment.options.scale?" in wrong.stderr
    )


@pytest.mark.parametrize(
    "text, problem",
    [
        ("import nothing_of_the_kind\n", "line 1: ModuleNotFoundError"),
        ("x = 1 / 0\n", "line 1: ZeroDivisionError"),
        ("def\n", "SyntaxError"),
        ("import sys\n\nsys.exit(3)\n", "line 3: SystemExit: 3"),
    ],
)
def test_a_plugin_that_fails_is_named_with_its_line(tmp_path, text, problem):
    (tmp_path / "broken_plugin.py").write_text(text)
    with pytest.raises(ConfigError, match=f"plugins.*broken_plugin.*{problem}"):
        import_plugins([str(tmp_path / "broken_plugin.py")])


@pytest.mark.parametrize("plugin", ["missing.py", "no_such_module_of_mine"])
def test_a_plugin_that_is_not_there_is_refused(plugin):
    with pytest.raises(ConfigError, match=plugin):
        import_plugins([plugin])


def test_a_tool_checks_its_arguments_and_its_time(config):
    with pytest.raises(TypeError, match="takes expression, not text"):
        asyncio.run(TOOLS["calculator"].call(QUESTION, {"text": "1"}))
    with pytest.raises(TypeError, match="expression = 1 is not of type str"):
        asyncio.run(TOOLS["calculator"].call(QUESTION, {"expression": 1}))
    from megatron_drmas.team.tool import Tool

    async def slow(expression: str) -> str:
        await asyncio.sleep(10)

    with pytest.raises(TrajectoryFailure, match=r"'slow' did not end in 0.01 s"):
        asyncio.run(Tool("slow", slow, 0.01).call(QUESTION, {"expression": ""}))
