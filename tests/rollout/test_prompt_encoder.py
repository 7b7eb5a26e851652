"""Prompts encoded on a thread: the tokenizer's own ids, once a text, and in batches that form while one is encoded."""

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_drmas.rollout.control_tokens import Mask, MaskedText
from megatron_drmas.rollout.prompt_encoder import PromptEncoder


class Characters:
    """Ids are characters; a batch waits for `gate`."""

    def __init__(self):
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()

    def encode_prompts(self, prompts):
        assert self.gate.wait(10)
        self.batches.append([prompt.text for prompt in prompts])
        if any(prompt.text == "broken" for prompt in prompts):
            raise ValueError("no such character")
        return [[ord(c) for c in prompt.text] for prompt in prompts]


def text(characters, masked=False):
    return MaskedText(characters, Mask({"\U00100000": "<"} if masked else {}))


@given(st.lists(st.tuples(st.text(max_size=3), st.booleans()), max_size=12))
@settings(max_examples=50)
def test_everyone_gets_the_ids_of_his_own_prompt_and_an_unmasked_text_is_encoded_once(asked):
    tokenizer = Characters()

    async def run():
        encoder = PromptEncoder(tokenizer)
        first = await asyncio.gather(*(encoder.ids(text(*each)) for each in asked))
        return first + await asyncio.gather(*(encoder.ids(text(*each)) for each in asked))

    for ids, (characters, _) in zip(asyncio.run(run()), asked * 2):
        assert ids.dtype == np.int32 and ids.tolist() == [ord(c) for c in characters]
    encoded = [each for batch in tokenizer.batches for each in batch]
    plain = {characters for characters, masked in asked if not masked}
    assert len(encoded) == len(plain) + 2 * sum(masked for _, masked in asked)


def test_what_is_asked_for_meanwhile_is_the_next_batch_and_the_loop_goes_on():
    tokenizer = Characters()

    async def run():
        encoder = PromptEncoder(tokenizer)
        tokenizer.gate.clear()
        asked = [asyncio.ensure_future(encoder.ids(text("a")))]
        for later in "bcd":
            await asyncio.sleep(0.001)
            asked.append(asyncio.ensure_future(encoder.ids(text(later))))
        asked[1].cancel()
        await asyncio.sleep(0)
        tokenizer.gate.set()
        return await asyncio.gather(*asked, return_exceptions=True)

    a, b, c, d = asyncio.run(run())
    assert tokenizer.batches == [["a"], ["b", "c", "d"]]
    assert isinstance(b, asyncio.CancelledError) and (a.tolist(), c.tolist(), d.tolist()) == ([97], [99], [100])


def test_a_failure_reaches_whoever_asked_and_is_not_remembered():
    tokenizer = Characters()

    async def run():
        encoder = PromptEncoder(tokenizer)
        for _ in range(2):
            with pytest.raises(ValueError, match="no such character"):
                await encoder.ids(text("broken"))
        return (await encoder.ids(text("a"))).tolist()

    assert asyncio.run(run()) == [97] and len(tokenizer.batches) == 3
