"""Gymnasium seen from the system: spaces as named arrays, vector environments that all reset alike,
slots and their layout.
"""

from __future__ import annotations

from tianflow.envs.make import probe

__all__ = ["probe"]
