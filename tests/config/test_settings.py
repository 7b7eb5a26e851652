"""Every key has its meaning beside it; bounds and choices are held; --explain and the reference page say the same."""

import math
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.command import registries
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.explain import explain
from megatron_drmas.config.load import compose_config
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.config.setting import Setting, check_settings, keys_of
from tools.config_reference import reference

KEYS = [key for key in keys_of(RunConfig) if not key.section]


def test_every_key_has_a_meaning():
    assert [key.path for key in KEYS if key.setting is None or len(key.setting.meaning) < 8] == [] and len(KEYS) > 100


def test_every_default_is_within_its_own_bounds():
    wrong = [key.path for key in KEYS if key.default != "???" and key.setting.objection(key.default)]
    assert wrong == []


def test_every_registry_is_known():
    assert {key.setting.registry for key in KEYS} - {None} <= registries().keys()


@given(
    st.floats(allow_nan=True), st.sampled_from([None, -1, 0, 0.5]), st.sampled_from([None, 1, 2]), st.booleans(), st.booleans()
)
def test_a_number_stands_exactly_if_it_is_within_its_bounds(value, low, high, low_open, high_open):
    known = Setting("x", **({"above" if low_open else "minimum": low} | {"below" if high_open else "maximum": high}))
    within = math.isfinite(value)
    within &= low is None or (value > low if low_open else value >= low)
    within &= high is None or (value < high if high_open else value <= high)
    assert (known.objection(value) is None) is within


@pytest.mark.parametrize(
    "override, said",
    [
        ("rollout.temperature=0", "rollout.temperature = 0.0: is too small; use at least 0.01"),
        ("policies.qwen2.optimizer.beta1=1", "policies.qwen2.optimizer.beta1 = 1.0: is too large; use less than 1"),
        ("policies.qwen2.optimizer.lr=inf", "policies.qwen2.optimizer.lr = inf: is not a finite number"),
        ("health.masked.warn=0", "health.masked.warn = 0.0: is too small; use more than 0"),
        ("cluster.device=tpu", "cluster.device = 'tpu': unknown; choose one of: auto, cpu, cuda"),
        ("team.agents.search.max_response_tokens=0", "team.agents.search.max_response_tokens = 0: is too small"),
        ("seed=2147483648", "seed = 2147483648: is too large"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_its_whole_key(override, said):
    with pytest.raises(ConfigError) as caught:
        check_settings(compose_config("search_hetero", [override]))
    assert said in str(caught.value)


def test_explain_tells_a_key_and_a_section():
    said = explain(RunConfig, "algorithm.loss.clip_high")
    assert said.startswith("algorithm.loss.clip_high  (float, default 0.2, in [0, inf))\n    The ratio is clipped")
    section = explain(RunConfig, "policies.any_name.optimizer")
    assert all(f"policies.NAME.optimizer.{name}  (" in section for name in ("lr", "decay", "grad_clip")) and "- cosine" in section
    assert "one of: ppo, teamtr" in explain(RunConfig, "algorithm.loss.name", {"loss": ["teamtr", "ppo"]})
    assert "health.masked.stop  (float or null, default 0.5, in (0, 1])" in explain(RunConfig, "health.masked")


@pytest.mark.parametrize(
    "key, near", [("lr", "policies.NAME.optimizer.lr"), ("algorithm.loss.clip_hi", "algorithm.loss.clip_high")]
)
def test_explain_names_what_is_near(key, near):
    with pytest.raises(ConfigError, match=f"no such key; near it: .*{near}"):
        explain(RunConfig, key)


def test_the_reference_page_is_the_classes(repository: Path):
    assert (repository / "docs" / "configuration.md").read_text() == reference(), "run python -m tools.config_reference"


def test_every_section_says_what_it_is():
    def sections(node):
        yield type(node)
        for item in fields(node):
            child = getattr(node, item.name)
            if is_dataclass(child):
                yield from sections(child)

    composed = compose_config("search_hetero", [])
    found = {*sections(composed), *(kind for policy in composed.policies.values() for kind in sections(policy))}
    assert [
        kind.__name__ for kind in found if not (kind.__doc__ or "").strip() or kind.__doc__.startswith(f"{kind.__name__}(")
    ] == []
