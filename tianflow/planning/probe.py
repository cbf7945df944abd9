"""Validation of a user's own code, in a child process that can be killed.

A constructor, a reset or a module of a user may hang, end its process, change the working directory
or start processes. None of it reaches the process that starts the run: the child has a time limit,
and is killed with everything that it started.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgpack

from tianflow.channels.codec import Codec
from tianflow.config.evaluations import all_evaluations
from tianflow.config.model import BUILT_IN_ALGORITHMS, Config, EnvSettings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.core.process_table import kill_marked
from tianflow.errors import ConfigError, Problem, TianflowError

MARK = "TIANFLOW_PROBE"
"""Environment variable by which the processes of a probe are found."""
REPORT_S = 5.0
"""Seconds between two reports of a probe that is still running."""
END_S = 5.0
"""Seconds for the processes of a probe to end once they are killed."""
SHIPPED = ("gymnasium.envs.", "ale_py.")
"""Modules of environments that may be made in the process that starts a run."""
PR_SET_PDEATHSIG = 1
_BOOT = (
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[1]); "
    "import tianflow.planning.validation, tianflow.planning.probe as p; gc.enable(); "
    "p.main(int(sys.argv[2]), int(sys.argv[3]))"
)
"""Imports make hardly any garbage, and looking for it takes a tenth of their time."""


class UndecidedError(TianflowError):
    """A probe ended before it had an answer: the caller's time was over, or the caller stopped."""


class FoundProblem(NamedTuple):
    """A `Problem` as plain data, its value as text."""

    path: str
    value: str | None
    message: str
    accepted: str
    nearest: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probe found: a specification, or problems."""

    spec: EnvironmentSpec | None
    problems: tuple[FoundProblem, ...]


ANSWERS = Codec("answer")
ANSWERS.register(Answer)


def runs_user_code(config: Config) -> bool:
    """True if validating ``config`` runs code that is neither tianflow's nor Gymnasium's."""
    if ":" in config.network.name or config.algorithm.name not in BUILT_IN_ALGORITHMS:
        return True
    return has_user_environment(config)


def has_user_environment(config: Config) -> bool:
    """True if making the environments of training and evaluations runs such code."""
    return any(
        _is_users(env) for env in (config.env, *(found.env for found in all_evaluations(config)))
    )


def _is_users(env: EnvSettings) -> bool:
    if env.wrappers:
        return True
    if env.vectorization == "envpool" or env.id.startswith(("ALE/", "ale_py:ALE/")):
        return False
    if ":" in env.id:
        return True
    import gymnasium

    spec = gymnasium.registry.get(env.id)
    entries = () if spec is None else (spec.entry_point, spec.vector_entry_point)
    return any(entry is not None and not str(entry).startswith(SHIPPED) for entry in entries)


needs_child = runs_user_code
"""Which configs are validated in a child. Tests that make many environments replace it."""


def probe(
    config: Config,
    *,
    report: Callable[[str], None],
    limit_s: float = math.inf,
    stop: int | None = None,
    output: int = 2,
    starts: bool = False,
    environments_only: bool = False,
) -> Answer:
    """Validate ``config`` in a child process.

    Args:
        config: to validate.
        report: called every `REPORT_S` seconds with the reason of the wait.
        limit_s: seconds that the caller waits at most.
        stop: a descriptor; once it is readable, the probe ends.
        output: descriptor for what the user's code prints, or `subprocess.DEVNULL`.
        starts: also find problems of a start on this machine (`planning.machine`).
        environments_only: only make the environments, and import nothing else of the user.

    Raises:
        ConfigError: the child did not answer within ``env.start_timeout_s``, or ended without an
            answer.
        UndecidedError: ``limit_s`` has passed, or ``stop`` is readable.
    """
    order = msgpack.packb([config.model_dump(mode="python"), starts, environments_only])
    token = secrets.token_hex(8)
    orders, answers = os.memfd_create("probe"), os.pipe()
    try:
        os.write(orders, order)
        os.lseek(orders, 0, os.SEEK_SET)
        child = subprocess.Popen(  # noqa: S603 - the interpreter itself, with `main` below
            [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), str(orders), str(answers[1])],
            stdin=subprocess.DEVNULL,
            stdout=output,  # not the caller's, where it would mix with what a command prints
            stderr=output,
            env={**os.environ, MARK: token},
            pass_fds=(orders, answers[1]),
            start_new_session=True,
        )
        os.close(answers[1])
        try:
            return _answer(config, child, answers[0], report=report, limit_s=limit_s, stop=stop)
        finally:
            kill_marked(MARK, token, {child.pid}, END_S)
            with suppress(subprocess.TimeoutExpired):
                child.wait(END_S)
    finally:
        os.close(orders)
        os.close(answers[0])


def _answer(
    config: Config,
    child: subprocess.Popen[bytes],
    end: int,
    *,
    report: Callable[[str], None],
    limit_s: float,
    stop: int | None,
) -> Answer:
    limit, began = config.env.start_timeout_s, time.monotonic()
    ends, said = [end] if stop is None else [end, stop], msgpack.Unpacker()
    while (left := began + min(limit, limit_s) - time.monotonic()) > 0:
        ready, _, _ = select.select(ends, [], [], min(left, REPORT_S))
        if stop in ready:
            raise UndecidedError("the probe was stopped")
        if not ready:
            waited = time.monotonic() - began
            report(
                f"waiting for environment {config.env.id} to be made and reset: {waited:.0f} s "
                f"of env.start_timeout_s = {limit:g} s"
            )
            continue
        part = os.read(end, 1 << 16)
        if not part:
            raise ConfigError([Problem("env.id", config.env.id, _how_it_ended(child))])
        said.feed(part)
        # the end of the pipe may never come: processes that an environment forks hold it open
        for found in said:
            answer = ANSWERS.decode(found)
            assert isinstance(answer, Answer)
            return answer
    if limit_s < limit:
        raise UndecidedError(f"the environment was not made and reset within {limit_s:g} s")
    message = f"was not made and reset within env.start_timeout_s = {limit:g} s"
    accepted = "an environment that starts faster, or a longer env.start_timeout_s"
    raise ConfigError([Problem("env.id", config.env.id, message, accepted)])


def _how_it_ended(child: subprocess.Popen[bytes]) -> str:
    try:
        code = child.wait(END_S)
    except subprocess.TimeoutExpired:
        return "closed the descriptors of the process that made it"
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    return f"ended the process that made it ({how})"


def main(orders: int, answers: int) -> None:
    """Validate the config that lies in ``orders``, and write the answer to ``answers``."""
    with suppress(AttributeError, OSError):  # a system without it still kills by the mark
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    from tianflow.logs import configure
    from tianflow.planning.machine import start_problems
    from tianflow.planning.validation import make_environments_here, validate_here

    configure(level="WARNING")
    tables, starts, environments_only = msgpack.unpackb(os.read(orders, 1 << 30))
    config = Config.model_validate(tables)
    found = make_environments_here(config) if environments_only else validate_here(config)
    problems = tuple(
        FoundProblem(
            problem.path,
            None if problem.value is None else str(problem.value),
            problem.message,
            problem.accepted,
            problem.nearest,
        )
        for problem in found.problems or (start_problems(config) if starts else ())
    )
    with os.fdopen(answers, "wb") as end:
        end.write(msgpack.packb(ANSWERS.encode(Answer(found.spec, problems))))
    os._exit(0)  # threads and exit handlers of a user's code cannot delay it
