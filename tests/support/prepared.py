"""Commands and programs in forks of one process that has imported what they need. Each of them
would otherwise import PyTorch or Gymnasium again, which takes longer than its work.

``python -m tests.support.prepared`` is that process. An order is a line of JSON on standard input,
its answer is a line of standard output: the exit code. The end of standard input ends it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = (
    "torch",
    "gymnasium",
    "aiohttp",
    "tianflow.cli.main",
    "tianflow.cli.train",
    "tianflow.api",
    "tianflow.policy",
    "tianflow.server.run.server",
    "tianflow.planning.validation",
)


class PreparedProcess:
    """The process, seen from a test. ``environment`` is that of everything that it runs."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.prepared"],
            env={**environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(
        self, words: Sequence[str], folder: Path, *, timeout: float, merged: bool = False
    ) -> tuple[int, str, str]:
        """Run ``tianflow ...`` or ``python -c TEXT`` in ``folder``: its exit code, what it wrote to
        standard output, and to standard error. ``merged``: all is written to standard output.

        Raises:
            TimeoutError: it has not ended after ``timeout`` seconds. It is killed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        out, err = (folder / f".{name}" for name in ("stdout", "stderr"))
        for file in (out, err):
            file.write_bytes(b"")
        files = [str(out), str(out if merged else err)]
        order = {"words": list(words), "folder": str(folder), "files": files}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            self._process.kill()
            raise TimeoutError(f"not within {timeout:g} s: {' '.join(words)}")
        code = int(self._process.stdout.readline())
        return code, out.read_text(errors="replace"), err.read_text(errors="replace")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def main() -> None:
    """Be the process."""
    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    assert 1 == len(os.listdir("/proc/self/task")), "a fork has no threads"  # noqa: PTH208 - a count is wanted
    for line in sys.stdin.buffer:
        child = os.fork()
        if child == 0:
            _obey(json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


def _obey(order: Mapping[str, Any]) -> NoReturn:
    """In the child: do it as a new interpreter does, and end."""
    code = 1
    try:
        os.chdir(order["folder"])
        for number, name in enumerate((os.devnull, *order["files"])):
            opened = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND)
            os.dup2(opened, number)
            os.close(opened)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - that of this process lies on the orders
        code = _run(order["words"])
    except BaseException:  # noqa: BLE001 - the last frame of a process
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _run(words: Sequence[str]) -> int:
    program, *arguments = words
    try:
        if program == "python":
            sys.path.insert(0, "")
            option, text = arguments
            assert option == "-c"
            sys.argv = [option]
            exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
        else:
            from tianflow.__main__ import main as command

            sys.argv = list(words)
            command()
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as at the end of an interpreter
    return 0


if __name__ == "__main__":
    main()
