"""The coordinator's side of a link's trajectory and grant channels: what the ends in a host say,
and what they are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tianflow.channels.codec import decode_trajectory, encode_batch, encode_grant
from tianflow.core.payloads import Batch, Episode, Grant, Settlement, Version
from tianflow.exchange.exchange import Exchange


class ServedExchange:
    """Serves one exchange to the `LinkTrajectorySender`s and the `LinkBatchSource` of one host.

    Waits: nobody. What an end waits for is answered by message, once the exchange has it.

    Args:
        exchange: decides.
        send: sends one message to the host; messages arrive in the order in which they were sent.
        push: lets them leave now: a learner waits for its batch, while what else this turn of the
            loop brings can wait.
        on_episodes: hears of the episodes that finished in each accepted trajectory.
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        send: Callable[..., None],
        push: Callable[[], None],
        on_episodes: Callable[[str, Sequence[Episode]], object],
    ) -> None:
        self._exchange, self._send, self._push, self._on_episodes = (
            exchange,
            send,
            push,
            on_episodes,
        )
        self.handlers: Mapping[str, Callable[..., None]] = {
            "want": self._want,
            "unwant": exchange.cancel_request,
            "begin": lambda ticket, lineage, number: exchange.begin(
                ticket, Version(lineage, number)
            ),
            "commit": self._commit,
            "abort": exchange.abort,
            "pull": self._pull,
            "unpull": exchange.cancel_pull,
            "back": exchange.give_back,
            "opened": lambda lineage, number: exchange.open_lineage(Version(lineage, number)),
            "settle": self._settle,
            "published": lambda lineage, number: exchange.published(Version(lineage, number)),
        }
        """By the first word of a message; the rest are the arguments."""

    def _want(self, holder: str, count: int) -> None:
        def deliver(grant: Grant | None) -> None:
            if grant is None:
                self._send("end", holder)
            else:
                self._send("grant", holder, encode_grant(grant))

        for _ in range(count):
            self._exchange.request_grant(holder, deliver)

    def _commit(self, holder: str, fields: list[int], ended: list[list[Any]]) -> None:
        if self._exchange.commit(decode_trajectory(fields)) and ended:
            self._on_episodes(
                holder,
                [Episode(float(episode_return), int(length)) for episode_return, length in ended],
            )

    def _pull(self, pull: int, lineage: int, number: int) -> None:
        def deliver(batch: Batch | None) -> None:
            self._send("batch", None if batch is None else [pull, *encode_batch(batch)])
            self._push()

        self._exchange.request_batch(Version(lineage, number), deliver)

    def _settle(
        self,
        version: list[int],
        tickets: list[int],
        bound: int | None,
        published: bool,
        skipped: bool,
    ) -> None:
        self._exchange.settle(
            Settlement(Version(*version), tuple(tickets), bound, published, skipped)
        )
