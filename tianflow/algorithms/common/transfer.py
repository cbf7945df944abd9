"""Parameters of a checkpoint in a new learner, computed in a process of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray

from tianflow import plugins
from tianflow.config import spaces
from tianflow.config.model import Config
from tianflow.interfaces import Algorithm, TransfersParameters
from tianflow.rundir.checkpoints import serialized
from tianflow.rundir.parameters import Fit, encode_tables, fit, full_name, read_parameters


def transfer(learner: Algorithm, there: Mapping[str, NDArray[Any]]) -> Fit | None:
    """Overwrite the parameters of a new ``learner`` with those of ``there`` that fit.

    Its optimiser, generator and counters stay as they are. None: the learner does not name its
    parameters, and nothing was changed.
    """
    if not isinstance(learner, TransfersParameters):
        return None
    state = learner.state_dict()
    here = read_parameters(state, encode_tables(learner.tables))
    found = fit(there, here)
    taken = frozenset(found.taken)
    for array, table in learner.tables.items():
        data = state[array].reshape(-1).view(np.uint8)
        for entry in table.entries:
            if (name := full_name(array, entry.name)) in taken:
                part = np.frombuffer(there[name].tobytes(), np.uint8)
                data[entry.offset : entry.offset + entry.nbytes] = part
    learner.load_state_dict(state)
    learner.follow_parameters()
    return found


def main(order: int, source: int, answer: int, state: int) -> None:
    """Write the state of a new learner to the descriptor ``state``, and its `Fit` to ``answer``.

    Args:
        order: descriptor of JSON with ``config`` and ``environment``.
        source: descriptor of safetensors with the parameters of a checkpoint.
        answer: descriptor for JSON; its ``fit`` is None if the algorithm names no parameters.
        state: descriptor for the contents of a state file.
    """
    torch.set_num_threads(1)
    tables = json.loads(_read(order))
    config = Config.model_validate(tables["config"])
    spec = spaces.from_json(tables["environment"])
    factory: Any = plugins.load("tianflow.algorithms", config.algorithm.name, path="algorithm.name")
    learner = factory.make_learner(config, spec, torch.device("cpu"))
    found = transfer(learner, safetensors.numpy.load(_read(source)))
    if found is not None:
        _write(state, serialized(learner.state_dict(), learner.tables))
    fields = None if found is None else {name: getattr(found, name) for name in Fit.__slots__}
    _write(answer, json.dumps({"fit": fields}).encode())


def _read(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return file.read()


def _write(descriptor: int, data: bytes) -> None:
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
