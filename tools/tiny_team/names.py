"""Made-up names and who may use them.

A name is one opening and one closing syllable ("Ba" + "von"), each a token of its own, so a model cannot know a name:
it has to copy both halves from what it reads.
"""

import random

CONSONANTS = "bcdfghjklmnprstvwxyz"
VOWELS = "aeiou"
LAST = "nlrsx"

OPENINGS = [(consonant + vowel).capitalize() for consonant in CONSONANTS for vowel in VOWELS]
CLOSINGS = [
    consonant + vowel + LAST[(row + column) % len(LAST)]
    for row, consonant in enumerate(CONSONANTS)
    for column, vowel in enumerate(VOWELS)
]

# Names of each split; no name is in two splits.  What is left (6,800) serves supervised examples.
SPLIT_SIZES = {"train": 800, "dev": 1200, "eval": 1200}


def split_names() -> dict[str, list[str]]:
    """All 10,000 names by split: "sft", "train" (RL), "dev" (choosing settings) and "eval" (reporting).

    The division is part of the data set's definition and depends on no seed, so names that the shipped weights were
    fine-tuned on never reach an evaluation.
    """
    names = [opening + closing for opening in OPENINGS for closing in CLOSINGS]
    random.Random("tiny team names").shuffle(names)
    splits = {}
    for split, size in SPLIT_SIZES.items():
        splits[split], names = names[:size], names[size:]
    return {**splits, "sft": names}
