"""Batches of turns with random structure."""

import pytest
import torch

from megatron_drmas.batch import TurnBatch


@pytest.fixture(scope="session")
def make_batch():
    """make_batch(scores-like columns) -> TurnBatch; every column but the given ones is filled in deterministically."""

    def make(agent, group, trajectory, reward, *, turn=None, valid=None, lengths=None, agents=3, seed=0, **columns) -> TurnBatch:
        rows = len(agent)
        generator = torch.Generator().manual_seed(seed)
        if lengths is None:
            lengths = torch.randint(1, 6, (rows,), generator=generator)
        prompt = torch.randint(1, 4, (rows,), generator=generator)
        lengths = torch.as_tensor(lengths, dtype=torch.int64)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (lengths + prompt).cumsum(0)])
        if turn is None:
            seen: dict = {}
            turn = [seen.setdefault(t, []).append(0) or len(seen[t]) - 1 for t in map(int, trajectory)]

        def column(values, dtype=torch.int64):
            return torch.as_tensor(values).to(dtype)

        return TurnBatch(
            tokens=torch.randint(0, 100, (int(offsets[-1]),), generator=generator),
            offsets=offsets,
            prompt_lengths=prompt,
            engine_logprobs=-torch.rand(int(lengths.sum()), generator=generator),
            agent=column(agent),
            policy=column(agent) % 2,
            group=column(group),
            trajectory=column(trajectory),
            sample=column(trajectory),
            turn=column(turn),
            reward=column(reward, torch.float32),
            valid=torch.ones(rows, dtype=torch.bool) if valid is None else column(valid, torch.bool),
            trainable=columns.pop("trainable", torch.ones(rows, dtype=torch.bool)),
            weight_versions=torch.zeros(int(lengths.sum()), dtype=torch.int32),
            agents=tuple(f"agent{k}" for k in range(agents)),
            policies=("policy0", "policy1"),
            questions=tuple(f"q{k}" for k in range(max(map(int, group), default=-1) + 1)),
            **columns,
        )

    return make


@pytest.fixture(scope="session")
def random_batch(make_batch):
    """random_batch(seed, groups, samples, agents) -> a batch as a workflow of conditional calls leaves it, rows shuffled."""

    def make(seed=0, groups=4, samples=5, agents=3, **columns) -> TurnBatch:
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for group in range(groups):
            for sample in range(samples):
                trajectory = group * samples + sample
                calls = int(torch.randint(1, 5, (), generator=generator))
                reward = float(torch.randint(0, 3, (), generator=generator)) / 2
                for turn in range(calls):
                    agent = int(torch.randint(0, agents, (), generator=generator))
                    valid = bool(torch.rand((), generator=generator) > 0.2)
                    rows.append(
                        (agent, group, trajectory, reward, turn, valid, int(torch.randint(0, 3, (), generator=generator)))
                    )
        rows = [rows[i] for i in torch.randperm(len(rows), generator=generator)]
        agent, group, trajectory, reward, turn, valid, state = zip(*rows)
        return make_batch(
            agent,
            group,
            trajectory,
            reward,
            turn=turn,
            valid=valid,
            agents=agents,
            seed=seed,
            state=torch.tensor(state),
            **columns,
        )

    return make
