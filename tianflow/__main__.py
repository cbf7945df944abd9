"""``python -m tianflow`` is ``tianflow``."""

from tianflow.cli import main

if __name__ == "__main__":
    main()
