"""A process that has imported everything and forks one job for each line it reads, so that a job starts in a fraction of a second.

Boundary: the job itself is ``specgen.cli.main`` in a child of its own, with nothing loaded that a job loads. Lines in: a JSON list, the log file and
the arguments. Lines out: the child's process id, then its exit status as ``waitstatus_to_exitcode`` gives it.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Serve until stdin ends."""
    import datasets  # noqa: F401
    import hydra  # noqa: F401

    import specgen.run  # noqa: F401
    from specgen import cli

    print("ready", flush=True)
    for line in sys.stdin:
        log, *arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            for stream in (1, 2):
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            code = cli.main(arguments)
            sys.stdout.flush()
            os._exit(code)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
