"""Tests of the benchmark harness, its documents, its child processes, and the suites."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command_line
from benchmarks.lib import child, machine, results
from benchmarks.lib.harness import (
    Benchmark,
    BenchmarkError,
    Outcome,
    Plan,
    Ratio,
    Side,
    Together,
    Values,
    alternate,
    part,
    quotient,
    spread,
)
from benchmarks.lib.machine import Load, Reading
from benchmarks.lib.paced import Pace
from benchmarks.studies import node_faults, stalled, storm
from benchmarks.suites import (
    actors,
    apex_gpu,
    channels,
    cost_of_balance,
    forecast,
    freshness,
    idle,
    impala_cartpole,
    inference,
    inference_gpu,
    learner,
    learner_gpu,
    many_actors,
    network,
    nodes,
    off_policy,
    peers_cartpole,
    peers_pong,
    peers_served,
    pong_gpu,
    readers,
    replay,
    scaling_gpu,
    time_to_target,
    transports,
    weights,
)
from benchmarks.workers import carriers, halves, paused_run, shards, training, turns
from tianflow.config.loading import load_config
from tianflow.simulation.calibration import _work

MACHINE = {
    "cpu": "abacus",
    "cores": 2,
    "cores_of_machine": 2,
    "gpus": [],
    "memory_gib": 7.5,
    "system": "Linux 6",
    "python": "3.11.0",
    "packages": {"numpy": "2.0.0", "torch": "not installed"},
    "revision": "0123456789ab",
    "modified": False,
    "threads": {"OMP_NUM_THREADS": "1"},
}


class Clock:
    """CPU readings one second apart. Other processes use a quarter of a core."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> Reading:
        self.now += 1.0
        return Reading(self.now, busy=0.75 * self.now, stolen=0.0, own=0.5 * self.now)


def side(name: str, log: list[str], values: Callable[[int], Values]) -> Side:
    def measure(number: int) -> Values:
        log.append(f"{name}{number}")
        return values(number)

    return Side(name, measure)


def benchmark(log: list[str], **parts: Any) -> Benchmark:
    ours, theirs = (
        side("ours", log, lambda n: {"s": 1.0 + n}),
        side("theirs", log, lambda n: {"s": None if n == 1 else 4.0 + 4.0 * n}),
    )
    ratio = Ratio(
        "theirs over ours",
        lambda v: quotient(v["theirs"]["s"], v["ours"]["s"]),
        aim=3.0,
        forecast=4.0,
    )
    given = {
        "sides": (ours, theirs),
        "ratios": (ratio,),
        "units": {"s": "s"},
        "settings": {"target": 1},
        "seeds": (1, 2, 3),
        "notes": ("a note",),
    }
    return Benchmark(name="race", title="who is first", **{**given, **parts})


def run(rounds: int = 3, **parts: Any) -> tuple[Outcome, list[str], list[str]]:
    log: list[str] = []
    lines: list[str] = []
    outcome = alternate(
        benchmark(log, **parts), rounds, patience_s=0.0, log=lines.append, read=Clock()
    )
    return outcome, log, lines


def document(**parts: Any) -> dict[str, Any]:
    return results.document(
        run(**parts)[0], machine=MACHINE, began="2030-01-01T00:00:00+00:00", quick=False
    )


# Statistics
# --------------------------------------------------------------------------------------------------


def test_spread_is_median_and_range() -> None:
    found = spread([3.0, 1.0, 9.0, 2.0, 5.0])
    assert (3.0, 1.0, 9.0, 5, 5) == (found.median, found.low, found.high, found.count, found.asked)


def test_a_missing_sample_counts_as_infinite_in_the_median_and_is_not_in_the_range() -> None:
    found = spread([3.0, None, 1.0])
    assert (3.0, 1.0, 3.0, 2, 3) == (found.median, found.low, found.high, found.count, found.asked)


@pytest.mark.parametrize("samples", [[None, None, 1.0], [None, 1.0], [], [None]])
def test_there_is_no_median_when_half_of_the_samples_are_missing(
    samples: list[float | None],
) -> None:
    assert spread(samples).median is None


@pytest.mark.parametrize(
    ("numerator", "denominator", "expected"),
    [(6.0, 3.0, 2.0), (None, 3.0, None), (6.0, None, None), (6.0, 0.0, None)],
)
def test_a_quotient_needs_both_values(
    numerator: float | None, denominator: float | None, expected: float | None
) -> None:
    assert expected == quotient(numerator, denominator)


# Alternation
# --------------------------------------------------------------------------------------------------


def test_an_interrupted_benchmark_has_the_samples_so_far() -> None:
    def interrupted(number: int) -> dict[str, float | None]:
        if number == 1:
            raise KeyboardInterrupt
        return {"s": 4.0}

    log: list[str] = []
    ours = side("ours", log, lambda n: {"s": 1.0 + n})
    whole = benchmark(log, sides=(ours, side("theirs", log, interrupted)))
    outcome = alternate(whole, 3, patience_s=0.0, log=lambda _: None, read=Clock())
    assert outcome.interrupted
    assert ([1.0, 2.0], [4.0]) == (outcome.values("ours", "s"), outcome.values("theirs", "s"))
    found = results.document(outcome, machine=MACHINE, began="now", quick=False)
    assert [[4.0]] == [ratio["samples"] for ratio in found["ratios"]]
    assert "Interrupted in round 2 of 3" in results.table(found)

    nothing = benchmark(log, sides=(side("theirs", log, lambda _: interrupted(1)),), ratios=())
    with pytest.raises(KeyboardInterrupt):
        alternate(nothing, 3, patience_s=0.0, log=lambda _: None, read=Clock())


