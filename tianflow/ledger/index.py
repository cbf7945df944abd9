"""Index of live tickets.

The queries of `Ledger.take` cost time in the number of versions, not in the number of tickets.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from operator import itemgetter

from tianflow.core.payloads import Version
from tianflow.ledger.tickets import State, Ticket

LISTED = (State.BEGUN, State.COMMITTED)
"""States indexed by version, in every run."""


class TicketIndex:
    """Live tickets by number and, once begun, by state and version.

    Only `move` changes the state or version of a ticket in the index. Listing or unlisting a ticket
    costs one search in a sorted list. Order of arrival is sorted only on demand, and only if a
    ticket was added out of order.

    Args:
        remote: granted tickets count as open, too (`Ledger`).
    """

    def __init__(self, *, remote: bool = False) -> None:
        self._tickets: dict[int, Ticket] = {}
        self._counts = dict.fromkeys(State, 0)
        self._open = (State.BEGUN, State.GRANTED) if remote else (State.BEGUN,)
        """States of open tickets, the one that commits sooner first."""
        self.listed: Mapping[State, dict[Version, list[int]]] = {
            state: {} for state in (*self._open, State.COMMITTED)
        }
        """Numbers of the tickets in each of these states by version, in ticket order. Read-only."""
        self._held: dict[str, list[int]] = {}
        """Numbers of the live tickets of each holder, in ticket order."""
        self._arrived: dict[int, tuple[float, int]] = {}
        """Time of commit and number of each committed ticket, by number."""
        self._last_arrival = (0.0, -1)
        self._arrival_is_sorted = True

    @property
    def by_number(self) -> Mapping[int, Ticket]:
        """All live tickets; a view, not a copy."""
        return self._tickets

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        """Live tickets in ticket order."""
        return iter(self._tickets.values())

    def __getitem__(self, number: int) -> Ticket:
        return self._tickets[number]

    def get(self, number: int) -> Ticket | None:
        """The live ticket ``number``, if any."""
        return self._tickets.get(number)

    def add(self, ticket: Ticket) -> None:
        """Add a live ticket."""
        self._tickets[ticket.number] = ticket
        held = self._held.get(ticket.holder)
        if held is None:
            held = self._held[ticket.holder] = []
        held.append(ticket.number)
        self._counts[ticket.state] += 1
        if ticket.state in self.listed:
            self._list(ticket)

    def pop(self, number: int) -> Ticket:
        """Remove and return the ticket ``number``.

        Raises:
            KeyError: the ticket is not live.
        """
        ticket = self._tickets.pop(number)
        self._held[ticket.holder].remove(number)
        self._counts[ticket.state] -= 1
        if ticket.state in self.listed:
            self._unlist(ticket)
        return ticket

    def move(self, ticket: Ticket, state: State, *, version: Version | None = None) -> None:
        """Change the state of ``ticket``, and its version if one is given.

        Before a move to `State.COMMITTED`, ``committed_at`` must be set.
        """
        counts = self._counts
        counts[ticket.state] -= 1
        counts[state] += 1
        if ticket.state in self.listed:
            self._unlist(ticket)
        ticket.state = state
        if version is not None:
            ticket.version = version
        if state in self.listed:
            self._list(ticket)

    # Asking
    # ----------------------------------------------------------------------------------------------

    def count(self, state: State) -> int:
        """Tickets in ``state``."""
        return self._counts[state]

    def versions(self, state: State) -> dict[Version, int]:
        """Tickets in ``state`` (one of ``listed``) per version, oldest version first."""
        return {version: len(numbers) for version, numbers in sorted(self.listed[state].items())}

    def of_version(self, state: State, version: Version) -> tuple[int, ...]:
        """Numbers of the tickets of one version, in ticket order."""
        return tuple(self.listed[state].get(version, ()))

    def of_holder(self, holder: str) -> list[Ticket]:
        """Live tickets of ``holder``, in ticket order."""
        return [self._tickets[number] for number in self._held.get(holder, ())]

    def oldest(self, state: State, count: int) -> list[Ticket]:
        """The first ``count`` tickets in ``state`` by version, then by number."""
        numbers = chain.from_iterable(map(itemgetter(1), sorted(self.listed[state].items())))
        return [self._tickets[number] for number in islice(numbers, count)]

    @property
    def open(self) -> int:
        """Tickets that may still be committed with the version that they have here."""
        return sum(map(self._counts.__getitem__, self._open))

    def open_versions(self, since: int) -> Counter[Version]:
        """Open tickets per version, from version number ``since`` on."""
        found = Counter[Version]()
        for version, _, numbers in self._open_groups(since):
            found[version] += len(numbers)
        return found

    def oldest_open(self, count: int, since: int) -> list[Ticket]:
        """The first ``count`` open tickets by version, from version number ``since`` on; of one
        version, those that have begun first.
        """
        numbers = chain.from_iterable(map(itemgetter(2), sorted(self._open_groups(since))))
        return [self._tickets[number] for number in islice(numbers, count)]

    def arrived(self, count: int) -> list[Ticket]:
        """The first ``count`` committed tickets by time of commit, then by number."""
        return [self._tickets[number] for number in islice(self._by_arrival(), count)]

    @property
    def first_arrival(self) -> float | None:
        """Time of the oldest commit among the committed tickets."""
        return next(iter(self._by_arrival().values()))[0] if self._arrived else None

    # Inside
    # ----------------------------------------------------------------------------------------------

    def _open_groups(self, since: int) -> list[tuple[Version, int, list[int]]]:
        return [
            (version, place, numbers)
            for place, state in enumerate(self._open)
            for version, numbers in self.listed[state].items()
            if version.number >= since
        ]

    def _list(self, ticket: Ticket) -> None:
        state, number = ticket.state, ticket.number
        listed = self.listed[state]
        numbers = listed.get(ticket.version)
        if numbers is None:
            listed[ticket.version] = [number]
        else:
            insort(numbers, number)
        if state is State.COMMITTED:
            arrival = self._arrived[number] = ticket.committed_at, number
            # returned to the queue, or committed at the same time by a ticket with a higher number
            if arrival < self._last_arrival:
                self._arrival_is_sorted = False
            else:
                self._last_arrival = arrival

    def _unlist(self, ticket: Ticket) -> None:
        state, number = ticket.state, ticket.number
        listed = self.listed[state]
        numbers = listed[ticket.version]
        del numbers[bisect_left(numbers, number)]
        if not numbers:
            del listed[ticket.version]
        if state is State.COMMITTED:
            del self._arrived[number]

    def _by_arrival(self) -> dict[int, tuple[float, int]]:
        if not self._arrival_is_sorted:
            self._arrived = dict(sorted(self._arrived.items(), key=itemgetter(1)))
            self._arrival_is_sorted = True
        return self._arrived
