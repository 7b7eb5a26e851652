"""Commands in README, CONTRIBUTING and docs/: a block runs, or says why not and is then read by the programs that it calls.

Python programs run in this process, for importing torch once is most of what a short command takes.
"""

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"(?:^ *<!-- not run: (?P<why>.+?) -->\n)?^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^ *```$", re.DOTALL | re.MULTILINE
)
SPAN = re.compile(r"`([^`]+)`")
INDENTED = re.compile(r"(?:^|(?<=\n\n))(?:    .+\n)+", re.MULTILINE)
KINDS = {"bash", "python", "yaml", "json", "mermaid", "text"}
COMMAND = re.compile(r"(?:\S*/)?(?:python|bash|sbatch|srun|ray|pip|pytest) \S|tools/\S+\.(?:sh|py) |slurm/\S+\.sh ")
COMPOSING = ("megatron_drmas.train", "megatron_drmas.sft", "megatron_drmas.evaluate")
SBATCH = {"account", "partition", "nodes", "gpus-per-node", "time", "signal", "cpus-per-task", "mem", "wrap"}
SBATCH |= {"container-image", "container-mounts"}  # Pyxis'
NOT_OURS = {"scancel", "squeue", "export", "module", "apptainer", "pip"}  # what a block that is not run may call besides


