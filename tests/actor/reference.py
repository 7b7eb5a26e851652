"""What an update should do, by plain transformers and autograd: no packing, no micro-batches, no parallelism."""

import torch
import transformers
from torch import Tensor

from megatron_drmas.batch import TurnBatch

transformers.logging.set_verbosity_error()


class Reference:
    """The policy in transformers with torch's AdamW, set as Megatron sets it."""

    def __init__(self, folder: str, lr: float = 1e-3, temperature: float = 1.0, grad_clip: float = 1.0):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.temperature = temperature
        self.grad_clip = grad_clip
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=lr, eps=1e-5
        )

    def rows(self, batch: TurnBatch) -> list[Tensor]:
        """Log-prob of every token of each row but its first."""
        result = []
        for row in range(len(batch)):
            tokens = batch.tokens[batch.offsets[row] : batch.offsets[row + 1]]
            logits = self.model(tokens[None]).logits[0, :-1] / self.temperature
            result.append(logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0])
        return result

    def token_logprobs(self, batch: TurnBatch) -> Tensor:
        """Of the response tokens, [T']."""
        return torch.cat([row[length - 1 :] for row, length in zip(self.rows(batch), batch.prompt_lengths.tolist())])

    def step(self, loss: Tensor) -> float:
        """An optimizer step; returns the gradient norm."""
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        self.optimizer.step()
        return float(norm)

    def update(self, batch: TurnBatch) -> tuple[float, float]:
        """One on-policy step: the mean over tokens of -advantage x ratio.  Returns loss and gradient norm."""
        logprobs = self.token_logprobs(batch)
        loss = -(batch.advantages * (logprobs - logprobs.detach()).exp()).mean()
        return float(loss), self.step(loss)
