"""What ``python -m specgen --help`` prints: usage, examples, and every key with its default and comment, read from the YAML files.

Boundary: reads ``conf/`` as text; imports neither Hydra nor torch, so that it answers at once.
"""

from __future__ import annotations

import re
from importlib.resources import files

from specgen.config import GROUPS

HEAD = """\
specgen: offline batch generation with speculative decoding.

usage: python -m specgen [key=value ...]             one job
       python -m specgen -m key=a,b [key=value ...]  a sweep: one job for each combination
       python -m specgen resume=FOLDER               go on with an interrupted job
       python -m specgen merge=DIR,DIR output.dir=DIR  join the shards of a run

  -h --help      this text              --cfg job        print the configuration and stop
  --version      specgen's version      --config-dir DIR more YAML files (groups, experiments)
  -m --multirun  a sweep                --hydra-help     the underlying Hydra flags

Examples
  python -m specgen                                                    the embedded model, a minute at most
  python -m specgen model=hf model.path=ORG/NAME draft=eagle3 draft.path=ORG/HEAD data=jsonl data.path=in.jsonl
  python -m specgen draft=eagle draft.topk=4 draft.num_steps=5         a draft tree
  python -m specgen +experiment=steps                                  a ready-made sweep

Quoting: a value with = , [ ] ( ) { } : ~ or non-ASCII characters is quoted once more inside the shell's quotes.
  "model.path='runs/epoch=3'"    'sampling.stop=["<|eot|>"]'    "data.path='[v1](x).jsonl'"
  sampling.stop=[a,b]            'sampling.stop="\\n\\n"'         (in stop: \\n \\t \\\\ \\uXXXX are escapes)
"""


def help_text() -> str:
    """The whole text."""
    conf = files("specgen.conf")
    parts = [HEAD, "\nGroups (group=NAME)\n"]
    for group, (_, options) in GROUPS.items():
        parts.append(f"  {group}=\n")
        for option in options:
            first = (conf / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()[0]
            parts.append(f"    {option:<13}{first.lstrip('# ')}\n")
    parts.append("\nKeys (key=default)\n")
    for group in GROUPS:
        parts += [
            _line(key, default, comment) for key, default, comment in keys((conf / group / "base.yaml").read_text(encoding="utf-8"), f"{group}.")
        ]
    parts += [_line(key, default, comment) for key, default, comment in keys((conf / "config.yaml").read_text(encoding="utf-8"), "")]
    parts.append("\nExit codes: 0 all rows done, 2 a mistake in the call, 3 some rows are errors, 1 a defect of specgen, 130 / 143 interrupted.\n")
    return "".join(parts)


def _line(key: str, default: str, comment: str) -> str:
    return f"  {key + '=' + default:<40} {comment}\n"


def keys(text: str, prefix: str) -> list[tuple[str, str, str]]:
    """(dotted key, default, comment) for each commented key of a YAML file of at most two levels."""
    found, section = [], ""
    for line in text.splitlines():
        if match := re.fullmatch(r"( *)(\w+): *(.*?)(?:  # (.*))?", line):
            indent, name, default, comment = match.groups()
            if not indent:
                section = "" if default else name + "."
            if default and comment:
                found.append((prefix + (section if indent else "") + name, default, comment))
    return found
