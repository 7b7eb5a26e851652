"""The questions of a run: those it trains on and those it is evaluated on, and what the two have in common."""

import hashlib
from dataclasses import dataclass, replace

from megatron_drmas.config.errors import ConfigError
from megatron_drmas.config.schema import DataConfig
from megatron_drmas.data.questions import Question, load_questions


@dataclass(frozen=True)
class QuestionSets:
    """Both sets; an evaluation question that is also a training question has `in_training` set."""

    train: list[Question]
    evaluation: list[Question]

    @property
    def shared(self) -> int:
        """How many evaluation questions are training questions too."""
        return sum(question.in_training for question in self.evaluation)


def check_data(config: DataConfig) -> None:
    """Check the section without reading a file.

    Raises:
        ConfigError: not exactly one source of evaluation questions.
    """
    if config.eval_holdout and config.eval:
        raise ConfigError(
            "data.eval_holdout",
            config.eval_holdout,
            f"data.eval = {config.eval!r} is given too",
            "set data.eval_holdout=0 to evaluate on that file, or data.eval=null",
        )
    if not config.eval_holdout and not config.eval:
        raise ConfigError(
            "data.eval",
            config.eval,
            "has no value",
            "give a file of questions, or data.eval_holdout=N to keep N of data.train out of training",
        )


def load_question_sets(config: DataConfig) -> QuestionSets:
    """Read the questions of a run.

    With `eval_holdout` the evaluation gets those of `data.train` whose texts have the smallest hashes, which no order of
    the file and no seed changes; a text that is there twice goes to one side as a whole.

    Raises:
        ConfigError: a file that cannot be read, a malformed row, or no question left to train on.
    """
    check_data(config)
    train = load_questions(config.train, "data.train")
    if config.eval_holdout:
        texts = sorted({_text(question) for question in train}, key=lambda text: hashlib.sha256(text.encode()).digest())
        if config.eval_holdout >= len(texts):
            raise ConfigError(
                "data.eval_holdout",
                config.eval_holdout,
                f"{config.train} holds {len(texts)} different questions, and none would be left to train on",
                "hold fewer out",
            )
        held = set(texts[: config.eval_holdout])
        evaluation = [question for question in train if _text(question) in held]
        return QuestionSets([question for question in train if _text(question) not in held], evaluation[: config.eval_limit])
    assert config.eval is not None, "check_data"
    evaluation = load_questions(config.eval, "data.eval", config.eval_limit)
    seen = set(map(_text, train))
    return QuestionSets(train, [replace(question, in_training=_text(question) in seen) for question in evaluation])


def overlap_warning(config: DataConfig, sets: QuestionSets) -> str | None:
    """One line about evaluation questions that are trained on; None if there are none."""
    if not sets.shared:
        return None
    part = "all" if sets.shared == len(sets.evaluation) else f"{sets.shared} of"
    return (
        f"data.eval = {config.eval!r}: {part} {len(sets.evaluation)} questions are training questions too, so a gain on them "
        f"may be memory; give other questions, or data.eval=null data.eval_holdout=N to keep N of data.train out of training"
    )


def _text(question: Question) -> str:
    return " ".join(question.text.casefold().split())