def test_sides_alternate() -> None:
    _, log, _ = run(rounds=3)
    assert ["ours0", "theirs0", "ours1", "theirs1", "ours2", "theirs2"] == log


def test_sides_measured_together_have_a_sample_each_in_every_round_and_share_the_load():
    both = Together(("one", "two"), lambda number: {"one": {"s": 1.0 + number}, "two": {"s": 3.0}})
    outcome, _, lines = run(rounds=2, sides=(both, Side("ours", lambda n: {"s": 4.0})))
    assert ("one", "two", "ours") == outcome.benchmark.names
    assert [
        {"one": {"s": 1.0 + n}, "two": {"s": 3.0}, "ours": {"s": 4.0}} for n in range(2)
    ] == list(outcome.rounds())
    one, two = outcome.samples[:2]
    assert (one.seconds, one.load) == (two.seconds, two.load)
    assert 6 == len(lines)


def test_warm_ups_come_first_and_are_not_samples() -> None:
    log: list[str] = []

    def warm_up() -> Values:
        log.append("warm")
        return {"s": 100.0}

    outcome, rest, _ = run(
        rounds=1,
        sides=(
            Side("ours", lambda n: {"s": 1.0}, warm_up),
            side("theirs", log, lambda n: {"s": 2.0}),
        ),
    )
    assert ["warm", "theirs0"] == log
    assert [] == rest
    assert [1.0] == outcome.values("ours", "s")
    assert [-1] == [sample.round for sample in outcome.warm_ups]


def test_ratios_are_of_the_same_round() -> None:
    outcome, _, _ = run(rounds=3)
    assert [
        {"ours": {"s": 1.0 + n}, "theirs": {"s": theirs}}
        for n, theirs in enumerate((4.0, None, 12.0))
    ] == list(outcome.rounds())
    (ratio,) = results.document(outcome, machine=MACHINE, began="now", quick=False)["ratios"]
    assert [4.0, None, 4.0] == ratio["samples"]
    assert (4.0, 4.0, 4.0, 2, 3) == (
        ratio["median"],
        ratio["low"],
        ratio["high"],
        ratio["count"],
        ratio["asked"],
    )


def test_a_part_has_the_selected_sides_and_the_ratios_that_need_no_other_side() -> None:
    ours, both = (
        Ratio(name, lambda values: values["ours"]["s"], sides=sides)
        for name, sides in (("ours", ("ours",)), ("both", None))
    )
    whole = benchmark([], ratios=(ours, both))
    outcome = alternate(part(whole, "our"), 1, patience_s=0.0, log=lambda _: None, read=Clock())
    found = results.document(outcome, machine=MACHINE, began="now", quick=False)
    assert "race-part" == found["benchmark"]
    assert {"ours"} == {sample["side"] for sample in found["samples"]}
    assert [("ours", [1.0])] == [(ratio["name"], ratio["samples"]) for ratio in found["ratios"]]
    with pytest.raises(BenchmarkError, match="expected a part of ours, theirs"):
        part(whole, "neither")


def test_each_sample_has_the_load_of_other_processes() -> None:
    outcome, _, lines = run(rounds=1)
    assert [Load(0.25, 0.0)] * 2 == [sample.load for sample in outcome.samples]
    assert [1.0, 1.0] == [sample.seconds for sample in outcome.samples]
    assert lines[0].endswith("round 1 of 1  ours: s 1  (others: 0.25 cores)")


def test_alternate_waits_for_other_processes_before_every_sample() -> None:
    asked: list[float] = []

    def quiet(patience_s: float) -> float:
        asked.append(patience_s)
        return 0.0

    alternate(benchmark([]), 2, patience_s=7.0, log=lambda _: None, read=Clock(), quiet=quiet)
    assert [7.0] * 4 == asked


def test_waiting_ends_when_other_processes_are_idle() -> None:
    readings = iter(
        [
            Reading(0, 0, 0, 0),
            Reading(0, 0, 0, 0),
            Reading(1, 1, 0, 0),
            Reading(1, 1, 0, 0),
            Reading(1, 1, 0, 0),
            Reading(2, 1.05, 0, 0),
        ]
    )
    slept: list[float] = []
    found = machine.wait_until_quiet(10.0, read=lambda: next(readings), sleep=slept.append)
    assert pytest.approx(0.05) == found
    assert [1.0, 1.0] == slept


def test_waiting_ends_with_patience() -> None:
    clock = Clock()
    assert 0.25 == machine.wait_until_quiet(5.0, read=clock, sleep=lambda _: None)
    assert clock.now < 12.0


def test_the_use_of_this_process_is_not_the_load_of_others() -> None:
    assert Load(0.5, 0.25) == machine.load_between(
        Reading(0.0, 10.0, 1.0, 5.0), Reading(2.0, 14.0, 1.5, 8.0)
    )


