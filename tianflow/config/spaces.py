"""The specification of an environment as JSON in the manifest of a checkpoint, and back.

A policy is loaded from it without the environment's code.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from tianflow.config.networks import previous_leaves
from tianflow.core.payloads import EnvironmentSpec
from tianflow.errors import CheckpointError

MOST = 2**28
"""Maximum elements of all leaves, or of an action; more is damage."""


def to_json(spec: EnvironmentSpec) -> dict[str, Any]:
    """``spec`` as JSON values. JSON has no infinities, so an infinite bound becomes None."""
    found = asdict(spec)
    for name in ("low", "high"):
        found["action"][name] = [
            bound if math.isfinite(bound) else None for bound in found["action"][name]
        ]
    return found


def from_json(data: Any) -> EnvironmentSpec:
    """The specification that `to_json` described.

    Raises:
        CheckpointError: it is not one.
    """
    try:
        data = dict(data)
        action = dict(data["action"])
        for name, infinite in (("low", -math.inf), ("high", math.inf)):
            action[name] = [infinite if bound is None else bound for bound in action[name]]
        spec: EnvironmentSpec = TypeAdapter(EnvironmentSpec).validate_python(
            {**data, "action": action}
        )
        _check(spec)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(
            f"the environment of the manifest is invalid at {place}: {first['msg']}"
        ) from error
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise CheckpointError(f"the environment of the manifest is invalid: {error!r}") from error
    return spec


def _check(spec: EnvironmentSpec) -> None:
    """Raise ValueError if no environment can have this specification."""
    added = spec.observation[len(spec.source) :]
    if len(spec.returned) != len(spec.source) or added not in ((), previous_leaves(spec.action)):
        raise ValueError("the leaves of the observation do not fit their sources")
    arrays = [(leaf.name, leaf.shape, leaf.dtype) for leaf in spec.observation]
    arrays.append(("action", spec.action.shape, spec.action.dtype))
    arrays += [
        (leaf.name, leaf.shape, raw.dtype)
        for leaf, raw in zip(spec.returned, spec.source, strict=True)
    ]
    for name, shape, dtype in arrays:
        if np.dtype(dtype).kind not in "biuf":
            raise ValueError(f"{name!r} has dtype {dtype!r}; accepted: numbers")
        if any(size < 1 for size in shape):
            raise ValueError(f"{name!r} has shape {shape}; accepted: sizes from 1")
    sizes = sum(math.prod(shape) for _, shape, _ in arrays)
    categories = [spec.action.categories, *(leaf.categories for leaf in spec.observation)]
    if sizes + sum(sum(values) for values in categories) > MOST:
        raise ValueError(f"its arrays have more than {MOST} elements")
    if any(count < 1 for values in categories for count in values):
        raise ValueError("a categorical leaf has no category")
    action = spec.action
    if action.kind == "box":
        expected, found = math.prod(action.shape), {len(action.low), len(action.high)}
    else:
        expected, found = len(action.categories), {len(action.start)}
    if found != {expected} or expected < 1:
        raise ValueError("the bounds or categories of the action do not fit its shape")
    for leaf, raw in zip(spec.returned, spec.source, strict=True):
        if len(raw.start) not in (0, math.prod(leaf.shape)):
            raise ValueError(f"the start of {leaf.name!r} does not fit its shape")
