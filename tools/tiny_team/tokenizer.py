"""The tiny team's tokenizer: one token for a word, two for a name, and bytes for everything else.

A Unigram model over byte-level text whose pieces are the words of the generated worlds (with the space before them),
the syllables of names and the agents' tags.  All 256 bytes are pieces too, so any text survives the round trip.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from tools.tiny_team.names import CLOSINGS, OPENINGS
from tools.tiny_team.world import RELATIONS

SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
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
    "\nquestion:", "\nsearch:", "\nfound:",
    "yes", "no", "?", ".",
]
BYTE_SCORE = -20.0  # against -1 for a piece: bytes only where no piece fits

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template; token 0 pads, token 1 ends a response."""
    def byte_level(text: str) -> str:
        return "".join(piece for piece, _ in ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text))

    pieces = [byte_level(piece) for piece in PIECES]
    scores = {symbol: BYTE_SCORE for symbol in sorted(ByteLevel.alphabet())} | {piece: -1.0 for piece in pieces}
    tokenizer = Tokenizer(Unigram([(token, 0.0) for token in SPECIAL] + list(scores.items()), unk_id=None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[PAD], eos_token=SPECIAL[END], chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False, model_max_length=2048,
    )


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template inside the latter."""
    build_tokenizer().save_pretrained(folder, save_jinja_files=False)