# Documents and tables
# --------------------------------------------------------------------------------------------------


def test_a_document_has_every_sample_and_fits_its_shape() -> None:
    found = document()
    results.check(found)
    assert [("ours", 0), ("theirs", 0), ("ours", 1), ("theirs", 1), ("ours", 2), ("theirs", 2)] == [
        (sample["side"], sample["round"]) for sample in found["samples"]
    ]
    assert [1, 2, 3] == found["seeds"]
    assert {
        "foreign_cores_median": 0.25,
        "foreign_cores_highest": 0.25,
        "stolen_cores_highest": 0.0,
    } == found["load"]


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("seconds", "long", "seconds is 'long'"),
        ("quick", 1, "quick is 1"),
        ("schema", True, "schema is True"),
        ("seeds", ["one"], r"seeds\[0\] is 'one'"),
        ("ratios", [{}], r"ratios\[0\] has the keys \[\]"),
        ("load", {"foreign_cores_median": 1.0}, "load has the keys"),
        ("samples", None, "samples is not a list"),
    ],
)
def test_a_document_of_another_shape_is_refused(path: str, value: object, complaint: str) -> None:
    with pytest.raises(BenchmarkError, match=complaint):
        results.check({**document(), path: value})


def test_a_document_with_an_extra_key_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="extra"):
        results.check({**document(), "extra": 1})


def test_json_and_table_lie_side_by_side(tmp_path: Path) -> None:
    written = results.write(document(), tmp_path / "results")
    assert tmp_path / "results" / "race.json" == written
    assert document()["samples"] == json.loads(written.read_text(encoding="utf-8"))["samples"]
    assert (
        results.table(document()).splitlines()[0]
        == (tmp_path / "results" / "race.md").read_text(encoding="utf-8").splitlines()[0]
    )


def test_a_quick_run_never_replaces_a_real_one(tmp_path: Path) -> None:
    assert "race-quick.json" == results.write({**document(), "quick": True}, tmp_path).name
    assert "numbers mean nothing" in (tmp_path / "race-quick.md").read_text(encoding="utf-8")


def test_the_table_names_the_sides_and_whether_the_aim_was_met() -> None:
    lines = results.table(document()).splitlines()
    assert "# race: who is first" == lines[0]
    assert "abacus, 2 cores" in lines[2]
    assert "numpy 2.0.0;" in lines[2]
    assert "torch" not in lines[2]
    (ratio,) = [line for line in lines if line.startswith("| theirs over ours")]
    assert ["theirs over ours", "4", "4 – 4", "≥ 3 forecast 4", "met"] == [
        cell.strip() for cell in ratio.strip("|").split("|")
    ]
    assert ["theirs", "s [s]", "12", "4 – 12", "2 of 3"] == [
        cell.strip() for cell in lines[-4].strip("|").split("|")
    ]
    assert "- a note" == lines[-2]
    assert 1 == len({len(line) for line in lines if line.startswith(("| ours", "| theirs  "))})


def test_an_aim_that_no_sample_reached_is_missed() -> None:
    never = Ratio("never", lambda _: None, aim=1.0)
    (line,) = [
        line
        for line in results.table(document(ratios=(never,))).splitlines()
        if line.startswith("| never")
    ]
    assert ["never", "–", "–", "≥ 1", "missed"] == [
        cell.strip() for cell in line.strip("|").split("|")
    ]


def test_a_value_that_only_the_warm_up_measured_is_marked() -> None:
    sides = (Side("ours", lambda n: {"s": 1.0}, lambda: {"mib": 12.0}),)
    found = document(sides=sides, ratios=(), units={"s": "s", "mib": "MiB"})["values"]
    assert [("s", 1.0, False, 3), ("mib", 12.0, True, 1)] == [
        (v["name"], v["median"], v["warm_up"], v["count"]) for v in found
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.12345, "0.123"), (999.4, "999"), (1234.5, "1,234"), (1e6, "1,000,000")],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert text == results.number(value)


# Machine and children
# --------------------------------------------------------------------------------------------------


def test_the_machine_is_described_by_names_and_numbers_alone() -> None:
    found = machine.describe()
    results.check({**document(), "machine": found})
    assert str(machine.ROOT) not in json.dumps(found)


def test_the_kernel_is_described_by_its_version_alone() -> None:
    assert ["6.18.44", "6.1.0"] == [
        machine.kernel_version(release) for release in ("6.18.44-made-by-a-builder", "6.1.0")
    ]
    assert "-" not in str(machine.describe()["system"])


@pytest.mark.parametrize(
    ("total", "text"), [(2, "abacus, 2 cores,"), (16, "abacus, 2 of 16 cores,")]
)
def test_the_table_names_the_total_of_cores_if_some_are_not_usable(total: int, text: str) -> None:
    assert text in results.table({**document(), "machine": {**MACHINE, "cores_of_machine": total}})


def test_the_usable_gpus_are_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, Abacus One'\necho '1, Abacus Two'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert ["Abacus One", "Abacus Two"] == machine.gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert ["Abacus Two"] == machine.gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [] == machine.gpus()
    assert "abacus, 2 cores, Abacus One, Linux" in results.table(
        {**document(), "machine": {**MACHINE, "gpus": ["Abacus One"]}}
    )
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [] == machine.gpus()


