"""An actor whose linear layers round as FP8 does: it trains, stays near fp32, and resumes bit for bit."""

import pytest
import torch
import torch.multiprocessing as mp

from megatron_drmas.config.schema import Fp8Config, ParallelConfig, PolicyConfig, PrecisionConfig
from megatron_drmas.rollout.batch import TurnBatch
from tests.tiny_models import make_llama


def make_batch() -> TurnBatch:
    generator = torch.Generator().manual_seed(0)
    rows, prompt = 8, 5
    lengths = torch.randint(3, 9, (rows,), generator=generator)
    total = int(lengths.sum())
    zeros = torch.zeros(rows, dtype=torch.int64)
    return TurnBatch(
        tokens=torch.randint(0, 235, (total + rows * prompt,), generator=generator),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), (lengths + prompt).cumsum(0)]),
        prompt_lengths=zeros + prompt,
        engine_logprobs=torch.full((total,), -5.0),
        agent=zeros,
        policy=zeros,
        group=zeros,
        trajectory=torch.arange(rows),
        turn=zeros,
        reward=zeros.float(),
        valid=zeros == 0,
        trainable=zeros == 0,
        weight_version=zeros,
        agents=("agent",),
        policies=("policy",),
        advantages=torch.randn(rows, generator=generator).repeat_interleave(lengths),
    )


def actor_rank(rank: int, size: int, port: int, folder: str, modes: list[PrecisionConfig]) -> None:
    torch.set_num_threads(1)
    from megatron_drmas.actor.policy_actor import PolicyActor
    from megatron_drmas.actor.settings import ActorSettings

    batch, results = make_batch(), []
    policy = PolicyConfig(model=f"{folder}/model", parallel=ParallelConfig(tensor=size, sequence=True))
    policy.optimizer.lr = 1e-3
    for number, precision in enumerate(modes):
        actor = PolicyActor(ActorSettings("policy", policy, precision, total_steps=10), rank, size, "127.0.0.1", port + number)
        actor.initialize(f"{folder}/model")
        logprobs = actor.token_logprobs(batch)
        first = actor.update(batch, 1)
        actor.save(f"{folder}/checkpoint{number}")
        second = actor.update(batch, 2)
        after = actor.token_logprobs(batch)
        actor.load(f"{folder}/checkpoint{number}")
        again = actor.update(batch, 2)
        results.append((logprobs, first, second, again, torch.equal(after, actor.token_logprobs(batch))))
        actor.shutdown()
    torch.save(results, f"{folder}/{rank}.pt")


def test_fp8_actor(tmp_path, free_port):
    make_llama(str(tmp_path / "model"))
    fp8 = [
        PrecisionConfig("fp8_emulated", fp8=Fp8Config("delayed", amax_history_len=3)),
        PrecisionConfig("fp8_emulated", fp8=Fp8Config("blockwise")),
        PrecisionConfig("fp8_emulated", fp8=Fp8Config("tensorwise", bf16_first_layers=1, bf16_last_layers=1)),
    ]
    mp.spawn(actor_rank, (2, free_port, str(tmp_path), [PrecisionConfig("fp32"), *fp8]), nprocs=2)
    exact, delayed, blockwise, none_left = torch.load(tmp_path / "0.pt", weights_only=False)
    for logprobs, first, second, again, same in (delayed, blockwise):
        distance = (logprobs - exact[0]).abs().mean()
        assert 1e-4 < distance < 0.5, "FP8 rounds, and not to nonsense"
        assert first["optimizer_steps"] == 1 and first["grad_norm"] == pytest.approx(exact[1]["grad_norm"], rel=0.5)
        assert first["grad_norm"] != exact[1]["grad_norm"]
        assert second == again and same, "the scaling history is part of the checkpoint"
    assert torch.equal(none_left[0], exact[0]), "layers kept in high precision do not round"
