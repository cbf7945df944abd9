"""``python -m tianflow.hosts DESCRIPTOR ...``: run a host in this process. The payload of
`tianflow.interfaces.StartProcess` comes on standard input, until its end.
"""

from __future__ import annotations

import atexit
import gc
import sys

from tianflow.hosts.main import main

if __name__ == "__main__":
    atexit.register(gc.freeze)  # see `tianflow.__main__`
    atexit.register(gc.collect)
    sys.exit(main(sys.stdin.buffer.read(), [int(number) for number in sys.argv[1:]]))
