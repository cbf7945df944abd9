"""What a person reads: the live screen, plain lines, the summary, and log lines."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
from dataclasses import replace
from typing import Any

import pytest
import structlog
from rich.console import Console

from tests.support.fakes_run import FakeRun
from tianflow import logs
from tianflow.cli.screen import (
    LastingConsole,
    PlainLines,
    Screen,
    drawing,
    make_screen,
    plain_line,
    summary_text,
)
from tianflow.core.events import EvaluationFinished, UpdateFinished
from tianflow.core.formatting import duration, number, sparkline
from tianflow.core.jsonable import json_ready
from tianflow.core.limits import Limits
from tianflow.core.payloads import Settlement, Version
from tianflow.core.statistics import BestVersion, ComponentStatistics, TimeShares
from tianflow.ledger.ledger import Ledger
from tianflow.observability.rates import RunRates
from tianflow.observability.run_document import ReplayState, RunDocument, describe, time_left
from tianflow.rundir.summary import REQUESTED, lost


def described(run: FakeRun, rates: RunRates | None = None) -> RunDocument:
    rates = RunRates(read=run.statistics) if rates is None else rates
    return describe(rates.sample(), run.config, rates)


def shown(run: FakeRun, width: int = 120, rates: RunRates | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(drawing(described(run, rates)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def run() -> FakeRun:
    run = FakeRun()
    run.train(5)
    return run


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"{name} "))


def test_the_screen_tells_the_whole_story(run: FakeRun) -> None:
    rates = RunRates(read=run.statistics)
    rates.sample()
    run.train(10)
    run.evaluation = {"mean_return": 12.5, "version": 9.0, "episodes": 100.0}
    run.further_evaluations = {"large": {"mean_return": 7.5, "version": 9.0, "episodes": 5.0}}
    best = BestVersion(version=8, mean_return=13.5, episodes=100)
    run.checkpoint = replace(run.checkpoint, best=best)
    text = shown(run, rates=rates)
    assert "best 13.5 at version 8   large 7.5 at version 9" in row(text, "evaluations")
    assert "fake  CartPole-v1 ppo  running  1:55" in text
    assert "8 mean  1 to 15 over 15 episodes   target 475   evaluated 12.5 at version 9" in row(
        text, "return"
    )
    assert "64 (10 s)  64 (60 s)  64 (300 s)   960 steps" in row(text, "steps/s")
    assert "0 min  0 mean  0 p99  0 max   bound 1" in row(text, "staleness")
    assert "busy 100%" in row(text, "learner")
    assert "waiting:grant 100%" in row(text, "actor")
    assert "learning-bound" in row(text, "bottleneck")
    assert "max_env_steps 2:21" in row(text, "time left")


def test_the_screen_shows_whether_a_run_learns(run: FakeRun) -> None:
    rates = RunRates(read=run.statistics)
    for _ in range(8):
        rates.sample()
        run.train(1)
    text = shown(run, rates=rates)
    assert "return" == row(text, "return").split()[0]
    assert "▁▂▃▄▅▆▇█" == row(text, "return").split()[1]
    assert ["loss", "█▆▅▄▃▂▁▁"] == row(text, "loss").split()[:2]
    values = (
        "0.1121  policy_loss -0.1121  value_loss 0.2242  entropy 0.5  approx_kl 0.01  grad_norm"
    )
    assert values in row(text, "loss")


def test_a_run_without_statistics_has_no_row_of_losses() -> None:
    run = FakeRun()
    assert "loss" not in shown(run)
    assert "loss" not in plain_line(described(run))


def test_a_statistic_of_a_user_can_be_the_loss() -> None:
    run = FakeRun()
    run.learning.add(run.learning.accept({"mine/actor_loss": 2.5, "train/x": 1.0}))
    assert "loss 2.5" in plain_line(described(run))
    assert ["loss", "2.5"] == row(shown(run), "loss").split()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ((), ""),
        ((None, None), ""),
        ((3.0,), "▁"),
        ((2.0, 2.0), "▁▁"),
        ((0.0, None, 1.0), "▁ █"),
        ((float("nan"), 0.0, float("inf"), 7.0), " ▁ █"),
        ((-1.7e308, 0.0, 1.7e308), "▁▅█"),
    ],
)
def test_a_sparkline_has_one_character_for_each_value(
    values: tuple[float | None, ...], line: str
) -> None:
    assert line == sparkline(values)


def test_a_run_that_just_began_has_dashes_and_no_error() -> None:
    run = FakeRun()
    run.ready, run.reasons, run.state = False, ("the learner is starting",), "starting"
    text = shown(run)
    assert "– mean" in row(text, "return")
    assert "– (10 s)" in row(text, "steps/s")
    assert "the learner is starting" in row(text, "not ready")
    assert "–" in plain_line(described(run))


def test_the_screen_fits_a_narrow_window(run: FakeRun) -> None:
    assert max(map(len, shown(run, width=40).splitlines())) <= 40


def test_violations_are_shouted(run: FakeRun) -> None:
    assert "violations" not in shown(run)
    run.train(1, bound=-1)
    assert "2 violations" in row(shown(run), "staleness")


def test_a_plain_line_is_one_line_without_control_characters(run: FakeRun) -> None:
    line = plain_line(described(run))
    assert line.isprintable()
    assert line.startswith(
        "1:45  running  steps 320 (–/s)  updates 5  return 3 over 5 episodes  loss 0.2  "
        "staleness mean 0 max 0 bound now 1  dropped 0"
    )


async def test_plain_lines_come_at_an_interval_and_once_at_the_end(run: FakeRun) -> None:
    lines: list[str] = []
    enough, started = asyncio.Event(), asyncio.Event()

    def write(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            enough.set()

    task = asyncio.create_task(PlainLines(run=run, write=write, interval_s=0.001).run(started.set))
    await asyncio.wait_for(enough.wait(), 5.0)
    assert started.is_set()
    run.state = "stopping"
    before = len(lines)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert "stopping" in lines[-1]
    assert before + 1 == len(lines)


async def test_plain_lines_have_the_result_of_each_evaluation(run: FakeRun) -> None:
    """Also of two between two lines, and of the last one of a run."""
    lines: list[str] = []
    started = asyncio.Event()
    plain = PlainLines(run=run, write=lines.append, interval_s=60.0)
    task = asyncio.create_task(plain.run(started.set))
    await started.wait()
    for version, name in ((3, "main"), (3, "large"), (5, "main")):
        run.events.publish(UpdateFinished(version=version, seconds=0.1, samples=64))
        run.events.publish(EvaluationFinished(version, 2, 12.5, (12.0, 13.0), name))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    *evaluations, last = lines
    assert [
        "evaluation main: mean return 12.5 over 2 episodes, version 3",
        "evaluation large: mean return 12.5 over 2 episodes, version 3",
        "evaluation main: mean return 12.5 over 2 episodes, version 5",
    ] == evaluations
    assert "running" in last


async def test_plain_lines_go_on_after_one_that_could_not_be_written(run: FakeRun) -> None:
    asked = 0
    written = asyncio.Event()

    def write(_line: str) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise OSError("no space left")
        written.set()

    task = asyncio.create_task(PlainLines(run=run, write=write, interval_s=0.001).run(lambda: None))
    done, _ = await asyncio.wait(
        {task, asyncio.create_task(written.wait())},
        timeout=5.0,
        return_when=asyncio.FIRST_COMPLETED,
    )
    assert task not in done
    assert written.is_set()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_a_reader_who_leaves_ends_nothing_but_what_it_read() -> None:
    """As in ``tianflow train ... | head -1``: rich would end the program, and with it the run."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor has no path
        console = LastingConsole(file=file)
        console.print("for nobody")
        file.write("the last words")  # written when it is closed


