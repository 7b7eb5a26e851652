"""Tokenizers and chat templates of the families' kinds, small and written for these tests, as model folders without weights."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "the quick brown fox asks what is the capital of France and who wrote it",
    "Search the evidence, then answer the question: 12 + 30 = 42. <answer>yes</answer> <search>no</search>",
    "user assistant system think end tool call im_start im_end eot_id header inst response",
] * 4
VOCAB = 400

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN25 = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}" + CHATML
QWEN3 = """\
{%- set ns = namespace(asked=0) %}
{%- for m in messages if m.role == 'user' %}{% set ns.asked = ns.asked + 1 %}{% endfor %}
{%- set seen = namespace(n=0) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set seen.n = seen.n + 1 %}{% endif %}
{%- if m.role == 'assistant' %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '' %}
{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>assistant\\n' }}
{%- if seen.n == ns.asked %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- said + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
SILENT = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)

CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THINKING = [AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
VOCABULARY = [
    AddedToken(piece, special=False, normalized=False) for piece in (" quick", "\n\n", "<answer>")
]  # no marks, but the last


def byte_level(special: list[Any], **options: Any) -> Tokenizer:
    """Llama 3's and Qwen's kind."""
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _train(
        tokenizer,
        trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
        special,
    )


def metaspace(special: list[Any], scheme: str) -> Tokenizer:
    """SentencePiece BPE as newer conversions have it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _train(tokenizer, _bytes(), special)


def prepending(special: list[Any]) -> Tokenizer:
    """SentencePiece BPE as older conversions have it: a normalizer writes the space before every section."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _train(tokenizer, _bytes(), special)


def unigram(special: list[Any]) -> Tokenizer:
    """A SentencePiece unigram model, whose vocabulary holds the control tokens too, behind a normalizer that can make them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    names = [
        "<unk>",
        *(str(token.content if isinstance(token, AddedToken) else token) for token in special if str(token) != "<unk>"),
    ]
    return _train(
        tokenizer, trainers.UnigramTrainer(vocab_size=120, special_tokens=names, unk_token="<unk>", show_progress=False), special
    )


def _bytes() -> trainers.BpeTrainer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return trainers.BpeTrainer(vocab_size=VOCAB + len(pieces), special_tokens=pieces, show_progress=False)


def _train(tokenizer: Tokenizer, trainer: Any, special: list[Any]) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = []  # bytes are no added tokens
    tokenizer = Tokenizer.from_str(json.dumps(data))
    for token in special:
        token = token if isinstance(token, AddedToken) else AddedToken(token, special=True, normalized=False)
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    return tokenizer


def save(
    folder: Path,
    tokenizer: Tokenizer,
    template: str,
    eos: str | None,
    bos: str | None = None,
    unk: str | None = None,
    config: dict | None = None,
    generation_config: dict | None = None,
) -> str:
    """Write the folder; `eos_token_id` of both configurations is the tokenizer's unless told otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
        "eos_token": eos,
        "bos_token": bos,
        "unk_token": unk,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    told = {"eos_token_id": tokenizer.token_to_id(eos) if eos else None}
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size() + 8, **told, **(config or {})}))
    (folder / "generation_config.json").write_text(json.dumps({**told, **(generation_config or {})}))
    return str(folder)


def make_family(name: str, folder: Path, **settings: Any) -> str:
    """A folder of one of FAMILIES."""
    if name == "chatml":
        return save(folder, byte_level([*CHATML_TOKENS, *VOCABULARY]), CHATML, "<|im_end|>", **settings)
    if name == "qwen2.5":
        return save(folder, byte_level([*CHATML_TOKENS, *THINKING[2:]]), QWEN25, "<|im_end|>", **settings)
    if name == "qwen3":
        return save(folder, byte_level([*CHATML_TOKENS, *THINKING, *VOCABULARY]), QWEN3, "<|im_end|>", **settings)
    if name == "llama3":
        names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        names += [f"<|reserved_special_token_{number}|>" for number in range(20)]
        return save(folder, byte_level(names, ignore_merges=True), LLAMA3, "<|eot_id|>", bos="<|begin_of_text|>", **settings)
    if name == "stripping":  # Phi's kind: a control token takes in the white space after it, another that before it
        names = [
            AddedToken(mark, special=True, normalized=False, rstrip=True, lstrip=mark == "<|im_end|>") for mark in CHATML_TOKENS
        ]
        return save(folder, byte_level(names), CHATML, "<|im_end|>", **settings)
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    if name == "mistral":
        tokenizer = metaspace(names, "first")
    elif name == "mistral_always":
        tokenizer = metaspace(names, "always")
    elif name == "mistral_legacy":
        tokenizer = prepending(names)
    elif name == "unigram":
        tokenizer = unigram([AddedToken(mark, special=True, normalized=True) for mark in names])
    else:
        raise ValueError(name)
    return save(folder, tokenizer, MISTRAL, "</s>", bos="<s>", unk="<unk>", **settings)


FAMILIES = ("chatml", "qwen2.5", "qwen3", "llama3", "stripping", "mistral", "mistral_always", "mistral_legacy", "unigram")
