"""A configuration that cannot work is refused in one line that names the key, the value and the remedy."""

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import CONFIG_DIR, compose_config, to_yaml
from megatron_drmas.validate import validate
from tools.tiny_team.models import POLICIES, build_model, save_policy

RECIPES = sorted(path.stem for path in CONFIG_DIR.glob("*.yaml"))


@pytest.fixture(scope="module")
def team_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("team")
    for policy in POLICIES:
        save_policy(build_model(policy, seed=0), folder / policy)
    (folder / "train.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    (folder / "eval.jsonl").write_text('{"question": "q", "answers": ["a", "b"]}\n')
    (folder / "corpus.jsonl").write_text('{"id": "0", "contents": "c"}\n')
    return folder


@pytest.fixture
def compose(team_dir):
    """Compose the default recipe on the small models of this module, and check it."""

    def checked(*overrides, folder=team_dir):
        config = compose_config("search_hetero", [f"variables.tiny_team={folder}", f"output_dir={folder}/outputs", *overrides])
        validate(config)
        return config

    return checked


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_validates_and_prints(recipe):
    config = compose_config(recipe, [])
    validate(config, files=False)
    assert f"name: {config.name}" in to_yaml(config)


@pytest.mark.parametrize(
    "text",
    [
        b"a: [1",
        b"- a",
        b"5",
        b"\xff\xfe",
        b"a: 1\n\tb: 2",
        b"a: 1\na: 2",
        b"defaults: 5",
        b"defaults:\n  - broken\n",
        b"a: &a {b: *a}",
    ],
)
def test_a_file_that_is_no_configuration_is_one_line(tmp_path, text):
    (tmp_path / "broken.yaml").write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        compose_config("broken", [], tmp_path)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


@pytest.mark.parametrize("override", ["algorithm=null", "team=null", "precision=null", "=5"])
def test_an_override_that_is_none_is_one_line(override):
    with pytest.raises(ConfigError) as caught:
        compose_config("search_hetero", [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("recipe", ["math", "math_4xh100"])
@pytest.mark.parametrize("team", ["math_eval_opt", "math_voting", "math_orch_workers"])
def test_the_math_recipes_take_other_teams(recipe, team):
    config = compose_config(recipe, [f"team={team}"])
    validate(config, files=False)
    assert {agent.policy for agent in config.team.agents.values()} == set(config.policies)


@pytest.mark.parametrize(
    "team, agent",
    [
        ("math", "solver"),
        ("math_single", "solver"),
        ("math_eval_opt", "generator"),
        ("math_voting", "voter"),
        ("math_orch_workers", "worker"),
        ("math_orch_workers", "synthesizer"),
    ],
)
def test_an_answering_agent_gives_one_answer(team, agent):
    overrides = [f"team={team}"] + (["~policies.verifier"] if team == "math_single" else [])
    for parser in ("boxed", "tag", "text"):
        validate(
            compose_config("math", [*overrides, f"team.agents.{agent}.parser={parser}", f"team.agents.{agent}.tag=answer"]),
            files=False,
        )
    config = compose_config("math", [*overrides, f"team.agents.{agent}.parser=tags", f"team.agents.{agent}.tag=answer"])
    with pytest.raises(ConfigError, match=f"team.agents.{agent}.parser = 'tags'.*grades one answer.*use boxed, tag or text"):
        validate(config, files=False)


def test_a_workflow_names_the_parser_that_it_needs():
    config = compose_config("math", ["team=math_orch_workers", "team.agents.orchestrator.parser=text"])
    with pytest.raises(ConfigError, match=r"team.agents.orchestrator.parser = 'text'.*use tags"):
        validate(config, files=False)


@pytest.mark.parametrize(
    "overrides, key",
    [
        (["team=math_voting", "algorithm.reward.verdict=0.1"], "algorithm.reward.verdict = 0.1"),
        (
            [
                "team=math_voting",
                "team.workflow.width=2",
                "team.agents.aggregator.choices=['1','2']",
                "algorithm.reward.verdict=0.1",
            ],
            "algorithm.reward.verdict",
        ),
        (["team=math_orch_workers", "algorithm.reward.verdict=-1"], "algorithm.reward.verdict"),
        (["team.agents.verifier.choices=[yes,no]"], "team.agents.verifier.choices = .*'approve' and 'reject'"),
        (["team.agents.verifier.choices=[Approve,reject]"], "team.agents.verifier.choices"),
        (["team.agents.verifier.choices=[]"], "team.agents.verifier.choices"),
        (["team.agents.verifier.parser=text"], "team.agents.verifier.choices = .*use parser tag"),
        (["team=math_eval_opt", "team.agents.evaluator.choices=[approve,reject]"], "team.agents.evaluator.choices = .*'correct'"),
        (["team.workflow.max_turns=1"], "team.workflow.max_turns = 1.*at least 2"),
    ],
)
def test_a_verdict_is_declared_by_the_workflow(overrides, key):
    with pytest.raises(ConfigError, match=key):
        validate(compose_config("math", overrides), files=False)


def test_a_third_choice_is_no_verdict():
    config = compose_config("math", ["team.agents.verifier.choices=[approve,reject,unsure]", "algorithm.reward.verdict=0.1"])
    assert validate(config, files=False) == []


@pytest.mark.parametrize(
    "override, key, value",
    [
        ("nosuch=1", "nosuch", "1"),
        ("+nosuch=1", "nosuch", "1"),
        ("+policies.qwen2.nosuch=1", "policies.qwen2.nosuch", "1"),
        ("rollout.temprature=1", "rollout.temprature", "1"),
        ("steps=many", "steps", "many"),
        ("steps=0", "steps", "0"),
        ("seed=-1", "seed", "-1"),
        ("seed=99999999999999999999", "seed", "99999999999999999999"),
        ("group_size=1", "group_size", "1"),
        ("name=..", "name", ".."),
        ("output_dir=/dev/null", "output_dir", "/dev/null"),
        ("policies.llama.optimizer.lr=.inf", "policies.llama.optimizer.lr", "inf"),
        ("algorithm.loss.entropy_coef=.nan", "algorithm.loss.entropy_coef", "nan"),
        ("name=a/b", "name", "a/b"),
        ("data.eval_limit=0", "data.eval_limit", "0"),
        ("policies.llama.optimizer.warmup_steps=32", "policies.llama.optimizer.warmup_steps", "32"),
        ("policies.llama.optimizer.decay=exponential", "policies.llama.optimizer.decay", "exponential"),
        ("policies.llama.micro_batch_tokens=0", "policies.llama.micro_batch_tokens", "0"),
        ("algorithm.loss.clip_high=-1", "algorithm.loss.clip_high", "-1"),
        ("algorithm.reward.overlong.penalty=-1", "algorithm.reward.overlong.penalty", "-1"),
        ("algorithm.loss={name: teamtr, aggregation: sequence_mean}", "algorithm.loss.name", "teamtr"),
        ("policies.llama.optimizer.min_lr=1", "policies.llama.optimizer.min_lr", "1"),
        ("policies.llama.optimizer.beta2=1", "policies.llama.optimizer.beta2", "1"),
        ("rollout.timeout_s=0", "rollout.timeout_s", "0"),
        ("cluster.gpus_per_node=1", "policies.qwen2.parallel", "tensor 2 x pipeline 1 x data 1"),
        ("cluster.gpus_per_node=64", "cluster.gpus_per_node", "torch sees"),
        ("cluster.device=cuda", "cluster.gpus_per_node", "0"),
        ("precision=fp9", "precision", "fp9"),
        ("precision.mode=fp9", "precision.mode", "fp9"),
        ("team.agents.answer.policy=nobody", "team.agents.answer.policy", "nobody"),
        ("team.agents.answer.parser=guess", "team.agents.answer.parser", "guess"),
        ("team.agents.answer.parser=tags", "team.agents.answer.parser", "one answer"),
        ("team.agents.answer.tag=think", "team.agents.answer.tag", "reasoning"),
        ("environment.normalization=ascii", "environment.normalization", "choose one of: squad, unicode"),
        ("team.agents.answer.prompt='{{'", "team.agents.answer.prompt", "Jinja"),
        ("team.agents.answer.prompt='{{ qestion }} {{ question }}'", "team.agents.answer.prompt", "uses qestion"),
        ("algorithm=dr_mass", "algorithm", "choose one of: at_grpo"),
        ("team=serch_tiny", "team", "search_tiny_rare"),
        ("~team.agents.answer", "team.agents.answer", "missing"),
        ("team.workflow.name=chat", "team.workflow.name", "chat"),
        ("policies.qwen2.parallel.tensor=3", "policies.qwen2.parallel.tensor", "3"),
        ("policies.qwen2.engine.tensor=3", "policies.qwen2.engine.tensor", "3"),
        ("policies.llama.parallel.pipeline=3", "policies.llama.parallel.pipeline", "3"),
        ("policies.llama.parallel.sequence=true", "policies.llama.parallel.sequence", "True"),
        ("policies.llama.model=/nonexistent", "policies.llama.model", "/nonexistent"),
        ("policies.llama.engine.max_model_len=64", "policies.llama.engine.max_model_len", "64"),
        ("data.train=/nonexistent.jsonl", "data.train", "/nonexistent.jsonl"),
        ("environment.name=math", "environment.retrieval", "not of math"),
        ("environment.grader.workers=2", "environment.grader", "of environment math"),
        ("environment.retrieval.tpok=2", "environment.retrieval.tpok", "did you mean environment.retrieval.topk"),
        ("environment.retrieval.topk=two", "environment.retrieval.topk", "is not a whole number"),
        ("environment.retrieval.corpus=/nonexistent", "environment.retrieval.corpus", "/nonexistent"),
        ("environment.retrieval.topk=101", "environment.retrieval.topk", "101"),
        ("environment.retrieval.restarts=-1", "environment.retrieval.restarts", "-1"),
        ("health.masked.stop=1.5", "health.masked.stop", "1.5"),
        ("health.invalid.warn=0", "health.invalid.warn", "0"),
        ("health.masked={warn: 0.6, stop: 0.5}", "health.masked.warn", "0.6"),
        ("health.patience=0", "health.patience", "0"),
        ("environment.retrieval.encoder=/nonexistent", "environment.retrieval.encoder", "/nonexistent"),
        ("algorithm.advantage.mean=median", "algorithm.advantage.mean", "median"),
        ("rollout.top_p=0", "rollout.top_p", "0"),
        ("rollout.temperature=0", "rollout.temperature", "0"),
        ("policies.llama.optimizer.eps=0", "policies.llama.optimizer.eps", "0"),
        ("policies.llama.engine.gpu_memory_utilization=1.5", "policies.llama.engine.gpu_memory_utilization", "1.5"),
        ("policies.llama.micro_batch_tokens=100", "policies.llama.micro_batch_tokens", "100"),
        ("cluster.transport=carrier_pigeon", "cluster.transport", "choose one of: auto"),
        ("cluster.transport=nccl", "cluster.transport", "cannot serve policy"),
        ("environment.retrieval.url=localhost:8000", "environment.retrieval.url", "http://HOST"),
        ("environment.retrieval.url=http://", "environment.retrieval.url", "is not an address"),
        ("environment.retrieval.url=http://x:99999", "environment.retrieval.url", "is not an address"),
    ],
)
def test_a_bad_setting_is_named(compose, override, key, value):
    with pytest.raises(ConfigError) as caught:
        compose(override)
    message = str(caught.value)
    assert message.startswith(key) and value in message and "\n" not in message and ";" in message


def test_an_environment_without_a_tool_of_the_workflow_is_named(compose):
    with pytest.raises(ConfigError, match="environment.name = 'math': has no tool 'search', which .*; use search"):
        compose("environment.name=math", "~environment.retrieval")


def test_a_model_whose_heads_vllm_cannot_compute_is_refused(compose, team_dir, monkeypatch):
    monkeypatch.setattr("megatron_drmas.validate.cpu_head_sizes", lambda: (48, 80))
    with pytest.raises(ConfigError, match=r"policies\.qwen2\.model.* heads have 32 dimensions.*one of: 48, 80"):
        compose()


def test_a_share_of_the_health_rule_can_be_off(compose):
    assert compose("health.masked.stop=null", "health.invalid.warn=null").health.masked.stop is None


def test_the_default_recipe_is_accepted(compose):
    assert set(compose().policies) == {"qwen2", "llama"}


@pytest.mark.parametrize(
    "mapping",
    [{"verifier": "qwen2", "search": "qwen2", "answer": "qwen2"}, {"verifier": "qwen2", "search": "llama", "answer": "third"}],
)
def test_any_map_of_agents_to_policies_composes(compose, team_dir, mapping):
    unused = {"qwen2", "llama"} - set(mapping.values())
    extra = ["+policy@policies.third=tiny", f"policies.third.model={team_dir}/llama"] if "third" in mapping.values() else []
    drop = [f"~policies.{name}" for name in unused] + [f"~policy@policies.{name}" for name in unused]
    config = compose(*extra, *drop, *(f"team.agents.{agent}.policy={policy}" for agent, policy in mapping.items()))
    assert {name: agent.policy for name, agent in config.team.agents.items()} == mapping


def test_prompts_longer_than_the_model_are_refused(compose):
    with pytest.raises(ConfigError, match="positions"):
        long = [
            f"policies.{name}.{key}=2000000"
            for name in ("qwen2", "llama")
            for key in ("engine.max_model_len", "micro_batch_tokens")
        ]
        compose("rollout.max_prompt_tokens=1000000", *long)


@pytest.fixture
def broken(tmp_path, team_dir):
    return shutil.copytree(team_dir, tmp_path / "broken")


@pytest.mark.parametrize(
    "file, content",
    [
        ("config.json", "[]"),
        ("config.json", "{nope"),
        ("config.json", {"num_attention_heads": "four"}),
        ("config.json", {"num_attention_heads": 0}),
        ("config.json", {"vocab_size": 99999}),
        ("config.json", {"num_hidden_layers": 7}),
        ("tokenizer.json", "{nope"),
        ("tokenizer_config.json", "[]"),
        ("model.safetensors", ""),
        ("model.safetensors", 5000),
    ],
)
def test_a_damaged_model_folder_is_refused_by_name(compose, broken, file, content):
    path = broken / "qwen2" / file
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content)
    path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content.encode())
    with pytest.raises(ConfigError) as caught:
        compose(folder=broken)
    message = str(caught.value)
    assert (message.startswith("policies.qwen2.") and str(broken / "qwen2") in message) or "layers" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "content",
    [
        "",
        "xx",
        '{"id": 1}',
        '{"id": "0", "contents": 5}',
        '{"id": "0", "contents": null}',
        '{"id": "0", "contents": "\\ud83d"}',
        '{"id": "\\udc00", "contents": "c"}',
        '{"id": "0", "contents": "a\\u0000"}',
        '{"id": 1, "contents": "a"}\n{"id": "1", "contents": "b"}',
        '{"id": 1, "contents": "a"}\n' + "\n" * 2000 + '{"id": 2, "contents": NaN}',
        "[" * 100000,
    ],
)
def test_a_malformed_corpus_is_refused_before_anything_starts(compose, broken, content):
    (broken / "corpus.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"environment.retrieval.corpus.*corpus.jsonl(:\d+| *:)") as caught:
        compose(folder=broken)
    assert "\n" not in str(caught.value)


def test_a_family_that_is_not_known_is_named(compose, broken):
    config = json.loads((broken / "llama" / "config.json").read_text()) | {"architectures": ["MambaForCausalLM"]}
    (broken / "llama" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"policies.llama.model.*MambaForCausalLM"):
        compose(folder=broken)


def test_experts_under_tensor_parallelism_need_sequence_parallelism(compose, broken):
    config = json.loads((broken / "llama" / "config.json").read_text()) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
    }
    (broken / "llama" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"policies.llama.parallel.sequence.*sequence=true"):
        compose("policies.llama.parallel.tensor=2", "policies.llama.parallel.pipeline=1", folder=broken)


