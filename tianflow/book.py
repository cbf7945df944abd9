"""Live tickets, kept so that what `Ledger.take` asks costs as much as there are versions, not as there are tickets."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain, islice

from tianflow.payloads import Version
from tianflow.tickets import State, Ticket

LISTED = (State.BEGUN, State.COMMITTED)
"""States that are asked for by version; the others only by number."""


class TicketBook:
    """Tickets by number and, once begun, by state and version. `move` is the one way to change a ticket's state or version.

    A listed ticket costs a search in one sorted list when it comes and when it goes.
    """

    def __init__(self) -> None:
        self._tickets: dict[int, Ticket] = {}
        self._counts = dict.fromkeys(State, 0)
        self._listed: dict[State, dict[Version, list[int]]] = {state: {} for state in LISTED}
        self._held: dict[str, list[int]] = {}
        """Numbers of the live tickets of each holder, in ticket order."""
        self._arrived: list[tuple[float, int]] = []
        """When each committed ticket was committed, and its number."""

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        """In ticket order."""
        return iter(self._tickets.values())

    def __getitem__(self, number: int) -> Ticket:
        return self._tickets[number]

    def get(self, number: int) -> Ticket | None:
        """The live ticket of that number."""
        return self._tickets.get(number)

    def add(self, ticket: Ticket) -> None:
        """``ticket`` lives from now on."""
        self._tickets[ticket.number] = ticket
        self._held.setdefault(ticket.holder, []).append(ticket.number)
        self._enter(ticket)

    def pop(self, number: int) -> Ticket:
        """The ticket of that number, which lives no longer. Raises KeyError."""
        ticket = self._tickets.pop(number)
        self._held[ticket.holder].remove(number)
        self._leave(ticket)
        return ticket

    def move(self, ticket: Ticket, state: State, *, version: Version | None = None) -> None:
        """``ticket`` is in ``state`` now, and of ``version``, if that is named. When it is committed, ``committed_at`` is known before."""
        self._leave(ticket)
        ticket.state = state
        if version is not None:
            ticket.version = version
        self._enter(ticket)

    # Asking ---------------------------------------------------------------------------------------------------------

    def count(self, state: State) -> int:
        """Tickets in ``state``."""
        return self._counts[state]

    def versions(self, state: State) -> dict[Version, int]:
        """How many tickets in ``state``, one of `LISTED`, there are of each version, oldest first."""
        return {version: len(numbers) for version, numbers in sorted(self._listed[state].items())}

    def of_version(self, state: State, version: Version) -> tuple[int, ...]:
        """Numbers of the tickets of one version, in ticket order."""
        return tuple(self._listed[state].get(version, ()))

    def of_holder(self, holder: str) -> list[Ticket]:
        """Live tickets of ``holder``, in ticket order."""
        return [self._tickets[number] for number in self._held.get(holder, ())]

    def oldest(self, state: State, count: int) -> list[Ticket]:
        """The first ``count`` tickets in ``state`` by version, then by number."""
        numbers = chain.from_iterable(numbers for _, numbers in sorted(self._listed[state].items()))
        return [self._tickets[number] for number in islice(numbers, count)]

    def arrived(self, count: int) -> list[Ticket]:
        """The first ``count`` committed tickets by the time of their commit, then by number."""
        return [self._tickets[number] for _, number in self._arrived[:count]]

    @property
    def first_arrival(self) -> float | None:
        """When the committed ticket that has waited longest was committed."""
        return self._arrived[0][0] if self._arrived else None

    # Inside ---------------------------------------------------------------------------------------------------------

    def _enter(self, ticket: Ticket) -> None:
        self._counts[ticket.state] += 1
        if ticket.state in LISTED:
            insort(self._listed[ticket.state].setdefault(ticket.version, []), ticket.number)
        if ticket.state is State.COMMITTED:
            insort(self._arrived, (ticket.committed_at, ticket.number))

    def _leave(self, ticket: Ticket) -> None:
        self._counts[ticket.state] -= 1
        if ticket.state in LISTED:
            numbers = self._listed[ticket.state][ticket.version]
            del numbers[bisect_left(numbers, ticket.number)]
            if not numbers:
                del self._listed[ticket.state][ticket.version]
        if ticket.state is State.COMMITTED:
            del self._arrived[bisect_left(self._arrived, (ticket.committed_at, ticket.number))]
