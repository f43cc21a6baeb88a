"""Python programs that find torch imported, which else takes each of them seconds of a processor's time.

`Popen` and `run` are those of `subprocess`, for a script, `-c` or a package with `-m`, if need be after
`-W ignore` or `-u`. The process is a fork of a server that imports torch once for all tests of a pytest
process. As any other it is a child of pytest, has the command line, environment, folder and files that it is
given, runs its program as `__main__`, and ends with its interpreter; but /proc has the server's environment,
and torch's libraries are not told of its end.
Away from Linux it is a plain process. A program that has torch imported may call `fork_from_here`: what it
starts is a fork of it.
It must not know what runs in them.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("preloaded_server.py")
PR_SET_CHILD_SUBREAPER = 36
ROOM_FOR_COMMANDS = 8000  # bytes, in /proc


class Server:
    """The process that is forked; it ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None  # none where it is a fork of this process
        self._owner = 0

    def start(self, request: dict[str, Any], fds: list[int]) -> int:
        """The pid of a child of this process that runs what is asked."""
        message = json.dumps(request).encode()
        with self._lock:
            if self._socket is None:
                self._serve()
            assert self._socket is not None
            adopt(True)  # the child's own parent ends at once
            try:
                socket.send_fds(self._socket, [struct.pack("!I", len(message))], fds)
                self._socket.sendall(message)
                answer = self._socket.recv(4, socket.MSG_WAITALL)
            finally:
                adopt(False)
        assert len(answer) == 4, "the server of preloaded programs has ended"
        pid: int = struct.unpack("!I", answer)[0]
        return pid

    def _serve(self) -> None:
        ours, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), str(its.fileno()), "-" * ROOM_FOR_COMMANDS],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._socket, self._owner = ours, os.getpid()
        atexit.register(self._close)

    def fork(self) -> None:
        """Let a fork of this process, which has no threads yet, be the server."""
        if sys.platform != "linux":
            return
        import preloaded_server

        ours, its = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            preloaded_server.run(its)
        its.close()
        self._socket = ours  # at its end the server ends

    def _close(self) -> None:
        assert self._socket is not None
        assert self._process is not None
        self._socket.close()
        if os.getpid() == self._owner:  # and not a fork of it
            self._process.kill()
            self._process.wait()


def adopt(whether: bool) -> None:
    """Whether processes below this one whose parent ends become its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(whether), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


_server = Server()
fork_from_here = _server.fork


class Popen(subprocess.Popen):
    """A process that begins with torch imported."""

    if sys.platform == "linux":

        def _execute_child(  # type: ignore[no-untyped-def]
            self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
            shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid,
            umask, start_new_session, *_,
        ):  # fmt: skip
            python, *arguments = map(os.fspath, args)
            assert python == sys.executable
            assert not any((preexec_fn, pass_fds, shell, gid, gids, uid)), "of subprocess.Popen alone"
            request = {
                "arguments": arguments,
                "cwd": os.fspath(cwd or os.getcwd()),
                "env": dict(os.environ if env is None else env),
                "session": start_new_session,
            }
            given = ((p2cread, 0), (c2pwrite, 1), (errwrite, 2))
            self.pid = _server.start(request, [own if fd == -1 else fd for fd, own in given])
            self._child_created = True
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def run(
    command: list[Any],
    *,
    timeout: float,
    check: bool = False,
    capture_output: bool = False,
    input: Any = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run` does."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
