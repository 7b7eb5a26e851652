"""A policy sees exactly the ids that its tokenizer.json gives, whatever its architecture; what ends a turn is one set of ids."""

import pytest
from tokenizers import AddedToken, Tokenizer

from megatron_drmas.rollout.tokenizer import ChatError, ChatTokenizer
from tests.rollout.chat_models import (
    CHATML,
    CHATML_TOKENS,
    FAMILIES,
    LLAMA3,
    QWEN3,
    SILENT,
    byte_level,
    make_family,
    metaspace,
    save,
)
from tools.tiny_team.models import POLICIES, build_model, save_policy

QUESTION = [{"role": "user", "content": "what is 12 + 30?"}]
ENDS = {"llama3": "<|eot_id|>", "chatml": "<|im_end|>", "qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>", "stripping": "<|im_end|>"}


def chatml(folder, template=CHATML, eos="<|im_end|>", options=None, **settings) -> ChatTokenizer:
    return ChatTokenizer(save(folder, byte_level(CHATML_TOKENS), template, eos, **settings), options or {})


def ids(chat: ChatTokenizer, *tokens: str) -> list[int]:
    return sorted(chat._tokenizer.convert_tokens_to_ids(list(tokens)))


@pytest.mark.parametrize("policy", POLICIES)
def test_ids_are_the_tokenizer_file_s_own(tmp_path, policy):
    save_policy(build_model(policy, seed=0), tmp_path)
    chat = ChatTokenizer(str(tmp_path), {})
    content = "verifier\nquestion: what is the founder of Sobux?\nverifier:"
    ids = chat.prompt_ids([{"role": "user", "content": content}])
    assert (
        ids
        == Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        .encode(f"<|user|>{content}<|assistant|>", add_special_tokens=False)
        .ids
    )
    assert chat.text(ids[1:-1]) == content


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dialogue_s_prompt_is_the_rollout_s_and_ends_as_the_template_ends_a_turn(tmp_path, family):
    chat = ChatTokenizer(make_family(family, tmp_path), {})
    prompt, response = chat.dialogue_ids([*QUESTION, {"role": "assistant", "content": "<answer>42</answer>"}])
    assert prompt == chat.prompt_ids(QUESTION)
    assert response[-1] == chat.end_of_turn == chat._tokenizer.convert_tokens_to_ids(ENDS.get(family, "</s>"))
    assert chat.end_of_turn in chat.stop_ids and response.count(chat.end_of_turn) == 1
    assert chat.text(response).endswith("<answer>42</answer>")


