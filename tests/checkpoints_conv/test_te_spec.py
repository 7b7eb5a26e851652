"""The Transformer Engine layer spec without a GPU: names, shapes, keys, and each spec's checkpoint in the other's model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoints_conv.formats.hf_folder import HfFolder
from checkpoints_conv.mapping.dist_keys import local_spec_key
from checkpoints_conv.mapping.model_mapping import ModelMapping, canonical_name
from checkpoints_conv.to_hf import to_hf
from checkpoints_conv.to_megatron import to_megatron
from tests.checkpoints_conv import jobs
from tests.checkpoints_conv.family_models import VARIANTS, tiny_spec
from tests.checkpoints_conv.ranks import Layout

LLAMA = {
    "embedding.word_embeddings.weight": [256, 64],
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": [64],
    "decoder.layers.0.self_attention.linear_qkv.weight": [128, 64],
    "decoder.layers.0.self_attention.linear_proj.weight": [64, 64],
    "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": [64],
    "decoder.layers.0.mlp.linear_fc1.weight": [192, 64],
    "decoder.layers.0.mlp.linear_fc2.weight": [64, 96],
    "decoder.final_layernorm.weight": [64],
}


@pytest.fixture(scope="module")
def work(models, repository, tmp_path_factory) -> Path:
    """A folder with, for every family and tying, the converter's checkpoint, Megatron's under this spec, and the report."""
    engine = Path(sys.prefix) / "te"  # beside the ordinary packages, not among them: Megatron's import fails with it
    if not (engine / "transformer_engine").is_dir():
        pytest.skip(f"Transformer Engine's Python half is not in {engine}; tools/test.sh fetches it")
    work = tmp_path_factory.mktemp("te")
    cases = []
    for family, tied in VARIANTS:
        folder = work / f"{family}-{tied}"
        to_megatron(models(family, tied), folder / "converted")
        cases.append([str(models(family, tied)), str(folder / "converted"), str(folder / "saved")])
    (work / "cases.json").write_text(json.dumps(cases))
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.checkpoints_conv.te_report", work / "cases.json", work / "report.json"],
        env={**os.environ, "PYTHONPATH": f"{engine}:{repository}"},
        cwd=repository,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return work


@pytest.fixture(params=VARIANTS, ids=str)
def case(request, work) -> tuple[str, bool, Path, dict]:
    """Family, tied, its folder in `work`, and its part of the report."""
    family, tied = request.param
    report = json.loads((work / "report.json").read_text())[VARIANTS.index(request.param)]
    return family, tied, work / f"{family}-{tied}", report


def test_names_are_the_tables(case):
    """The table's own names are this spec's, and every shape is what the table says (embedding: padded)."""
    family, tied, _, report = case
    spec = tiny_spec(family, tied)
    names = [canonical_name(name, experts=spec.experts > 0) for name in report["parameters"]]
    if not spec.experts:
        assert names == list(report["parameters"])
    mapping = ModelMapping(spec)
    assert sorted(names) == sorted(mapping.megatron_names())
    for name, shape in zip(names, report["parameters"].values(), strict=True):
        rule = mapping.entry(name).rule
        assert shape == ([256, 64] if rule.vocab else list(rule.megatron_shape(spec)))


def test_known_names_and_shapes(work):
    parameters = json.loads((work / "report.json").read_text())[VARIANTS.index(("llama", True))]["parameters"]
    assert {name: shape for name, shape in parameters.items() if ".layers." not in name or ".layers.0." in name} == LLAMA


def test_folder_goes_in_and_comes_out(case):
    *_, report = case
    assert report["not exported"] == report["wrong"] == []


def test_converted_checkpoint_loads_into_it(case):
    assert case[3]["wrong from checkpoint"] == []


def test_its_checkpoint_loads_into_the_local_spec_and_converts_back(case, ranks, models, tmp_path):
    family, tied, folder, _ = case
    to_hf(folder / "saved", tmp_path / "back", hf_files=models(family, tied))
    ours, back = HfFolder(models(family, tied)), HfFolder(tmp_path / "back")
    assert sorted(ours.names()) == sorted(back.names())
    assert all(torch.equal(ours.tensor(name), back.tensor(name)) for name in ours.names())
    if family != "qwen3_moe":  # Megatron's two specs file its MLP norm under different keys
        assert ranks.run(Layout(), tmp_path / "store", jobs.load_saved, models(family, tied), folder / "saved") == [[]]


def test_both_specs_share_their_keys(case, ranks, models, tmp_path):
    """But for the norms' FP8 state, and the MLP norm of a mixture of experts, for which to_megatron writes both keys."""
    family, tied, _, report = case
    (local,) = ranks.run(Layout(), tmp_path / "store", jobs.sharded_keys, models(family, tied))
    extra = {key for key in report["keys"] if "norm._extra_state" in key}
    ours = set(map(local_spec_key, set(report["keys"]) - extra))
    assert ours == set(local)
    assert {key.split("._extra_state")[0].split(".")[-1] for key in extra} <= {
        "final_layernorm",
        "q_layernorm",
        "k_layernorm",
        "pre_mlp_layernorm",
    }
