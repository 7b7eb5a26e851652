"""The tiny team's tokenizer: one token for a word, two for a name, and bytes for everything else.

Qwen2's byte-level tokenizer without merges, to which the words of the generated worlds (with the space before them),
the syllables of names and the agents' marks and tags are added as tokens.  It has Qwen2's class because transformers
loads no other for a Qwen2 model; the Llama model shares it.
"""

from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel
from transformers import AddedToken, Qwen2Tokenizer

from tools.tiny_team.names import CLOSINGS, OPENINGS
from tools.tiny_team.world import RELATIONS

SPECIAL = ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
PAD, END = 0, 1

TAGS = [f"<{slash}{tag}>" for tag in ("verify", "search", "answer") for slash in ("", "/")]
WORDS = ["what", "is", "tell", "me", "do", "you", "know", "the", "of", *(name for kind in RELATIONS.values() for name in kind)]
ROLES = ["verifier", "searcher", "answerer"]
PIECES = [
    *(f" {word}" for word in WORDS),
    *(f" {syllable}" for syllable in OPENINGS),
    *CLOSINGS,
    *TAGS,
    *ROLES,
    *(f"\n{role}:" for role in ROLES),
    "\nquestion:",
    "\nsearch:",
    "\nfound:",
    "yes",
    "no",
    "?",
    ".",
]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> Qwen2Tokenizer:
    """The tokenizer with its chat template; token 0 pads, token 1 ends a response."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *sorted(ByteLevel.alphabet())])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        unk_token=SPECIAL[PAD],
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[END],
        extra_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in PIECES])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template inside the latter."""
    build_tokenizer().save_pretrained(folder, save_jinja_files=False)
