"""The inside of a sandbox: takes on the limits, says that it is ready, and becomes the program that it is sent.

    python -I -S guest.py UID MEMORY_BYTES PROCESSES DISK_BYTES CPU_S

Run by path, with nothing but the standard library.  Once it has written a line to standard error it reads the size of a
request in ten digits, and the request, {"code": …, "stdin": text or null}; from then on the process is the program's: its
standard streams, its exit status.  With null its standard input is what follows.
"""

import json
import os
import resource
import sys

PIPE_BYTES = 65536  # that a pipe holds
SIZE_DIGITS = 10


def limit(uid: int, memory: int, processes: int, disk: int, cpu_s: int) -> None:
    """Take on the limits, and leave the superuser; neither can be undone."""
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def read(count: int) -> bytes:
    """So many bytes of standard input, and no more: what follows is the program's."""
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            os._exit(0)  # the pool ended
        data += part
    return data


def feed(text: str) -> None:
    """Make a text the standard input."""
    reading, writing = os.pipe()
    data = text.encode()
    if len(data) <= PIPE_BYTES:
        os.write(writing, data)
    elif os.fork() == 0:
        os.close(reading)
        try:
            while data:
                data = data[os.write(writing, data) :]
        except BrokenPipeError:
            pass
        os._exit(0)
    os.close(writing)
    os.dup2(reading, 0)
    os.close(reading)


def main() -> None:
    """Wait for the program, and run it as __main__."""
    limit(*map(int, sys.argv[1:]))
    sys.stderr.write("ready\n")
    sys.stderr.flush()
    request = json.loads(read(int(read(SIZE_DIGITS))))
    if request["stdin"] is not None:
        feed(request["stdin"])
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape")  # noqa: SIM115  the program's
    sys.argv = ["main.py"]
    program = {"__name__": "__main__", "__builtins__": __builtins__}
    source = request["code"]
    del request
    try:
        exec(compile(source, "main.py", "exec"), program)
    except Exception as error:
        sys.stdout.flush()
        trace = error.__traceback__ and error.__traceback__.tb_next  # without this file's frame
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


if __name__ == "__main__":
    main()
