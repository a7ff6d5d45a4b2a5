"""What a worker does with parts of a source file: count their hashes, or encode and write them.

Both treat bad rows alike and record each part that they finish.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from recsys_tpu.data.criteo.diagnose import BadRow
from recsys_tpu.data.criteo.encode import Encoder, transform_dense
from recsys_tpu.data.criteo.parse import Rows, parse_block
from recsys_tpu.data.criteo.plan import Part
from recsys_tpu.data.criteo.pool import Report
from recsys_tpu.data.criteo.recipe import Recipe
from recsys_tpu.data.criteo.source import INDEX_LINES, LineStream, SourceError, SourceFile
from recsys_tpu.data.criteo.vocabulary import HashCounter, Run
from recsys_tpu.data.criteo.workspace import Workspace
from recsys_tpu.data.criteo.writer import PartWriter
from recsys_tpu.errors import UserError


class BadRowError(UserError, ValueError):
    """A row is not valid, or more rows than allowed are not; names file, line and what to do."""


@dataclass(frozen=True)
class Job:
    """What all tasks share.  `max_bad` is None where a bad row is an error, else how many may be skipped."""

    output: Path
    recipe: Recipe
    sources: Sequence[SourceFile]
    max_bad: int | None
    block_bytes: int
    encoder: Encoder | None = None


@dataclass
class Tally:
    """Counts of one part; lines = rows + rejected."""

    rows: int = 0
    positives: int = 0
    rejected: int = 0
    crlf_lines: int = 0


PartsFunction = Callable[[tuple[Job, Sequence[Part]], Report], None]


def count_step(part: Part) -> str:
    return f"count/{part.key}"


def encode_step(part: Part) -> str:
    return f"encode/{part.key}"


def rejects_path(workspace: Workspace, part: Part) -> Path:
    return workspace.root / "encode" / f"{part.key}.rejects.jsonl"


def count_hashes(task: tuple[Job, Sequence[Part]], report: Report) -> None:
    """Count the hashes of each part, for the vocabulary."""
    job, parts = task
    workspace = Workspace(job.output)

    def count(part: Part, blocks: Iterator[Rows], tally: Tally, bad: list[BadRow]) -> None:
        stem = workspace.root / "count" / part.key
        stem.parent.mkdir(parents=True, exist_ok=True)
        counter = HashCounter(stem)
        for rows in blocks:
            counter.add(rows.hashes, rows.hashes_missing)
        workspace.save(count_step(part), {"runs": [asdict(run) for run in counter.finish()]})

    _for_each_part(job, parts, count, report)


def stored_runs(workspace: Workspace, parts: Sequence[Part]) -> list[Run]:
    """The runs of all counted parts."""
    runs: list[Run] = []
    for part in parts:
        content = workspace.load(count_step(part))
        assert content is not None
        stored = content["runs"]
        assert isinstance(stored, list)
        runs.extend(Run(**run) for run in stored)
    return runs


def encode(task: tuple[Job, Sequence[Part]], report: Report) -> None:
    """Write each part and its rejects."""
    job, parts = task
    workspace = Workspace(job.output)
    encoder, recipe = job.encoder, job.recipe
    assert encoder is not None

    def write(part: Part, blocks: Iterator[Rows], tally: Tally, bad: list[BadRow]) -> None:
        path = job.output / part.file
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = workspace.root / "encode" / f"{part.key}.tmp"
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with PartWriter(
            path,
            temporary=temporary,
            row_group_rows=recipe.row_group_rows,
            compression=recipe.compression,
        ) as writer:
            for rows in blocks:
                writer.add(
                    rows.labels,
                    transform_dense(rows.counts),
                    encoder.encode(rows.hashes, rows.hashes_missing),
                )
        tally.rows, tally.positives = writer.rows, writer.positives
        assert tally.rows + tally.rejected == part.lines, "a row was lost or written twice"
        _write_rejects(rejects_path(workspace, part), job.sources[part.source].name, bad)
        workspace.save(encode_step(part), asdict(tally))

    _for_each_part(job, parts, write, report)


def _for_each_part(
    job: Job,
    parts: Sequence[Part],
    handle: Callable[[Part, Iterator[Rows], Tally, list[BadRow]], None],
    report: Report,
) -> None:
    """Stream parts, all of one source file and ascending, through `handle`."""
    source = job.sources[parts[0].source]
    with Path(source.path).open("rb") as file:
        status = os.fstat(file.fileno())
        if (status.st_size, status.st_mtime_ns) != (source.bytes, source.mtime_ns):
            raise SourceError(
                f"{source.path}: changed while it was read; let it be and preprocess into a new directory"
            )
        line = 1
        if source.offsets is not None:
            index = (parts[0].first_line - 1) // INDEX_LINES
            line += index * INDEX_LINES
            file.seek(source.offsets[index])
        stream = LineStream(
            source.path, file, line=line, compressed=source.offsets is None, read_bytes=job.block_bytes
        )
        with contextlib.closing(stream):
            for part in parts:
                tally, bad = Tally(), list[BadRow]()
                handle(part, _parsed_rows(job, source, stream, part, tally, bad, report), tally, bad)


def _parsed_rows(
    job: Job,
    source: SourceFile,
    stream: LineStream,
    part: Part,
    tally: Tally,
    bad: list[BadRow],
    report: Report,
) -> Iterator[Rows]:
    """Valid rows of a part, block by block; `tally` and `bad` take what was refused."""
    for first_line, text in stream.read(part.first_line, part.last_line):
        parsed = parse_block(text, first_line=first_line, labelled=job.recipe.labelled)
        tally.rejected += len(parsed.bad)
        tally.crlf_lines += parsed.crlf_lines
        bad.extend(parsed.bad)
        if parsed.bad and job.max_bad is None:
            row = parsed.bad[0]
            raise BadRowError(
                f"{source.path}: line {row.line}: {row.reason}. Mend the file, or skip and record such rows "
                "with --on-bad-row skip --max-bad N"
            )
        if job.max_bad is not None and tally.rejected > job.max_bad:
            raise too_many_bad_rows(job.max_bad, source.path, bad)
        yield parsed.rows
        report(len(parsed.rows.labels) + len(parsed.bad))


def too_many_bad_rows(max_bad: int, path: str, bad: Sequence[BadRow]) -> BadRowError:
    """The error of exceeding --max-bad, with some of the rows as examples."""
    examples = "; ".join(f"{path}: line {row.line}: {row.reason}" for row in bad[:3])
    return BadRowError(
        f"more than --max-bad {max_bad} bad rows, such as {examples}. Mend the file or raise --max-bad"
    )


def _write_rejects(path: Path, name: str, bad: Sequence[BadRow]) -> None:
    if not bad:
        return
    temporary = path.with_suffix(".tmp")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("w", encoding="utf-8") as file:
        for row in bad:
            raw = row.raw.decode("utf-8", errors="backslashreplace")
            file.write(json.dumps({"file": name, "line": row.line, "reason": row.reason, "raw": raw}) + "\n")
    temporary.replace(path)
