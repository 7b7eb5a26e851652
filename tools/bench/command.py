"""The command line of a benchmark."""

import argparse
from typing import NoReturn


class BenchParser(argparse.ArgumentParser):
    """Shows a module's docstring as it is written, and answers bad arguments in one line.

    Args:
        doc: the docstring.
    """

    def __init__(self, doc: str | None):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.removesuffix('.py')}: {message}\n")