async def test_the_screen_draws_again_and_leaves_its_last_drawing(run: FakeRun) -> None:
    out = io.StringIO()
    screen = Screen(
        run=run, console=Console(file=out, force_terminal=True, width=100), interval_s=0.001
    )
    started = asyncio.Event()
    task = asyncio.create_task(screen.run(started.set))
    await asyncio.wait_for(started.wait(), 5.0)
    await asyncio.sleep(0)
    run.state = "stopping"
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert "running" in out.getvalue()
    assert "stopping" in out.getvalue()
    assert out.getvalue().endswith("\x1b[?25h")  # the cursor is visible again


@pytest.mark.parametrize(
    ("terminal", "plain", "kind"),
    [(True, False, Screen), (True, True, PlainLines), (False, False, PlainLines)],
)
def test_a_terminal_gets_the_screen_unless_plain_is_asked_for(
    run: FakeRun, terminal: bool, plain: bool, kind: type
) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal)
    assert kind is type(make_screen(run=run, console=console, plain=plain))


def test_plain_lines_on_a_console_are_not_wrapped(run: FakeRun) -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=20)
    lines = make_screen(run=run, console=console, plain=True)
    assert isinstance(lines, PlainLines)
    lines._write(lines.line())
    assert isinstance(console.file, io.StringIO)
    assert f"{lines.line()}\n" == console.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.4, "0:00"),
        (59.6, "1:00"),
        (61, "1:01"),
        (3723, "1:02:03"),
        (360_000, "100:00:00"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert text == duration(seconds)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (1.23456, "1.235"),
        (1234567.8, "1,234,568"),
        (12345, "12,345"),
        (-0.5, "-0.5"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert text == number(value)


def test_time_left_follows_the_pace_of_the_last_minute(run: FakeRun) -> None:
    rates = RunRates(read=run.statistics)
    rates.sample()
    assert time_left(run.statistics(), run.config, rates) == {}
    run.train(10)
    left = time_left(rates.sample(), run.config, rates)
    assert (10_000 - 15 * 64) / 64.0 == pytest.approx(left["max_env_steps"])
    assert (475.0 - 8.0) / 0.5 == pytest.approx(left["target"])
    run.state = "done"
    assert time_left(rates.sample(), run.config, rates) == {}


def test_time_before_training_does_not_count_towards_the_limit_of_seconds() -> None:
    run = FakeRun()
    run.config = run.config.model_copy(
        update={"run": run.config.run.model_copy(update={"max_seconds": 40.0})}
    )
    rates = RunRates(read=run.statistics)
    run.now += 30.0
    assert (
        40.0 == time_left(replace(rates.sample(), trained_s=0.0), run.config, rates)["max_seconds"]
    )
    assert (
        25.0 == time_left(replace(rates.sample(), trained_s=15.0), run.config, rates)["max_seconds"]
    )
    run.state = "stopping"
    assert {} == time_left(rates.sample(), run.config, rates)


def test_an_evaluation_that_a_run_waits_for_is_named(run: FakeRun) -> None:
    seen = replace(described(run), state="stopping", bottleneck="stopping")
    assert plain_line(replace(seen, evaluating=True)).endswith("  stopping  an evaluation runs")
    assert plain_line(replace(seen, evaluating=False)).endswith("  stopping")


def test_a_run_that_waits_for_an_evaluation_tells_for_how_long_at_most(run: FakeRun) -> None:
    run.state = "stopping"
    seen = replace(run.statistics(), evaluating=True, evaluation_left_s=592.0)
    line = plain_line(describe(seen, run.config, RunRates(read=run.statistics)))
    assert line.endswith("  an evaluation runs  evaluation.timeout_s is reached in 9:52")


def test_a_learner_that_is_not_there_yet_has_made_no_update() -> None:
    run = FakeRun()
    run.ledger = Ledger(limits=Limits(batch=1, max_staleness=1, credits=4, patience=10.0), slots=8)
    assert -1 == run.statistics().ledger.version.number
    assert 0 == described(run).progress.updates


def test_a_falling_return_forecasts_no_target(run: FakeRun) -> None:
    rates = RunRates(read=run.statistics)
    rates.sample()
    run.train(1)
    run.returns.append(-100.0)
    assert "target" not in time_left(rates.sample(), run.config, rates)


def test_recent_shares_forget_what_was_before_the_window() -> None:
    run = FakeRun()
    rates = RunRates(read=run.statistics)
    for _ in range(100):
        run.train(1)
        rates.sample()
    assert {"learner": {"busy": 1.0}, "actor": {"waiting:grant": 1.0}} == rates.shares(60.0)


def test_a_restarted_component_counts_from_zero_again(run: FakeRun) -> None:
    rates = RunRates(read=run.statistics)
    rates.sample()
    run.now += 30.0
    young = TimeShares({"starting": 3.0, "waiting:batch": 15.0}, "busy", run.now)
    run._components = lambda: (ComponentStatistics("learner", "learner", "learner", young),)  # type: ignore[method-assign]
    rates.sample()
    assert {
        "learner": {"starting": pytest.approx(2 / 7), "waiting:batch": pytest.approx(5 / 7)}
    } == rates.shares(60.0)


SUMMARY = {
    "run": "cartpole-1",
    "state": "done",
    "reason": "the target is reached",
    "target_return": 475.0,
    "target_reached": True,
    "evaluation": {"mean_return": 498.25, "episodes": 100, "version": 321},
    "further_evaluations": {"large": {"mean_return": 98.5, "episodes": 10, "version": 321}},
    "best": {"mean_return": 499.0, "episodes": 100, "version": 300},
    "time_to_target_s": 65.0,
    "training_s": 80.0,
    "env_steps": 123456,
    "steps_per_s": 1543.2,
    "updates": 321,
    "episodes": 456,
    "mean_return": 480.0,
    "recent_episodes": 2,
    "staleness": {"bound": 1, "mean": 0.9, "p99": 1, "max": 1, "violations": 0},
    "trajectories": {"begun": 700, "trained": 690, "dropped": {"expired": 4}, "open": 6},
    "error": None,
}


def test_the_summary_is_short_and_complete() -> None:
    text = summary_text(SUMMARY)
    for part in (
        "cartpole-1: done (the target is reached)",
        "evaluation: mean return 498.2 over 100 episodes, version 321",
        "evaluation large: mean return 98.5 over 10 episodes, version 321",
        "best: mean return 499 over 100 episodes, version 300",
        "target 475: reached after 1:05",
        (
            "123,456 steps in 1:20 (1,543/s), 321 updates, 456 episodes, "
            "mean return 480 over the last 2 episodes"
        ),
        "staleness mean 0.9, p99 1, max 1; bound 1 at the end, 0 violations",
        "700 begun, 690 trained, dropped: expired 4",
    ):
        assert part in text
    assert "error" not in text


def test_a_summary_of_an_older_version_does_not_have_the_number_of_its_last_episodes() -> None:
    older = {name: value for name, value in SUMMARY.items() if name != "recent_episodes"}
    assert "mean return 480 over the last episodes (at most 100)" in summary_text(older)


def replaying(run: FakeRun, *, shards: int, state: str) -> str:
    """The plain line of a run with replay, of which ``shards`` report."""
    run.state = state
    fields: dict[str, Any] = {
        name: 0
        for name in ReplayState.__dataclass_fields__
        if name not in {"samples_per_insert_target", "held_back", "discarded", "blocked_s"}
    }
    replay = ReplayState(
        **{**fields, "shards": shards, "items": 5, "capacity": 10},
        samples_per_insert_target=None,
        held_back={},
        discarded={},
        blocked_s={},
    )
    return plain_line(replace(described(run), replay=replay))


def test_replay_without_shards_starts_or_does_not_work(run: FakeRun) -> None:
    assert "replay shards start  " in replaying(run, shards=0, state="starting")
    assert "replay shards do not work  " in replaying(run, shards=0, state="running")
    assert "replay 5 of 10 items  " in replaying(run, shards=1, state="running")


def test_a_limit_is_named_with_the_time_until_it_is_reached(run: FakeRun) -> None:
    rates = RunRates(read=run.statistics)
    rates.sample()
    run.train(10)
    assert "  max_env_steps is reached in 2:21" in plain_line(described(run, rates))


def test_a_summary_tells_steps_before_a_resume_from_those_since() -> None:
    text = summary_text({**SUMMARY, "training_s": 10.0})
    assert "123,456 steps, 15,432 of them since the resume in 0:10 (1,543/s)" in text


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        (321, ""),
        (300, "the newest checkpoint is of version 300, so 21 updates are lost"),
        (None, "no checkpoint was written, so 321 updates are lost"),
    ],
)
def test_a_summary_says_what_no_checkpoint_holds(checkpoint: int | None, said: str) -> None:
    assert said == lost({**SUMMARY, "checkpoint": checkpoint})
    assert said in summary_text({**SUMMARY, "checkpoint": checkpoint})
    assert "lost" not in summary_text(SUMMARY)


