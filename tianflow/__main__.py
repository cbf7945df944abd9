"""``python -m tianflow`` is ``tianflow``."""


def main() -> None:
    """The ``tianflow`` script. Ctrl-C during its import prints
    no traceback.
    """
    try:
        from tianflow.cli.main import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
