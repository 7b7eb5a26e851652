"""A policy's own tokenizer and chat template."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder.

    A tokenizer.json is taken as it is.  `AutoTokenizer` would rebuild parts of it by the model's architecture, and a Qwen2
    model with a tokenizer of its own would see other ids than it was trained on.
    """
    loader = PreTrainedTokenizerFast if (Path(model) / "tokenizer.json").is_file() else AutoTokenizer
    return loader.from_pretrained(model, local_files_only=True)


class ChatTokenizer:
    """Messages → prompt ids, sampled ids → text.

    Args:
        model: Hugging Face folder.
        template_options: further variables of the chat template, such as `enable_thinking`.
    """

    def __init__(self, model: str, template_options: dict[str, Any]):
        self._tokenizer = load_tokenizer(model)
        self._options = template_options

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """The chat rendered once, with the mark that lets the assistant speak."""
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **self._options)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def prompt_text(self, prompt_ids: list[int]) -> str:
        """A prompt as the model sees it, the template's marks included."""
        return self._tokenizer.decode(prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def text(self, token_ids: list[int]) -> str:
        """The response as text, without the end-of-turn mark."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
