"""Draws terminal output as SVG: ``python -m specgen | python docs/images/terminal.py "python -m specgen" > docs/images/run.svg``.

Boundary: text in, SVG out, every character as it came.
"""

from __future__ import annotations

import sys
from html import escape

CHAR, LINE, MARGIN = 7.83, 18, 16  # pixels: width of a character at 13 px, height of a line, space around


def draw(command: str, output: str) -> str:
    """An SVG of a prompt with ``command`` and the lines of ``output`` below it."""
    lines = [f"$ {command}", *output.rstrip("\n").expandtabs().split("\n")]
    width = round(2 * MARGIN + CHAR * max(map(len, lines)))
    height = 2 * MARGIN + LINE * len(lines)
    rows = [
        f'<text x="{MARGIN}" y="{MARGIN + LINE * i + 13}" xml:space="preserve">{escape(line, quote=False)}</text>'
        for i, line in enumerate(lines)
        if line
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">',
            f"<title>Output of {escape(command, quote=False)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#161b22"/>',
            '<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="13" fill="#e6edf3">',
            *rows,
            "</g>",
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(draw(sys.argv[1], sys.stdin.read()))
