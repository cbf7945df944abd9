"""``python -m tianflow`` is ``tianflow``."""

import atexit
import gc


def main() -> None:
    """The ``tianflow`` script. Ctrl-C during its import prints
    no traceback.
    """
    # The interpreter looks for garbage in all modules several times while it ends, which takes
    # 0.4 s with PyTorch. Once is enough: finalizers of the last garbage are called.
    atexit.register(gc.freeze)
    atexit.register(gc.collect)
    gc.disable()  # imports make hardly any garbage, and looking for it takes a tenth of their time
    try:
        from tianflow.cli.main import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        gc.enable()
    run()


if __name__ == "__main__":
    main()
