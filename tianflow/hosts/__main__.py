"""``python -m tianflow.hosts DESCRIPTOR ...``: run a host process that was started by other means
than a fork. Its `StartHost` comes on standard input.
"""

from __future__ import annotations

import sys

from tianflow.hosts.main import main

if __name__ == "__main__":
    sys.exit(main(sys.stdin.buffer.read(), [int(number) for number in sys.argv[1:]]))
