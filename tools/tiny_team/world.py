"""Small worlds of persons, companies, cities and countries, and the questions one can ask about them.

A fact is a passage, "the mayor of Bavon is Kilor."; a question asks for one fact ("what is the mayor of Bavon?") or
for a chain of two ("what is the mayor of the birthplace of Zuden?"), whose second query needs the first one's answer.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

RELATIONS = {
    "person": {"birthplace": "city", "employer": "company", "spouse": "person"},
    "company": {"seat": "city", "founder": "person"},
    "city": {"country": "country", "mayor": "person"},
    "country": {},
}
POPULATION = {"person": 8, "company": 4, "city": 4, "country": 2}
NAMES_PER_WORLD = sum(POPULATION.values())
TEMPLATES = ("what is {}?", "tell me {}.", "do you know {}?")


def query_of(relation: str, subject: str) -> str:
    return f"the {relation} of {subject}"


@dataclass(frozen=True)
class Fact:
    relation: str
    subject: str
    value: str

    @property
    def passage(self) -> str:
        return f"{query_of(self.relation, self.subject)} is {self.value}."


@dataclass(frozen=True)
class WorldQuestion:
    """A question with the facts that lead to its answer, in the order they have to be found."""

    text: str
    chain: tuple[Fact, ...]

    @property
    def answer(self) -> str:
        return self.chain[-1].value

    @property
    def hop(self) -> int:
        return len(self.chain)


@dataclass
class World:
    """Facts by (relation, subject)."""

    facts: dict[tuple[str, str], Fact] = field(default_factory=dict)

    def chains(self, hops: int) -> list[tuple[Fact, ...]]:
        """Every chain of facts of this length whose answer is not its own start."""
        chains: list[tuple[Fact, ...]] = [(fact,) for fact in self.facts.values()]
        by_subject: dict[str, list[Fact]] = {}
        for fact in self.facts.values():
            by_subject.setdefault(fact.subject, []).append(fact)
        for _ in range(hops - 1):
            chains = [(*chain, fact) for chain in chains for fact in by_subject.get(chain[-1].value, [])]
        return [chain for chain in chains if chain[-1].value != chain[0].subject]

    def questions(self, one_hop: int, two_hop: int, rng: random.Random) -> list[WorldQuestion]:
        """So many different questions of either kind, shuffled together."""
        picked = rng.sample(self.chains(1), one_hop) + rng.sample(self.chains(2), two_hop)
        rng.shuffle(picked)
        return [ask(chain, rng) for chain in picked]


def ask(chain: tuple[Fact, ...], rng: random.Random) -> WorldQuestion:
    """The question whose answer is the chain's last value, in one of the templates."""
    asked = chain[0].subject
    for fact in chain:
        asked = query_of(fact.relation, asked)
    return WorldQuestion(rng.choice(TEMPLATES).format(asked), chain)


def make_world(names: Iterable[str], rng: random.Random) -> World:
    """A world over the first `NAMES_PER_WORLD` names.

    Only every second person has a spouse on record, and no two facts share relation and subject, or relation and
    value where both are persons: a query for one fact has one best passage.
    """
    supply: Iterator[str] = iter(names)
    members = {kind: list(islice(supply, count)) for kind, count in POPULATION.items()}
    world = World()

    def add(relation: str, subject: str, value: str) -> None:
        world.facts[relation, subject] = Fact(relation, subject, value)

    couples = rng.sample(members["person"], len(members["person"]))
    for kind, relations in RELATIONS.items():
        for subject in members[kind]:
            for relation, target in relations.items():
                if relation == "spouse":
                    position = couples.index(subject)
                    if position % 2 == 0:
                        add(relation, subject, couples[position + 1])
                else:
                    add(relation, subject, rng.choice(members[target]))
    return world


def make_worlds(count: int, names: list[str], rng: random.Random) -> list[World]:
    """Worlds that share no name, as long as `names` has enough of them.

    Raises:
        ValueError: fewer than `count * NAMES_PER_WORLD` names.
    """
    needed = count * NAMES_PER_WORLD
    if needed > len(names):
        raise ValueError(f"{count} worlds need {needed} names, and there are {len(names)}")
    supply = iter(rng.sample(names, needed))
    return [make_world(supply, rng) for _ in range(count)]
