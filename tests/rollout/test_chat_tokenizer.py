"""A policy sees exactly the ids that its tokenizer.json gives, whatever its architecture."""

import pytest
from tokenizers import Tokenizer

from megatron_drmas.rollout.tokenizer import ChatTokenizer
from tools.tiny_team.models import POLICIES, build_model, save_policy


@pytest.mark.parametrize("policy", POLICIES)
def test_ids_are_the_tokenizer_file_s_own(tmp_path, policy):
    save_policy(build_model(policy, seed=0), tmp_path)
    chat = ChatTokenizer(str(tmp_path), {})
    content = "verifier\nquestion: what is the founder of Sobux?\nverifier:"
    ids = chat.prompt_ids([{"role": "user", "content": content}])
    assert ids == Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(f"<|user|>{content}<|assistant|>", add_special_tokens=False).ids
    assert chat.text(ids) == content
