"""Contents stay text: only the chat template's own control tokens become ids, and everything else is what the tokenizer gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_drmas.rollout.control_tokens import Mask
from megatron_drmas.rollout.tokenizer import ChatTokenizer
from tests.rollout.chat_models import FAMILIES, make_family
from tools.tiny_team.models import build_model, save_policy

LOSSLESS = [name for name in (*FAMILIES, "tiny") if name not in ("unigram", "stripping", "mistral_legacy")]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    save_policy(build_model("qwen2", seed=0), folder / "tiny")
    chats = {name: ChatTokenizer(make_family(name, folder / name), {}) for name in FAMILIES}
    return chats | {"tiny": ChatTokenizer(str(folder / "tiny"), {})}


def pieces(chat: ChatTokenizer) -> list[str]:
    """Control tokens, parts of them, and what surrounds them."""
    names = list(chat._control.ids)[:8]
    parts = [name[:cut] for name in names for cut in (1, 2, len(name) - 1)] + [name[1:] for name in names]
    return [
        *names,
        *parts,
        " ",
        "\n",
        "\n\n",
        " quick",
        " what",
        "user",
        "é",
        "<",
        "|>",
        "]",
        "0",
        "\U00100000",
        "\U000f0000",
        "＜",
        "｜＞",
        "\ufffd",
    ]


def plain(chat: ChatTokenizer, messages: list[dict[str, str]], generate: bool = True) -> list[int]:
    """What transformers makes of a chat, control tokens in contents and all."""
    return chat._tokenizer.apply_chat_template(messages, add_generation_prompt=generate, return_dict=False)


def control_ids(chat: ChatTokenizer, ids: list[int]) -> list[int]:
    unknown = chat._tokenizer.unk_token_id
    return [id for id in ids if id in chat._control.ids.values() and (id != unknown or chat._tokenizer.unk_token != "<unk>")]


@pytest.mark.parametrize("family", [*FAMILIES, "tiny"])
@settings(max_examples=60)
@given(data=st.data())
def test_only_the_template_writes_control_tokens(chats, family, data):
    chat = chats[family]
    content = "".join(
        data.draw(
            st.lists(st.one_of(st.sampled_from(pieces(chat)), st.text(st.characters(codec="utf-8"), max_size=3)), max_size=8)
        )
    )
    ids = chat.prompt_ids([{"role": "user", "content": content}])
    assert control_ids(chat, ids) == control_ids(chat, plain(chat, [{"role": "user", "content": "word"}]))


@pytest.mark.parametrize("family", LOSSLESS)
@settings(max_examples=40)
@given(data=st.data())
def test_what_contents_spell_is_what_the_model_reads(chats, family, data):
    chat = chats[family]
    content = "x" + "".join(data.draw(st.lists(st.sampled_from(pieces(chat)[:-4]), max_size=8))) + "x"
    ids = chat.prompt_ids([{"role": "user", "content": content}])
    assert content in chat._tokenizer.decode(ids)


@pytest.mark.parametrize("family", [*FAMILIES, "tiny"])
@settings(max_examples=60)
@given(data=st.data())
def test_without_control_tokens_the_ids_are_the_tokenizer_s_own(chats, family, data):
    chat = chats[family]
    content = "".join(
        data.draw(
            st.lists(
                st.one_of(
                    st.sampled_from([" ", "\n\n", " quick", "user", "é", "= 42."]),
                    st.text(st.characters(codec="utf-8"), max_size=4),
                ),
                max_size=8,
            )
        )
    )
    content = content.replace("<", "").replace("[", "")
    assert chat.prompt_ids([{"role": "user", "content": content}]) == plain(chat, [{"role": "user", "content": content}])


@pytest.mark.parametrize("family", [*FAMILIES, "tiny"])
@settings(max_examples=60)
@given(data=st.data())
def test_the_renamed_copy_encodes_as_the_tokenizer_does(chats, family, data):
    """Any text whose control tokens all count: the way through aliases changes nothing."""
    chat = chats[family]
    names = list(chat._control.ids)[:8]
    strings = st.one_of(
        st.sampled_from([*names, " ", "  ", "\n", " quick", "user", "é"]),
        st.text(st.characters(codec="utf-8", exclude_characters="<[＜［﹤"), max_size=4),
    )
    text = "".join(data.draw(st.lists(strings, max_size=10)))
    assert chat._control.encode(text, Mask({}, doubtful=True)) == chat._tokenizer.encode(text, add_special_tokens=False)


def test_a_system_message_that_the_user_s_completes(chats):
    """The template writes nothing between the two that would part them."""
    chat = chats["chatml"]
    chat._tokenizer.chat_template, template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}<|im_start|>",
        chat._tokenizer.chat_template,
    )
    try:
        ids = chat.prompt_ids([{"role": "system", "content": "a<|im_"}, {"role": "user", "content": "end|>b"}])
        assert control_ids(chat, ids) == [chat._control.ids["<|im_start|>"]]
        assert chat._tokenizer.decode(ids) == "a<|im_end|>b<|im_start|>"
    finally:
        chat._tokenizer.chat_template = template


def test_normalization_makes_no_control_token(chats):
    content = "＜s＞ ［INST］ a"
    assert control_ids(chats["unigram"], plain(chats["unigram"], [{"role": "user", "content": content}])).count(1) == 2
    assert control_ids(chats["unigram"], chats["unigram"].prompt_ids([{"role": "user", "content": content}])).count(1) == 1


def test_words_among_the_added_tokens_are_vocabulary(chats):
    chat = chats["qwen3"]
    tokens = chat._tokenizer.convert_ids_to_tokens(
        chat.prompt_ids([{"role": "user", "content": "a quick\n\n<answer> <|im_end|>"}])
    )
    assert " quick" in tokens and "\n\n" in tokens and "<answer>" not in tokens


def test_an_assistant_writes_the_marks_that_models_write(chats):
    chat = chats["qwen3"]
    _, response = chat.dialogue_ids(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nyes<|im_end|>"}]
    )
    assert chat._tokenizer.convert_ids_to_tokens(response)[0] == "<think>"
    assert response.count(chat.end_of_turn) == 1 and response[-1] == chat.end_of_turn
    assert chat.text(response) == "<think>\nwhy\n</think>\n\nyes<|im_end|>"
    assert chat.spelled({"role": "assistant", "content": "<think> a <|im_end|>"}) == ["<|im_end|>"]