def test_driver_and_links_of_the_usable_gpus_are_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\tSYS\t0-31\n"
        "GPU1\tNV18\t X \tPHB\t0-31\nGPU2\tSYS\tPHB\t X \t0-31\n\nLegend:\n\n  X = Self\n"
    )
    (tmp_path / "topology").write_text(topology)
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\nif [ $1 = topo ]; then /bin/cat {tmp_path / 'topology'}; else\n"
        "for i in 0 1 2; do echo $i, 1.2; done; fi\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "driver 1.2, GPU0-GPU1 NV18, GPU0-GPU2 SYS, GPU1-GPU2 PHB" == machine.cards()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert "driver 1.2, GPU0-GPU2 SYS" == machine.cards()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "driver 1.2" == machine.cards()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "no GPU" == machine.cards()


def test_children_do_not_inherit_variables_that_mislead_numerical_libraries() -> None:
    found = machine.clean_environment(
        {"OPENBLAS_CORETYPE": "X", "OPENBLAS_L2_SIZE": "1", "HOME": "here", "OMP_NUM_THREADS": "8"}
    )
    assert {"HOME", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH"} == set(found)
    assert "1" == found["OMP_NUM_THREADS"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module of the given text that a child can run, and returns its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(text: str) -> str:
        (tmp_path / "some_child.py").write_text(text, encoding="utf-8")
        return "some_child"

    return write


def test_the_last_line_of_a_child_is_its_answer(module: Callable[[str], str]) -> None:
    found = child.run(
        module("import json, sys; print('hello'); print(json.dumps({'given': sys.argv[1:]}))"),
        1,
        "two",
        timeout_s=30.0,
    )
    assert {"given": ["1", "two"]} == found.answer
    assert found.peak_mib is None


def test_the_error_of_a_failed_child_contains_its_output(module: Callable[[str], str]) -> None:
    with pytest.raises(BenchmarkError, match="no such luck"):
        child.run(module("raise SystemExit('no such luck')"), timeout_s=30.0)


def test_a_child_that_times_out_has_ended(module: Callable[[str], str], tmp_path: Path) -> None:
    name = module(
        "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); "
        "time.sleep(600)"
    )
    with pytest.raises(BenchmarkError, match="took longer than 1 s"):
        child.run(name, tmp_path / "pid", timeout_s=1.0)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text(encoding='utf-8')}").exists()


def test_children_that_run_together_wait_for_one_another(
    module: Callable[[str], str], tmp_path: Path
) -> None:
    text = """
import pathlib, sys, time
from benchmarks.lib import child
time.sleep(0.3 if sys.argv[1].endswith("b") else 0.0)  # the other child must wait
pathlib.Path(sys.argv[1]).touch()
child.wait_for_start()
child.report({"others": [pathlib.Path(other).exists() for other in sys.argv[2:]]})
"""
    name, a, b = module(text), tmp_path / "a", tmp_path / "b"
    assert [{"others": [True]}, {"others": [True]}] == child.run_together(
        [(name, (a, b)), (name, (b, a))], timeout_s=30.0
    )


def test_a_partner_answers_line_by_line_and_its_failure_has_a_reason(
    module: Callable[[str], str],
) -> None:
    name = module(
        "import sys\nfor line in sys.stdin: print('{\"twice\": %d}' % (2 * int(line)), flush=True)"
    )
    with child.Partner(name) as partner:
        for number in (3, 5):
            partner.send(number)
            assert {"twice": 2 * number} == partner.receive(timeout_s=30.0)
        with pytest.raises(child.ChildTimeoutError, match="took longer than 0 s"):
            partner.receive(timeout_s=0.1)
        partner.send("no number")
        with pytest.raises(BenchmarkError, match="invalid literal"):
            partner.receive(timeout_s=30.0)
    assert partner._process.poll() is not None


def test_windows_merge_into_means_and_pooled_lags() -> None:
    first: dict[str, Any] = {
        "trained_per_s": 10.0,
        "staleness_max": 1.0,
        "return": 7.0,
        "late": [0.001],
        "bare_late": [0.002],
    }
    second = {
        "trained_per_s": 20.0,
        "staleness_max": 0.0,
        "return": 8.0,
        "late": [0.003],
        "bare_late": [0.001],
    }
    found = turns.merged([first, second])
    assert {
        "trained_per_s": 15.0,
        "staleness_max": 1.0,
        "return": 8.0,
        "lag": 3.0,
        "bare_lag": 2.0,
    } == found


# Suites
# ---------------------------------------------------------------------------------------------


MADE = [
    *(
        impala_cartpole,
        cost_of_balance,
        freshness,
        many_actors,
        stalled,
        storm,
        node_faults,
        nodes,
        pong_gpu,
    ),
    *(
        channels,
        transports,
        network,
        weights,
        actors,
        learner,
        learner_gpu,
        off_policy,
        idle,
        readers,
        replay,
        scaling_gpu,
        apex_gpu,
        forecast,
        inference,
        inference_gpu,
        peers_cartpole,
        peers_pong,
        peers_served,
    ),
]


@pytest.mark.parametrize("module", MADE)
def test_every_benchmark_can_be_made_and_has_settings_for_repeating_it(
    module: Any, tmp_path: Path
) -> None:
    made = module.make(Plan(quick=True, rounds=2, scratch=tmp_path))
    assert len(made.names) == len(set(made.names))
    assert made.settings
    assert made.name in (*command_line.NAMES, *command_line.LONG)


def test_every_name_of_the_command_line_is_a_module() -> None:
    names = (*command_line.NAMES, *command_line.LONG)
    assert {time_to_target.__name__, *(module.__name__ for module in MADE)} == {
        command_line.module_of(name) for name in names
    }


def test_the_controller_idles_no_actor_at_any_number_of_actors() -> None:
    for count in many_actors.COUNTS:
        config = load_config(many_actors.CONFIG, many_actors.overrides(count, 7))
        assert config.bound is not None
        batch = config.algorithm.batch_trajectories
        assert (config.bound + 1) * batch >= config.actors.count + batch
        assert config.actors.hosts is not None
        assert config.actors.hosts <= min(count, 7)


def test_many_actors_are_compared_with_each_other_count() -> None:
    values = {
        many_actors.side_of(count): {"trained_per_s": rate, "lag": 2.0, "bare_lag": 1.0}
        for count, rate in ((1, 50.0), (8, 40.0))
    }
    made = many_actors.make(Plan(quick=True, rounds=1, scratch=Path()))
    assert [0.8, 1.5] == [ratio.of(values) for ratio in made.ratios]


def test_quantiles_lie_between_the_edges_of_a_histogram() -> None:
    counts = {0.1: 90.0, 0.2: 8.0, 0.4: 2.0, float("inf"): 0.0}
    assert 0.1 == training.quantile(counts, 0.9)
    assert pytest.approx(0.15) == training.quantile(counts, 0.94)
    assert pytest.approx(0.3) == training.quantile(counts, 0.99)
    assert 0.4 == training.quantile({0.4: 0.0, float("inf"): 3.0}, 0.5)
    assert training.quantile({0.1: 0.0}, 0.5) is None


def test_the_limit_of_a_request_is_its_wait_and_two_batches() -> None:
    values: Any = {inference.MANY: {"batch_p99": 0.002, "wait_p99": 0.004}}
    assert pytest.approx(1.25) == inference.latency(inference.MANY)(values)


def test_cpu_time_of_turns_counts_by_their_updates() -> None:
    turns = [{"updates_per_s": 10.0, "cpu_ms": 5.0}, {"updates_per_s": 30.0, "cpu_ms": 1.0}]
    assert {"updates_per_s": 20.0, "cpu_ms": 2.0} == off_policy.means(turns)


def test_updates_are_compared_with_those_of_as_many_threads(tmp_path: Path) -> None:
    made = off_policy.make(Plan(quick=False, rounds=1, scratch=tmp_path))
    for ratio in made.ratios:
        assert ratio.sides is not None
        ours, other = ratio.sides
        assert off_policy.OURS in ours
        assert off_policy.OURS not in other
        assert ours.endswith("1 thread") == other.endswith("1 thread")


@pytest.mark.e2e
@pytest.mark.parametrize("who", ["tianflow", "eager"])
@pytest.mark.parametrize("algorithm", off_policy.ALGORITHMS)
def test_a_process_of_updates_answers_with_its_rate(algorithm: str, who: str) -> None:
    with child.Partner("benchmarks.workers.updates", who, algorithm, "cpu", 1, "8,8") as partner:
        assert {"ready": True} == partner.receive(timeout_s=60.0)
        partner.send(0.05)
        found = partner.receive(timeout_s=30.0)
    assert found["updates_per_s"] > 0.0
    assert found["cpu_ms"] > 0.0


def test_actors_are_idled_by_no_bound_where_inference_is_measured() -> None:
    for case in inference.cases(3).values():
        config = load_config(training.CONFIGS / case.config, case.overrides)
        assert config.bound is not None
        assert config.bound * config.algorithm.batch_trajectories >= config.actors.count


def test_actors_are_faster_than_the_learner_where_freshness_is_measured() -> None:
    config = load_config(training.CONFIGS / "paced.toml", freshness.overrides("freshest", 1))
    steps_s = config.actors.rollout_steps * config.env.kwargs["seconds"]
    update_s = config.algorithm.update_seconds  # type: ignore[attr-defined]
    batches_while_one_is_trained_on = (
        config.actors.count / steps_s * update_s / config.algorithm.batch_trajectories
    )
    assert pytest.approx(freshness.FASTER) == batches_while_one_is_trained_on
    assert ("freshest", 4) == (config.balance.controller, config.bound)


def test_the_gain_from_cores_is_compared_with_that_of_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling_gpu.os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(Path, "exists", lambda _: True)
    made = scaling_gpu.make(Plan(quick=False, rounds=1, scratch=tmp_path))
    values: dict[str, Values] = {}
    for count, trained, alone in ((1, 5.0, 10.0), (2, 9.0, 20.0), (4, 15.0, 40.0)):
        values[scaling_gpu.run_on(count)] = {"trained_per_s": trained}
        values[scaling_gpu.alone_on(count)] = {"environments": alone}
    values |= {name: {"steps_per_s": 3.0} for name in scaling_gpu.IN_TURN}
    assert set(values) == set(made.names)
    assert [0.9, 0.75, 0.5, 0.45, 0.375, 5.0, 5.0] == [ratio.of(values) for ratio in made.ratios]
    assert [0.9, 0.9, None, None, None, None, None] == [ratio.aim for ratio in made.ratios]


def test_the_shipped_config_is_that_of_the_most_cores() -> None:
    assert scaling_gpu.COUNTS[-1] == load_config(scaling_gpu.CONFIG).algorithm.batch_trajectories


def test_a_rate_of_servers_is_their_sum_and_a_wait_that_of_the_slowest() -> None:
    class Said:
        def __init__(self, **values: float | None) -> None:
            self.values, self.lines = values, list[object]()

        def send(self, line: object) -> None:
            self.lines.append(line)

        def receive(self, *, timeout_s: float) -> dict[str, float | None]:
            assert timeout_s
            return self.values

    servers: Any = [
        Said(observations=3.0, wait_p50=0.1, wait_p99=0.4, batch_requests=2.0),
        Said(observations=5.0, wait_p50=0.2, wait_p99=None, batch_requests=4.0),
    ]
    busy: Any = Said(samples_per_s=7.0)
    assert {
        "observations": 8.0,
        "wait_p50": 0.2,
        "wait_p99": None,
        "batch_requests": 3.0,
        "samples_per_s": 7.0,
    } == inference_gpu.turn(servers, busy, 1.0)
    assert [[1.0], [1.0], ["resident 1.5"]] == [one.lines for one in (*servers, busy)]


@pytest.mark.e2e
def test_a_server_answers_a_process_that_asks_again_at_once() -> None:
    arguments = (inference_gpu.CONFIG, "actors.count=3", "inference.device=cpu", "env.num_envs=1")
    with child.Partner("benchmarks.workers.inference_server", *arguments) as partner:
        for _ in range(2):
            partner.send(0.3)
            found = partner.receive(timeout_s=60.0)
            assert found["observations"] > 0.0
            assert 0.0 < found["wait_p50"] <= found["wait_p99"] < 60.0
            assert 1.0 <= found["batch_requests"] <= 3.0


@pytest.mark.e2e
def test_a_bare_loop_measures_once_for_each_line() -> None:
    config = training.CONFIGS / "impala_cartpole.toml"
    arguments = ("environments", config, 0.02, "--turns")
    with child.Partner("benchmarks.workers.bare_loops", *arguments) as partner:
        for _ in range(2):
            partner.send("go")
            assert partner.receive(timeout_s=60.0)["per_s"] > 0.0


@pytest.mark.e2e
def test_one_process_steps_acts_and_learns_in_turn() -> None:
    found = child.run(
        "benchmarks.workers.in_turn",
        *(scaling_gpu.CONFIG, 0.02, "cpu", "env.num_envs=2", "actors.rollout_steps=4"),
        timeout_s=60.0,
    ).answer
    assert found["steps_per_s"] > 0.0


def test_carriers_that_are_not_installed_are_skipped_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports.importlib.util, "find_spec", lambda name: None)
    made = transports.make(Plan(quick=True, rounds=1, scratch=tmp_path))
    assert {"tianflow", transports.ONES, transports.COLD, "memcpy", "multiprocessing.Queue"} == set(
        made.names
    )
    assert {
        f"{name} is not installed and was skipped." for name in ("zmq ipc", "zmq tcp", "mpi4py")
    } == set(made.notes[6:])
    values = {name: dict.fromkeys(made.units, 2.0) for name in made.names}
    assert {1.0} == {ratio.of(values) for ratio in made.ratios}


