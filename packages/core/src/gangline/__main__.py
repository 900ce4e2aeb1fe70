"""Entry point of `python -m gangline`, which runs the command `gangline`."""

import sys

from gangline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
