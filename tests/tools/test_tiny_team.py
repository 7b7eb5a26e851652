"""The tiny team: supervised examples and the shipped policies."""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import islice

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from megatron_drmas.config.load import compose_config
from megatron_drmas.rollout.tokenizer import load_tokenizer
from megatron_drmas.team.team import Team
from megatron_drmas.validate import validate
from megatron_drmas.workflows.search import SearchStep
from tools.tiny_team.__main__ import WEIGHTS
from tools.tiny_team.dialogues import Noise, load_agents, stream_examples
from tools.tiny_team.models import build_model
from tools.tiny_team.tokenizer import build_tokenizer
from tools.tiny_team.warm_start import BATCH, RECIPES, write_examples

WITHOUT_NOISE = Noise(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def run(*arguments: str, timeout: float) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.fixture(scope="module")
def tiny_team(tmp_path_factory):
    folder = tmp_path_factory.mktemp("team")
    run("tools.tiny_team", "--out", str(folder), timeout=60)
    return folder


def test_prompts_of_the_examples_are_those_of_the_recipe():
    team = Team.from_config(compose_config("search_hetero", []).team)
    history = [SearchStep("the mayor of Bavor", ["the seat of Kixon is Bavor.", "the mayor of Bavor is Duvas."])]
    for name, agent in load_agents().items():
        variables = {"question": "what is the mayor of Bavor?", "history": history, "turn": 2, "max_turns": 4}
        assert agent.messages(**variables) == team.agents[name].messages(**variables)


def test_examples_parse_fit_and_carry_no_evaluated_name():
    config = compose_config("search_hetero", [])
    team, tokenizer = Team.from_config(config.team), build_tokenizer()
    for example in islice(stream_examples(seed=0), 2000):
        *prompt, response = example.messages
        assert team.agents[example.agent].parse(response["content"]) is not None
        assert (
            len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"])
            <= config.rollout.max_prompt_tokens
        )
        limit = team.agents[example.agent].config.max_response_tokens
        assert len(tokenizer.encode(response["content"], add_special_tokens=False)) + 1 <= limit


def test_without_noise_the_expert_is_right():
    for example in islice(stream_examples(0, WITHOUT_NOISE), 500):
        prompt, said = (message["content"] for message in example.messages)
        content = load_agents()[example.agent].parse(said)
        question = prompt.split("\n")[1]
        relations = [word for word in question.split() if f" {word} of " in question]
        searches = prompt.count("\nsearch:")
        if example.agent == "verifier":
            assert content == ("yes" if searches == len(relations) else "no")
        elif example.agent == "search":
            assert content.split()[1] == relations[::-1][searches]
        else:
            assert f" {relations[0]} of " in prompt and prompt.split("\n")[-2].endswith(f" is {content}.")


@pytest.mark.parametrize("policy", RECIPES)
def test_a_recipe_sees_its_agents_equally_often(policy, tmp_path):
    write_examples(policy, tmp_path / "examples.jsonl")
    marks = [json.loads(line)["messages"][0]["content"].split()[0] for line in (tmp_path / "examples.jsonl").open()]
    per_batch = [Counter(marks[start : start + BATCH]) for start in range(0, len(marks), BATCH)]
    assert len(per_batch) == RECIPES[policy].steps
    assert all(set(counts.values()) == {BATCH // len(RECIPES[policy].agents)} for counts in per_batch)


def test_shipped_policies_are_small_and_complete(tiny_team):
    assert sum(file.stat().st_size for file in WEIGHTS.rglob("*") if file.is_file()) < 8e6
    validate(compose_config("search_hetero", [f"variables.tiny_team={tiny_team}"]))
    for policy in RECIPES:
        shipped = AutoModelForCausalLM.from_pretrained(tiny_team / policy)
        fresh = build_model(policy, seed=0)
        assert {name: tensor.shape for name, tensor in shipped.state_dict().items()} == {
            name: tensor.shape for name, tensor in fresh.state_dict().items()
        }
        assert load_tokenizer(str(tiny_team / policy)).get_vocab() == build_tokenizer().get_vocab()


def test_shipped_verifier_speaks_its_tag(tiny_team):
    tokenizer = load_tokenizer(str(tiny_team / "qwen2"))
    verifier = load_agents()["verifier"]
    prompt = verifier.messages(question="what is the mayor of Bavor?", history=[], turn=1, max_turns=4)
    ids = torch.tensor([tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]])
    model = AutoModelForCausalLM.from_pretrained(tiny_team / "qwen2", dtype=torch.float32)
    said = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
    assert verifier.parse(tokenizer.decode(said, skip_special_tokens=True)) in ("yes", "no")


@torch.no_grad()
def losses(folder, policy, noise, count=200):
    """Mean loss of response tokens by agent, and how often all of them would be chosen, on examples never trained on."""
    tokenizer = load_tokenizer(str(folder / policy))
    model = AutoModelForCausalLM.from_pretrained(folder / policy, dtype=torch.float32)
    loss, right = {}, {}
    for agent in RECIPES[policy].agents:
        stream = (example for example in stream_examples(seed=1, noise=noise) if example.agent == agent)
        responses = []
        for *prompt, response in (example.messages for example in islice(stream, count)):
            prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
            ids = torch.tensor(
                prompt_ids + tokenizer.encode(response["content"], add_special_tokens=False) + [tokenizer.eos_token_id]
            )
            responses.append((model(ids[None]).logits[0, len(prompt_ids) - 1 : -1], ids[len(prompt_ids) :]))
        loss[agent] = cross_entropy(
            torch.cat([logits for logits, _ in responses]), torch.cat([ids for _, ids in responses])
        ).item()
        right[agent] = sum(bool((logits.argmax(-1) == ids).all()) for logits, ids in responses) / count
    return loss, right


def test_shipped_policies_copy_but_judge_badly():
    """Where reinforcement learning begins: names are found and copied; a one-hop question's fact ends the search too often."""
    _, copies = losses(WEIGHTS, "llama", WITHOUT_NOISE)
    assert copies["answer"] > 0.85 and copies["search"] > 0.7
    _, judges = losses(WEIGHTS, "qwen2", WITHOUT_NOISE)
    assert 0.5 < judges["verifier"] < 0.9


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tool_reproduces_the_shipped_policies(tmp_path):
    """Up to rounding, which differs between processors and which fine-tuning amplifies."""
    run("tools.tiny_team", "--out", str(tmp_path), "--retrain", timeout=900)
    for policy, recipe in RECIPES.items():
        (shipped, _), (made, _) = (losses(folder, policy, recipe.noise) for folder in (WEIGHTS, tmp_path))
        assert made == pytest.approx(shipped, abs=0.1), policy