def test_mpi4py_is_skipped_without_mpiexec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(carriers, "mpiexec", lambda: None)
    assert ("mpi4py",) == transports.missing_carriers()


@pytest.mark.parametrize(
    "module", [actors, apex_gpu, inference_gpu, learner, pong_gpu, replay, scaling_gpu]
)
def test_the_error_without_atari_names_the_package_to_install(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchmarkError, match=r"pip install -e '\.\[bench\]'"):
        module.make(Plan(quick=True, rounds=1, scratch=tmp_path))


@pytest.mark.parametrize("module", [apex_gpu, inference_gpu, pong_gpu, scaling_gpu])
def test_a_machine_without_a_gpu_is_refused(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: path.name != "nvidiactl")
    with pytest.raises(BenchmarkError, match="no NVIDIA GPU"):
        module.make(Plan(quick=False, rounds=1, scratch=tmp_path))


@pytest.mark.parametrize("case", forecast.CASES.values(), ids=list(forecast.CASES))
def test_every_forecast_run_is_a_config_with_the_work_of_its_source(
    case: forecast.Case,
) -> None:
    """A duration in a history belongs to a piece of work, so both must have the same work."""
    config = load_config(case.config, case.settings)
    source = load_config(case.config, case.settings if case.source is None else case.source)
    assert config == load_config(case.config, (*(case.source or case.settings), *case.changes))
    assert _work(source) == _work(config)
    assert (source == config) == (case.source is None)
    assert config.run.target_return is None


