"""``python -m tianflow`` is ``tianflow``."""

import gc
from contextlib import suppress


def main() -> None:
    """The ``tianflow`` script. Ctrl-C during its import prints
    no traceback.
    """
    gc.disable()  # imports make hardly any garbage, and looking for it takes a tenth of their time
    try:
        from tianflow.cli.main import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        gc.enable()
    try:
        run()
    finally:
        # While it ends, the interpreter looks for garbage in all modules several times, which
        # takes 0.3 s with PyTorch. Once is enough.
        with suppress(KeyboardInterrupt):  # the exit code is known
            gc.collect()
            gc.freeze()


if __name__ == "__main__":
    main()
