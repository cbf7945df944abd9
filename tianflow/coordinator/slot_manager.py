"""SlotManager: the slots of a run, and the exchange over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tianflow.config.rules import make_controllers, rate_limits
from tianflow.core.limits import Limits
from tianflow.errors import ConfigError, Problem, TianflowError
from tianflow.exchange.exchange import Exchange
from tianflow.exchange.replay_exchange import ReplayExchange
from tianflow.ledger.ledger import Ledger
from tianflow.planning.memory import DRAW_SLOTS, slots_capacity, slots_wanted
from tianflow.replay.rate_limiter import Limiter

if TYPE_CHECKING:
    from tianflow.config.model import Config
    from tianflow.core.payloads import TrajectoryLayout
    from tianflow.interfaces import SlotOwner
    from tianflow.rundir.checkpoints import Checkpoint


class SlotManager:
    """The slots of a run.

    Args:
        owner: of their memory.
        layout: of a trajectory.
    """

    def __init__(self, *, owner: SlotOwner, layout: TrajectoryLayout) -> None:
        self._owner, self._layout = owner, layout

    def open(
        self,
        config: Config,
        *,
        clock: Callable[[], float],
        schedule: Callable[[int], tuple[int, float]],
        resumed: Checkpoint | None,
        remote: bool = False,
    ) -> Exchange:
        """Allocate the first slots, and make the exchange over them.

        Args:
            config: settings at the start.
            clock: monotonic seconds, less the time for which the run was paused.
            schedule: environment steps so far, and exponent of importance weights, for the draw
                after a number of updates.
            resumed: with replay, the checkpoint whose counts the limiter continues.
            remote: actors are on other machines.
        """
        wanted = min(slots_wanted(config), slots_capacity(config, self._layout))
        self._owner.add_slots(wanted)
        batch, arena = config.algorithm.batch_trajectories, self._owner.arena
        ledger = Ledger(
            limits=Limits(batch=batch, max_staleness=config.bound, credits=max(batch, wanted)),
            slots=wanted,
            remote=remote,
        )
        if self._owner.draws is None or config.algorithm.window is None:
            return Exchange(ledger=ledger, arena=arena, clock=clock)
        return ReplayExchange(
            ledger=ledger,
            arena=arena,
            clock=clock,
            draws=self._owner.draws,
            slots=DRAW_SLOTS,
            limiter=_limiter(config, resumed),
            period=config.algorithm.window[1],
            prioritised=config.replay.selector == "prioritised",
            schedule=schedule,
            seed=config.run.seed,
            shards=config.replay.shards,
            ahead=config.learner.prefetch > 0 and not config.run.deterministic,
        )

    def check(self, config: Config) -> None:
        """Raise ConfigError if ``config`` cannot be put in force: a controller refuses it, or the
        memory limit holds too few slots for a batch and the actors.
        """
        make_controllers(config)
        limit, arena = slots_capacity(config, self._layout), self._owner.arena.capacity
        capacity, batch = min(limit, arena), config.algorithm.batch_trajectories
        # Address space is fixed at the start, so a larger limit adds none.
        holder = "the memory limit" if limit <= arena else "the arena of this run"
        if capacity < batch:
            message = (
                f"{holder} holds {capacity} trajectories: fewer than a batch can never feed the "
                "learner"
            )
            raise ConfigError(
                [Problem("algorithm.batch_trajectories", batch, message, f"at most {capacity}")]
            )
        count, most = config.actors.count, capacity - batch
        if count > most:
            message = (
                f"{holder} holds {capacity} trajectories: too few for a batch of {batch} and a "
                "slot for every actor"
            )
            raise ConfigError([Problem("actors.count", count, message, f"at most {most}")])

    def grow(self, config: Config, exchange: Exchange) -> None:
        """Allocate the slots that ``config`` wants. Raises ConfigError, and nothing changes, when
        the machine's memory is full.
        """
        room = min(slots_capacity(config, self._layout), exchange.arena.capacity)
        more = min(slots_wanted(config), room) - exchange.ledger.slots
        if more <= 0:
            return
        try:
            self._owner.add_slots(more)
        except TianflowError as error:
            raise ConfigError(
                [Problem("balance.memory_limit", config.balance.memory_limit, str(error))]
            ) from error
        exchange.add_slots(more)


def _limiter(config: Config, resumed: Checkpoint | None) -> Limiter:
    limiter = Limiter(limits=rate_limits(config))
    if resumed is not None and resumed.manifest.get("replay") is not None:
        limiter.restore(resumed.manifest["replay"])
        if not resumed.manifest.get("replay_files"):  # the items that it counted were not saved
            limiter.lost(limiter.statistics().size)
    return limiter