def test_forecasts_are_compared_with_measurements_in_both_directions() -> None:
    seen: Values = {
        "committed_per_s": 100.0,
        "staleness_mean": 2.0,
        "return": None,
        "learner_waits": 0.0,
        "actors_wait": 0.0,
    }
    values = dict.fromkeys(
        forecast.CASES, forecast.compared(seen, {"steps_per_s": 125.0, "staleness": {"mean": 1.5}})
    )
    values |= {forecast.ADVICE: {"pace": 100.0, "forecast_pace": 50.0}}
    values |= {forecast.CROWD: {"virtual_per_cpu_s": 3.0, "staleness_max": 10.0}}
    assert [1.25, 0.8, 0.75, 0.75] * len(forecast.CASES) + [0.5, 0.5, 3.0, 2.0] == [
        ratio.of(values) for ratio in forecast.ratios()
    ]


@pytest.mark.parametrize(
    "case", [*actors.CASES.items(), *learner.CASES.items(), *replay.SHARDS.items()]
)
def test_every_case_of_a_half_is_a_config(case: tuple[str, tuple[Path, tuple[str, ...]]]) -> None:
    name, (file, overrides) = case
    config = load_config(file, overrides)
    assert ("ALE" in config.env.id) == any(
        word in name for word in ("ALE", "Atari", "nature_cnn", "impala_resnet")
    )
    assert name == config.network.name or case not in learner.CASES.items()


