"""``python -m specgen``. Knows nothing but the command line's entry."""

import sys

from specgen.cli import main

if __name__ == "__main__":
    sys.exit(main())
