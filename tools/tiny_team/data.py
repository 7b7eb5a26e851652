"""The corpus and the question files of the tiny team."""

import json
import os
import random
from collections.abc import Iterable
from pathlib import Path

from tools.tiny_team.names import split_names
from tools.tiny_team.world import make_worlds

# split: (worlds, one-hop and two-hop questions of each)
SPLITS = {"train": (12, 32, 48), "dev": (20, 8, 12), "eval": (20, 8, 12)}


def write_data(folder: Path, seed: int) -> None:
    """Write corpus.jsonl, the passages of all splits, and train.jsonl, dev.jsonl and eval.jsonl.

    Settings are chosen on dev and results reported on eval; the three share no name with each other nor with the
    worlds of supervised fine-tuning.

    Args:
        folder: made if missing.
        seed: picks the worlds; which split a name belongs to does not depend on it.
    """
    passages = []
    for split, (count, one_hop, two_hop) in SPLITS.items():
        rng = random.Random(f"{split} {seed}")
        questions = []
        for index, world in enumerate(make_worlds(count, split_names()[split], rng)):
            facts = list(world.facts.values())
            rng.shuffle(facts)
            passages += [{"id": f"{split}-{index}-{number}", "contents": fact.passage} for number, fact in enumerate(facts)]
            questions += [(index, question) for question in world.questions(one_hop, two_hop, rng)]
        write_jsonl(
            folder / f"{split}.jsonl",
            (
                {
                    "id": f"{split}-{number}",
                    "question": question.text,
                    "answers": [question.answer],
                    "hop": question.hop,
                    "world": index,
                    "data_source": "tiny_world",
                }
                for number, (index, question) in enumerate(questions)
            ),
        )
    write_jsonl(folder / "corpus.jsonl", passages)


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    """Write one JSON object a line, beside and then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp_path = path.with_name(path.name + ".part")
    with temp_path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(temp_path, path)
