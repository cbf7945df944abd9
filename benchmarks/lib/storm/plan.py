"""The plan of a storm: which fault strikes which role at which moment.

A seed gives the same plan.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.lib.live_run import FORK_SERVER
from benchmarks.lib.storm.environment import MOMENTS, UPDATE

Kind = Literal["kill", "stop", "hang", "disk", "clock", "pause"]
DAY = 86_400.0
YEAR = 365.0 * DAY
JUMPS = (DAY, -DAY, 10 * YEAR, -30 * YEAR, 60.0, -60.0)
"""Seconds that the wall clock jumps."""
ACTORS, SHARDS = "actors", "replay"
"""Roles of which there are several. A fault strikes one that exists at its moment."""
COORDINATOR = "coordinator"
"""The role that faults only stop. The ends of its lives kill it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at: moment in its round, in seconds.
        kind: what happens.
        role: role of its victim; "" for the disk, the clock and a pause.
        seconds: how long it lasts; 0 for a kill. A hanging environment does not end by itself.
        detail: moment of a hang.
        shift: seconds that the clock is off.
        pick: chooses one of several processes of a role, from 0 to 1.
    """

    at: float
    kind: Kind
    role: str = ""
    seconds: float = 0.0
    detail: str = ""
    shift: float = 0.0
    pick: float = 0.0

    @property
    def name(self) -> str:
        """Kind, role and moment, for counts and messages."""
        return " ".join(part for part in (self.kind, self.role, self.detail) if part)


@dataclass(frozen=True, slots=True)
class Size:
    """Lengths of a storm's parts, in seconds, and its limits.

    Attributes:
        stop_s: how long a process stays stopped, or a learner hangs.
        short_s: shortest and longest disk fault, clock fault and pause.
        spread_s: span over which the faults of a round begin.
        together: main faults of a round.
        kills: most kills beside them.
        settle_s: quiet time after each round, in which everything is judged.
        life_s: shortest and longest life of a coordinator.
        step_timeouts: values of ``env.step_timeout_s``; lives alternate between them.
        start_timeout_s: value of ``env.start_timeout_s``.
        evaluation_timeout_s: value of ``evaluation.timeout_s``.
        evaluate_every_s: value of ``evaluation.every_s``.
        recover_s: longest time from the end of the last fault to an update.
        ready_after_s: quiet time after which ``/readyz`` must answer 200.
    """

    stop_s: float
    short_s: tuple[float, float]
    spread_s: float
    together: int
    kills: int
    settle_s: float
    life_s: tuple[float, float]
    step_timeouts: tuple[float, ...]
    start_timeout_s: float
    evaluation_timeout_s: float
    evaluate_every_s: float
    recover_s: float
    ready_after_s: float


LONG = Size(
    stop_s=30.0,
    short_s=(6.0, 12.0),
    spread_s=10.0,
    together=3,
    kills=5,
    settle_s=6.0,
    life_s=(60.0, 120.0),
    step_timeouts=(5.0, 45.0),
    start_timeout_s=20.0,
    evaluation_timeout_s=15.0,
    evaluate_every_s=5.0,
    recover_s=90.0,
    ready_after_s=3.0,
)
SHORT = Size(
    stop_s=2.0,
    short_s=(1.0, 2.0),
    spread_s=2.0,
    together=4,
    kills=3,
    settle_s=2.0,
    life_s=(8.0, 12.0),
    step_timeouts=(3.0,),
    start_timeout_s=10.0,
    evaluation_timeout_s=5.0,
    evaluate_every_s=2.0,
    recover_s=60.0,
    ready_after_s=1.0,
)


def roles(*, replay: bool) -> tuple[str, ...]:
    """Return the roles that faults strike."""
    return ("learner", ACTORS, "evaluator", FORK_SERVER, *((SHARDS,) if replay else ()))


def cards(*, replay: bool) -> tuple[Fault, ...]:
    """Return every main fault once, without moments and lengths."""
    kinds: tuple[Kind, ...] = ("kill", "stop")
    found = [Fault(0.0, kind, role) for kind in kinds for role in roles(replay=replay)]
    found += [Fault(0.0, "hang", ACTORS, detail=moment) for moment in MOMENTS]
    found += [Fault(0.0, "hang", "evaluator", detail=moment) for moment in ("step", "reset")]
    found += [Fault(0.0, "hang", "learner", detail=UPDATE)]
    found += [Fault(0.0, "stop", COORDINATOR), Fault(0.0, "disk"), Fault(0.0, "pause")]
    found += [Fault(0.0, "clock", shift=jump) for jump in JUMPS]
    return tuple(found)


def rounds(seed: int, size: Size, *, replay: bool) -> Iterator[tuple[Fault, ...]]:
    """Yield rounds without end. A shuffled deck of all main faults is dealt out; then it is
    shuffled again.

    The fork server is struck by main faults only: three deaths in a row before it has forked end a
    run on purpose.
    """
    dice = random.Random(seed)
    deck: list[Fault] = []
    while True:
        struck: list[Fault] = []
        while len(struck) < size.together:
            if not deck:
                deck = list(cards(replay=replay))
                dice.shuffle(deck)
            struck.append(_timed(deck.pop(), size, dice))
        struck += [
            Fault(
                dice.uniform(0.0, size.spread_s),
                "kill",
                dice.choice([role for role in roles(replay=replay) if role != FORK_SERVER]),
                pick=dice.random(),
            )
            for _ in range(dice.randint(0, size.kills))
        ]
        yield tuple(sorted(struck, key=lambda fault: fault.at))


def _timed(card: Fault, size: Size, dice: random.Random) -> Fault:
    """Give a card its moment and its length."""
    seconds = 0.0
    if card.kind in ("stop", "hang"):
        seconds = size.stop_s
    elif card.kind in ("disk", "clock", "pause"):
        seconds = dice.uniform(*size.short_s)
    return Fault(
        dice.uniform(0.0, size.spread_s),
        card.kind,
        card.role,
        seconds,
        card.detail,
        card.shift,
        dice.random(),
    )


def length(faults: Sequence[Fault]) -> float:
    """Return the seconds from the begin of a round to the end of its last fault that ends by
    itself.
    """
    return max(fault.at + fault.seconds for fault in faults)
