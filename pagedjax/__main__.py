"""`python -m pagedjax`: the command line without the installed script."""

import sys

from pagedjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
