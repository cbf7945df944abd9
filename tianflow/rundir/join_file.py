"""``join.toml`` in the directory of a run: what a process needs to become a node of the run."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from tianflow.channels.keys import Keys, private_draft, read_private, require_address
from tianflow.errors import ConfigError, Problem

NAME = "join.toml"
LARGEST = 4096
"""Bytes of a file that are read at most."""
_SECRETS = ("server_public", "client_public", "client_secret")


@dataclass(frozen=True, slots=True)
class JoinFile:
    """The run, the address of its gateway, and the keys of nodes. ``keys`` None: connections are
    neither encrypted nor authenticated.
    """

    run: str
    address: str
    keys: Keys | None

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all, readable by its owner only."""
        lines = [f'run = "{self.run}"\n', f'address = "{self.address}"\n']
        if self.keys is not None:
            lines += [f'{name} = "{getattr(self.keys, name).decode()}"\n' for name in _SECRETS]
        with private_draft(
            path, ["# The nodes of a run of tianflow join with this file.\n", *lines]
        ) as draft:
            draft.replace(path)

    @classmethod
    def read(cls, path: Path) -> JoinFile:
        """The file at ``path``.

        Raises:
            ConfigError: it is not a join file, or other users can read it.
            OSError: it cannot be read.
        """
        data = read_private(path, LARGEST, named="join file")
        try:
            table = tomllib.loads(data.decode("ascii"))
            run, address = table.pop("run"), table.pop("address")
            require_address(address, path="address")
            public, client, secret = (table.pop(name, "").encode("ascii") for name in _SECRETS)
        except (AttributeError, KeyError, ValueError, ConfigError):
            raise _bad(path) from None
        lengths = {len(public), len(client), len(secret)}
        if table or not isinstance(run, str) or lengths not in ({0}, {40}) or len(data) > LARGEST:
            raise _bad(path)
        keys = Keys(public, b"", client, secret, str(path)) if public else None
        return cls(run, address, keys)


def _bad(path: Path) -> ConfigError:
    accepted = "the join.toml of an active run"
    return ConfigError([Problem("join file", str(path), "is not a join file", accepted)])