@pytest.mark.parametrize("options", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_options_reach_prompts_and_dialogues_alike(tmp_path, options):
    chat = ChatTokenizer(make_family("qwen3", tmp_path), options)
    prompt, response = chat.dialogue_ids([*QUESTION, {"role": "assistant", "content": "42"}])
    assert prompt == chat.prompt_ids(QUESTION)
    thinking = chat._tokenizer.convert_tokens_to_ids("<think>")
    assert (prompt.count(thinking), response.count(thinking)) == ((1, 0) if options.get("enable_thinking") is False else (0, 1))


@pytest.mark.parametrize(
    "told, tokenizer_says, stops",
    [
        ({}, "<|im_end|>", ["<|im_end|>"]),
        ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": None}}, "<|im_end|>", ["<|im_end|>"]),
        (
            {"config": {"eos_token_id": 383}, "generation_config": {"eos_token_id": 383}},
            "<|im_end|>",
            ["<|endoftext|>", "<|im_end|>"],
        ),
        ({"generation_config": {"eos_token_id": [385, 383]}}, "<|im_end|>", ["<|endoftext|>", "<|im_end|>"]),
        ({"config": {"eos_token_id": 383}}, "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]),
        (
            {"config": {"eos_token_id": 383}, "generation_config": {"eos_token_id": 385}},
            "<|im_end|>",
            ["<|endoftext|>", "<|im_end|>"],
        ),
        ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": None}}, None, ["<|im_end|>"]),
    ],
)
def test_whatever_is_said_to_end_a_turn_ends_it(tmp_path, told, tokenizer_says, stops):
    chat = chatml(tmp_path, eos=tokenizer_says, **told)
    assert chat.stop_ids == ids(chat, *stops)
    assert [chat.end_of_turn] == ids(chat, "<|im_end|>")


@pytest.mark.parametrize(
    "told, said",
    [
        ({}, False),
        ({"generation_config": {"eos_token_id": [385, 383]}}, False),
        ({"config": {"eos_token_id": 383}, "generation_config": {"eos_token_id": 383}}, True),
        ({"config": {"eos_token_id": 383}}, True),
    ],
)
def test_a_disagreement_is_said(tmp_path, told, said):
    notices = chatml(tmp_path, **told).notices
    assert any("the sources disagree on what ends a response" in notice for notice in notices) == said
    assert not said or "<|endoftext|> (383) or <|im_end|> (385) will" in notices[0]


@pytest.mark.parametrize(
    "eos, problem",
    [
        (9999, "no token"),
        (-1, "no token"),
        ([385, 391], "no token"),
        (5, "the ordinary token"),
        ("</s>", "'</s>'"),
        (True, "True"),
        ([385, None], "None"),
    ],
)
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_an_end_that_cannot_be_is_refused(tmp_path, file, eos, problem):
    with pytest.raises(ChatError, match=f"its {file}.json has eos_token_id.*{problem}"):
        chatml(tmp_path, **{file: {"eos_token_id": eos}})


def test_no_end_at_all_is_refused(tmp_path):
    with pytest.raises(ChatError, match="nothing says which token ends a response"):
        chatml(tmp_path, template="{% for m in messages %}{{ m.content }}\n{% endfor %}", eos=None)


def test_a_template_without_an_end_leaves_it_to_the_tokenizer(tmp_path):
    chat = chatml(
        tmp_path,
        template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
    )
    _, response = chat.dialogue_ids([*QUESTION, {"role": "assistant", "content": "42"}])
    assert chat.text(response) == " 42\n" and [response[-1]] == ids(chat, "<|im_end|>")


@pytest.mark.parametrize(
    "template, options, key, problem",
    [
        (QWEN3, {"enable_thinkng": False}, "enable_thinkng", "did you mean enable_thinking?"),
        (CHATML, {"enable_thinking": False}, "enable_thinking", "never reads it"),
        (QWEN3, {"enable_thinking": "false"}, "enable_thinking", "without quotes"),
        (CHATML, {"messages": []}, "messages", "never reads it"),
        (CHATML, {"add_generation_prompt": False}, "add_generation_prompt", "never reads it"),
        (CHATML + "{{ tokenize }}", {"tokenize": True}, "tokenize", "never reads it"),
        (CHATML, {"m": 1}, "m", "never reads it"),
        ("{% if x", {}, None, "not Jinja"),
        (CHATML + "{{ raise_exception('no') }}", {}, None, "cannot render user"),
        (CHATML + "{{ 1 + 'a' }}", {}, None, "cannot render user"),
    ],
)
def test_a_template_or_an_option_that_cannot_work_is_refused(tmp_path, template, options, key, problem):
    with pytest.raises(ChatError) as caught:
        chatml(tmp_path, template=template, options=options)
    assert caught.value.option == key and problem.replace("\\", "") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template, notice",
    [
        (CHATML + "{{ strftime_now('%Y') }}", "today's date"),
        (
            "{% if date_string is not defined %}{% set date_string = strftime_now('%Y') %}{% endif %}{{ date_string }}" + CHATML,
            "template_options.date_string",
        ),
        (CHATML.replace("im_start", "start"), "<|start|>, which the tokenizer does not know"),
    ],
)
def test_what_deserves_a_look_is_said(tmp_path, template, notice):
    assert any(notice in line for line in chatml(tmp_path, template=template).notices)


def test_a_date_that_is_given_is_no_surprise(tmp_path):
    template = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%Y') %}{% endif %}{{ date_string }}" + CHATML
    )
    assert chatml(tmp_path, template=template, options={"date_string": "1 Jan 2026"}).notices == []


