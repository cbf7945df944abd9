"""Replay tables: shards of windows over steps, selectors, and draws over several shards."""

from __future__ import annotations

from tianflow.replay.fragments import Fragment, StepStream
from tianflow.replay.observations import find_stacks
from tianflow.replay.selection import Fifo, Lifo, PrioritisedSelector, Selector, Uniform
from tianflow.replay.sequences import (
    ActorError,
    InitialPriority,
    RunningMaximum,
    SequenceError,
    sequence_priority,
)
from tianflow.replay.settings import DrawnItems, Inserted, ShardSettings, ShardStatistics, Tally
from tianflow.replay.shard import Shard

__all__ = [
    "ActorError",
    "DrawnItems",
    "Fifo",
    "Fragment",
    "InitialPriority",
    "Inserted",
    "Lifo",
    "PrioritisedSelector",
    "RunningMaximum",
    "Selector",
    "SequenceError",
    "Shard",
    "ShardSettings",
    "ShardStatistics",
    "StepStream",
    "Tally",
    "Uniform",
    "find_stacks",
    "sequence_priority",
]
