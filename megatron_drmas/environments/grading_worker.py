"""The process that parses and compares mathematical answers, for `grading.Grader`.

Started as a script (not as a module), so that it loads `megatron_drmas.answers` and nothing else of the package.  It prints
a line when ready, then answers each JSON line {"answer", "gold"} with a JSON line {"correct", "error"}.
Arguments: memory limit in MiB, time limit of one answer in seconds.

What it parses was written by a language model, so it gives up, before the first answer, its right to more memory,
to open sockets, to write files and to start programs.  Its parent kills it when an answer takes too long; the alarm
here does the same if there is no parent any more.
"""

import json
import logging
import os
import resource
import signal
import sys

from megatron_drmas.answers.equality import same_answer

FORBIDDEN = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "ctypes.")
# Loads what the libraries import late, while that is allowed
WARM_UP = (("\\frac{1}{2}", "0.5"), ("\\sqrt{2+\\sqrt{3}}", "\\frac{\\sqrt{6}+\\sqrt{2}}{2}"), ("\\cos 2x", "2\\cos^2 x-1"),
           ("\\int_0^1 x dx", "\\ln 2"), ("(1,2)\\cup(3,4)", "\\emptyset"), ("x=2y", "2x=4y"))  # fmt: skip
HEADROOM_MIB = 64  # what parsing an ordinary answer may take


def restrict(memory_mib: int) -> None:
    """Limit this process's address space; ends it when the libraries leave too little."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used_mib = int(file.read().split()[0]) * resource.getpagesize() >> 20
    if memory_mib < used_mib + HEADROOM_MIB:
        sys.exit(f"the libraries take {used_mib} MiB of address space, so the limit must be {used_mib + HEADROOM_MIB} or more")
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def deny(event: str, _args: tuple) -> None:
        if event.startswith(FORBIDDEN):
            raise PermissionError(f"a grading worker may not do {event}")

    sys.addaudithook(deny)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # parsers write there, to no purpose


def main() -> None:
    memory_mib, time_limit = int(sys.argv[1]), float(sys.argv[2])
    logging.disable(logging.WARNING)
    for answer, gold in WARM_UP:
        same_answer(answer, gold)
    restrict(memory_mib)
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, time_limit)
        request = json.loads(line)
        reply: dict[str, bool | str | None]
        try:
            reply = {"correct": same_answer(request["answer"], request["gold"]), "error": None}
        except MemoryError:
            reply = {"correct": False, "error": "memory limit"}
        except Exception as error:  # any parser may fail in any way on such input: the answer is wrong, and says why
            reply = {"correct": False, "error": f"{type(error).__name__}: {error}"[:200]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
