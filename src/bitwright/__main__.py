"""``python -m bitwright``: the command line."""

import sys

from bitwright.cli import main

if __name__ == "__main__":
    sys.exit(main())
