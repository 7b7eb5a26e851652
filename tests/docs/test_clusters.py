"""The placement on docs/clusters.md is the one that the code computes."""

import re

import pytest

from megatron_drmas.cluster.placement import place
from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.load import compose_config
from megatron_drmas.weight_sync.transport import choose_transport


@pytest.fixture(scope="module")
def section(repository) -> str:
    text = (repository / "docs" / "clusters.md").read_text()
    return text.partition("### Two nodes of four GPUs\n")[2].partition("\n## ")[0]


def test_placement(section):
    config = compose_config("search_hetero_8xh100", ["cluster.nodes=2", "cluster.gpus_per_node=4"])
    placement = place(config, "cuda")
    rows = []
    for name, policy in config.policies.items():
        slots = placement.actors[name]
        (node,) = {slot.node for slot in slots + placement.engines[name]}
        gpus = " ".join(str(slot.devices[0]) for slot in slots)
        engine, transport = policy.engine, choose_transport("auto", placement.route(name, policy, "cuda"), name).name
        layout = f"tensor {policy.parallel.tensor} | node {node}: {gpus} | {engine.replicas} × tensor {engine.tensor}"
        rows.append(f"| `{name}` | {layout} | {transport} |")
    assert "\n".join(rows) in section


def test_apart(section):
    """With pools of their own for actors and engines, as the page sets them."""
    overrides = re.search(r"```bash\n# apart\n(.+?)```", section, re.S)[1].replace("\\\n", " ").split()
    config = compose_config("search_hetero_8xh100", [word for word in overrides if "=" in word and not word.startswith("--")])
    placement = place(config, "cuda")
    assert not placement.crowded()


def test_refusal(section):
    with pytest.raises(ConfigError) as refused:
        place(compose_config("search_hetero_8xh100", ["cluster.gpus_per_node=2"]), "cuda")
    assert re.search(r"```text\n(.+)\n```", section)[1] == str(refused.value)