def blocks(run: bool) -> list:
    """(page, text) of each block of commands that runs, or does not."""
    return [
        pytest.param(match["text"], id=f"{page.stem}-{number}")
        for page in PAGES
        for number, match in enumerate(FENCE.finditer(page.read_text()))
        if match["kind"] == "bash" and (match["why"] is None) == run
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def spans() -> list:
    """Commands that stand in the text."""
    found = {}
    for page in PAGES:
        for span in SPAN.findall(prose(page)):
            text = " ".join(span.split())
            if COMMAND.match(text):
                found.setdefault(text, page.stem)
    return [pytest.param(text, id=f"{page}: {text}") for text, page in found.items()]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a block."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


class Read(BaseException):
    """The program has understood its arguments."""


@pytest.fixture
def reading(monkeypatch):
    """Programs stop when they have read their arguments."""
    parsers = {name: getattr(argparse.ArgumentParser, name) for name in ("parse_args", "parse_intermixed_args")}

    def stopping(parse):
        def stop(*args, **kwargs):
            parse(*args, **kwargs)
            raise Read

        return stop

    for name, parse in parsers.items():
        monkeypatch.setattr(argparse.ArgumentParser, name, stopping(parse))


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """The working directory: it looks like the repository, has the files that the pages tell a reader to write, and keeps what
    commands write."""
    for entry in ROOT.iterdir():
        if entry.name not in ("outputs", ".git"):
            (tmp_path / entry.name).symlink_to(entry)
    for page in PAGES:
        for match in FENCE.finditer(page.read_text()):
            named = re.match(r"# (mine/\S+)\n", match["text"])
            if named:
                file = tmp_path / named[1]
                file.parent.mkdir(exist_ok=True)
                file.write_text(match["text"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(target: str, module: bool, arguments: list[str], monkeypatch) -> int:
    """What `python -m target …` or `python target …` exits with."""
    if module:
        name = target if util.find_spec(target).submodule_search_locations is None else f"{target}.__main__"
        program = importlib.import_module(name)
    else:
        spec = util.spec_from_file_location(Path(target).stem, ROOT / target)
        program = util.module_from_spec(spec)
        spec.loader.exec_module(program)
    monkeypatch.setattr(sys, "argv", [target, *arguments])
    try:
        return program.main() or 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def python(words: list[str]) -> tuple[str, bool, list[str]]:
    """(module or file, whether it is a module, arguments) of a call of Python."""
    return (words[2], True, words[3:]) if words[1] == "-m" else (words[1], False, words[2:])


def read(words: list[str], monkeypatch, capsys) -> None:
    """Let whatever a command calls read its arguments; nothing is started."""
    name = Path(words[0]).name
    if name == "python":
        target, module, arguments = python(words)
        with pytest.raises(Read):
            pytest.fail(
                f"{shlex.join(words)}: ended with {call(target, module, arguments, monkeypatch)} {capsys.readouterr().err}"
            )
    elif words[0] == "slurm/search_hetero.sh" or words[:2] == ["bash", "slurm/search_hetero.sh"]:
        assert (ROOT / "slurm/search_hetero.sh").is_file()
        read(["python", "-m", "megatron_drmas.train", *words[words.index("slurm/search_hetero.sh") + 1 :]], monkeypatch, capsys)
    elif name == "bash":
        script = (ROOT / words[1]).read_text()
        for word in words[2:]:
            known = (ROOT / word).exists() if word.startswith("tests/") else word in script
            assert known or words[1] == "tools/test.sh", f"{words[1]} knows no {word}"  # the rest of test.sh's are pytest's
    elif name == "sbatch":
        end = next((place for place, word in enumerate(words) if word.endswith(".sh")), len(words))
        options = [word for word in words[1:end] if word.startswith("--")]
        assert options or end < len(words)
        for option in options:
            assert option[2:].partition("=")[0] in SBATCH, f"{option}: an option of sbatch that this test does not know"
        if "--wrap" in words:
            read(shlex.split(words[words.index("--wrap") + 1]), monkeypatch, capsys)
        else:
            read(words[end:], monkeypatch, capsys)
    elif name == "apptainer":
        read(words[words.index("bash") :], monkeypatch, capsys)
    else:
        assert name in NOT_OURS, f"{name}: a command that this test does not know"


def composed(words: list[str]) -> list[str] | None:
    """The command that composes what another one would train or evaluate; None: it does neither."""
    if words[0] == "apptainer":
        words = words[words.index("bash") :]
    if "slurm/search_hetero.sh" in words:
        script = words.index("slurm/search_hetero.sh")
        nodes = [word.replace("--", "cluster.") for word in words[:script] if word.startswith("--nodes=")]
        return ["python", "-m", "megatron_drmas.train", *nodes, *words[script + 1 :], "--print"]  # the script adds the nodes
    if Path(words[0]).name == "python" and words[1] == "-m" and words[2] in COMPOSING:
        return [*(word for word in words if word != "--check"), "--print"]
    return None


@pytest.mark.parametrize("text", blocks(run=True))
def test_commands_run(checkout, monkeypatch, capfd, text):
    assert list(commands(text))
    for words in commands(text):
        if Path(words[0]).name == "python":
            code = call(*python(words), monkeypatch)
        else:
            code = subprocess.run(words, cwd=checkout, timeout=120).returncode
        assert code == 0, f"{shlex.join(words)}\n{capfd.readouterr().err[-2000:]}"


@pytest.mark.parametrize("text", blocks(run=False))
def test_other_commands_are_read_and_compose(checkout, monkeypatch, capsys, text):
    assert list(commands(text))
    for words in commands(text):
        if composing := composed(words):
            assert call(*python(composing), monkeypatch) == 0, f"{shlex.join(composing)}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("text", blocks(run=False))
def test_programs_read_their_arguments(reading, monkeypatch, capsys, text):
    for words in commands(text):
        read(words, monkeypatch, capsys)


@pytest.mark.parametrize("text", spans())
def test_commands_in_the_text_are_read(reading, monkeypatch, capsys, text):
    """Placeholders in capitals included; an ellipsis stands for more."""
    words = shlex.split(re.sub(r"\[[^\]]*\]|…", "", text))
    read(words, monkeypatch, capsys)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_command_hides(page):
    """Every fenced block says what it holds, and commands stand in `bash` blocks."""
    text = page.read_text()
    for match in FENCE.finditer(text):
        assert match["kind"] in KINDS, f"a block of kind {match['kind']!r}: {match['text'][:40]}"
        if match["kind"] == "text":
            assert not any(COMMAND.match(line.strip()) for line in match["text"].splitlines()), match["text"]
    for block in INDENTED.findall(prose(page)):
        assert not any(COMMAND.match(line.strip()) for line in block.splitlines()), f"commands in an indented block: {block}"
