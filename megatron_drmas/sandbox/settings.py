"""Settings of the sandbox."""

from dataclasses import dataclass

from megatron_drmas.config.setting import setting


@dataclass
class SandboxConfig:
    """Where programs that a model wrote run, and under which limits."""

    kind: str = setting(
        "What isolates a program from the machine",
        "auto",
        choices={
            "auto": "bubblewrap, or the run is refused",
            "bubblewrap": "namespaces of its own: no network, no file but Python's and a small /tmp",
            "apptainer": "a container of `image`, without network or home",
            "none": "nothing but the limits: only for programs that are trusted",
        },
    )
    image: str = setting("apptainer: image with Python 3 that it runs in", "")
    workers: int = setting("Programs that run at the same time", 2, minimum=2)
    timeout_s: float = setting("Seconds that a program may take", 10.0, minimum=0.1)
    memory_mib: int = setting("Address space of each of its processes in MiB", 512, minimum=32)
    processes: int = setting("Processes and threads that it may have", 16, minimum=1)
    disk_mib: int = setting("What it may write to /tmp in MiB", 64, minimum=1)
    output_kib: int = setting("What it may print in KiB", 256, minimum=1)
