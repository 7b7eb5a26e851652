import socket
from collections.abc import Callable, Iterator

import pytest

from tests.actor.ranks import Ranks
from tests.tiny_models import make_llama, make_qwen2, make_qwen3_moe


@pytest.fixture(scope="session")
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two processes, for every layout of at most two ranks.  Not kept for longer: gloo's threads wake even when idle."""
    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[[], Ranks]]:
    """Makes processes that have run nothing yet."""
    pools = []

    def make() -> Ranks:
        pools.append(Ranks(2))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tied Llama with Llama-3 RoPE scaling and grouped queries, an untied Qwen2 with biases, and a mixture of experts."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": make_llama(str(folder / "llama"), num_attention_heads=4, num_key_value_heads=2),
        "qwen2": make_qwen2(str(folder / "qwen2")),
        "qwen3_moe": make_qwen3_moe(str(folder / "qwen3_moe")),
    }
