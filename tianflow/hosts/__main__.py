"""``python -m tianflow.hosts DESCRIPTOR ...``: run a host in this process. The payload of
`tianflow.interfaces.StartProcess` comes on standard input, until its end.
"""

from __future__ import annotations

import gc
import sys

from tianflow.hosts.main import main

if __name__ == "__main__":
    code = main(sys.stdin.buffer.read(), [int(number) for number in sys.argv[1:]])
    gc.collect()
    gc.freeze()  # the interpreter ends sooner, see `tianflow.__main__`
    sys.exit(code)
