"""Runs in a process of its own with Transformer Engine's Python half on the path: what a Transformer Engine model is called.

    python -m tests.checkpoints_conv.te_report CASES.json REPORT.json

CASES is a list of [Hugging Face folder, checkpoint of to_megatron, folder to save to].
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.te_stub.engine import install

install()

from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

from checkpoints_conv.formats.hf_folder import HfFolder
from checkpoints_conv.megatron.export import iter_hf_tensors
from checkpoints_conv.megatron.forward import load_dist_checkpoint
from checkpoints_conv.megatron.load import load_hf_weights
from tests.checkpoints_conv import jobs
from tests.checkpoints_conv.ranks import Layout


def build(folder: Path) -> tuple[list, object]:
    spec = jobs.spec_of(folder)
    layers = get_gpt_layer_with_transformer_engine_spec(
        num_experts=spec.experts or None, moe_grouped_gemm=spec.experts > 0, qk_layernorm=spec.qk_norm
    )
    return jobs.build(spec, layers, moe_grouped_gemm=spec.experts > 0), spec


def report(folder: Path, checkpoint: Path, saved: Path) -> dict:
    chunks, spec = build(folder)
    load_hf_weights(chunks, folder, spec)
    source = HfFolder(folder)
    exported = dict(iter_hf_tensors(chunks, spec))
    others, _ = build(folder)
    load_dist_checkpoint(others, checkpoint)
    saved.mkdir()
    dist_checkpointing.save({"model0": chunks[0].sharded_state_dict()}, str(saved))
    return {
        "parameters": {name: list(parameter.shape) for name, parameter in chunks[0].named_parameters()},
        "keys": jobs.describe_keys(chunks[0].sharded_state_dict()),
        "not exported": sorted(set(source.names()) - set(exported)),
        "wrong": [name for name, tensor in exported.items() if not tensor.equal(source.tensor(name))],
        "wrong from checkpoint": jobs.differing(chunks, others),
    }


def main() -> None:
    cases, out = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        jobs.initialize(Layout(), 0, Path(folder) / "store")
        reports = [report(*map(Path, case)) for case in json.loads(cases.read_text())]
        jobs.destroy()
    out.write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
