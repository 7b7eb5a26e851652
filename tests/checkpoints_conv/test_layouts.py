"""Live models in every layout: what goes in comes out, once, bit for bit."""

from pathlib import Path

import pytest
import torch

from checkpoints_conv.formats.hf_folder import HfFolder
from checkpoints_conv.to_hf import to_hf
from checkpoints_conv.to_megatron import to_megatron
from tests.checkpoints_conv import jobs
from tests.checkpoints_conv.family_models import VARIANTS
from tests.checkpoints_conv.ranks import Layout

LAYOUTS = [Layout(), Layout(tensor=4), Layout(tensor=2, pipeline=2), Layout(pipeline=2, virtual=2, world=4)]
EXPERTS = [Layout(tensor=2, expert=2), Layout(pipeline=2, expert=2)]


def variants(layout: Layout) -> list[tuple[str, bool]]:
    return [("qwen3_moe", False)] if layout.expert > 1 else VARIANTS


def assert_same_tensors(a: Path, b: Path) -> None:
    left, right = HfFolder(a), HfFolder(b)
    assert sorted(left.names()) == sorted(right.names())
    assert [name for name in left.names() if not torch.equal(left.tensor(name), right.tensor(name))] == []
    assert left.dtypes == right.dtypes


@pytest.mark.parametrize("layout", LAYOUTS + EXPERTS, ids=str)
def test_every_tensor_comes_out_once_and_unchanged(ranks, models, tmp_path, layout):
    """Bijection over stages (every rank of a stage has all of its tensors), zero padding, tied copies, and the folder."""
    folders = {variant: models(*variant) for variant in variants(layout)}
    arguments = [(folder, tmp_path / f"{family}-{tied}") for (family, tied), folder in folders.items()]
    by_rank = ranks.run(layout, tmp_path / "store", jobs.each, jobs.export, arguments)
    for (folder, exported), *results in zip(arguments, *by_rank, strict=True):
        by_stage = {}
        for result in results:
            assert by_stage.setdefault(result["stage"], result["names"]) == result["names"]
            assert (result["wrong"], result["padding"], result["untied"]) == ([], 0.0, []), exported.name
        published = [name for names in by_stage.values() for name in names]
        assert sorted(published) == sorted(HfFolder(folder).names()), exported.name
        assert_same_tensors(folder, exported)


@pytest.mark.parametrize("layout", LAYOUTS[1:] + EXPERTS, ids=str)
def test_converted_checkpoint_loads_in_every_layout(ranks, models, tmp_path, layout):
    """Megatron's own loader and saver: HF -> converter -> Megatron -> converter -> HF is the identity."""
    arguments = []
    for family, tied in variants(layout):
        folder, work = models(family, tied), tmp_path / f"{family}-{tied}"
        to_megatron(folder, work / "megatron")
        arguments.append((folder, work / "megatron", work / "saved"))
    by_rank = ranks.run(layout, tmp_path / "store", jobs.each, jobs.load_and_save_dist, arguments)
    for (folder, converted, saved), *differing in zip(arguments, *by_rank, strict=True):
        assert differing == [[]] * layout.size, converted
        to_hf(saved, saved.with_name("back"), hf_files=folder)
        assert_same_tensors(folder, saved.with_name("back"))


def test_a_checkpoint_with_one_key_per_layer_converts(ranks, models, tmp_path):
    folders = [models("qwen2", True), models("qwen3_moe")]
    arguments = []
    for folder in folders:
        work = tmp_path / folder.name
        to_megatron(folder, work / "megatron")
        arguments.append((folder, work / "megatron", work / "saved", True))
    ranks.run(Layout(tensor=2, pipeline=2), tmp_path / "store", jobs.each, jobs.load_and_save_dist, arguments)
    for folder, _, saved, _ in arguments:
        to_hf(saved, saved.with_name("back"), hf_files=folder)
        assert_same_tensors(folder, saved.with_name("back"))


def test_a_missing_chunk_is_an_error_on_every_rank(ranks, models, tmp_path):
    layout = Layout(pipeline=2, virtual=2)
    errors = ranks.run(layout, tmp_path / "store", jobs.load_part, models("llama", True))
    assert len(errors) == 2
    assert all("decoder.layers.2." in error and "absent" in error for error in errors)


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads"])
def test_a_model_of_another_config_is_refused_by_name(ranks, models, tmp_path, field):
    values = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_key_value_heads": 2}
    other = models("llama", False, **{field: values[field]}, **({"head_dim": 8} if field == "hidden_size" else {}))
    errors = ranks.run(Layout(pipeline=2), tmp_path / "store", jobs.load_other, models("llama", False), other)
    assert all(error and ("decoder." in error or "embedding." in error) for error in errors)