def test_the_smaller_limit_counts() -> None:
    values: dict[str, Values] = {
        "apex, 2 shards": {"updates_per_s": 30.0},
        "limits, 2 shards": {"draws": 100.0, "steps": 40.0},
    }
    assert 0.75 == replay.over_limit(values, 2)


@pytest.mark.parametrize("count", apex_gpu.COUNTS)
def test_actors_do_not_limit_a_run_of_apex_on_a_gpu(count: int) -> None:
    config = load_config(replay.PONG, (*apex_gpu.overrides(count), *apex_gpu.RUN))
    assert (count, 4) == (config.replay.shards, config.actors.count)
    a_trajectory = config.actors.rollout_steps * config.env.num_envs
    assert config.replay.samples_per_insert is not None
    # one trajectory permits as many updates as a learner on a GPU makes in about a second
    assert config.replay.samples_per_insert * a_trajectory > 2_000 * config.algorithm.items


# Timed work
# --------------------------------------------------------------------------------------------------


def test_parts_take_turns_and_their_rates_are_their_own() -> None:
    calls: list[str] = []

    def work(name: str, units: int, seconds: float) -> Callable[[], int]:
        def do() -> int:
            calls.append(name)
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                pass
            return units

        return do

    found = halves.take_turns({"a": work("a", 10, 0.02), "b": work("b", 30, 0.03)}, 0.15)
    turns = [name for name, _ in itertools.groupby(calls)]
    assert ["a", "b"] * (len(turns) // 2) == turns
    assert len(turns) >= 6
    assert found["a"] <= 500.0
    assert found["b"] <= 1000.0
    assert min(found.values()) > 0.0


def test_figures_are_the_rate_and_quantiles_of_the_later_latencies() -> None:
    found = carriers.figures(2.0, 10, 1_000_000, [9_000_000, 1000, 2000, 3000])
    assert {"messages": 5.0, "bandwidth": 5.0, "p50": 2.0, "p99": 2.0} == found


def test_larger_messages_are_fewer_but_at_least_two() -> None:
    sizes = list(transports.SIZES.values())
    for share in (0.02, 1.0):
        found = [carriers.counts(nbytes, share) for nbytes in sizes]
        assert sorted(found, reverse=True) == found
        assert min(min(pair) for pair in found) >= 2
        assert {0} == {
            many % carriers.in_flight(nbytes)
            for nbytes, (many, _) in zip(sizes, found, strict=True)
        }


@pytest.mark.e2e
@pytest.mark.parametrize("carrier", ["memcpy", "queue"])
def test_a_carrier_brings_every_message(carrier: str) -> None:
    found = child.run("benchmarks.workers.carriers", carrier, 0.02, 4096, timeout_s=30.0).answer[
        "4096"
    ]
    assert set(transports.FIGURES) == set(found)
    assert min(found.values()) > 0.0


def test_the_consumer_copies_the_producers_messages() -> None:
    sent: list[Any] = []
    carriers.produce(
        lambda _, data: data.copy(),
        lambda written, _: sent.append(written),
        lambda: None,
        4096,
        0.02,
    )
    many, single = carriers.counts(4096, 0.02)
    before = carriers.in_flight(4096)
    assert before + many + single == len(sent)
    stamps = [int(data[: carriers.STAMP].view("int64")[0]) for data in sent[before + many :]]
    assert sorted(set(stamps)) == stamps
    arriving = iter(sent)
    found = carriers.consume(lambda: next(arriving), lambda: None, 4096, 0.02)
    assert found["p50"] > 0.0
    assert next(arriving, None) is None


@pytest.mark.e2e
@pytest.mark.parametrize("what", ["slots", "ones", "cold"])
def test_trajectories_stream_through_slots(what: str) -> None:
    found = child.run("benchmarks.workers.streaming", what, 0.02, 65536, timeout_s=30.0).answer[
        "65536"
    ]
    assert set(transports.FIGURES) == set(found)
    assert min(found.values()) > 0.0


@pytest.mark.e2e
def test_the_last_reader_has_the_weights_after_they_were_published() -> None:
    found = child.run(
        "benchmarks.workers.weight_readers", "spread", 4096, 2, 4, timeout_s=30.0
    ).answer
    assert found["last_reader"] > found["publish"] > 0.0


def test_a_stopped_process_uses_nothing_and_a_busy_one_all() -> None:
    before, began = paused_run.cpu_seconds(os.getpid()), time.thread_time()
    while time.thread_time() - began < 0.1:
        pass
    assert 0.09 < paused_run.cpu_seconds(os.getpid()) - before < 1.0
    assert paused_run.pss_mib([os.getpid()]) > 1.0


def test_real_trajectories_fill_a_shard_until_it_evicts() -> None:
    config = load_config(
        replay.CARTPOLE, ("replay.capacity=2000", "replay.min_size=100", "env.num_envs=4")
    )
    source = shards.fragments(config)
    first = [next(source) for _ in range(shards.FRAGMENTS + 1)]
    assert [0, *range(1, shards.FRAGMENTS), 0] == [fragment.number for fragment in first]
    assert [0, 1] == [first[0].stream.incarnation, first[-1].stream.incarnation]
    found = shards.filled(config, source).statistics().steps
    assert sum(found.removed.values()) > 0
    assert found.resident > 1000


def test_the_error_without_the_peer_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_to_target.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchmarkError, match=r"pip install -e '\.\[bench\]'"):
        time_to_target.make(Plan(quick=True, rounds=1, scratch=tmp_path))


