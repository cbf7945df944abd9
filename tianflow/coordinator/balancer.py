"""ledger snapshots, settings, ticks -> Balancer -> limits in force (through controllers)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tianflow.config.rules import make_controllers
from tianflow.core.directives import Directive, SetAdmission, SetBound, SetCredits, SetOrder
from tianflow.core.events import Observed
from tianflow.core.limits import Limits
from tianflow.core.payloads import credits_ceiling
from tianflow.core.statistics import ControllerStatistics

if TYPE_CHECKING:
    from tianflow.config.model import Config
    from tianflow.exchange.exchange import Exchange
    from tianflow.interfaces import Controller, SettingsReader

TICK_S = 0.25
"""Seconds between two updates without another cause: a controller that observes waiting needs the
time.
"""


@dataclass(frozen=True, slots=True)
class ControllerRequests:
    """The newest request of one controller of each kind; None: it made no such request."""

    credits: int | None = None
    bound: SetBound | None = None
    admission: SetAdmission | None = None
    order: SetOrder | None = None

    def after(self, directive: Directive) -> ControllerRequests:
        """Absolute directives overwrite."""
        match directive:
            case SetCredits(limit=limit):
                return replace(self, credits=limit)
            case SetBound():
                return replace(self, bound=directive)
            case SetAdmission():
                return replace(self, admission=directive)
            case SetOrder():
                return replace(self, order=directive)
        raise TypeError(f"a controller gave {directive!r}, which is not a directive")


def merge(
    wishes: Mapping[str, ControllerRequests], config: Config, *, slots: int
) -> tuple[Limits, str]:
    """One set of limits from the config and all controllers: the strictest wins. Also which
    controller set the credits ("" for none).

    A controller without a request for the bound counts as a request for the configured one. So the
    bound is loosened only if every controller requests it, as ``open_loop`` does. Admission is open
    only if every controller requests it, as ``consume_only`` does.
    """
    bounds = [
        config.bound if wish.bound is None else wish.bound.max_staleness for wish in wishes.values()
    ]
    finite = [bound for bound in bounds if bound is not None]
    own = () if config.bound is None else (config.bound,)
    bound = min((*finite, *own)) if finite else None if bounds else config.bound
    admissions = [
        wish.admission is not None and wish.admission.admission == "open"
        for wish in wishes.values()
    ]
    is_open = bool(admissions) and all(admissions)
    orders = [wish.order.order for wish in wishes.values() if wish.order is not None]
    asked = {name: wish.credits for name, wish in wishes.items() if wish.credits is not None}
    winner = min(asked, key=lambda name: asked[name]) if asked else ""
    batch = config.algorithm.batch_trajectories
    target = asked.get(winner, slots)
    if config.balance.credits is not None and config.balance.credits < target:
        target, winner = config.balance.credits, "balance.credits"
    limits = Limits(
        batch=batch,
        max_staleness=bound,
        credits=max(target, batch),
        patience=None if config.run.deterministic else config.balance.straggler_patience,
        order="arrival" if "arrival" in orders and (bound is None or is_open) else "version",
        admission="open" if is_open else "paced",
        late_share=config.cluster.late_share,
    )
    return limits, winner


class Balancer:
    """Shows the state of the run to controllers, and puts their requests in force.

    Consumes: the ledger, settings, ticks. Produces: limits. Waits: never for long; it updates after
    every settled batch, every change of settings and every tick. At every moment between, the
    ledger itself enforces C <= (bound + 1 - lag) * B, unless admission is open.

    Args:
        exchange: receives the limits.
        settings: live settings.
        set_bound: puts the bound of the controllers in force.
        waiting_seconds: cumulative (learner, sum over actors) seconds waited.
        actors: number of actors.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        settings: SettingsReader,
        set_bound: Callable[[int | None], None],
        waiting_seconds: Callable[[], tuple[float, float]],
        actors: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = "balancer"
        self._exchange, self._settings, self._clock = exchange, settings, clock
        self._set_bound, self._waiting_seconds, self._actors = set_bound, waiting_seconds, actors
        self._controllers: dict[str, Controller] = {}
        self._named: tuple[object, object] = (None, None)
        self._wishes: dict[str, ControllerRequests] = {}
        self._directives: dict[str, int] = {}
        self._winner = ""
        exchange.on_settled(self.update)
        settings.on_change(self.update)
        self.update()

    async def run(self, started: Callable[[], None]) -> None:
        """Tick until cancelled."""
        started()
        while True:
            await asyncio.sleep(TICK_S)
            self.update()

    def update(self) -> None:
        """Show the present state to every controller, and put the merged limits in force."""
        config = self._settings.value.config
        if self._named != (config.balance.controller, config.balance.parameters):
            self._controllers = make_controllers(config)
            self._wishes = {name: ControllerRequests() for name in self._controllers}
            self._named = (config.balance.controller, config.balance.parameters)
            self._directives |= {name: self._directives.get(name, 0) for name in self._controllers}
        observed = self._observe(config)
        for name, controller in self._controllers.items():
            for directive in controller.handle(observed):
                self._wishes[name] = self._wishes[name].after(directive)
                self._directives[name] += 1
        limits, self._winner = merge(self._wishes, config, slots=self._exchange.ledger.slots)
        self._exchange.set_limits(limits)
        self._set_bound(limits.max_staleness)

    def bound_with(self, config: Config) -> int | None:
        """The bound in force with ``config``, by the requests of the controllers that run now.
        `update` then asks the controllers that ``config`` names.
        """
        if self._named != (config.balance.controller, config.balance.parameters):
            return config.bound
        return merge(self._wishes, config, slots=self._exchange.ledger.slots)[0].max_staleness

    def statistics(self) -> tuple[ControllerStatistics, ...]:
        """The requests of each controller, and which controller is in force."""
        return tuple(
            ControllerStatistics(
                name,
                count,
                self._wishes[name].credits if name in self._wishes else None,
                name == self._winner,
            )
            for name, count in self._directives.items()
        )

    def _observe(self, config: Config) -> Observed:
        ledger = self._exchange.ledger
        learner, actors = self._waiting_seconds()
        bound = config.bound
        batch = config.algorithm.batch_trajectories
        lag = ledger.publish_lag
        ceiling = ledger.slots
        if bound is not None:
            ceiling = credits_ceiling(bound, publish_lag=lag, batch=batch)
        return Observed(
            now=self._clock(),
            version=max(0, ledger.version.number),
            publish_lag=lag,
            batch=batch,
            max_staleness=bound,
            credits_limit=ledger.credits_limit,
            credits_in_use=ledger.credits_in_use,
            credits_ceiling=ceiling,
            slots=ledger.slots,
            actors=self._actors(),
            learner_waiting_s=learner,
            actors_waiting_s=actors,
        )
