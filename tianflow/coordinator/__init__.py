"""A run: the one process that supervises, balances, keeps the ledger and the slots, checkpoints,
and answers.

`Run` makes the parts and lives. Each part owns its state: `Life` how the run goes, `Control` the
settings in force and who changed them, `Staff` the hosts, `Reception` what they tell, `Goal`
whether the target is reached, `Rounds` what is due now and then, `Ending` the last things,
`Readings` what can be seen.
"""

from __future__ import annotations

from tianflow.coordinator.lifecycle import ENDED
from tianflow.coordinator.run import Run

__all__ = ["ENDED", "Run"]
