"""A replica of the gated team's training in plain torch: one run takes seconds instead of minutes.

Search is frozen, so its trajectories come from `contexts`; only the Answer agent is sampled and trained.  Scores, advantages,
loss and mini-batches are the project's own functions; the model is `tiny_lm`, the optimizer torch's AdamW at the project's
settings.  All that is random depends on the seed, the step and the place in the batch, so runs that differ in variant or rate
alone see the same questions, the same trajectories of Search and the same uniform numbers.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import cast

import torch
from torch import Tensor

from megatron_drmas.algorithm.advantages import compute_advantages
from megatron_drmas.algorithm.agent_statistics import agent_statistics
from megatron_drmas.algorithm.losses import LossInputs, policy_loss
from megatron_drmas.algorithm.minibatch import plan_minibatches
from megatron_drmas.batch import TurnBatch
from megatron_drmas.config.algorithm import AlgorithmConfig
from megatron_drmas.config.schema import AgentConfig
from megatron_drmas.environments.search import exact_match
from megatron_drmas.rollout.tokenizer import ChatTokenizer
from megatron_drmas.team.parsing import PARSERS
from tools.ablation.branches import Calls, Responses, response_logits, response_logprobs, sample
from tools.ablation.contexts import QuestionContexts
from tools.ablation.tiny_lm import TinyLlama
from tools.ablation.variants import VARIANTS
from tools.tiny_team.tokenizer import PAD

TEMPERATURE = 0.6
LIMIT = 8  # tokens of an answer
INVALID_PENALTY = 0.1
GRAD_CLIP = 1.0
AGENT = AgentConfig(policy="answer", prompt="", tag="answer")
EVALUATION_ROWS = 64  # that go through the model together; what more of them computes falls out of the cache
RESAMPLES = 8  # rollouts of the same questions behind one signal-to-noise ratio
SIGNAL_SEED = 1_000_000_007


@dataclass(frozen=True)
class Settings:
    """One run.  Runs are paired over everything but `variant` and `rate`."""

    warm_start: int
    seed: int
    questions: int
    samples: int
    updates: int  # optimizer steps on one batch
    variant: str  # a key of VARIANTS
    rate: float
    steps: int = 64
    keep: float = 1 / 3
    otherwise: float = 0.0


@dataclass
class Rollout:
    """One batch: all rows of the team for the statistics, and Answer's calls for the gradient.

    batch: Search's rows and Answer's, a single token each.
    calls, responses: Answer's, in the order of its rows.
    """

    batch: TurnBatch
    calls: Calls
    responses: Responses

    @property
    def answers(self) -> Tensor:
        """Which rows of the batch are Answer's, bool [R]."""
        return self.batch.agent == 1


