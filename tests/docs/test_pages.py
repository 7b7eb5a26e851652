"""What the pages name is there: links, files, keys of the configuration, and messages that the code has."""

import ast
import re
from pathlib import Path

import pytest

from megatron_drmas.config.schema import RunConfig
from megatron_drmas.config.setting import keys_of
from megatron_drmas.data.dialogues import load_dialogues
from megatron_drmas.data.questions import load_questions

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
SECTIONS = {key.path for key in keys_of(RunConfig) if "." not in key.path and key.section}
FILES = re.compile(r"[\w.-]+/(?:[\w.-]+/)*(?:[\w-]+\.(?:py|sh|yaml|lock|md))?")
BESIDE = ("", "megatron_drmas")  # where a file that a page names may lie
OF_A_RUN = {"outputs", "logs", "checkpoints", "hf", "trajectories", "tensorboard", "evaluations"}
OF_A_READER = {"mine", "models", "questions"}


def text_spans(page: Path) -> list[str]:
    """What stands in backticks in the text of a page."""
    return [" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", page.read_text()))]


def known_keys() -> list[list[str]]:
    return [key.path.split(".") for key in keys_of(RunConfig)]


def is_key(parts: list[str], keys: list[list[str]]) -> bool:
    """Whether a key or a section has this name, in which a map's names, or a last *, may be anything."""
    if parts[-1] == "*":
        parts = parts[:-1]
    return any(len(parts) <= len(key) and all(a == b or b == "NAME" for a, b in zip(parts, key)) for key in keys)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), f"no {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, anchor


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "plugins"], ids=lambda page: page.stem)
def test_files_that_are_named_are_there(page):
    """A guide that writes files of its own names those too, and is left out."""
    for span in text_spans(page):
        if FILES.fullmatch(span) and span.partition("/")[0] not in OF_A_RUN | OF_A_READER:
            assert any((ROOT / folder / span).exists() for folder in BESIDE), f"no file {span}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_keys_that_are_named_exist(page):
    keys = known_keys()
    for span in text_spans(page):
        for word in span.split():
            name = word.partition("=")[0].rstrip(",")
            if re.fullmatch(r"[a-z_]+(\.[\w*]+)+", name) and name.split(".")[0] in SECTIONS:
                assert is_key(name.split("."), keys), f"no key {name}"


def templates() -> list[str]:
    """Every text of the code, with … for what is filled in; shell scripts as they are."""
    found = []
    for package in ("megatron_drmas", "checkpoints_conv"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
    return found + [path.read_text() for folder in ("tools", "slurm") for path in (ROOT / folder).glob("*.sh")]


def test_messages_that_the_questions_quote_are_the_code_s():
    """A question that begins with a quotation: **"…"**, with … for what varies."""
    quotes = re.findall(r'^\*\*"(.+?)"', (ROOT / "docs" / "faq.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(quotes) >= 10
    texts = templates()
    for quote in quotes:
        pieces = [" ".join(piece.split()) for piece in quote.split("…")]
        pattern = re.compile(".*?".join(re.escape(piece) for piece in pieces if piece), re.DOTALL)
        assert any(pattern.search(text) for text in texts), f"the code does not say: {quote}"


def test_data_that_is_shown_can_be_read(tmp_path):
    """Blocks of JSON lines are questions or dialogues."""
    blocks = [
        block for page in PAGES for block in re.findall(r"^ *```json\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    ]
    assert len(blocks) >= 2
    for number, block in enumerate(blocks):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(block)
        load = load_dialogues if '"messages"' in block else load_questions
        assert len(load(str(file), "data")) == len(block.splitlines())