def test_a_summary_of_a_failed_start_says_why() -> None:
    text = summary_text(
        {"run": "a", "state": "failed", "target_return": 475.0, "error": "actor-0: no such file"}
    )
    assert "a: failed\n  target 475: not reached\n  error: actor-0: no such file" == text


@pytest.mark.parametrize(
    ("reason", "said"),
    [(REQUESTED, "a: stopped on request"), ("SIGTERM", "a: stopped (SIGTERM)"), ("", "a: stopped")],
)
def test_a_summary_says_why_a_run_was_stopped(reason: str, said: str) -> None:
    assert said == summary_text({"run": "a", "state": "stopped", "reason": reason})


def test_skipped_publishes_show_as_lag(run: FakeRun) -> None:
    run.ledger.settle(Settlement(Version(1, 6), (), 1, published=False))
    versions = json_ready(described(run).versions)
    assert (6, 5, 1) == (
        versions["learner"]["number"],
        versions["published"]["number"],
        versions["publish_lag"],
    )


# Log lines
# --------------------------------------------------------------------------------------------------


def test_json_lines_hold_what_is_bound_and_the_exception() -> None:
    out = io.StringIO()
    logs.configure(stream=out)
    try:
        int("broken")
    except ValueError:
        logs.logger("host", run="a", component="actor-1").exception("a component failed", version=3)
    line = json.loads(out.getvalue())
    expected = {
        "run": "a",
        "component": "actor-1",
        "event": "a component failed",
        "version": 3,
        "level": "error",
    }
    assert expected == {key: line[key] for key in expected}
    assert "ValueError: invalid literal" in line["exception"]
    assert line["timestamp"].endswith("Z")


