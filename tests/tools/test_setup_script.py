"""tools/setup.sh, with a stand-in for Python that writes down what it is asked to do."""

import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

FAKE_PYTHON = """#!/usr/bin/env bash
case $1 in
  -c) exit 0 ;;
  -m) case $2 in
      venv) mkdir -p "$3/bin" "$3/lib/python3.11/site-packages"; cp "$0" "$3/bin/python" ;;
      pip) echo "${@:3}" >>"$CALLS"
           if [ -n "$PIP_SLEEPS" ]; then sleep "$PIP_SLEEPS"; fi
           if [ -n "$PIP_FAILS_ON" ] && [[ "$*" == *"$PIP_FAILS_ON"* ]]; then echo "$PIP_SAYS"; exit 1; fi ;;
      esac ;;
esac
"""


class Checkout:
    """A copy of what setup.sh needs, with stand-in programs first on the path."""

    def __init__(self, root: Path, repository: Path):
        self.root = root / "checkout"
        self.programs = root / "bin"
        self.calls_file = root / "calls"
        self.programs.mkdir()
        shutil.copytree(
            repository / "tools", self.root / "tools", ignore=shutil.ignore_patterns("tiny_team", "bench", "__pycache__")
        )
        (self.root / "requirements").mkdir()
        (self.root / "requirements" / "cpu.lock").write_text("torch==2.13.0+cpu\nray==2.60.0\n")
        (self.root / "requirements" / "gpu.lock").write_text(
            "torch==2.13.0\ntransformer-engine==2.11.0\ntransformer-engine-torch==2.11.0\n"
        )
        (self.root / "setup.py").write_text("version 1")
        self.add_program("python3.11", FAKE_PYTHON)

    def add_program(self, name: str, text: str) -> None:
        path = self.programs / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IEXEC)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        path = f"{self.programs}:/usr/bin:/bin"
        variables = {
            "PATH": path,
            "CALLS": str(self.calls_file),
            "PIP_SLEEPS": "",
            "PIP_FAILS_ON": "",
            "PIP_SAYS": "",
        } | environment
        command = ["/bin/bash", str(self.root / "tools" / "setup.sh"), *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        process = self.start(*arguments, **environment)
        output = process.communicate()[0]
        return process.returncode, output

    def calls(self) -> list[str]:
        """pip's arguments since the last time this was asked."""
        calls = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return calls


@pytest.fixture
def checkout(tmp_path, repository) -> Checkout:
    return Checkout(tmp_path, repository)


def test_the_lock_file_is_installed_exactly_and_then_the_package(checkout):
    assert checkout.run()[0] == 0
    first, second = checkout.calls()
    assert "--no-deps" in first and first.endswith("-r " + str(checkout.root / ".venv/packages.txt"))
    assert (checkout.root / ".venv/packages.txt").read_text() == (checkout.root / "requirements/cpu.lock").read_text()
    assert "--no-deps" in second and second.endswith(f"--editable {checkout.root}")


def test_a_second_run_does_nothing_and_says_nothing(checkout):
    checkout.run()
    checkout.calls()
    assert checkout.run() == (0, "")
    assert checkout.calls() == []


@pytest.mark.parametrize("name", ["setup.py", "requirements/cpu.lock"])
def test_a_changed_version_is_installed_into_the_same_environment(checkout, name):
    checkout.run()
    checkout.calls()
    kept = checkout.root / ".venv" / "kept"
    kept.touch()
    (checkout.root / name).write_text("other==1\n")
    assert checkout.run()[0] == 0
    assert len(checkout.calls()) == 2 and kept.exists()


def test_an_interrupted_run_is_begun_afresh(checkout):
    process = checkout.start(PIP_SLEEPS="60")
    while not checkout.calls_file.exists():
        time.sleep(0.05)
    (checkout.root / ".venv" / "half").touch()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) != 0
    checkout.calls()
    assert checkout.run()[0] == 0
    assert len(checkout.calls()) == 2 and not (checkout.root / ".venv" / "half").exists()


def test_two_runs_at_once_install_once(checkout):
    runs = [checkout.start(PIP_SLEEPS="0.5") for _ in range(2)]
    outputs = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0] and len(checkout.calls()) == 2
    assert "waiting" in "".join(outputs)


