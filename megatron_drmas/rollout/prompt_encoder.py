"""Prompts' ids without holding up the event loop."""

import asyncio
from collections import OrderedDict
from typing import Protocol

import numpy as np

from megatron_drmas.rollout.control_tokens import MaskedText

KEPT = 4096  # prompts whose ids are remembered


class Encoder(Protocol):
    """What is needed of a `ChatTokenizer`."""

    def encode_prompts(self, prompts: list[MaskedText]) -> list[list[int]]:
        """The ids of rendered prompts."""


class PromptEncoder:
    """Encodes the rendered prompts of many coroutines on a thread, one batch at a time.

    What is asked for while a batch is encoded makes up the next one.  Prompts that render to the same text, as the first
    calls of a question's trajectories do, are encoded once and share their array.
    """

    def __init__(self, tokenizer: Encoder):
        self._tokenizer = tokenizer
        self._known: OrderedDict[str, asyncio.Future[np.ndarray]] = OrderedDict()  # by text, where nothing is masked
        self._asked: list[tuple[MaskedText, asyncio.Future[np.ndarray]]] = []
        self._encoding: asyncio.Task | None = None

    async def ids(self, prompt: MaskedText) -> np.ndarray:
        """A prompt's ids: int32 [P], not to be written to."""
        found = self._known.get(prompt.text) if not prompt.mask else None
        if found is None:
            found = asyncio.get_running_loop().create_future()
            self._asked.append((prompt, found))
            if not prompt.mask:
                self._known[prompt.text] = found
                if len(self._known) > KEPT:
                    self._known.popitem(last=False)
            if self._encoding is None:
                self._encoding = asyncio.create_task(self._encode())
        else:
            self._known.move_to_end(prompt.text)
        return found.result() if found.done() else await asyncio.shield(found)  # others may wait for it too

    async def _encode(self) -> None:
        try:
            while self._asked:
                asked, self._asked = self._asked, []
                try:
                    encoded = await asyncio.to_thread(self._tokenizer.encode_prompts, [prompt for prompt, _ in asked])
                except Exception as error:  # the caller gets it
                    for prompt, found in asked:
                        self._known.pop(prompt.text, None)
                        found.set_exception(error)
                else:
                    for (_, found), ids in zip(asked, encoded):
                        found.set_result(np.array(ids, dtype=np.int32))
        finally:
            self._encoding = None
