"""What a team says is rendered before anything starts, by the command that trains, evaluates or fine-tunes."""

import json
import logging
import shutil

import pytest

import megatron_drmas.workflows  # noqa: F401  registers
from megatron_drmas import sft
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import compose_config
from megatron_drmas.environments.base import ENVIRONMENTS
from megatron_drmas.team.team import Team
from megatron_drmas.validate import validate
from megatron_drmas.validate_templates import rehearse
from tools.tiny_team.models import POLICIES, build_model, save_policy
from tools.tiny_team.tokenizer import CHAT_TEMPLATE

WITHOUT_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHAT_TEMPLATE
)
SILENT = CHAT_TEMPLATE.replace("in messages", "in messages if message['role'] != 'system'")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("team")
    for policy in POLICIES:
        save_policy(build_model(policy, seed=0), folder / policy)
    for name in ("train", "eval"):
        (folder / f"{name}.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    (folder / "corpus.jsonl").write_text('{"id": "0", "contents": "c"}\n')
    return folder


@pytest.fixture
def team_dir(tmp_path, source):
    return shutil.copytree(source, tmp_path / "team")


def change(path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def check(folder, *overrides: str) -> None:
    validate(compose_config("search_hetero", [f"variables.tiny_team={folder}", f"output_dir={folder}/outputs", *overrides]))


@pytest.mark.parametrize(
    "template, overrides, message",
    [
        (
            WITHOUT_SYSTEM,
            ["team.agents.search.system='Be brief.'"],
            "team.agents.search.system = 'Be brief.': policy 'llama' .* cannot render system . user",
        ),
        (
            SILENT,
            ["team.agents.search.system='Be brief.'"],
            "team.agents.search.system = 'Be brief.': policy 'llama' .* leaves out what the system says",
        ),
        ("{{ raise_exception('no') }}", [], "policies.llama.model = .*cannot render user messages .*no"),
        ("{{ nosuch.content }}", [], "policies.llama.model = .*cannot render user messages .*nosuch"),
        ("{% for", [], "policies.llama.model = .*not Jinja"),
        (
            CHAT_TEMPLATE,
            ["+policies.llama.template_options.enable_thinkng=false"],
            "policies.llama.template_options.enable_thinkng = False: the chat template never",
        ),
        (CHAT_TEMPLATE, ["rollout.max_prompt_tokens=3"], "rollout.max_prompt_tokens = 3: the prompt of agent 'verifier' has"),
        (CHAT_TEMPLATE, ["rollout.top_p=0.5"], "rollout.top_p = 0.5: training computes log-probs over the whole vocabulary"),
        (CHAT_TEMPLATE, ["rollout.temperature=0.005"], "rollout.temperature = 0.005: is too small"),
        (
            CHAT_TEMPLATE,
            ["team.agents.answer.prompt='{{ question }} {{ history[0].nosuch }}'"],
            "team.agents.answer.prompt: cannot be rendered",
        ),
        (
            CHAT_TEMPLATE,
            ["team.agents.search.prompt='{% for s in history %}{{ s.qery }}{% endfor %}'"],
            "team.agents.search.prompt: cannot be rendered: .*qery",
        ),
    ],
)
def test_a_team_that_cannot_speak_is_refused(team_dir, template, overrides, message):
    change(team_dir / "llama" / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ConfigError, match=message) as caught:
        check(team_dir, *overrides)
    assert "\n" not in str(caught.value)


def test_a_token_beyond_the_model_is_refused(team_dir):
    tokenizer = json.loads((team_dir / "llama" / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        tokenizer["added_tokens"][-1]
        | {"id": max(t["id"] for t in tokenizer["added_tokens"]) + 1, "content": "<|turn|>", "special": True}
    )
    (team_dir / "llama" / "tokenizer.json").write_text(json.dumps(tokenizer))
    change(team_dir / "llama" / "tokenizer_config.json", chat_template="<|turn|>" + CHAT_TEMPLATE)
    with pytest.raises(ConfigError, match=r"policies.llama.model = .*<\|turn\|>.*vocab_size"):
        check(team_dir)


def test_sources_that_disagree_on_the_stop_token_are_reported(team_dir, caplog):
    for file in ("config.json", "generation_config.json"):
        change(team_dir / "qwen2" / file, eos_token_id=0)
    with caplog.at_level(logging.WARNING):
        check(team_dir)
    assert [record.message for record in caplog.records] == [
        "policies.qwen2: the sources disagree on what ends a response (generation_config.json says 0, config.json says 0, the "
        "tokenizer says 1, the chat template says 1): <|endoftext|> (0) or <|end|> (1) will"
    ]


def test_a_control_token_in_a_prompt_of_the_recipe_is_said(team_dir, caplog):
    with caplog.at_level(logging.WARNING):
        check(team_dir, "team.agents.answer.prompt='{{ question }}<|end|><|assistant|>yes'")
    assert "team.agents.answer.prompt spells control tokens of its policy (<|assistant|> <|end|>)" in caplog.text


@pytest.mark.parametrize(
    "recipe, team",
    [
        ("search_hetero", "search_tiny"),
        ("search_hetero", "search_tiny_rare"),
        ("math", "math"),
        ("math", "math_eval_opt"),
        ("math", "math_voting"),
        ("math", "math_orch_workers"),
    ],
)
def test_a_rehearsal_hears_every_agent_with_and_without_history(recipe, team):
    config = compose_config(recipe, [f"team={team}"])
    prompts = rehearse(Team.from_config(config.team), ENVIRONMENTS[config.environment.name].tools())
    assert prompts.keys() == config.team.agents.keys()
    if team in ("search_tiny", "math", "math_eval_opt"):
        assert all(len({str(messages) for messages in heard}) > 1 for heard in prompts.values())


@pytest.mark.parametrize(
    "template, override, row, message",
    [
        (
            WITHOUT_SYSTEM,
            None,
            {"messages": [{"role": role, "content": role} for role in ("system", "user", "assistant")]},
            "data = .*line 2: .*cannot render system",
        ),
        (
            SILENT,
            None,
            {"messages": [{"role": role, "content": role} for role in ("system", "user", "assistant")]},
            "data = .*line 2: .*leaves out what the system",
        ),
        (CHAT_TEMPLATE, "+policy.template_options.enable_thinkng=false", {}, "policy.template_options.enable_thinkng = False"),
    ],
)
def test_fine_tuning_refuses_the_same(team_dir, template, override, row, message, monkeypatch, capsys):
    change(team_dir / "llama" / "tokenizer_config.json", chat_template=template)
    good = {"prompt": "a", "response": "b"}
    (team_dir / "examples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (good, row or good)))
    overrides = [
        f"policy.model={team_dir}/llama",
        f"data={team_dir}/examples.jsonl",
        f"output_dir={team_dir}/out",
        "steps=20",
        *([override] if override else []),
    ]
    monkeypatch.setattr("sys.argv", ["sft", *overrides])
    assert sft.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("sft: ") and error.count("\n") == 1
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(error.removeprefix("sft: ").strip(), None, "", "")
