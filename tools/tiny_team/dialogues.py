"""Supervised examples for the tiny team: an imperfect expert's play in generated worlds.

The expert's mistakes leave reinforcement learning something to improve: it says yes too early and no too late, asks
for the wrong fact and answers with the wrong name.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_drmas.config.schema import AgentConfig
from megatron_drmas.team.team import Agent
from megatron_drmas.workflows.search import SearchStep
from tools.tiny_team.names import split_names
from tools.tiny_team.world import RELATIONS, Fact, World, WorldQuestion, make_worlds, query_of

TEAM = Path(__file__).parents[2] / "configs" / "team" / "search_tiny.yaml"
ALL_RELATIONS = [relation for relations in RELATIONS.values() for relation in relations]
MAX_TURNS = 4
PASSAGES = 2


@dataclass(frozen=True)
class Noise:
    """How often the expert errs."""

    blind_yes: float = 0.3  # "yes" before any search
    early_yes: float = 0.6  # "yes" although what was found is not the answer
    late_no: float = 0.2  # "no" although it is
    wrong_first_query: float = 0.15
    wrong_next_query: float = 0.35
    wrong_answer: float = 0.2


@dataclass(frozen=True)
class Example:
    """One agent call with the expert's output."""

    agent: str
    messages: tuple[dict[str, str], ...]


def load_agents() -> dict[str, Agent]:
    """The agents of configs/team/search_tiny.yaml, whose prompts the examples are rendered with."""
    agents = yaml.safe_load(TEAM.read_text())["agents"]
    return {name: Agent(name, AgentConfig(**settings)) for name, settings in agents.items()}


def retrieve(world: World, query: str, rng: random.Random) -> list[str]:
    """What BM25 would find, best passage last: a name outweighs a relation, ties fall at random."""
    words = set(query.split())

    def score(fact: Fact) -> tuple[float, float]:
        return 2 * (fact.subject in words) + 2 * (fact.value in words) + (fact.relation in words), rng.random()

    ranked = sorted(world.facts.values(), key=score)
    return [fact.passage for fact in ranked[-PASSAGES:]]


def play(agents: dict[str, Agent], world: World, question: WorldQuestion, noise: Noise, rng: random.Random) -> Iterator[Example]:
    """The expert's calls on one question, along one trajectory of its own mistakes."""
    history: list[SearchStep] = []

    def example(agent: str, content: str) -> Example:
        # No space after an opening tag for "yes" and "no", which are pieces of their own; names and queries need one.
        config = agents[agent].config
        text = f"<{config.tag}>{content if config.choices else ' ' + content}</{config.tag}>"
        prompt = agents[agent].messages(question=question.text, history=history, turn=len(history) + 1, max_turns=MAX_TURNS)
        return Example(agent, (*prompt, {"role": "assistant", "content": text}))

    for _turn in range(1, MAX_TURNS + 1):
        found = {passage for step in history for passage in step.passages}
        missing = [fact for fact in question.chain if fact.passage not in found]
        yes = 1 - noise.late_no if not missing else noise.early_yes if history else noise.blind_yes
        says_yes = rng.random() < yes
        yield example("verifier", "yes" if says_yes else "no")
        if not missing or (says_yes and history):
            yield example("answer", _answer(question, found, bool(missing) or rng.random() < noise.wrong_answer, rng))
            if says_yes and not missing:
                return
        fact = (missing or question.chain[-1:])[0]
        query = query_of(fact.relation, fact.subject)
        if rng.random() < (noise.wrong_next_query if history else noise.wrong_first_query):
            query = _wrong_query(question, found, rng)
        yield example("search", query)
        history.append(SearchStep(query, retrieve(world, query, rng)))


def _answer(question: WorldQuestion, found: set[str], wrong: bool, rng: random.Random) -> str:
    if not wrong:
        return question.answer
    names = sorted({word.rstrip(".") for passage in found for word in passage.split() if word[0].isupper()} - {question.answer})
    return rng.choice(names)


def _wrong_query(question: WorldQuestion, found: set[str], rng: random.Random) -> str:
    names = {question.chain[0].subject} | {word.rstrip(".") for passage in found for word in passage.split() if word[0].isupper()}
    asked = [fact.relation for fact in question.chain]
    relation = rng.choice(asked) if rng.random() < 0.5 else rng.choice(ALL_RELATIONS)
    return query_of(relation, rng.choice(sorted(names)))


def stream_examples(seed: int, noise: Noise = Noise(), one_hop: int = 8, two_hop: int = 12) -> Iterator[Example]:
    """Examples without end, each world of new names drawn from the supervised split."""
    agents = load_agents()
    names = split_names()["sft"]
    rng = random.Random(f"sft {seed}")
    while True:
        (world,) = make_worlds(1, names, rng)
        for question in world.questions(one_hop, two_hop, rng):
            yield from play(agents, world, question, noise, rng)
