"""Runs functions as another user of this machine, in tests that run as root."""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

NOBODY, SOMEBODY = 65534, 64999


@functools.cache
def other_python() -> str:
    """Return an interpreter of this Python's version that other users may start; empty: there is none."""
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}", "/usr/local/bin/python3"):
        tried = subprocess.run(["setpriv", f"--reuid={NOBODY}", "sh", "-c", f"exec {python} -V"], capture_output=True)
        if tried.returncode == 0 and platform.python_version_tuple()[1] in tried.stdout.decode().split("."):
            return python
    return ""


@functools.cache
def namespaces() -> bool:
    """Return whether a process can have mounts of its own here, as containers have."""
    probe = ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(probe, capture_output=True).returncode == 0


@functools.cache
def networks() -> bool:
    """Return whether a process can have networks of its own here."""
    tried = ["unshare", "--net", "ip", "link", "add", "probe0", "type", "bridge"]
    known = shutil.which("unshare") is not None and shutil.which("ip") is not None
    return os.getuid() == 0 and known and subprocess.run(tried, capture_output=True).returncode == 0


def can(marker: str) -> bool:
    """Return whether this machine and user can do what a marker needs."""
    if marker == "networks":
        return networks()
    if marker == "namespaces":
        return namespaces()
    return os.getuid() == 0 and (marker == "root" or (shutil.which("setpriv") is not None and bool(other_python())))


def as_user(uid: int, function: Callable[[], Any]) -> Any:
    """Return what `function` returns in a forked process of a user, which needs no permission to read our files."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            answer = {"value": function()}
        except BaseException as error:
            # No traceback: that may import modules, from folders that this user cannot read.
            answer = {"error": repr(error)}
        finally:
            try:
                os.write(writer, json.dumps(answer).encode())
            finally:
                os._exit(0)  # in any case: this process must not go on as the test run
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = json.loads(file.read())
    os.waitpid(child, 0)
    if "error" in answer:
        raise AssertionError(f"user {uid}: {answer['error']}")
    return answer["value"]
