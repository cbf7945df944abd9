"""AttributeSetter: attributes of single environments, set at the beginning of their episodes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tianflow import plugins
from tianflow.errors import Problem

PLAIN = (bool, int, float, str, list, tuple, dict)
"""Types of the attributes that a refusal offers."""


class AttributeRefusedError(ValueError):
    """An attribute cannot be set. ``problem``: path, value, and what is accepted."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


class AttributeSetter:
    """A wrapper function after which ``reset`` sets attributes first. It must be the outermost one.
    Steps cost nothing more.

    Args:
        wanted: attributes in force, by name. It is called at every reset.
    """

    def __init__(self, wanted: Callable[[], Mapping[str, Any]]) -> None:
        self._wanted = wanted

    def __call__(self, environment: Any) -> Any:
        """``environment``, with another ``reset``."""
        environment.reset = _Reset(environment, self._wanted)
        return environment


class _Reset:
    """``reset`` of one environment.

    Raises:
        AttributeRefusedError: the environment does not have one of the attributes, or one of them
            changed the spaces.
    """

    def __init__(self, environment: Any, wanted: Callable[[], Mapping[str, Any]]) -> None:
        self._environment, self._wanted, self._reset = environment, wanted, environment.reset
        self._spaces = environment.observation_space, environment.action_space
        self._in_force: Mapping[str, Any] = {}
        self._constructed: dict[str, Any] = {}
        """Value of the constructor of each attribute that was ever set."""
        functools.update_wrapper(self, environment.reset)  # Gymnasium's checks read its signature

    def __call__(self, **arguments: Any) -> Any:
        wanted = self._wanted()
        if wanted == self._in_force:
            return self._reset(**arguments)
        self._set(wanted)
        result = self._reset(**arguments)
        found = self._environment.observation_space, self._environment.action_space
        if found != self._spaces:
            message = f"changes the spaces from {self._spaces} to {found}"
            accepted = "attributes that do not change the spaces"
            raise AttributeRefusedError(Problem("env.set", dict(wanted), message, accepted))
        self._in_force = wanted
        return result

    def _set(self, wanted: Mapping[str, Any]) -> None:
        environment, constructed = self._environment, self._constructed
        for name, value in wanted.items():
            if name.startswith("_") or not environment.has_wrapper_attr(name):
                known = tuple(_attributes(environment))
                message = f"is not an attribute of {environment}"
                accepted = f"one of {', '.join(known)}" if known else ""
                nearest = plugins.nearest(name, known)
                problem = Problem(f"env.set.{name}", value, message, accepted, nearest)
                raise AttributeRefusedError(problem)
            constructed.setdefault(name, environment.get_wrapper_attr(name))
        for name, value in constructed.items():
            # A copy: an environment may change its own.
            environment.set_wrapper_attr(name, copy.deepcopy(wanted.get(name, value)))


def _attributes(environment: Any) -> Iterator[str]:
    """Public attributes of ``environment`` and what it wraps that are numbers, flags, text, lists
    or tables.
    """
    while environment is not None:
        for name, value in vars(environment).items():
            if not name.startswith("_") and isinstance(value, PLAIN):
                yield name
        environment = vars(environment).get("env")
