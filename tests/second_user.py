"""Another user of this machine, for tests that run as root."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

NOBODY, SOMEBODY = 65534, 64999

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users (run the tests as root)")


def as_user(uid: int, function: Callable[[], Any]) -> Any:
    """What `function` returns in a process of this user: forked, so that it needs no right to our files."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            answer = {"value": function()}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = json.loads(file.read())
    os.waitpid(child, 0)
    if "error" in answer:
        print(answer["error"], file=sys.stderr)
        raise AssertionError(f"user {uid}: {answer['error'].splitlines()[-1]}")
    return answer["value"]
