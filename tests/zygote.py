"""Starts Python processes with their imports done, as forks of a process (the zygote) that only imports.

Importing torch and making a first optimizer takes four seconds of CPU, a daemon's imports one, a fork 0.05. Apart from
that they are as `python ...` makes them: children of the process that starts them, with their own arguments,
environment, folder, streams and end. To test the start itself, memory or a command line, start an interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, str(ROOT / "tests" / "torchrun.py")]
"""Command of a torchrun whose ranks are forks too."""
TRAINING = ("numpy", "torch", "torch._dynamo", "torch.utils.data")
"""Modules that a training script imports. Making the first optimizer imports the third."""
RANKS = (*TRAINING, "torch.distributed.run")
DAEMON = (
    "rich.console", "sentinel.cli.daemon", "sentinel.cli.incidents", "sentinel.cli.log_format", "sentinel.cli.status",
    "sentinel.daemon.app", "sentinel.daemon.frontend.metrics", "sentinel.web.http",
)  # fmt: skip
"""Modules that `sentinel daemon` imports, and those of the commands that query it."""
LONGEST_REQUEST = 1 << 17
_PR_SET_CHILD_SUBREAPER = 36


class Zygote:
    """The connection to a zygote."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def fork(
        self, arguments: Sequence[str], folder: str, environment: Mapping[str, str], streams: list[int], session: bool
    ) -> int:
        """Fork a child; return its pid. The zygote orphans it, and orphans become this process's children meanwhile."""
        request = json.dumps([arguments, folder, dict(environment), session]).encode()
        _adopt_orphans(True)
        try:
            socket.send_fds(self._channel, [request], streams)
            child, orphaned = self._channel.recv(64), self._channel.recv(64)
        finally:
            _adopt_orphans(False)
        assert orphaned, "the zygote has ended: what it said of its imports is above"
        return int(child)


def _adopt_orphans(wanted: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def open_channel() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a channel to a zygote."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@functools.cache
def start_zygote(imports: tuple[str, ...]) -> Zygote:
    """Return this process's zygote with these imports, starting it at the first call."""
    ours, theirs = open_channel()
    with theirs:
        command = [sys.executable, "-c", "from tests import zygote; zygote.main()", str(theirs.fileno()), *imports]
        null = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], **null)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return Zygote(ours)


class ForkedProcess(subprocess.Popen[Any]):
    """`Popen([sys.executable, ...])`, as a fork of a zygote."""

    def __init__(self, args: Sequence[Any], *, zygote: Zygote, **options: Any) -> None:
        self._zygote = zygote
        super().__init__([*map(str, args)], **options)

    def _execute_child(
        self, args: list[str], executable: None, preexec_fn: None, close_fds: bool, pass_fds: tuple[int, ...],
        cwd: Any, env: Mapping[str, str] | None, startupinfo: None, creationflags: int, shell: bool,
        p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
        restore_signals: bool, gid: None, gids: None, uid: None, umask: int, start_new_session: bool, *_: object,
    ) -> None:  # fmt: skip
        assert preexec_fn is None, "a fork has no place for it"
        assert not pass_fds, "a fork gets its three streams"
        streams = [given if given >= 0 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        folder, environment = os.fspath(cwd or os.getcwd()), os.environ if env is None else env
        self.pid = self._zygote.fork(args[1:], folder, environment, streams, start_new_session)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def run_fork(
    command: Sequence[Any], imports: tuple[str, ...], timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command as `subprocess.run([sys.executable, ...], capture_output=True, text=True)` does, by a fork."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    with ForkedProcess(command, zygote=start_zygote(imports), **pipes) as process:
        try:
            said, complained = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, said, complained)


def main() -> NoReturn:
    """Run as the zygote: `python -c ... DESCRIPTOR MODULE...`."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    serve(channel)


def serve(channel: socket.socket) -> NoReturn:
    """Fork for each request, and run its program in the fork, until the other end closes the channel."""
    gc.freeze()  # as in tests/conftest.py: objects loaded by now are not the program's
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, LONGEST_REQUEST, 3)
        if not request:
            os._exit(0)
        between = os.fork()
        if between == 0:
            orphaning = os.getpid()
            if child := os.fork():
                channel.send(str(child).encode())
                os._exit(0)
            channel.close()
            while os.getppid() == orphaning:
                time.sleep(0.001)
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            _run(*json.loads(request))
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        channel.send(b"orphaned")


def _run(*request: Any) -> NoReturn:
    """Run the program, and exit as the interpreter does, but without its finalization.

    With torch that takes a second, and after `gc.freeze` native modules would report leaked objects.
    """
    code: Any = 0
    try:
        _become(*request)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or without a reader
            stream.flush()
    os._exit(code)


def _become(arguments: list[str], folder: str, environment: dict[str, str], session: bool) -> None:
    """Run as `python [-u] (-c CODE | -m MODULE | SCRIPT) ...`."""
    if session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script ignores it in what it runs in the background
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    unbuffered = arguments[0] == "-u"
    del arguments[: int(unbuffered)]
    output = io.FileIO(1, "w", closefd=False)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(output if unbuffered else io.BufferedWriter(output), write_through=unbuffered)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.modules["__main__"] = ModuleType("__main__")
    names = vars(sys.modules["__main__"])
    if arguments[0] == "-m":
        sys.argv, sys.path[:1] = arguments[1:], [folder, *paths]
        runpy._run_module_as_main(arguments[1])
    elif arguments[0] == "-c":
        sys.argv, sys.path[:1] = ["-c", *arguments[2:]], ["", *paths]
        exec(arguments[1], names)
    else:
        sys.argv, sys.path[:1] = arguments, [str(Path(arguments[0]).resolve().parent), *paths]
        names["__file__"] = arguments[0]
        exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), names)
