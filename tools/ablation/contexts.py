"""What the frozen Search agent leaves the Answer agent: histories of every question, drawn once for all runs of the replica.

Search does not learn, so its trajectories have one distribution for the whole study.  `SAMPLES` of them are drawn for each
question: where retrieval keeps the passages that hold the answer, and where it loses them.
"""

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

import megatron_drmas.workflows  # noqa: F401  registers
from megatron_drmas.config.load import compose_config
from megatron_drmas.config.schema import RunConfig
from megatron_drmas.data.questions import Question, load_questions
from megatron_drmas.environments.bm25_index import Bm25Index
from megatron_drmas.environments.search import SearchConfig, SearchEnvironment
from megatron_drmas.observability.history import write_atomically
from megatron_drmas.rollout.tokenizer import ChatTokenizer, load_tokenizer
from megatron_drmas.team.team import Team
from megatron_drmas.team.trajectory import Turn
from tools.ablation.branches import Calls, sample
from tools.ablation.tiny_lm import TinyLlama
from tools.tiny_team.tokenizer import END

SAMPLES = {"train": 16, "dev": 4, "eval": 4}
MODEL_ROWS = 4096  # calls that go through the model together


@dataclass(frozen=True)
class Context:
    """One trajectory up to the Answer agent: whether each query was well formed, and Answer's prompt if it is called."""

    valid: tuple[bool, ...]
    prompt: tuple[int, ...] | None


@dataclass(frozen=True)
class QuestionContexts:
    """A question's accepted answers, their tokens as a well-formed output, and trajectories that keep or lose the answer."""

    answers: tuple[str, ...]
    gold: tuple[int, ...]
    kept: tuple[Context, ...]
    lost: tuple[Context, ...]


class _Waiting(Exception):
    """A trajectory waits for a query."""


class _Scripted:
    """A `Context` of a workflow that replays the queries so far; `pending` is the call that it then waits for."""

    use_turn_rewards = False

    def __init__(
        self, queries: list[tuple[str, str | None]], lost: bool, environment: SearchEnvironment, question: Question, find: Any
    ):
        self._queries, self._lost, self._environment, self._question, self._find = (
            iter(queries),
            lost,
            environment,
            question,
            find,
        )
        self.pending: tuple[str, dict] = ("", {})

    def chance(self, name: str) -> float:
        return 1.0 if self._lost else 0.0

    async def tool(self, name: str, **arguments: Any) -> Any:
        if name == "search":
            return self._find(**arguments)
        return await self._environment.call_tool(name, self._question, arguments)

    async def call(self, agent: str, **variables: Any) -> Turn:
        text, content = next(self._queries, (None, None))
        if text is None:
            self.pending = (agent, variables)
            raise _Waiting
        return Turn(agent, "", 0, [], np.empty(0), np.empty(0), np.empty(0), 0, "stop", [], text, content)


class ContextStudy:
    """Draws contexts with the project's own workflow, prompts, parsers and index.

    Args:
        tiny_team: folder of `python -m tools.tiny_team`.
        seed: of the sampling.
    """

    def __init__(self, tiny_team: Path, seed: int = 0):
        self.config: RunConfig = compose_config("search_gated", [f"variables.tiny_team={tiny_team}", "variables.answer=unused"])
        self.team = Team.from_config(self.config.team)
        self.environment = SearchEnvironment(self.config.environment)
        self.tokenizer = ChatTokenizer(str(tiny_team / "llama"), {})
        self._words = load_tokenizer(str(tiny_team / "llama"))
        self.model = TinyLlama(tiny_team / "llama")
        self.tiny_team = tiny_team
        self._index = Bm25Index.open(tiny_team / "corpus.jsonl")
        self._found: dict[str, list[str]] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, split: str, limit: int | None = None) -> list[QuestionContexts]:
        """The contexts of every question (at most `limit`) of train, dev or eval."""
        questions = load_questions(str(self.tiny_team / f"{split}.jsonl"), split, limit)
        kinds = (False, True) if split == "train" else (False,)
        slots = [(question, lost) for question in questions for lost in kinds for _ in range(SAMPLES[split])]
        queries: list[list] = [[] for _ in slots]
        contexts: dict[int, Context] = {}
        calls: dict[tuple, tuple] = {}  # trajectories that are equal so far make the same call
        while len(contexts) < len(slots):
            asked = {}
            for number, (question, lost) in enumerate(slots):
                if number in contexts:
                    continue
                so_far = (question.id, lost, *queries[number])
                if so_far not in calls:
                    calls[so_far] = self._next_call(question, lost, queries[number])
                agent, prompt = calls[so_far]
                if agent == "search":
                    asked[number] = prompt
                else:
                    contexts[number] = Context(tuple(content is not None for _, content in queries[number]), prompt)
            for number, text in zip(asked, self._speak(list(asked.values()))):
                queries[number].append((text, self.team.agents["search"].parse(text)))
        width = SAMPLES[split] * len(kinds)
        return [
            QuestionContexts(
                question.answers,
                self._gold(question.answers[0]),
                tuple(contexts[number * width + i] for i in range(SAMPLES[split])),
                tuple(contexts[number * width + i] for i in range(SAMPLES[split], width)),
            )
            for number, question in enumerate(questions)
        ]

    def _next_call(self, question: Question, lost: bool, queries: list) -> tuple[str | None, tuple[int, ...] | None]:
        context = _Scripted(queries, lost, self.environment, question, self._find)
        try:
            asyncio.run(self.team.workflow.run(cast(Any, context), question))
        except _Waiting:
            agent, variables = context.pending
            return agent, tuple(self.tokenizer.prompt_ids(self.team.agents[agent].messages(**variables)))
        return None, None

    def _speak(self, prompts: list[tuple[int, ...]]) -> list[str]:
        limit = self.team.agents["search"].config.max_response_tokens or self.config.rollout.max_response_tokens
        texts: list[str] = []
        for start in range(0, len(prompts), MODEL_ROWS):
            calls = Calls.of([list(prompt) for prompt in prompts[start : start + MODEL_ROWS]])
            uniform = torch.rand(len(calls), limit, generator=self._generator, dtype=torch.float64)
            responses = sample(self.model, calls, uniform, self.config.rollout.temperature)
            texts += map(self.tokenizer.text, responses.lists())
        return texts

    def _find(self, query: str) -> list[str]:
        if query not in self._found:
            environment = self.config.environment
            assert isinstance(environment, SearchConfig)
            settings = environment.retrieval
            passages = [passage.contents for passage in self._index.search(query, settings.topk)]
            self._found[query] = passages[::-1] if settings.order == "best_last" else passages
        return self._found[query]

    def _gold(self, answer: str) -> tuple[int, ...]:
        tag = self.config.team.agents["answer"].tag
        return (*self._words.encode(f"<{tag}> {answer}</{tag}>", add_special_tokens=False), END)


def load_contexts(tiny_team: Path, path: Path) -> dict[str, list[QuestionContexts]]:
    """All splits' contexts, drawn and written to `path` (JSON) if an earlier command has not."""
    if not path.exists():
        study = ContextStudy(tiny_team)
        write_atomically(path, json.dumps({split: [asdict(of) for of in study.draw(split)] for split in SAMPLES}))

    def context(of: dict) -> Context:
        return Context(tuple(of["valid"]), tuple(of["prompt"]) if of["prompt"] else None)

    return {
        split: [
            QuestionContexts(
                tuple(of["answers"]), tuple(of["gold"]), tuple(map(context, of["kept"])), tuple(map(context, of["lost"]))
            )
            for of in questions
        ]
        for split, questions in json.loads(path.read_text()).items()
    }
