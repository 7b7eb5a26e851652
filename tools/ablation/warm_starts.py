"""Weakened warm starts of the gated team's Answer agent.

The tiny team's Llama policy answers too well for a study of how it learns.  Copying a name is a phase transition, which a
shorter warm start has not reached at all; so the finished policy is fine-tuned a little further on examples of which half
hold a wrong answer, and keeps the skill while it doubts.
"""

import os
import shutil
import tempfile
from itertools import islice
from pathlib import Path

from tools.tiny_team.data import write_jsonl
from tools.tiny_team.dialogues import Noise, stream_examples

STEPS = 60
BATCH = 32
NOISE = Noise(early_yes=0.3, wrong_answer=0.5)
FIRST_SEED = 100  # of the examples; smaller ones are the tiny team's own


def warm_start(tiny_team: Path, out: Path, seed: int) -> Path:
    """The weakened Answer policy of this seed, made if it is not there yet (about half a minute on one core).

    Args:
        tiny_team: folder of `python -m tools.tiny_team`.
        out: the folder that holds, or will hold, `warm_starts/SEED`.

    Returns:
        A Hugging Face folder.
    """
    folder = out / "warm_starts" / str(seed)
    if not folder.exists():
        _make(tiny_team, folder, seed)
    return folder


def _make(tiny_team: Path, folder: Path, seed: int) -> None:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

    from megatron_drmas.config.schema import OptimizerConfig, PolicyConfig, PrecisionConfig
    from megatron_drmas.sft import SftConfig, finetune
    from tools.tiny_team.models import store_policy

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "examples.jsonl"
        answers = (example for example in stream_examples(FIRST_SEED + seed, NOISE) if example.agent == "answer")
        write_jsonl(data, ({"messages": example.messages} for example in islice(answers, STEPS * BATCH)))
        optimizer = OptimizerConfig(lr=1e-3, beta2=0.95, decay="linear", decay_steps=2 * STEPS, warmup_steps=10)
        tuned = finetune(
            SftConfig(
                name="warm_start",
                policy=PolicyConfig(
                    model=str(tiny_team / "llama"), optimizer=optimizer, micro_batch_tokens=8192, recompute=False
                ),
                precision=PrecisionConfig(mode="fp32"),
                data=str(data),
                steps=STEPS,
                batch_size=BATCH,
                prompt_weight=0.3,
                shuffle=False,
                seed=seed,
                output_dir=scratch,
                device="cpu",
            )
        )
        temp_path = folder.with_name(f"{folder.name}.part")
        store_policy(tuned, temp_path)
        shutil.rmtree(folder, ignore_errors=True)
        temp_path.rename(folder)
