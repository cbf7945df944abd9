"""`SubmissionChecks`: validates submitted configs in child processes, a few at a time.

A submission is answered within `ANSWER_S`. A config that was not decided by then is accepted; its
run validates it again when it starts, and fails with the problem as its reason.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Self

from tianflow.config.model import Config
from tianflow.errors import ConfigError, Problem
from tianflow.observability.sinks.outlet import require_sinks
from tianflow.planning import probe

ANSWER_S = 5.0
"""Seconds for the check of a submission. A client waits 10 s for the whole answer."""
CHILDREN = 2
"""Child processes at a time: a check costs about a second of one core, as much as a start."""


class SubmissionChecks:
    """Makes the environment of each submitted config once, in a child process that can be killed.

    Consumes: configs. Waits: for one of `CHILDREN` places, and for the child. Unblocked by: an
    answer, `ANSWER_S`, the end of the context, which leaves no process.
    """

    def __init__(self) -> None:
        # Submissions queue here, at most as many as there are connections.
        self._children = ThreadPoolExecutor(CHILDREN, thread_name_prefix="check")
        self._stopped, self._stop = os.pipe()
        self._closed = False

    async def check(self, config: Config) -> None:
        """Validate ``config``. Returns without an answer if there is none within `ANSWER_S`.

        Raises:
            ConfigError: a run of ``config`` would fail at its start.
        """
        if self._closed:
            return
        deadline = time.monotonic() + ANSWER_S
        checking = asyncio.get_running_loop().run_in_executor(
            self._children, self._problems, config, deadline
        )
        with suppress(TimeoutError, probe.UndecidedError):
            async with asyncio.timeout(ANSWER_S):
                problems = await checking
            if problems:
                raise ConfigError(problems)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        os.close(self._stop)  # every check sees the end of this pipe
        await asyncio.to_thread(self._children.shutdown, cancel_futures=True)
        os.close(self._stopped)

    def _problems(self, config: Config, deadline: float) -> list[Problem]:
        """Problems of ``config``, in a thread that may wait for the child."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise probe.UndecidedError("other submissions were checked until the time was over")
        try:
            require_sinks(config)
            answer = probe.probe(
                config,
                report=lambda _: None,
                limit_s=left,
                stop=self._stopped,
                output=subprocess.DEVNULL,
                starts=True,
            )
        except ConfigError as error:
            return list(error.problems)
        return [Problem(*fields) for fields in answer.problems]
