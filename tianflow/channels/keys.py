"""Addresses of TCP, and the keys without which no connection may leave the machine."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq

from tianflow.errors import ConfigError, Problem
from tianflow.logs import logger

ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5}|\*)")
KEY_FIELDS = ("server_public", "server_secret", "client_public", "client_secret")
KEY_FILE_BYTES = 4096
log = logger("channels.keys")


def require_address(address: object, *, path: str, listen: bool = False) -> str:
    """``address`` if it is ``tcp://HOST:PORT``.

    Args:
        address: what was given.
        path: the setting to name in an error.
        listen: True: ``*`` may stand for every host, and for any free port.

    Raises:
        ConfigError: it is not.
    """
    found = ADDRESS.fullmatch(address) if isinstance(address, str) else None
    wild = found is not None and "*" in (found["host"], found["port"])
    if (
        found is None
        or (wild and not listen)
        or (found["port"] != "*" and int(found["port"]) > 65535)
    ):
        accepted = "tcp://HOST:PORT" + (", * for every host or any free port" if listen else "")
        raise ConfigError([Problem(path, address, "is not a valid address", accepted)])
    return found[0]


def is_loopback(address: str) -> bool:
    """True if ``address`` cannot be reached from another machine."""
    found = ADDRESS.fullmatch(address)
    host = "" if found is None else found["host"].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name may mean any machine
        return False


def require_keys(address: str, keys: Keys | None, *, insecure: bool, path: str) -> None:
    """Refuse an ``address`` off loopback without ``keys``; with ``insecure`` only warn.

    Raises:
        ConfigError: naming ``path``.
    """
    if keys is not None or is_loopback(address):
        return
    if not insecure:
        message = (
            "leaves this machine without a key: every message could be read and changed on its way"
        )
        raise ConfigError([Problem(path, address, message, "a key file, or a loopback address")])
    log.warning("connections are neither encrypted nor authenticated", address=address)


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """Two CURVE key pairs, in Z85: one for servers, one for clients. Every machine that takes part
    has the same.
    """

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes
    origin: str = ""
    """The file they were read from."""

    @classmethod
    def generate(cls) -> Keys:
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> Keys:
        """The keys that `texts` gave."""
        public, secret, client, other = (texts[name].encode("ascii") for name in KEY_FIELDS)
        return cls(public, secret, client, other)

    @property
    def texts(self) -> dict[str, str]:
        """The keys by name."""
        return {name: getattr(self, name).decode("ascii") for name in KEY_FIELDS}

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that distinguish keys and do not reveal them."""
        return hashlib.sha256(self.server_public + self.client_public).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"Keys({self.fingerprint})"


@contextlib.contextmanager
def private_draft(path: Path, lines: Iterable[str]) -> Iterator[Path]:
    """A file of mode 0600 with ``lines``, which is on the disk, beside ``path``. It is removed
    unless the context gives it another name.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)  # it holds keys


def read_private(path: Path, largest: int, *, named: str) -> bytes:
    """The contents of a file that only its owner may read. One byte more than ``largest``: it is
    larger.

    Raises:
        ConfigError: it is not a regular file, or other users can read it. ``named``: what it is.
        OSError: it cannot be read.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe ends at once
        mode = os.fstat(file.fileno()).st_mode
        message, accepted = "", ""
        if not stat.S_ISREG(mode):
            message = "is not a regular file"
        elif mode & 0o077:
            message = f"has mode {stat.S_IMODE(mode):04o}: other users can read or change the keys"
            accepted = f"mode 0600: chmod 600 {path}"
        if message:
            raise ConfigError([Problem(named, str(path), message, accepted)])
        return file.read(largest + 1)


def read_keys(path: Path | str) -> Keys:
    """The keys in the file ``path``.

    Raises:
        ConfigError: it is not a key file, or other users can read it.
        OSError: it cannot be read.
    """
    path = Path(path)
    data = read_private(path, KEY_FILE_BYTES, named="key file")
    try:
        table = tomllib.loads(data.decode("ascii"))
        values = [table[name].encode("ascii") for name in KEY_FIELDS]
        pairs = (values[:2], values[2:])
        complete = len(data) <= KEY_FILE_BYTES and len(table) == len(KEY_FIELDS)
        valid = complete and all(
            len(public) == len(secret) == 40 and zmq.curve_public(secret) == public
            for public, secret in pairs
        )
    except (AttributeError, KeyError, ValueError, zmq.ZMQError):
        valid = False
    if not valid:
        message, accepted = "is not a complete key file", "a file that env-server wrote"
        raise ConfigError([Problem("key file", str(path), message, accepted)])
    return Keys(values[0], values[1], values[2], values[3], str(path))


def read_or_make_keys(path: Path | str) -> Keys:
    """The keys in ``path``; a file of mode 0600 with new ones is written if it does not exist.

    Two processes that do so at once get the same keys. Raises as `read_keys`.
    """
    path = Path(path)
    if not path.exists():
        keys = Keys.generate()
        lines = [f'{name} = "{getattr(keys, name).decode("ascii")}"\n' for name in KEY_FIELDS]
        with (
            private_draft(
                path, ["# Keys of tianflow env-server and of its clients.\n", *lines]
            ) as draft,
            contextlib.suppress(FileExistsError),
        ):  # another process was first
            os.link(draft, path)
    return read_keys(path)