@pytest.mark.parametrize(
    "template, roles, problem",
    [
        (SILENT, ("system", "user"), "leaves out what the system says"),
        ("{{ messages[-1].content }}<|im_end|>", ("user", "assistant", "user"), "leaves out what the user says"),
        (CHATML, ("system", "user"), None),
    ],
)
def test_a_template_that_says_less_is_refused(tmp_path, template, roles, problem):
    chat = chatml(tmp_path, template=template)
    if problem is None:
        chat.check_roles(roles)
    else:
        with pytest.raises(ChatError, match=problem):
            chat.check_roles(roles)


def test_a_template_without_a_system_role_is_refused(tmp_path):
    with pytest.raises(ChatError, match=r"cannot render system . user messages.*Only user and assistant"):
        ChatTokenizer(make_family("mistral", tmp_path), {}).check_prompt([{"role": "system", "content": "Be brief."}, *QUESTION])


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    with pytest.raises(ChatError, match=r"token 385 \(<\|im_end\|>\), its config.json a vocab_size of 380"):
        chatml(tmp_path, config={"vocab_size": 380})


def test_characters_that_the_tokenizer_does_not_know_are_refused_in_prompts(tmp_path):
    folder = make_family("unigram", tmp_path)
    with pytest.raises(ChatError, match="does not know every character"):
        ChatTokenizer(folder, {}).check_prompt([{"role": "user", "content": "naïve 漢"}])
    assert ChatTokenizer(folder, {}).check_prompt([{"role": "user", "content": "search the evidence"}]) > 3


def test_a_response_s_text_hides_nothing_but_its_end(tmp_path):
    chat = chatml(tmp_path, generation_config={"eos_token_id": [385, 383]})
    start, end, other = ids(chat, "<|im_start|>") + ids(chat, "<|im_end|>") + ids(chat, "<|endoftext|>")
    four, two = ids(chat, "4") + ids(chat, "2")
    assert chat.text([four, two, end]) == chat.text([four, two, other]) == chat.text([four, two]) == "42"
    assert chat.text([four, start, two, end]) == "4<|im_start|>2"
    assert chat.text([four, 390, two]) == "4\ufffd2"  # the model's vocabulary is larger than the tokenizer's
    assert chat.text([end]) == chat.text([]) == ""


def test_templates_are_read_from_every_place(tmp_path):
    chat = chatml(tmp_path / "a")
    folder = tmp_path / "b"
    save(folder, byte_level(CHATML_TOKENS), None, "<|im_end|>")
    (folder / "chat_template.jinja").write_text(CHATML)
    assert ChatTokenizer(str(folder), {}).prompt_ids(QUESTION) == chat.prompt_ids(QUESTION)
    named = save(tmp_path / "c", byte_level(CHATML_TOKENS), [{"name": "rag", "template": CHATML}], "<|im_end|>")
    with pytest.raises(ChatError, match="no usable chat template"):
        ChatTokenizer(named, {})


def test_a_first_section_has_its_space_once(tmp_path):
    """SentencePiece writes a space before a text: of a response only if the template does."""
    chat = ChatTokenizer(save(tmp_path, metaspace(["<unk>", "<s>", "</s>"], "first"), LLAMA3, "</s>", bos="<s>", unk="<unk>"), {})
    prompt, response = chat.dialogue_ids([*QUESTION, {"role": "assistant", "content": "yes"}])
    assert chat._tokenizer.convert_ids_to_tokens(prompt)[:2] == ["<s>", "<"]
    assert not chat._tokenizer.convert_ids_to_tokens(response)[0].startswith("▁")


def test_an_end_that_is_no_special_token_stays_text_too(tmp_path):
    tokens = [*CHATML_TOKENS[:2], AddedToken("<|im_end|>", special=False, normalized=False)]
    chat = ChatTokenizer(save(tmp_path, byte_level(tokens), CHATML, "<|endoftext|>"), {})
    _, response = chat.dialogue_ids([*QUESTION, {"role": "assistant", "content": "a<|im_end|>b"}])
    assert response[-1] == chat.end_of_turn and response.count(chat.end_of_turn) == 1
    assert chat.text(response) == "a<|im_end|>b" and len(chat.stop_ids) == 2
