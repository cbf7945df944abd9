"""The oracle whose learner has several ranks: ``tests.e2e.ranked:RankedOracle``."""

from __future__ import annotations

import os
from typing import ClassVar

import torch

from tests.support.oracle import Oracle, OracleLearner, OracleSettings
from tianflow.algorithms.common.ranks import ALONE, Ranks
from tianflow.config.model import Config
from tianflow.core.payloads import EnvironmentSpec
from tianflow.interfaces import LearnerBatch


class RankedOracleSettings(OracleSettings):
    splits_over_ranks: ClassVar[bool] = True
    name: str = "tests.e2e.ranked:RankedOracle"


class RankedLearner(OracleLearner):
    """Rank 0 writes down the staleness of the whole batch. All data were made with its weights."""

    ranks: Ranks = ALONE

    def join(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._me = int(ranks.add(torch.tensor(0 if ranks.rank else self._me)))
        if ranks.rank:
            self._record = os.open(os.devnull, os.O_WRONLY)

    def _oldest(self, batch: LearnerBatch) -> list[tuple[int, int]]:
        found = super()._oldest(batch)
        assert {pid for pid, _ in found} == {self._me}
        numbers = torch.tensor([number for _, number in found], dtype=torch.float64)
        (whole,) = self.ranks.gather(numbers)
        return [(self._me, int(number)) for number in whole]


class RankedOracle(Oracle):
    settings = RankedOracleSettings

    @staticmethod
    def make_learner(config: Config, spec: EnvironmentSpec, device: torch.device) -> RankedLearner:
        assert isinstance(config.algorithm, OracleSettings)
        return RankedLearner(config.algorithm)