@pytest.mark.parametrize("case", cost_of_balance.CASES)
def test_every_case_of_balance_is_a_config(case: str) -> None:
    file, overrides = cost_of_balance.CASES[case]
    config = load_config(training.CONFIGS / file, overrides)
    assert 1 == config.algorithm.batch_trajectories
    assert (
        ("open loop" in case)
        == (config.bound is None)
        == (config.balance.controller == "open_loop")
    )


@pytest.mark.parametrize("actors", [1, 4])
def test_paced_halves_are_equally_fast(actors: int) -> None:
    config = load_config(training.CONFIGS / cost_of_balance.PACED, cost_of_balance.paced(actors))
    a_trajectory = config.env.kwargs["seconds"] * config.actors.rollout_steps
    assert pytest.approx(config.algorithm.update_seconds) == a_trajectory / config.actors.count  # type: ignore[attr-defined]
    assert actors == config.actors.hosts == config.actors.count


def test_the_controller_forecasts_throughput() -> None:
    assert [1.0, 1.0, 0.4, 0.5, 0.2] == [
        cost_of_balance.forecast(*case)
        for case in ((1, 1, 1), (4, 1, 4), (4, 1, 1), (1, 1, 0), (4, 1, 0))
    ]


def test_a_paced_step_includes_its_actors_computing_but_not_its_waiting() -> None:
    pace = Pace(1.0)
    assert [11.0, 12.0, 13.0, 14.5] == [pace.due(now) for now in (10.0, 11.1, 12.25, 13.5)]


def test_the_default_is_all_benchmarks() -> None:
    chosen = command_line.arguments([])
    assert (list(command_line.NAMES), 5, 60.0) == (chosen.names, chosen.rounds, chosen.patience)


def test_quick_is_one_round_without_waiting() -> None:
    chosen = command_line.arguments(["channels", "--quick"])
    assert (["channels"], 1, 0.0) == (chosen.names, chosen.rounds, chosen.patience)


def test_the_error_for_an_unknown_benchmark_lists_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.arguments(["chanels"])
    assert "many_actors, channels" in capsys.readouterr().err


def test_a_benchmark_that_cannot_run_fails_the_command_and_not_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run_one(name: str, *_: object) -> None:
        ran.append(name)
        if name == "channels":
            raise BenchmarkError("no such luck")

    monkeypatch.setattr(command_line, "run", run_one)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "channels", "impala_cartpole"])
    assert 1 == command_line.main()
    assert ["channels", "impala_cartpole"] == ran
    assert "channels: no such luck" in capsys.readouterr().err


def test_only_the_cores_that_may_be_used_count_as_load() -> None:
    stat = "cpu  9 9 9 9\ncpu0 1 2 3 4\ncpu1 10 20 30 40\ncpu10 100 200 300 400\nintr 5\n"
    assert [101, 202, 303, 404] == machine._core_times(stat, {0, 10})


@pytest.mark.parametrize(
    ("module", "hosted"),
    [
        ("benchmarks.workers.bare_loops", True),
        ("benchmarks.workers.halves", True),
        ("tianflow", False),
    ],
)
def test_parts_of_a_run_get_the_environment_of_hosts(
    module: str, hosted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}
    monkeypatch.setattr(child.subprocess, "Popen", lambda *_, env, **__: given.update(env))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    child._start(module, ())
    assert hosted == ("MALLOC_TRIM_THRESHOLD_" in given)
    assert ("1", "3") == (given["OMP_NUM_THREADS"], given["MALLOC_ARENA_MAX"])