class Replica:
    """Trains Answer policies.

    Args:
        contexts: of `load_contexts`.
        tokenizer: the tiny team's.
    """

    def __init__(self, contexts: dict[str, list[QuestionContexts]], tokenizer: ChatTokenizer):
        self.contexts, self.tokenizer = contexts, tokenizer
        self._graded: dict[tuple[int, tuple[int, ...]], tuple[bool, float]] = {}
        self._evaluations: dict[
            str, list[tuple[tuple[int, ...], tuple[int, ...]]]
        ] = {}  # gold and prompt, where Answer is called
        for split in ("dev", "eval"):
            prompts = ((of.gold, next((context.prompt for context in of.kept if context.prompt), None)) for of in contexts[split])
            self._evaluations[split] = [(gold, prompt) for gold, prompt in prompts if prompt]

    def run(self, model_folder: Path, settings: Settings) -> dict:
        """One run from a warm start.

        Returns:
            JSON: `settings`, `seconds`; by step `reward`, `called` (rows), `called_match`, `factor`, `zero` (share of Answer's
            rows with advantage 0), `squared` (mean squared advantage), `entropy`, `norm` (largest of the step's updates);
            `evaluations` {split: {"sampled", "greedy"}} after the last step; `signal`, the signal-to-noise ratio at the middle
            step.
        """
        began = perf_counter()
        model = TinyLlama(model_folder)
        for parameter in model.parameters:
            parameter.requires_grad_()
        optimizer = torch.optim.AdamW(model.parameters, lr=settings.rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        order = torch.randperm(len(self.contexts["train"]), generator=torch.Generator().manual_seed(settings.seed))
        steps: dict[str, list] = {}
        signal = None
        for step in range(1, settings.steps + 1):
            first = (step - 1) * settings.questions
            questions = [int(order[(first + i) % len(order)]) for i in range(settings.questions)]
            if step == settings.steps // 2:
                signal = self.signal_to_noise(model, settings)
            generator = torch.Generator().manual_seed(settings.seed * 100_003 + step)
            rollout = self.rollout(model, settings, questions, generator)
            for name, value in self._update(model, optimizer, rollout, settings, generator).items():
                steps.setdefault(name, []).append(value)
        evaluations = {split: self.evaluate(model, split) for split in self._evaluations}
        return {
            "settings": asdict(settings),
            "seconds": round(perf_counter() - began, 2),
            "evaluations": evaluations,
            "signal": signal,
            **steps,
        }

    def rollout(self, model: TinyLlama, settings: Settings, questions: list[int], generator: torch.Generator) -> Rollout:
        """Sample `settings.samples` trajectories of each question."""
        size = (len(questions), settings.samples)
        lost = (torch.rand(size, generator=generator) >= settings.keep).tolist()
        pick = torch.rand(size, generator=generator).tolist()
        uniform = torch.rand((*size, LIMIT), generator=generator, dtype=torch.float64).flatten(0, 1)
        contexts, group = [], []
        for place, question in enumerate(questions):
            of = self.contexts["train"][question]
            for sample_lost, share in zip(lost[place], pick[place]):
                kind = of.lost if sample_lost else of.kept
                contexts.append(kind[int(share * len(kind))])
                group.append(place)
        called = [number for number, context in enumerate(contexts) if context.prompt]
        calls = Calls.of([list(contexts[number].prompt or ()) for number in called])
        responses = _nothing() if not called else sample(model, calls, uniform[called], TEMPERATURE)
        reward, valid = [settings.otherwise] * len(contexts), {}
        for number, response in zip(called, responses.lists()):
            valid[number], reward[number] = self._grade(questions[group[number]], response)
        rows = [(number, turn, 0, ok) for number, context in enumerate(contexts) for turn, ok in enumerate(context.valid)]
        rows += [(number, len(contexts[number].valid), 1, valid[number]) for number in called]
        return Rollout(turn_batch(rows, group, reward), calls, responses)

    def _grade(self, question: int, response: list[int]) -> tuple[bool, float]:
        key = (question, tuple(response))
        if key not in self._graded:
            answer = PARSERS[AGENT.parser](self.tokenizer.text(response), AGENT)
            self._graded[key] = answer is not None, exact_match(answer, self.contexts["train"][question].answers)
        return self._graded[key]

    def _update(
        self, model: TinyLlama, optimizer: torch.optim.Optimizer, rollout: Rollout, settings: Settings, generator: torch.Generator
    ) -> dict[str, float | None]:
        batch, answers = rollout.batch, rollout.answers
        advantages = row_advantages(batch, settings.variant)[answers]
        norms = [0.0]
        for rows in plan_minibatches(batch.select(answers), settings.updates, generator):
            backward(model, rollout, advantages, rows, settings.updates > 1)
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters, GRAD_CLIP)))
            optimizer.step()
        statistics = agent_statistics(batch)[1]
        tokens = int(rollout.responses.lengths.sum())
        return {
            "reward": _rounded(float(batch.reward[~answers & (batch.turn == 0)].mean())),
            "called": len(advantages),
            "called_match": _rounded(statistics.get("return_mean")),
            "factor": _rounded(statistics.get("baseline_inflation")),
            "zero": _rounded(float((advantages == 0).float().mean()) if len(advantages) else None),
            "squared": _rounded(float(advantages.square().mean()) if len(advantages) else None),
            "entropy": _rounded(-float(rollout.responses.logprobs.sum()) / tokens if tokens else None),
            "norm": _rounded(max(norms)),
        }

    def signal_to_noise(self, model: TinyLlama, settings: Settings) -> float | None:
        """|E g|^2 / tr Cov(g) of the batch's gradient, the same questions sampled again and again; unbiased above and below.

        The questions and random numbers are the same in all runs.  None if no resample has a gradient.
        """
        questions = torch.randperm(len(self.contexts["train"]), generator=torch.Generator().manual_seed(SIGNAL_SEED))
        gradients = []
        for number in range(RESAMPLES):
            generator = torch.Generator().manual_seed(SIGNAL_SEED + 1 + number)
            rollout = self.rollout(model, settings, questions[: settings.questions].tolist(), generator)
            advantages = row_advantages(rollout.batch, settings.variant)[rollout.answers]
            backward(model, rollout, advantages, torch.arange(len(advantages)), False)
            gradients.append(torch.cat([cast(Tensor, parameter.grad).flatten() for parameter in model.parameters]))
        stacked = torch.stack(gradients)
        mean = stacked.mean(0)
        noise = float((stacked - mean).square().sum()) / (RESAMPLES - 1)
        return _rounded((float(mean.square().sum()) - noise / RESAMPLES) / noise) if noise else None

    @torch.no_grad()
    def evaluate(self, model: TinyLlama, split: str) -> dict[str, float | None]:
        """Exact match when called: the probability of the accepted answer (sampled), and whether it is the likeliest (greedy)."""
        measured = [self._match(model, *zip(*part)) for part in _parts(self._evaluations[split], EVALUATION_ROWS)]
        sampled, greedy = (torch.cat(parts) for parts in zip(*measured))
        return {"sampled": _rounded(float(sampled.mean())), "greedy": _rounded(float(greedy.float().mean()))}

    def _match(self, model: TinyLlama, golds: tuple, prompts: tuple) -> tuple[Tensor, Tensor]:
        longest = max(map(len, golds))
        tokens = torch.tensor([[*gold, *[PAD] * (longest - len(gold))] for gold in golds])
        mask = torch.arange(longest) < torch.tensor([len(gold) for gold in golds])[:, None]
        logits, row = response_logits(model, Calls.of(list(prompts)), Responses(tokens, mask, torch.zeros(mask.shape)))
        logits = logits[row]
        chosen = torch.log_softmax(logits / TEMPERATURE, -1).gather(2, tokens[:, :, None])[:, :, 0]
        return (chosen * mask).sum(1).exp(), ((logits.argmax(-1) == tokens) | ~mask).all(1)


