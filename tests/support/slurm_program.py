"""``tianflow`` for tests of jobs: it asks often for the state of a job."""

from __future__ import annotations

import sys

from tianflow.__main__ import main
from tianflow.cli import batch

if __name__ == "__main__":
    batch.ASK_S = 0.5
    sys.exit(main())
