"""A tokenizer's control tokens, and how a text that spells one stays text.

A tokenizer turns the string of an added token into its id wherever it occurs, so a question or a tool's result with
`<|im_end|>` would end a turn that the chat template has only begun.  Here contents are *masked* while the template is
rendered, which leaves the template's own control tokens as the only ones; those are then encoded as aliases that no
content holds, by a copy of the tokenizer that knows no other name for them.
"""

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

MARK = re.compile(r"\s*[<\[{(|«].*[>\]})|»]\s*", re.DOTALL)
FIRST_MASK = 0x100000  # a private-use plane


class ControlTokens:
    """The added tokens that mark up a chat.

    These are the special ones, and of the others those in brackets, such as `<think>` or `<tool_call>`.  An added token
    that is a word or white space is vocabulary like any other.

    Args:
        tokenizer: whose tokens they are.
        stop_ids: ids that end a response; control tokens in any case.

    Attributes:
        ids: of all control tokens, by their strings.
        special: the strings that only a template may write; an assistant's turn may hold the others, as a model samples
            them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop_ids: Iterable[int]):
        added, stop_ids = tokenizer.added_tokens_decoder, set(stop_ids)
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self.special = frozenset(token.content for id, token in added.items() if token.special or id in stop_ids)
        self._names = {
            id: token.content for id, token in added.items() if token.content in self.special or MARK.fullmatch(token.content)
        }
        self.ids = {content: id for id, content in self._names.items()}
        self._all, self._special = _Finder(self.ids), _Finder(self.special)
        # Normalization can make a control token of other characters, such as full-width brackets.
        self._normalizer = self._backend.normalizer if any(added[id].normalized for id in self.ids.values()) else None

    def spelled(self, message: dict[str, str]) -> list[str]:
        """The control tokens that a message spells and that must stay text, in their order."""
        finder, content = self._finder(message), message["content"]
        return [name for place in finder.places(content) if (name := finder.name_at(content, place))]

    def mask(self, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], "Mask"]:
        """Hide what contents spell from the chat template: the first character of each control token, and of what the text
        after the content could complete to one, becomes a private-use character.

        Returns:
            The messages, and how to read what the template makes of them.  A mask that is false has hidden nothing, and
            the rendered text can be encoded as it is.
        """
        places = [self._finder(message).places(message["content"]) for message in messages]
        hidden = sorted({message["content"][place] for message, found in zip(messages, places) for place in found})
        text, masks, code = "".join(message["content"] for message in messages), {}, FIRST_MASK
        for character in hidden:
            while chr(code) in text:
                code += 1
            masks[character], code = chr(code), code + 1
        masked = []
        for message, found in zip(messages, places):
            characters = list(message["content"])
            for place in found:
                characters[place] = masks[characters[place]]
            masked.append({**message, "content": "".join(characters)})
        doubtful = self._normalizer is not None and any(
            self._all.places(self._normalizer.normalize_str(message["content"])) for message in masked
        )
        return masked, Mask({mask: character for character, mask in masks.items()}, doubtful)

    def encode_all(self, texts: Sequence["MaskedText"]) -> list[list[int]]:
        """`encode` of each, together; Python's lock is free meanwhile."""
        plain = [masked.text for masked in texts if not masked.mask]
        encoded = iter(self._backend.encode_batch_fast(plain, add_special_tokens=False))
        return [self.encode(masked.text, masked.mask) if masked.mask else next(encoded).ids for masked in texts]

    def encode(self, text: str, mask: "Mask") -> list[int]:
        """The ids of a rendered text: those of its control tokens, and around them those of its contents as plain text.

        Without anything masked they are the tokenizer's own.
        """
        encoding = self._backend.encode(text, add_special_tokens=False)
        if not mask:
            return encoding.ids
        parts, end = [], 0
        for id, (start, stop) in zip(encoding.ids, encoding.offsets):
            name = self._names.get(id)
            if name is not None and name in text[start:stop]:  # or it is the unknown token, and replaces a character
                start += text[start:stop].index(name)  # white space that the token takes in stays with its neighbors
                parts += [mask.lift(text[end:start]), self._aliases[name]]
                end = start + len(name)
        parts.append(mask.lift(text[end:]))
        return [self._original.get(id, id) for id in self._plain.encode("".join(parts), add_special_tokens=False).ids]

    def _finder(self, message: dict[str, str]) -> "_Finder":
        return self._special if message["role"] == "assistant" else self._all

    @cached_property
    def _aliases(self) -> dict[str, str]:
        secret = secrets.token_hex(8)  # no content can spell what it cannot know
        return {name: f"\U000f0000{secret}{number}\U000f0000" for number, name in enumerate(self.ids)}

    @cached_property
    def _plain(self) -> Tokenizer:
        """The tokenizer with its control tokens renamed to their aliases, in the vocabulary of its model too."""
        data = json.loads(self._backend.to_str())
        data.update(truncation=None, padding=None, post_processor=None)
        for token in data["added_tokens"]:
            token["content"] = self._rename(token["content"])
        model = data["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._rename(token): id for token, id in model["vocab"].items()}
        else:
            model["vocab"] = [[self._rename(token), score] for token, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = self._rename(model["unk_token"])
        if "merges" in model:
            model["merges"] = [pair for pair in map(_pair, model["merges"]) if not self.ids.keys() & {*pair, "".join(pair)}]
        return Tokenizer.from_str(json.dumps(data))

    @cached_property
    def _original(self) -> dict[int, int]:
        """Id in the copy → id, where they differ."""
        tokens = self._backend.get_added_tokens_decoder()
        ids = {self._plain.token_to_id(self._rename(token.content)): id for id, token in tokens.items()}
        return {copied: id for copied, id in ids.items() if copied is not None and copied != id}

    def _rename(self, token: str) -> str:
        return self._aliases.get(token, token)


class Mask:
    """What replaces what in a masked text.

    Args:
        characters: by the private-use characters that replace them.
        doubtful: the text may hold a control token although nothing is masked.
    """

    def __init__(self, characters: dict[str, str], doubtful: bool = False):
        self._table = str.maketrans(characters)
        self._doubtful = doubtful

    def __bool__(self) -> bool:
        return self._doubtful or bool(self._table)

    def lift(self, text: str) -> str:
        """The text with its own characters."""
        return text.translate(self._table) if self._table else text


class MaskedText(NamedTuple):
    """What a template has made of masked messages, and how to read it."""

    text: str
    mask: Mask


class _Finder:
    """Finds strings wherever they begin, and at the end of a text also their beginnings."""

    def __init__(self, strings: Iterable[str]):
        strings = sorted(strings, key=len, reverse=True)
        self._longest = max(map(len, strings), default=0)
        self._prefixes = {string[:length] for string in strings for length in range(1, len(string))}
        firsts = "".join(sorted({re.escape(string[0]) for string in strings}))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")
        self._whole = re.compile("|".join(map(re.escape, strings)) or "(?!)")

    def places(self, text: str) -> list[int]:
        """Where one of the strings begins, or what is left of the text is the beginning of one."""
        return [
            place
            for place in (match.start() for match in self._first.finditer(text))
            if self._whole.match(text, place) or (len(text) - place < self._longest and text[place:] in self._prefixes)
        ]

    def name_at(self, text: str, place: int) -> str | None:
        """The longest string that begins there."""
        match = self._whole.match(text, place)
        return match.group() if match else None


def _pair(merge: str | list[str]) -> tuple[str, str]:
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second
