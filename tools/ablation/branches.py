"""Many responses to few prompts on a `TinyLlama`: sampling, and log-probabilities, each distinct prefix computed once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.ablation.tiny_lm import TinyLlama
from tools.tiny_team.tokenizer import END, PAD


@dataclass(frozen=True)
class Calls:
    """Calls with the same few prompts.

    prompts: the distinct ones, as token ids.
    which: int64 [calls], each call's prompt.
    """

    prompts: list[list[int]]
    which: Tensor

    @classmethod
    def of(cls, prompts: list[list[int]]) -> "Calls":
        """The calls of one prompt each."""
        place: dict[tuple[int, ...], int] = {}
        which = [place.setdefault(tuple(prompt), len(place)) for prompt in prompts]
        return cls([list(prompt) for prompt in place], torch.tensor(which, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.which)

    def select(self, rows: Tensor) -> "Calls":
        """These calls, with only the prompts that they have."""
        kept, which = self.which[rows].unique(return_inverse=True)
        return Calls([self.prompts[index] for index in kept.tolist()], which)

    @property
    def last(self) -> Tensor:
        """The last token of every distinct prompt, int64 [prompts]."""
        return torch.tensor([prompt[-1] for prompt in self.prompts])


@dataclass(frozen=True)
class Responses:
    """What the calls answered; columns [calls, longest], padded at the end.

    tokens: int64.
    mask: bool, which of them are there.
    logprobs: float32, of each token when it was sampled; 0 where none is.
    """

    tokens: Tensor
    mask: Tensor
    logprobs: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(1)

    def lists(self) -> list[list[int]]:
        return [row[:length] for row, length in zip(self.tokens.tolist(), self.lengths.tolist())]


@torch.no_grad()
def sample(model: TinyLlama, calls: Calls, uniform: Tensor, temperature: float) -> Responses:
    """A response to each call.  Calls that have sampled the same tokens so far share one row of the model's batch.

    Args:
        uniform: float64 [calls, limit] in [0, 1): call i's token k is where the cumulative distribution passes uniform[i, k], so
            equal numbers mean equal responses as long as the distributions are equal.
    """
    rows, limit = uniform.shape
    tokens = torch.full((rows, limit), PAD)
    logprobs, mask = torch.zeros(rows, limit), torch.zeros(rows, limit, dtype=torch.bool)
    prefix, own = model.prefill(calls.prompts), None
    prompt, last, node = torch.arange(len(calls.prompts)), calls.last, calls.which  # of a node, of a node, of a live call
    live = torch.arange(rows)
    for k in range(limit):
        logits, own = model.extend(prefix, prompt, last[:, None], own)
        scores = torch.log_softmax(logits[:, -1] / temperature, -1)
        cumulative = scores.double().exp().cumsum(-1)
        drawn = torch.searchsorted(cumulative[node], uniform[live, k, None] * cumulative[node, -1:], right=True)[:, 0]
        tokens[live, k], logprobs[live, k], mask[live, k] = drawn, scores[node, drawn], True
        goes_on = drawn != END
        live = live[goes_on]
        if not len(live):
            break
        children, node = (node[goes_on] * scores.shape[1] + drawn[goes_on]).unique(return_inverse=True)
        parent = children // scores.shape[1]
        own = [(key[parent], value[parent]) for key, value in own]
        prompt, last = prompt[parent], children % scores.shape[1]
    longest = int(mask.sum(1).max()) if rows else 0
    return Responses(tokens[:, :longest], mask[:, :longest], logprobs[:, :longest])


def response_logits(model: TinyLlama, calls: Calls, responses: Responses) -> tuple[Tensor, Tensor]:
    """The model's logits at every token of every distinct response, with gradient.

    Returns:
        [distinct, longest, vocabulary], and int64 [calls], each call's row in it.
    """
    keys = torch.cat([calls.which[:, None], torch.where(responses.mask, responses.tokens, -1)], 1)
    distinct, row = keys.unique(dim=0, return_inverse=True)
    prompt = distinct[:, 0]
    before = torch.cat([calls.last[prompt, None], distinct[:, 1:-1].clamp(min=PAD)], 1)
    return model.extend(model.prefill(calls.prompts), prompt, before)[0], row


def response_logprobs(model: TinyLlama, calls: Calls, responses: Responses, temperature: float) -> Tensor:
    """Log-probabilities of the responses' tokens, float32 [calls, longest], with gradient; anything where no token is."""
    logits, row = response_logits(model, calls, responses)
    normal = torch.logsumexp(logits / temperature, -1)  # by distinct response: equal ones share this too
    chosen = logits[row[:, None], torch.arange(responses.tokens.shape[1]), responses.tokens] / temperature
    return chosen - normal[row]
