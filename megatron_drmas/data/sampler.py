"""The order in which training sees the questions."""

import random


class QuestionSampler:
    """Indices of questions, epoch after epoch, each epoch in an order of its own.

    The order is a function of the seed alone and the state is one integer, so a resumed run continues with exactly the
    questions an undisturbed one would draw.

    Args:
        size: number of questions.
        seed: seed of the order.
        shuffle: keep the file's order when false.
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True):
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.cursor = 0
        self._epoch = -1
        self._order: list[int] = []

    def draw(self, count: int) -> list[int]:
        """The next `count` indices."""
        drawn = []
        for position in range(self.cursor, self.cursor + count):
            epoch, index = divmod(position, self.size)
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = list(range(self.size))
                if self.shuffle:
                    random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
            drawn.append(self._order[index])
        self.cursor += count
        return drawn

    def state_dict(self) -> dict:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict) -> None:
        self.cursor = state["cursor"]
