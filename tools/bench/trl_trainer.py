"""TRL's GRPOTrainer for `tools/bench/trl.py`, in an environment that has TRL and not this project.

Reads its settings as a line of JSON from the standard input, then takes one step for each further line, and prints a line of
JSON when it has loaded and after each step.
"""

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class OnRequest(TrainerCallback):
    """Takes a step when asked for, and says how long it took."""

    def __init__(self) -> None:
        self.tokens = 0
        self.began = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        if not sys.stdin.readline():
            sys.exit("trl_trainer: standard input was closed")
        self.tokens, self.began = 0, time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        say(seconds=time.perf_counter() - self.began, tokens=self.tokens)


def say(**values: object) -> None:
    """A line for the caller."""
    print(json.dumps(values), file=ANSWERS, flush=True)


def main() -> None:
    """Serve the steps."""
    settings = json.loads(sys.stdin.readline())
    torch.set_num_threads(settings["threads"])
    counter = OnRequest()

    def graded(completion_ids: list[list[int]], completions: list, answer: list[str], **_: object) -> list[float]:
        """1 where the boxed text is the answer."""
        counter.tokens += sum(map(len, completion_ids))
        return [float(f"\\boxed{{{right}}}" in text[0]["content"]) for text, right in zip(completions, answer)]

    rows = [{"prompt": [{"role": "user", "content": prompt}], "answer": answer} for prompt, answer in settings["rows"]]
    rollouts = settings["questions"] * settings["samples"]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            max_steps=settings["steps"],
            per_device_train_batch_size=settings["micro_batch"],
            gradient_accumulation_steps=rollouts // settings["micro_batch"],
            generation_batch_size=rollouts,
            num_generations=settings["samples"],
            max_completion_length=settings["response"],
            temperature=1.0,
            top_p=1.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            beta=0.0,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            model_init_kwargs={"dtype": "float32"},
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(settings["model"], [graded], config, Dataset.from_list(rows), callbacks=[counter])
        say(ready=True)
        trainer.train()


if __name__ == "__main__":
    ANSWERS, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    main()
