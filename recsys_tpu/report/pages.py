"""The blocks of a report as Markdown and as one HTML file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from recsys_tpu.report.content import Block, Chart, Code, Section, Table, Text

_STYLE = """
body { font-family: sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border: 1px solid #ddd; padding: 0.25rem 0.6rem; text-align: left; word-break: break-word; }
th { background: #f5f5f5; }
pre { background: #f7f7f7; padding: 0.8rem; overflow-x: auto; }
svg { max-width: 100%; height: auto; }
"""


def markdown(title: str, sections: Sequence[Section]) -> str:
    """The report with its charts as links to ``report-<name>.svg``."""
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += [_markdown_block(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def html(title: str, sections: Sequence[Section]) -> str:
    """The report as one file that needs no other."""
    parts = [f"<h1>{escape(title)}</h1>"]
    for section in sections:
        parts.append(f"<h2>{escape(section.title)}</h2>")
        parts += [_html_block(block) for block in section.blocks]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def charts(sections: Sequence[Section]) -> dict[str, str]:
    """SVG by file name."""
    return {
        f"report-{block.name}.svg": block.svg
        for section in sections
        for block in section.blocks
        if isinstance(block, Chart)
    }


def _markdown_block(block: Block) -> str:
    match block:
        case Text():
            return block.text
        case Code():
            return f"```\n{block.text.rstrip()}\n```"
        case Chart():
            return f"![{block.name}](report-{block.name}.svg)"
        case Table():
            lines = [_row(block.columns), _row(["---"] * len(block.columns)), *map(_row, block.rows)]
            return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _html_block(block: Block) -> str:
    match block:
        case Text():
            return f"<p>{_bold(escape(block.text))}</p>"
        case Code():
            return f"<pre>{escape(block.text)}</pre>"
        case Chart():
            return block.svg
        case Table():
            head = "".join(f"<th>{escape(cell)}</th>" for cell in block.columns)
            rows = "".join(
                "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in block.rows
            )
            return f"<table><tr>{head}</tr>{rows}</table>"


def _bold(text: str) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
