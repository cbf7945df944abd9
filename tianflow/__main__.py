"""``python -m tianflow`` is ``tianflow``."""


def main() -> None:
    """The ``tianflow`` script. A Ctrl-C while it is still being imported is no error of ours, and
    shows no trace.
    """
    try:
        from tianflow.cli.main import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
