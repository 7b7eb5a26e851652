"""The generated worlds: splits, questions, retrieval, and that the task needs all three roles."""

import asyncio
import itertools
import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_drmas.config.schema import WorkflowConfig
from megatron_drmas.data.questions import Question, load_questions
from megatron_drmas.environments.bm25_index import Bm25Index
from megatron_drmas.environments.search import exact_match
from megatron_drmas.team.trajectory import Turn
from megatron_drmas.workflows.search import SearchWorkflow
from tests.scripted import ScriptedTools
from tools.tiny_team.data import SPLITS, write_data
from tools.tiny_team.names import CLOSINGS, OPENINGS, split_names
from tools.tiny_team.world import make_worlds, query_of

RELATION_WORDS = {"birthplace", "employer", "spouse", "seat", "founder", "country", "mayor"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_data(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def index(data):
    return Bm25Index.open(data / "corpus.jsonl")


@pytest.fixture(scope="module")
def questions(data):
    return load_questions(str(data / "eval.jsonl"), "data.eval")


def names_in(text: str) -> set[str]:
    words = text.replace("?", " ").replace(".", " ").split()
    return {word for word in words if word[0].isupper()}


def test_every_name_belongs_to_one_split():
    splits = split_names()
    names = [name for members in splits.values() for name in members]
    assert len(names) == len(set(names)) == len(OPENINGS) * len(CLOSINGS)
    assert split_names() == splits


def test_no_evaluated_name_occurs_elsewhere(data):
    used = {
        split: names_in((data / f"{split}.jsonl").read_text()) & set(itertools.chain.from_iterable(split_names().values()))
        for split in SPLITS
    }
    for split, names in used.items():
        assert names and names <= set(split_names()[split])


def test_files_have_the_announced_sizes(data, questions):
    for split, (worlds, one_hop, two_hop) in SPLITS.items():
        hops = Counter(question.extra["hop"] for question in load_questions(str(data / f"{split}.jsonl"), "data"))
        assert hops == {1: worlds * one_hop, 2: worlds * two_hop}
    assert len(questions) >= 300


def test_same_seed_same_files_other_seed_other_worlds(data, tmp_path):
    write_data(tmp_path / "again", seed=0)
    write_data(tmp_path / "other", seed=1)
    for name in ("corpus.jsonl", "train.jsonl", "dev.jsonl", "eval.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (data / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (data / name).read_bytes()


def test_too_few_names_is_an_error():
    with pytest.raises(ValueError, match="3 worlds need 54 names, and there are 20"):
        make_worlds(3, split_names()["eval"][:20], random.Random(0))


@given(st.integers(0, 10**6))
def test_a_chain_leads_to_its_answer_and_never_back_to_its_start(seed):
    (world,) = make_worlds(1, split_names()["eval"], random.Random(seed))
    for question in world.questions(8, 12, random.Random(seed)):
        for before, after in zip(question.chain, question.chain[1:]):
            assert after.subject == before.value
        assert all(world.facts[fact.relation, fact.subject] == fact for fact in question.chain)
        assert names_in(question.text) == {question.chain[0].subject}
        assert question.answer != question.chain[0].subject


def test_the_right_query_finds_its_passage_first(data, index):
    for line in (data / "corpus.jsonl").read_text().splitlines():
        passage = json.loads(line)["contents"]
        query = passage.rsplit(" is ", 1)[0]
        assert index.search(query, 2)[0].contents == passage


class ScriptedTeam(ScriptedTools):
    """A `Context` whose agents are functions of (question, history); retrieval is real."""

    use_turn_rewards = False

    def __init__(self, index: Bm25Index, **agents):
        self.index, self.agents = index, agents

    async def call(self, agent, question, history, **variables):
        content = self.agents[agent](question, history)
        return Turn(agent, "policy", 0, [], [], [], [], 8, "stop", [], content, content)

    async def retrieve(self, query):
        return [passage.contents for passage in self.index.search(query, 2)][::-1]


def relations_of(question: str) -> list[str]:
    """Relations in the order they have to be looked up: the innermost first."""
    return [word for word in question.split() if word in RELATION_WORDS][::-1]


def right_search(question, history):
    (start,) = names_in(question)
    relations = relations_of(question)
    hop = min(len(history), len(relations) - 1)
    return query_of(relations[hop], right_answer(question, history) if hop else start)


def right_verdict(question, history):
    return "yes" if len(history) == len(relations_of(question)) else "no"


def right_answer(question, history):
    return history[-1].passages[-1].rsplit(" is ", 1)[1].rstrip(".") if history else "nothing"


def exact_matches(index, questions: list[Question], verifier=right_verdict, search=right_search, answer=right_answer) -> float:
    workflow = SearchWorkflow(WorkflowConfig(name="search", max_turns=4, history=4))
    team = ScriptedTeam(index, verifier=verifier, search=search, answer=answer)
    outcomes = [asyncio.run(workflow.run(team, question)) for question in questions]
    return sum(exact_match(outcome.answer, question.answers) for outcome, question in zip(outcomes, questions)) / len(questions)


def test_three_right_agents_answer_everything(index, questions):
    assert exact_matches(index, questions) == 1.0


@pytest.mark.parametrize("verdict", ["yes", "no"])
def test_a_verifier_without_judgment_loses(index, questions, verdict):
    assert exact_matches(index, questions, verifier=lambda question, history: verdict) <= 0.01


def test_an_answer_that_was_not_searched_for_is_wrong(index, questions):
    most_frequent = Counter(question.answers[0] for question in questions).most_common(1)[0][0]
    guesses = (lambda question, history: min(names_in(question)), lambda question, history: most_frequent)
    for guess in guesses:
        assert exact_matches(index, questions, verifier=lambda question, history: "yes", answer=guess) <= 0.03


def test_searching_for_the_question_is_not_enough(index, questions):
    two_hops = [question for question in questions if question.extra["hop"] == 2]
    assert exact_matches(index, two_hops, search=lambda question, history: question) <= 0.1


def test_an_answer_agent_that_copies_the_wrong_name_loses(index, questions):
    def subject(question, history):
        return history[-1].passages[-1].split(" of ")[1].split(" is ")[0]

    assert exact_matches(index, questions, answer=subject) == 0.0
