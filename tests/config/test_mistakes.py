"""A mistake is answered with the keys that were probably meant, whole paths, in one line."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import CONFIG_DIR, compose_config, to_dict
from megatron_drmas.config.mistakes import NAME, composed_keys, nearest

KEYS = composed_keys(OmegaConf.create(to_dict(compose_config("search_hetero", []))))


def refusal(*overrides, name="search_hetero", folder=None):
    with pytest.raises(ConfigError) as caught:
        compose_config(name, list(overrides), folder)
    message = str(caught.value)
    assert "\n" not in message and ";" in message
    return message


@pytest.mark.parametrize(
    "override, meant",
    [
        ("lr=1e-4", "policies.qwen2.optimizer.lr or policies.llama.optimizer.lr"),
        ("+lr=1e-4", "policies.qwen2.optimizer.lr or policies.llama.optimizer.lr"),
        ("optimizer.lr=1e-4", "policies.qwen2.optimizer.lr or policies.llama.optimizer.lr"),
        ("optimizer.learning_rate=1e-4", "policies.qwen2.optimizer.lr or policies.llama.optimizer.lr"),
        ("policies.qwen2.lr=1e-4", "policies.qwen2.optimizer.lr"),
        ("policies.qwen2.optimizer.learning_rate=1e-4", "policies.qwen2.optimizer.lr"),
        ("policies.llama.engine.max_modellen=3", "policies.llama.engine.max_model_len"),
        ("temperature=1", "rollout.temperature or evaluation.temperature"),
        ("gpus_per_node=8", "cluster.gpus_per_node"),
        ("algorithm.advantage.meen=group", "algorithm.advantage.mean"),
        ("algoritm=grpo", "algorithm"),
    ],
)
def test_a_near_miss_names_the_whole_path(override, meant):
    assert f"no such key; did you mean {meant}?" in refusal(override)


@given(st.sampled_from([key for key in KEYS if len(key.rpartition(".")[2]) >= 5]), st.data())
def test_a_letter_left_out_is_found(key, data):
    start = key.rpartition(".")[0]
    position = data.draw(st.integers(len(start) + 2, len(key) - 1))
    assert key in nearest(key[:position] + key[position + 1 :], KEYS)


@pytest.mark.parametrize(
    "override",
    [
        "+policies.third={model: x}",
        "policies.third={model: x}",
        "++policies.third={model: x}",
        "+policies.third.model=x",
        "policies.third.model=x",
    ],
)
def test_how_a_policy_is_added_is_said(override):
    message = refusal(override)
    assert message.startswith("policies.third") and "+policy@policies.third=tiny" in message and "qwen2, llama" in message


@pytest.mark.parametrize(
    "override, said",
    [
        ("policies.qwen.model=x", "did you mean policies.qwen2?"),
        ("policies.qwen2=tiny", "policy@policies.qwen2=OPTION"),
        ("policy@policies.qwen2=tyny", "policy@policies.qwen2 = 'tyny': no such option"),
        ("policy@policies.third=tiny", "add it: +policy@policies.third=tiny"),
        ("polcy@policies.qwen2=tiny", "did you mean policy"),
        ("team.agents.verifyer.system=x", "no such agent (there are verifier, search, answer)"),
        (
            "policies.qwen2.template_options.enable_thinking=false",
            "add it: +policies.qwen2.template_options.enable_thinking=false",
        ),
        ("steps", "is not an override"),
        ("name=a=b", "name = 'a=b'"),
        ("hydra.run.dir=x", "hydra.run.dir = 'x'"),
        ("=3", "override = '=3': names no key; write key=value"),
        ("group_size=four", "group_size = 'four': is not a whole number; write one, group_size=8"),
        ("group_size=4.5", "group_size = '4.5': is not a whole number"),
        ("rollout.temperature=hot", "rollout.temperature = 'hot': is not a number"),
        ("evaluation.greedy=maybe", "is neither true nor false; write evaluation.greedy=true or evaluation.greedy=false"),
        ("plugins=mine.py", "plugins = 'mine.py': is not a list; write 'plugins=[A,B]'"),
        (
            "health.masked=0.5",
            "is a group of settings, not a value; set its keys, such as health.masked.warn, health.masked.stop",
        ),
    ],
)
def test_a_mistake_of_another_kind_says_what_to_write(override, said):
    assert said in refusal(override)


@pytest.mark.parametrize("overrides", [(), ("steps=3",)])
def test_a_recipe_without_the_schema_is_told_to_begin_with_it(tmp_path, overrides):
    (tmp_path / "bare.yaml").write_text("defaults: [policy@policies.a: tiny, _self_]\nname: bare\nsteps: 1\n")
    assert "its defaults lack schema" in refusal(*overrides, name="bare", folder=tmp_path)


def test_a_wrong_type_in_a_recipe_is_named_too(tmp_path):
    (tmp_path / "own.yaml").write_text("defaults: [search_hetero, _self_]\ngroup_size: four\n")
    assert "group_size = 'four': is not a whole number" in refusal(name="own", folder=tmp_path)


NAMES = ["qwen2.5", "7b", "a b", "a/b", "a=b", "", "_x", "__", "_global_", "a:b", "a@b", "é", "a$", "x" * 65]


@pytest.mark.parametrize("name", [*NAMES, 7, 1.5, True, None])
@pytest.mark.parametrize("section", ["policies", "team.agents"])
def test_a_name_that_no_key_can_hold_is_refused_by_name(tmp_path, name, section):
    entry = {"model": "x"} if section == "policies" else {"policy": "qwen2", "prompt": "x"}
    recipe = OmegaConf.create({"defaults": ["search_hetero", "_self_"]})
    text = OmegaConf.to_yaml(recipe) + ("policies:\n  " if section == "policies" else "team:\n  agents:\n    ")
    (tmp_path / "own.yaml").write_text(
        text + (f"'{name}'" if isinstance(name, str) else {None: "null", True: "true"}.get(name, str(name))) + f": {entry}\n"
    )
    message = refusal(name="own", folder=tmp_path)
    assert message.startswith(section if name is None else f"{section} = {name!r}") and "cannot be the name" in message
    assert refusal("policies.qwen2.5.model=x", name="own", folder=tmp_path) == message


@pytest.mark.parametrize("name", [name for name in NAMES if "=" not in name])
def test_a_name_is_refused_on_the_command_line_too(name):
    assert refusal(f"+policy@policies.{name}=tiny").startswith(f"policies = {name!r}")


@settings(max_examples=20)  # each composes a recipe
@given(st.from_regex(NAME, fullmatch=True))
def test_what_is_accepted_as_a_name_can_be_overridden(name):
    config = compose_config("search_hetero", [f"+policy@policies.{name}=tiny", f"policies.{name}.model=here"])
    assert config.policies[name].model == "here"


@pytest.fixture
def own(tmp_path):
    """A folder with a team of one's own, and a precision of a name that the package has too."""
    (tmp_path / "team").mkdir()
    (tmp_path / "precision").mkdir()
    (tmp_path / "team" / "ours.yaml").write_text(
        (CONFIG_DIR / "team" / "search_tiny.yaml").read_text().replace("max_turns: 4", "max_turns: 2")
    )
    (tmp_path / "precision" / "fp32.yaml").write_text("mode: fp32\nrollout: bfloat16\n")
    (tmp_path / "mine.yaml").write_text("defaults:\n  - search_hetero\n  - override team: ours\n  - _self_\nname: mine\n")
    return tmp_path


def test_a_folder_of_ones_own_comes_before_the_packages(own):
    config = compose_config("mine", ["algorithm=grpo"], own)
    assert (config.name, config.team.workflow.max_turns, config.precision.rollout) == ("mine", 2, "bfloat16")
    assert compose_config("search_hetero", ["team=ours"], own).team.workflow.max_turns == 2
    assert compose_config("search_hetero", []).precision.rollout == "float32"


def test_errors_name_both_folders_and_all_options(own):
    message = refusal("precision=fp9", name="mine", folder=own)
    assert "precision = 'fp9'" in message and str(own) in message and str(CONFIG_DIR) in message and "bf16, fp32, fp8" in message
    message = refusal(name="nosuch", folder=own)
    assert str(own) in message and str(CONFIG_DIR) in message and "mine" in message and "search_hetero" in message
    assert refusal(folder=own / "none").startswith("--config-dir")
    assert refusal(folder=own / "mine.yaml").startswith("--config-dir")
