"""Checkpoints that no run wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tianflow import plugins
from tianflow.config import spaces
from tianflow.config.loading import load_config
from tianflow.core.payloads import Version
from tianflow.planning import validation
from tianflow.rundir.checkpoints import CheckpointStore, write_state

Sections = dict[str, dict[str, Any]]


def checkpoint(folder: Path, sections: Sections) -> Path:
    """One whose weights and statistics are all drawn, so that nothing is 0 or 1 by chance."""
    config = load_config(sections)
    spec = validation.require_valid(config).spec
    factory: Any = plugins.load("tianflow.algorithms", config.algorithm.name, path="algorithm.name")
    learner = factory.make_learner(config, spec, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    buffer = learner.model.buffer
    buffer.parameters.add_(torch.randn(buffer.parameters.shape, generator=generator) * 0.03)
    for extra in buffer.extras.values():
        extra.copy_(torch.rand(extra.shape, generator=generator).double() + 0.5)
    store = CheckpointStore(folder / "a-run" / "checkpoints", keep=1)
    staged = store.stage()
    state = write_state(staged, learner.state_dict())
    assert spec is not None
    manifest = {
        "config": json.loads(config.model_dump_json()),
        "env_steps": 1234,
        "environment": spaces.to_json(spec),
    }
    return store.publish(staged, version=Version(1, 10), state=state, manifest=manifest)
