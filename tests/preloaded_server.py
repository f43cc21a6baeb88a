"""The process behind `preloaded.py`: it imports torch, then forks for each program that is asked for.

    python preloaded_server.py FD PADDING

FD is its socket. A fork leaves `serve`, and runs its program as `__main__`. PADDING makes room in its command
line, as /proc has it, for that of each program.
"""

import ctypes
import gc
import json
import os
import socket
import struct
import sys
import warnings
import weakref
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import numpy
import torch
import torch._dynamo  # the first optimizer would
from huge_pages import use_huge_pages

import edl_torch.data.checkpoint
import edl_torch.data.loader  # noqa: F401


def run(connection: socket.socket) -> NoReturn:
    """Serve; in each fork, run the program, and end with it."""
    leave_what_is_imported()
    first, *rest = serve(connection)
    program = sys.modules["__main__"] = ModuleType("__main__")
    if first == "-c":
        text, *rest = rest
        sys.path[0], sys.argv, file = "", [first, *rest], "<string>"
    elif first == "-m":
        module, *rest = rest
        file = str(find_spec(f"{module}.__main__").origin)  # type: ignore[union-attr]
        text = Path(file).read_bytes()  # type: ignore[assignment]
        sys.path[0], sys.argv = os.getcwd(), [file, *rest]
    else:
        text, file = Path(first).read_bytes(), first  # type: ignore[assignment]
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(first)), [first, *rest]
        program.__file__ = os.path.abspath(first)
    exec(compile(text, file, "exec"), program.__dict__)
    sys.exit()


def leave_what_is_imported() -> None:
    """Let forks end without freeing it object by object, which costs each 0.1 s of a processor.

    What they import and make themselves goes, and modules are emptied, as in any interpreter that ends; but
    the operators that torch has registered stay.
    """
    for finalizer in tuple(weakref.finalize._registry):  # type: ignore[attr-defined]
        pending = finalizer.peek()
        if pending is not None and pending[1].__module__ == "torch.library":
            finalizer.atexit = False
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(gc.get_objects()))
    gc.freeze()  # nor does the collector look through them
    use_huge_pages()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc's, which calls it before the destructors of torch's libraries
        libc.on_exit(libc._exit, None)


def serve(connection: socket.socket) -> list[str]:
    """Fork for each request. Returns in a fork: its arguments."""
    while True:
        size, fds, *_ = socket.recv_fds(connection, 4, 3)
        if not size:
            os._exit(0)  # whoever asked has ended
        message = connection.recv(struct.unpack("!I", size)[0], socket.MSG_WAITALL)
        told, tell = os.pipe()
        go, let_go = os.pipe()
        middle = fork()
        if middle == 0:
            if fork():
                os._exit(0)
            request = json.loads(message)
            if request.pop("session"):
                os.setsid()
            os.write(tell, struct.pack("!I", os.getpid()))
            os.read(go, 1)
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
            os.closerange(3, max(connection.detach(), *fds, told, tell, go, let_go) + 1)
            return become(**request)
        os.waitpid(middle, 0)  # from here on the child is that of the process that asked
        pid = os.read(told, 4)
        os.write(let_go, b"1")
        connection.sendall(pid)
        for fd in (*fds, told, tell, go, let_go):
            os.close(fd)


def fork() -> int:
    with warnings.catch_warnings(action="ignore"):  # OpenBLAS has threads
        return os.fork()


def become(arguments: list[str], cwd: str, env: dict[str, str]) -> list[str]:
    """Take over what a new process has from its parent, and the interpreter's options."""
    show([sys.executable, *arguments])
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    ignored = env.get("PYTHONWARNINGS") == "ignore"
    if arguments[:2] == ["-W", "ignore"]:
        ignored = True
        del arguments[:2]
    if ignored:
        sys.warnoptions.append("ignore")
        warnings.simplefilter("ignore")
    unbuffered = arguments[0] == "-u"
    if unbuffered:
        del arguments[0]
    if unbuffered or env.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if "PYTHONPATH" in env:
        sys.path[1:1] = [os.path.abspath(path) for path in env["PYTHONPATH"].split(os.pathsep) if path]
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    numpy.random.seed()  # not as in every other fork
    return arguments


def show(command: list[str]) -> None:
    """Let /proc have it as this process's command line."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = "\0".join(command).encode()[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    show(sys.orig_argv[:3])
    run(socket.socket(fileno=int(sys.argv[1])))
