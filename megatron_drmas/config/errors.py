"""The one error a user's configuration can raise."""


class ConfigError(ValueError):
    """A setting that cannot work.  The message is one line: the key, its value and the remedy."""

    def __init__(self, key: str, value: object, problem: str, remedy: str):
        self.key = key
        shown = "" if value is None else f" = {value!r}"
        super().__init__(f"{key}{shown}: {problem}; {remedy}".replace("\n", " "))
