"""Draw the text diagrams of the documentation as SVG.

    python tools/draw_diagrams.py          write docs/diagrams/*.svg from docs/diagrams/*.txt
    python tools/draw_diagrams.py --check  exit with 1 if an SVG differs from what would be written

``+``, ``-`` and ``|`` draw lines, ``<`` and ``>`` at their ends arrow heads. A rectangle of lines is a box, which is
highlighted if its upper edge is drawn with ``=``. The first of several lines of text in a box is bold.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs/diagrams"
WIDTH, HEIGHT = 8, 17  # of a character, in pixels
ACROSS = re.compile(r"[-=<>][-=<>+|]|[+|][-=<>]")
DOWN = re.compile(r"\|[|+]|\+\|")

STYLE = """\
  <style>
    text { font: 13px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #24292f; white-space: pre }
    .title { font-weight: bold }
    rect { fill: #ffffff } .box { fill: #eef2f9 } .inner { fill: #ffffff } .marked { fill: #ffe2a8 }
    .lines { stroke: #6b7686; fill: none } .heads { fill: #6b7686 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e3e7ee }
      rect { fill: #1c2029 } .box { fill: #2a303d } .inner { fill: #1c2029 } .marked { fill: #6b4e12 }
      .lines { stroke: #939eb0 } .heads { fill: #939eb0 }
    }
  </style>"""


class Grid:
    """The characters of a diagram, by column and row."""

    def __init__(self, text: str) -> None:
        self.rows = text.rstrip("\n").split("\n")
        self.size = max(map(len, self.rows)), len(self.rows)
        #: Pairs of neighbouring characters that a line joins, by the first of both.
        self.across, self.down = set[tuple[int, int]](), set[tuple[int, int]]()
        for y in range(self.size[1]):
            for x in range(self.size[0]):
                if ACROSS.match(self.at(x, y) + self.at(x + 1, y)):
                    self.across.add((x, y))
                if DOWN.match(self.at(x, y) + self.at(x, y + 1)):
                    self.down.add((x, y))

    def at(self, x: int, y: int) -> str:
        """Return the character at a place, a space outside."""
        return self.rows[y][x] if 0 <= y < len(self.rows) and 0 <= x < len(self.rows[y]) else " "

    def is_line(self, x: int, y: int) -> bool:
        """Return True if the character at a place is a part of a line."""
        return not {(x, y), (x - 1, y)}.isdisjoint(self.across) or not {(x, y), (x, y - 1)}.isdisjoint(
            self.down
        )

    def find_boxes(self) -> list[tuple[int, int, int, int]]:
        """Return the rectangles as left, top, right, bottom; larger ones first."""
        boxes = []
        for x, y in sorted(self.across & self.down):
            if self.at(x, y) != "+":
                continue
            right = x + 1
            while (right - 1, y) in self.across and not (
                self.at(right, y) == "+" and (right, y) in self.down
            ):
                right += 1
            bottom = y + 1
            while (x, bottom - 1) in self.down and not (
                self.at(x, bottom) == "+" and (x, bottom) in self.across
            ):
                bottom += 1
            edges = {(column, bottom) for column in range(x, right)} <= self.across
            if edges and {(right, row) for row in range(y, bottom)} <= self.down:
                boxes.append((x, y, right, bottom))
        return sorted(boxes, key=lambda box: (box[0] - box[2]) * (box[3] - box[1]))


def draw(text: str, title: str) -> str:
    """Return the SVG of a diagram."""
    grid = Grid(text)
    columns, rows = grid.size

    def place(x: float, y: float) -> str:
        return f"{(x + 1.5) * WIDTH:g} {(y + 1) * HEIGHT:g}"

    shapes, boxes = [], grid.find_boxes()
    for left, top, right, bottom in boxes:
        inside = any(a < left and b < top and c > right and d > bottom for a, b, c, d in boxes)
        style = "marked" if grid.at(left + 1, top) == "=" else "inner" if inside else "box"
        x, y = place(left, top).split()
        size = f'width="{(right - left) * WIDTH}" height="{(bottom - top) * HEIGHT}"'
        shapes.append(f'  <rect class="{style}" x="{x}" y="{y}" {size}/>')
    lines = [f"M{place(x, y)}h{WIDTH}" for x, y in sorted(grid.across)]
    lines += [f"M{place(x, y)}v{HEIGHT}" for x, y in sorted(grid.down)]
    shapes.append(f'  <path class="lines" d="{"".join(lines)}"/>')
    heads = []
    for x, y in ((x, y) for y in range(rows) for x in range(columns) if grid.is_line(x, y)):
        if grid.at(x, y) in "<>":
            step = WIDTH if grid.at(x, y) == ">" else -WIDTH
            heads.append(f"M{place(x, y - 0.25)}v{HEIGHT / 2:g}l{step} {-HEIGHT / 4:g}z")
    if heads:
        shapes.append(f'  <path class="heads" d="{"".join(heads)}"/>')
    for y in range(rows):
        free = "".join(" " if grid.is_line(x, y) else grid.at(x, y) for x in range(columns))
        for found in re.finditer(r"\S+(?: \S+)*", free):
            x = found.start()
            first = (x, y - 1) in grid.across and (x, y + 1) not in grid.across
            style = ' class="title"' if first else ""
            at = f'x="{(x + 1) * WIDTH:g}" y="{(y + 1) * HEIGHT + 4:g}" textLength="{len(found[0]) * WIDTH}"'
            shapes.append(f"  <text{style} {at}>{escape(found[0])}</text>")
    size = (columns + 2) * WIDTH, (rows + 1) * HEIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" viewBox="0 0 {size[0]} {size[1]}" role="img">',
            f"  <title>{escape(title)}</title>",
            STYLE,
            '  <rect width="100%" height="100%" rx="6"/>',
            *shapes,
            "</svg>\n",
        ]
    )


def main(arguments: list[str]) -> int:
    """Write or check all diagrams; return the exit status."""
    status = 0
    for source in sorted(FOLDER.glob("*.txt")):
        title, _, text = source.read_text(encoding="utf-8").partition("\n\n")
        target, content = source.with_suffix(".svg"), draw(text, title)
        if target.exists() and target.read_text(encoding="utf-8") == content:
            continue
        if "--check" in arguments:
            print(f"{target.name} differs from what tools/draw_diagrams.py would write")
            status = 1
        else:
            target.write_text(content, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
