"""A real, deterministic engine on a Qwen2 with biases: an update is complete and exact, or it is refused."""

import time

import pytest
import torch
from transformers import Qwen2ForCausalLM

from megatron_drmas.config.schema import EngineConfig
from megatron_drmas.rollout.engine_messages import EngineError, EngineSettings
from megatron_drmas.weight_sync.errors import WeightSyncError
from megatron_drmas.weight_sync.shm_sender import ShmSender
from megatron_drmas.weight_sync.verify import compare, digest
from tests.engine_process import EngineProcess, prompt, request, said
from tests.tiny_models import make_qwen2

LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_qwen2(str(tmp_path_factory.mktemp("qwen2")))


@pytest.fixture(scope="module")
def running(folder):
    size = EngineConfig(max_model_len=128, max_num_seqs=8, kv_cache_mib=32)
    with EngineProcess(EngineSettings("verifier", folder, (2,), size, deterministic=True)) as engine:
        yield engine


@pytest.fixture
def tensors(folder) -> dict[str, torch.Tensor]:
    return dict(Qwen2ForCausalLM.from_pretrained(folder).state_dict())


@pytest.fixture
def engine(running, tensors) -> EngineProcess:
    running.update(tensors.items(), version=0)
    return running


def test_the_engine_holds_every_tensor_that_was_sent(engine, tensors):
    for tensor in tensors.values():
        tensor.add_(torch.randn_like(tensor))
    sent = engine.update(tensors.items(), version=1)
    loaded = engine.call("weight_digests")
    assert sent.keys() == tensors.keys()
    assert sum(name.endswith("bias") for name in loaded) == 3 * LAYERS
    compare(sent, loaded, "the engine")


def test_one_bit_of_one_tensor_is_seen(engine, tensors):
    sent = {name: digest(tensor) for name, tensor in tensors.items()}
    bias = tensors["model.layers.1.self_attn.k_proj.bias"]
    bias[3] = torch.nextafter(bias[3], torch.tensor(torch.inf))
    engine.update(tensors.items(), version=1)
    with pytest.raises(WeightSyncError, match=r"1 of \d+ tensors differ: model.layers.1.self_attn.k_proj.bias"):
        compare(sent, engine.call("weight_digests"), "the engine")


def test_the_bucket_size_changes_nothing(engine, tensors):
    digests = [(engine.update(tensors.items(), 1, size), engine.call("weight_digests")) for size in (1, 50_000, 10**9)]
    assert digests[0] == digests[1] == digests[2] and digests[0][0] == digests[0][1]


def spoil(tensors: dict[str, torch.Tensor], fault: str) -> list[tuple[str, torch.Tensor]]:
    stream = list(tensors.items())
    victim = next(i for i, (name, _) in enumerate(stream) if name == "model.layers.1.mlp.up_proj.weight")
    name, tensor = stream[victim]
    if fault == "unknown":
        stream.insert(victim, ("model.layers.7.mlp.up_proj.weight", tensor))
    elif fault == "twice":
        stream.insert(victim + 3, (name, tensor))
    elif fault == "shape":
        stream[victim] = (name, tensor.t().contiguous())
    elif fault == "missing":
        del stream[victim]
    return stream


@pytest.mark.parametrize(
    "fault, message",
    [
        ("unknown", "'model.layers.7.mlp.up_proj.weight' is not a tensor"),
        ("twice", "'model.layers.1.mlp.up_proj.weight' came twice"),
        ("shape", r"'model.layers.1.mlp.up_proj.weight' has shape \(64, 128\)"),
        ("missing", "1 tensors did not come: model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_faulty_update_names_the_tensor_and_closes_the_engine_until_a_good_one(engine, tensors, fault, message):
    with pytest.raises(WeightSyncError, match=message):
        engine.update(spoil(tensors, fault), version=1)
    with pytest.raises(EngineError, match=f"'verifier' holds incomplete weights.*{message}"):
        engine.call("submit", [request(1, prompt(5))])
    engine.update(tensors.items(), version=2)
    (sample,) = engine.generate([request(1, prompt(5))])
    assert sample.error is None and sample.weight_versions == [(2, len(sample.token_ids))]


def test_an_update_refused_at_its_first_bucket_leaves_the_old_weights(engine, tensors):
    before = engine.generate([request(1, prompt(5))])
    with pytest.raises(WeightSyncError, match="not a tensor"):
        engine.update([("lm_tail.weight", torch.zeros(3))], version=1)
    with pytest.raises(WeightSyncError, match="has dtype bfloat16; the engine holds float32"):
        sender = ShmSender([(name, tensor.bfloat16()) for name, tensor in tensors.items()], 10**6)
        engine.call("begin_update")
        try:
            engine.call("load_bucket", sender.next_bucket())
        finally:
            sender.close()
    assert said(engine.generate([request(1, prompt(5))])) == said(before)


def test_a_sender_that_went_away_is_named_by_its_segment(engine, tensors):
    sender = ShmSender(tensors.items(), 20_000)
    info = sender.next_bucket()
    sender.close()
    engine.call("begin_update")
    with pytest.raises(WeightSyncError, match=f"segment '{info['segment']}' is gone"):
        engine.call("load_bucket", info)


def test_an_abandoned_update_can_be_begun_again(engine, tensors):
    sender = ShmSender(tensors.items(), 20_000)
    engine.call("begin_update")
    engine.call("load_bucket", sender.next_bucket())
    sender.close()
    sent = engine.update(tensors.items(), version=1)
    assert sent and sent == engine.call("weight_digests")


def test_nothing_is_generated_during_an_update(engine, tensors):
    engine.call("begin_update")
    steps = engine.call("stats")["steps"]
    engine.call("submit", [request(1, prompt(5))])
    assert engine.call("poll", 0.2) == [] and engine.call("stats")["steps"] == steps
    engine.update(tensors.items(), version=1)
    (sample,) = engine.collect([1])
    assert sample.weight_versions == [(1, len(sample.token_ids))]


def test_an_update_within_a_response_begins_another_span(engine, tensors):
    steps = engine.call("stats")["steps"]
    engine.call("submit", [request(1, prompt(5), max_tokens=120)])
    while engine.call("stats")["steps"] < steps + 3:
        time.sleep(0.001)
    engine.update(tensors.items(), version=1)
    (sample,) = engine.collect([1])
    (old, before), (new, after) = sample.weight_versions
    assert (old, new) == (0, 1) and min(before, after) >= 1 and before + after == len(sample.token_ids)


def test_a_submit_gives_the_same_bits_whatever_came_before(engine):
    asked = [request(i, prompt(40 + i % 3, i % 2), max_tokens=5 + i % 7) for i in range(12)]
    first = engine.generate(asked)
    engine.call("submit", [request(100 + i, prompt(40 + i, i), max_tokens=20) for i in range(8)])
    engine.call("submit", asked)  # while the others run
    again = engine.collect([one.key for one in asked] + [100 + i for i in range(8)])
    assert said(again[: len(asked)]) == said(first)


def test_poll_gives_up_after_its_time(engine):
    began = time.monotonic()
    assert engine.call("poll", 0.1) == []
    assert time.monotonic() - began < 10.0
