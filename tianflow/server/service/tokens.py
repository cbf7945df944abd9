"""The tokens of a service, in a file that only its owner can read, so that they survive a
restart.
"""

from __future__ import annotations

import os
import tomllib
from contextlib import suppress
from pathlib import Path

from tianflow.errors import ConfigError, Problem
from tianflow.server.common.auth import Tokens


def read_or_create(path: Path) -> Tokens:
    """Read the tokens in ``path`` (TOML: ``control = "..."``, ``read = "..."``); create the file
    with new tokens if it is missing.

    Raises:
        ConfigError: others can read the file, or it does not hold two different tokens.
    """
    try:
        if path.exists():
            return _read(path)
        tokens = Tokens.make()
        _write(
            path,
            f'# control: everything; read: reading only\ncontrol = "{tokens.control}"\nread = '
            f'"{tokens.read}"\n',
        )
    except OSError as error:
        raise ConfigError(
            [Problem("--token-file", str(path), f"cannot be used: {error.strerror}")]
        ) from error
    return tokens


def _write(path: Path, text: str) -> None:
    """Write the whole file or none: a partial file, after a full disk, would be refused at every
    later start.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise


def _read(path: Path) -> Tokens:
    if path.stat().st_mode & 0o077:
        raise ConfigError(
            [Problem("--token-file", str(path), "is readable by others", f"chmod 600 {path}")]
        )
    accepted = 'two lines, control = "..." and read = "...", with different tokens'
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        control, read = tables["control"], tables["read"]
        if not (isinstance(control, str) and isinstance(read, str) and control and read):
            raise ConfigError(
                [Problem("--token-file", str(path), "holds an invalid token", accepted)]
            )
        return Tokens(control, read)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            [Problem("--token-file", str(path), "does not hold the tokens", accepted)]
        ) from error