def row_advantages(batch: TurnBatch, variant: str) -> Tensor:
    """The advantage of every row, float32 [R]."""
    return compute_advantages(batch, AlgorithmConfig(advantage=VARIANTS[variant].advantage, invalid_penalty=INVALID_PENALTY))


def backward(model: TinyLlama, rollout: Rollout, advantages: Tensor, rows: Tensor, ratios: bool) -> None:
    """Leave the mini-batch's gradient in `model`; only rows that have one run through the model.

    Args:
        advantages: float32 [Answer's rows].
        rows: int64, the mini-batch among Answer's rows.
        ratios: the policy has moved since it sampled.
    """
    for parameter in model.parameters:
        parameter.grad = torch.zeros_like(parameter)
    used = rows[advantages[rows] != 0]
    if not len(used):
        return
    config = AlgorithmConfig().loss
    weight = 1 / float(rollout.responses.lengths[rows].sum())
    whole = rollout.responses
    responses = Responses(whole.tokens[used], whole.mask[used], whole.logprobs[used])
    row, column = responses.mask.nonzero(as_tuple=True)
    logprobs = response_logprobs(model, rollout.calls.select(used), responses, TEMPERATURE)[row, column]
    sampled = responses.logprobs[row, column]
    inputs = LossInputs(
        logprobs=logprobs,
        engine_logprobs=sampled,
        advantages=advantages[used][row],
        token_weights=torch.full_like(sampled, weight),
        sequence=row,
        sequences=len(used),
        old_logprobs=sampled if ratios else None,
    )
    policy_loss(inputs, config).loss.backward()


def turn_batch(rows: list[tuple[int, int, int, bool]], group: list[int], reward: list[float]) -> TurnBatch:
    """Rows (trajectory, turn, agent, valid) as a batch of one response token each: statistics need no more."""
    trajectory, turn, agent, valid = (torch.tensor(column) for column in zip(*rows))
    count, ones = len(rows), torch.ones(len(rows), dtype=torch.bool)
    return TurnBatch(
        tokens=torch.zeros(count, dtype=torch.int64),
        offsets=torch.arange(count + 1),
        prompt_lengths=torch.zeros(count, dtype=torch.int64),
        engine_logprobs=torch.zeros(count),
        agent=agent,
        policy=agent,
        group=torch.tensor(group)[trajectory],
        trajectory=trajectory,
        sample=torch.zeros_like(trajectory),
        turn=turn,
        reward=torch.tensor(reward, dtype=torch.float32)[trajectory],
        valid=valid.bool(),
        trainable=ones,
        weight_versions=torch.zeros(count, dtype=torch.int32),
        agents=("search", "answer"),
        policies=("search", "answer"),
        questions=tuple(map(str, range(max(group) + 1))),
    )


def _parts(items: list, size: int) -> list[list]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _nothing() -> Responses:
    return Responses(torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, 0, dtype=torch.bool), torch.zeros(0, 0))


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