def test_a_tokenizer_without_a_chat_template_is_refused(compose, broken):
    for file in ("chat_template.jinja", "chat_template.json"):
        (broken / "qwen2" / file).unlink(missing_ok=True)
    path = broken / "qwen2" / "tokenizer_config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "chat_template"}))
    with pytest.raises(ConfigError, match=r"policies.qwen2.model.*chat template"):
        compose(folder=broken)


@pytest.mark.parametrize(
    "content, line", [("", None), ('{"question": "q", "answer": "a"}\n{oops\n', 2), ('{"question": "q"}\n', 1)]
)
def test_bad_data_is_refused_by_file_and_line(compose, broken, content, line):
    (broken / "train.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"data.train.*train.jsonl") as caught:
        compose(folder=broken)
    assert line is None or f"line {line}" in str(caught.value)


def test_the_command_says_one_line_and_fails():
    done = subprocess.run(
        [sys.executable, "-m", "megatron_drmas.train", "nosuch.key=1"],
        capture_output=True,
        text=True,
        cwd=Path(CONFIG_DIR).parent,
    )
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "nosuch.key" in done.stderr


STALE = ["algorithm.staleness=1", "algorithm.loss.mismatch.correction=truncate"]
POOLS = ["cluster.device=cpu", "cluster.gpus_per_node=4", "+cluster.pools.train=2", "+cluster.pools.serve=2"]
ACTORS = [f"policies.{name}.actor_pool=train" for name in ("qwen2", "llama")]
ENGINES = [f"policies.{name}.engine_pool=serve" for name in ("qwen2", "llama")]


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([*STALE, "algorithm.loss.mismatch.correction=none"], "algorithm.staleness = 1: .*; set .*correction=truncate"),
        ([*STALE, "algorithm=teamtr"], "algorithm.staleness = 1: with algorithm.sequential .*; use 0"),
        ([*STALE, *POOLS[:2]], "algorithm.staleness = 1: .* share GPU 0 of node 0, GPU 2 of node 0; .*engine_pool"),
        (
            [*STALE, *POOLS, *ACTORS, ENGINES[0], "policies.llama.engine_pool=train"],
            "algorithm.staleness = 1: .* share GPU 0 of node 0; ",
        ),
        ([*STALE, *POOLS, *ACTORS, *ENGINES], None),
        (STALE, None),
    ],
)
def test_staleness_needs_a_correction_and_engines_on_gpus_of_their_own(overrides, message):
    """Actors may share GPUs with actors."""
    config = compose_config("search_hetero", overrides)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        validate(config, files=False, machine=False)
