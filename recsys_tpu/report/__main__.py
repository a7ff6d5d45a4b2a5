"""Write report.html and report.md about a run: `python -m recsys_tpu.report runs/NAME [runs/NAME ...]`.

Several runs must differ in their seed only; the report then has the mean and the standard deviation.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from recsys_tpu.errors import run_command
from recsys_tpu.report.content import report_sections
from recsys_tpu.report.pages import charts, html, markdown
from recsys_tpu.report.run_record import read_run


def write_report(directories: Sequence[Path], output: Path) -> None:
    """Write the report of runs to a folder.

    Raises:
        ReportError: a folder is not that of an evaluated run, or the runs differ in more than the seed.
    """
    runs = [read_run(directory) for directory in directories]
    sections = report_sections(runs)
    title = f"{runs[0].config.model.kind}: {', '.join(run.directory.name for run in runs)}"
    output.mkdir(parents=True, exist_ok=True)
    for name, text in {
        "report.md": markdown(title, sections),
        "report.html": html(title, sections),
        **charts(sections),
    }.items():
        (output / name).write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m recsys_tpu.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, such as runs/dlrm"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write (default: the first run)")
    options = parser.parse_args(arguments)
    output = options.output or options.runs[0]
    run_command(lambda: write_report(options.runs, output))
    print(f"wrote {output / 'report.html'} and {output / 'report.md'}")


if __name__ == "__main__":
    main()