def test_a_failure_names_the_log_and_is_not_taken_for_done(checkout):
    code, output = checkout.run(PIP_FAILS_ON="packages.txt", PIP_SAYS="ERROR: no space left")
    assert code != 0 and "ERROR: no space left" in output and "setup.log" in output
    checkout.calls()
    assert checkout.run()[0] == 0 and len(checkout.calls()) == 2


def test_a_missing_cpu_build_of_torch_says_what_to_set(checkout):
    says = "ERROR: No matching distribution found for torch==2.13.0+cpu"
    code, output = checkout.run(PIP_FAILS_ON="packages.txt", PIP_SAYS=says)
    assert code != 0 and "PIP_EXTRA_INDEX_URL" in output.splitlines()[-1]


@pytest.mark.parametrize(
    "cause",
    [
        "NewConnectionError('Failed to establish a new connection')",
        'NameResolutionError("Failed to resolve")',
        "ProxyError('Cannot connect')",
    ],
)
def test_without_a_network_one_line_says_where_to_run_it(checkout, cause):
    says = (
        f"WARNING: Retrying (Retry(total=0)) after connection broken by '{cause}': /simple/torch/\n"
        "ERROR: No matching distribution found for torch==2.13.0+cpu"
    )
    code, output = checkout.run(PIP_FAILS_ON="packages.txt", PIP_SAYS=says)
    assert code != 0 and "no package index answers" in output.splitlines()[-1] and "PIP_FIND_LINKS" in output.splitlines()[-1]
    assert "ERROR" not in output and len(output.splitlines()) == 2


def test_a_wheel_that_a_folder_lacks_is_named(checkout):
    says = "ERROR: No matching distribution found for ray==2.60.0"
    code, output = checkout.run(PIP_FAILS_ON="packages.txt", PIP_SAYS=says, PIP_NO_INDEX="1", PIP_FIND_LINKS="wheels")
    assert code != 0 and "ray==2.60.0 not in PIP_FIND_LINKS=wheels" in output.splitlines()[-1]


def test_a_complete_environment_needs_no_network(checkout):
    checkout.run()
    checkout.calls()
    assert checkout.run(PIP_FAILS_ON="install", PIP_SAYS="NewConnectionError") == (0, "") and checkout.calls() == []


def test_a_gpu_gets_its_lock_file_and_transformer_engine_last(checkout):
    checkout.run()
    checkout.calls()
    checkout.add_program("nvidia-smi", "#!/bin/sh\necho 'GPU 0: something'\n")
    assert checkout.run()[0] == 0
    _, engine, _ = checkout.calls()
    assert (checkout.root / ".venv/packages.txt").read_text() == "torch==2.13.0\n"
    assert "--no-build-isolation" in engine and engine.endswith("transformer-engine==2.11.0 transformer-engine-torch==2.11.0")
    assert (checkout.root / ".venv/.platform").read_text() == "gpu\n"


def test_a_transformer_engine_that_does_not_build_is_left_out_whole(checkout):
    code, output = checkout.run("gpu", PIP_FAILS_ON="transformer-engine-torch==", PIP_SAYS="no nvcc")
    assert code == 0 and "fp8 is not available" in output
    assert "uninstall --yes transformer-engine transformer-engine-torch" in checkout.calls()


def test_gpu_packages_are_not_replaced_because_no_gpu_is_visible(checkout):
    checkout.run("gpu")
    code, output = checkout.run()
    assert code != 0 and "no GPU is visible" in output
    assert checkout.run("cpu")[0] == 0 and (checkout.root / ".venv/.platform").read_text() == "cpu\n"


def test_without_python_311_the_package_to_install_is_named(checkout):
    for name in ("python3.11", "python3"):
        checkout.add_program(name, "#!/bin/sh\nexit 1\n")
    path = checkout.root.parent / "tools_only"
    path.mkdir()
    for name in ("dirname", "cat", "sha256sum", "cut", "flock", "mkdir", "touch", "rm"):
        (path / name).symlink_to(shutil.which(name))
    code, output = checkout.run(PATH=f"{checkout.programs}:{path}")
    assert code != 0 and "apt-get install python3.11" in output and len(output.splitlines()) == 1


def test_an_unknown_platform_is_refused(checkout):
    code, output = checkout.run("tpu")
    assert code != 0 and "'tpu'" in output and "cpu and gpu" in output