def test_a_terminal_gets_lines_for_people() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    logs.configure(stream=out)
    logs.logger("host", component="actor-1").warning("slow")
    assert "slow" in out.getvalue()
    assert "actor-1" in out.getvalue()
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(out.getvalue())


def test_the_root_logger_is_never_touched() -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    heard: list[logging.LogRecord] = []
    root.addHandler(handler := logging.Handler())
    handler.emit = heard.append  # type: ignore[method-assign]
    logs.configure(stream=io.StringIO())
    logs.configure(stream=io.StringIO())
    logs.logger("host").info("something")
    root.removeHandler(handler)
    assert [] == heard
    assert (list(root.handlers), root.level) == before
    assert 1 == sum(
        isinstance(handler, logs._TianflowHandler)
        for handler in logging.getLogger("tianflow").handlers
    )


def test_levels_are_obeyed_and_loggers_made_before_follow() -> None:
    early, asked = logs.logger("early"), structlog.get_logger("tianflow.asked")
    out = io.StringIO()
    logs.configure(stream=out, level="WARNING")
    early.info("quiet")
    asked.info("quiet")
    early.warning("loud")
    asked.warning("loud too")
    assert ["loud", "loud too"] == [
        json.loads(line)["event"] for line in out.getvalue().splitlines()
    ]


def test_without_set_up_records_go_where_the_program_sends_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        logs.logger("host", component="actor-1").info("hello", steps=3)
    assert ("hello", "actor-1", 3) == (
        caplog.records[0].message,
        caplog.records[0].component,
        caplog.records[0].steps,
    )  # type: ignore[attr-defined]
