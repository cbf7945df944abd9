"""The coordinator: the one process of a run that supervises, balances, checkpoints and answers. It
owns the ledger and the slots.

`Run` makes the parts and connects them. Each part owns its state: `Lifecycle` the state of the run,
`LiveConfig` the settings in force, `Control` changes and actions, `HostGroup` the hosts, `Inbox`
what they report, `ComponentRegistry` the components, `CheckpointManager` checkpoints,
`TargetTracker` the target, `PeriodicTasks` what is due, `Shutdown` the end, `RunSnapshot` what is
shown.
"""

from __future__ import annotations

from tianflow.coordinator.lifecycle import ENDED
from tianflow.coordinator.run import Run

__all__ = ["ENDED", "Run"]
