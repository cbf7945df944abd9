"""Environments: spaces as named arrays, and vector environments with uniform autoreset."""

from __future__ import annotations

from tianflow.envs.make import probe

__all__ = ["probe"]
