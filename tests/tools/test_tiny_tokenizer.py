"""The tiny team's tokenizer: exact round trips, words and names in the announced number of tokens."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tools.tiny_team.names import split_names
from tools.tiny_team.tokenizer import END, PAD, TAGS, build_tokenizer, save_tokenizer
from tools.tiny_team.world import make_worlds

TOKENIZER = build_tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@given(st.text())
def test_any_text_survives_the_round_trip(text):
    assert TOKENIZER.decode(encode(text)) == text


@given(st.lists(st.sampled_from([*TAGS, "yes", " the", " Ba", "von", "\nfound:", "x", "é", " "]), max_size=20).map("".join))
def test_tags_and_words_survive_decoding_without_special_tokens(text):
    assert TOKENIZER.decode([*encode(text), END], skip_special_tokens=True) == text


def test_worlds_need_no_byte_tokens():
    rng = random.Random(0)
    for world in make_worlds(5, split_names()["sft"], rng):
        for fact in world.facts.values():
            # the r of Sub ject is Val ue .
            assert len(encode(" " + fact.passage)) == 9
        for question in world.questions(8, 12, rng):
            assert all(len(token) > 1 or token in "?." for token in TOKENIZER.convert_ids_to_tokens(encode(" " + question.text)))


def test_saved_tokenizer_is_the_same(tmp_path):
    save_tokenizer(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    messages = [
        {"role": "system", "content": "héllo"},
        {"role": "user", "content": "verifier\nquestion: what is the mayor of Bavor?"},
    ]
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert (loaded.pad_token_id, loaded.eos_token_id) == (PAD, END)
    assert loaded.apply_chat_template(messages, add_generation_prompt=True) == TOKENIZER.apply_chat_template(
        messages, add_generation_prompt=True
    )


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_is_one_token_and_not_special(tag):
    (token,) = encode(tag)
    assert token not in TOKENIZER.all_special_ids


def test_chat_template_appends_the_answer_to_the_prompt():
    messages = [{"role": "user", "content": "verifier:"}, {"role": "assistant", "content": "<verify>no</verify>"}]
    prompt = TOKENIZER.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    whole = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert whole == prompt + "<verify>no</verify><|end|>"
    assert encode(whole) == encode(prompt) + encode("<verify>no</verify>") + [END]
