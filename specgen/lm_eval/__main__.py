"""The harness's own command line, after ``specgen`` is among its models: it looks for none outside its package.

Boundary: an error of the user is one line on stderr and exit code 2, as with ``python -m specgen``; everything else is the harness's.
"""

from __future__ import annotations

import sys
import traceback
from importlib import import_module

from specgen.errors import SpecgenError
from specgen.launch import debugging, one_line, say


def main() -> int:
    """Run the harness on ``sys.argv``; returns the exit code."""
    try:
        import_module("specgen.lm_eval.model")  # puts it among the harness's models
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except SpecgenError as error:
        if debugging():
            traceback.print_exception(error)
        say(one_line(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
