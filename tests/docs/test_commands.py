"""Commands in README and docs are run, or at least composed; those that are not run say why."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<why>.+?) -->\n)?^(?P<indent> *)```bash\n(?P<text>.*?)^ *```", re.DOTALL | re.MULTILINE
)
COMPOSING = ("megatron_drmas.train", "megatron_drmas.sft", "megatron_drmas.evaluate")


def blocks(run: bool) -> list:
    """(page, text) of each block that is run, or is not."""
    found = []
    for page in PAGES:
        for number, match in enumerate(BLOCK.finditer(page.read_text())):
            if (match["why"] is None) == run:
                found.append(pytest.param(match["text"], id=f"{page.stem}-{number}"))
    return found


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A folder that looks like the repository and keeps what commands write."""
    for entry in ROOT.iterdir():
        if entry.name not in ("outputs", ".git"):
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


def bash(command: str, folder: Path) -> None:
    done = subprocess.run(["bash", "-euc", command], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("text", blocks(run=True))
def test_commands_run(checkout, text):
    bash(text, checkout)


@pytest.mark.parametrize("text", blocks(run=False))
def test_other_commands_name_what_is_there_and_compose(checkout, text):
    """Scripts and modules exist; what trains or evaluates is composed with the arguments that the page gives it."""
    commands = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    assert commands
    for command in commands:
        words = shlex.split(command, comments=True)
        for word in words:
            if word.endswith(".sh"):
                assert (ROOT / word).is_file(), f"{command}: no {word}"
        if "-m" in words and (module := words[words.index("-m") + 1]) in COMPOSING:
            rest = [word for word in words[words.index("-m") + 2 :] if word != "--check"]
            bash(shlex.join([".venv/bin/python", "-m", module, *rest, "--print"]), checkout)
        elif "slurm/search_hetero.sh" in words:
            script = words.index("slurm/search_hetero.sh")
            nodes = [word.replace("--", "cluster.") for word in words[:script] if word.startswith("--nodes=")]
            rest = [*nodes, *words[script + 1 :]]  # the script takes it from the allocation
            bash(shlex.join([".venv/bin/python", "-m", "megatron_drmas.train", *rest, "--print"]), checkout)


def test_pages_link_to_what_is_there():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: no {target}"
