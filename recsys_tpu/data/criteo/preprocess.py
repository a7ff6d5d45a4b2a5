"""Preprocess a Criteo log: scan the files, plan the parts, fit a vocabulary, encode, describe the result."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from recsys_tpu.data.criteo import work
from recsys_tpu.data.criteo.encode import FIRST_HASH_ID, Encoder, HashedEncoder, VocabularyEncoder
from recsys_tpu.data.criteo.plan import Part, group_parts, plan_parts
from recsys_tpu.data.criteo.pool import Report, run_tasks
from recsys_tpu.data.criteo.progress import phase
from recsys_tpu.data.criteo.recipe import Hashed, Recipe, Vocabulary
from recsys_tpu.data.criteo.schema import DENSE_FEATURES, SPARSE_FEATURES
from recsys_tpu.data.criteo.source import READ_BYTES, SourceError, SourceFile, expand_inputs, scan
from recsys_tpu.data.criteo.splits import RowRange, resolve_splits
from recsys_tpu.data.criteo.vocabulary import Run, write_vocabulary
from recsys_tpu.data.criteo.work import BadRowError, Job, Tally
from recsys_tpu.data.criteo.workspace import Workspace, check_same
from recsys_tpu.data.metadata import METADATA_FILE, DatasetError, DatasetMetadata, Split

REJECTS_FILE = "rejects.jsonl"
VOCABULARY_DIRECTORY = "vocabulary"


def preprocess(
    inputs: Sequence[str],
    output: Path,
    recipe: Recipe,
    *,
    jobs: int,
    max_bad: int | None = None,
    block_bytes: int = READ_BYTES,
    console: Console | None = None,
) -> DatasetMetadata:
    """Turn Criteo logs into a directory of Parquet files that `DatasetMetadata` describes.

    A run that was killed continues where it stopped when called again in the same way.

    Args:
        inputs: paths or globs of the source files, plain or gzip.
        output: directory to write; new, empty, or begun by an earlier run of the same recipe.
        recipe: every choice that decides the content.
        jobs: worker processes.
        max_bad: None makes a bad row an error; otherwise up to so many are skipped and recorded.
        block_bytes: text parsed at once; decides speed and memory, never content.
        console: where progress and the report go.

    Raises:
        SourceError: a file is missing, empty, damaged or changed.
        BadRowError: a bad row, or too many.
        SplitError: the splits don't fit the files.
        DatasetError: the output directory is in use or holds something else.
        OSError: for one, the disk is full.
    """
    console = console or Console(quiet=True)
    paths = expand_inputs(inputs)
    if (output / METADATA_FILE).exists():
        return _already_complete(output, paths, recipe, console)
    with Workspace(output) as workspace:
        workspace.claim("recipe", recipe.describe())
        sources = _scan(workspace, paths, jobs, console)
        workspace.claim("source", {"files": [_identity(source) for source in sources]})
        ranges = resolve_splits(
            recipe.splits,
            names=[source.name for source in sources],
            rows=[source.lines for source in sources],
            last_day=recipe.last_day,
        )
        parts = plan_parts(sources, ranges, recipe.rows_per_part)
        job = Job(output, recipe, sources, max_bad, block_bytes)
        encoder, num_embeddings = _make_encoder(workspace, job, parts, jobs, console)
        job = replace(job, encoder=encoder)
        _run(workspace, "encode", work.encode, work.encode_step, job, parts, jobs, console)
        metadata = _finish(workspace, job, ranges, parts, num_embeddings)
        metadata.save(output)
        workspace.delete()
    _print_report(console, output, metadata)
    return metadata


def _already_complete(
    output: Path, paths: Sequence[str], recipe: Recipe, console: Console
) -> DatasetMetadata:
    """Metadata of a complete directory, if it was made by this recipe from files of these names and sizes."""
    metadata = DatasetMetadata.load(output)
    stored = {key: metadata.recipe.get(key) for key in recipe.describe()}
    check_same(output, stored, recipe.describe())
    files = metadata.source["files"]
    assert isinstance(files, list)
    wanted = [{"name": Path(path).name, "bytes": Path(path).stat().st_size} for path in paths]
    found = [{key: item[key] for key in ("name", "bytes")} for item in files if isinstance(item, dict)]
    check_same(output, {"source": found}, {"source": wanted})
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(output / "_work")  # killed between writing metadata.json and this
    console.print(f"{output} is already complete: nothing to do")
    return metadata


def _identity(source: SourceFile) -> dict[str, Any]:
    """What makes a source file the same one, wherever it lies."""
    content = asdict(source)
    return {"name": source.name} | {
        key: content[key] for key in ("bytes", "sha256", "lines", "blank_lines_at_end")
    }


def _scan(workspace: Workspace, paths: Sequence[str], jobs: int, console: Console) -> list[SourceFile]:
    """Scan the files that an earlier run didn't scan or that were touched since."""
    tasks = [(workspace.output, index, path) for index, path in enumerate(paths)]
    todo = [task for task in tasks if _stored_scan(*task) is None]
    total = sum(Path(path).stat().st_size for _, _, path in todo)
    with phase(console, "scan", total, unit="MB", scale=1_000_000) as report:
        run_tasks(_scan_file, todo, jobs=jobs, report=report)
    sources = [_stored_scan(*task) for task in tasks]
    for path, source in zip(paths, sources, strict=True):
        if source is None:
            raise SourceError(f"{path}: changed while it was read; let it be and run again")
    return [source for source in sources if source is not None]


def _scan_file(task: tuple[Path, int, str], report: Report) -> None:
    output, index, path = task
    Workspace(output).save(f"scan/{index}", asdict(scan(path, report)))


def _stored_scan(output: Path, index: int, path: str) -> SourceFile | None:
    content = Workspace(output).load(f"scan/{index}")
    if content is None:
        return None
    source = SourceFile(**content)  # type: ignore[arg-type]
    status = Path(path).stat()
    current = (path, status.st_size, status.st_mtime_ns)
    return source if (source.path, source.bytes, source.mtime_ns) == current else None


def _make_encoder(
    workspace: Workspace, job: Job, parts: Sequence[Part], jobs: int, console: Console
) -> tuple[Encoder, dict[str, int]]:
    """The encoder and each feature's table size; fits the vocabulary where the recipe has one."""
    ids = job.recipe.ids
    if isinstance(ids, Hashed):
        return HashedEncoder(ids.num_embeddings), dict(zip(SPARSE_FEATURES, ids.num_embeddings, strict=True))
    counted = [part for part in parts if part.split == "train" or ids.fit_on == "all"]
    if not counted:
        raise ValueError("a vocabulary is fitted on the train split: give --split train=FIRST-LAST")
    hash_files = [workspace.root / VOCABULARY_DIRECTORY / f"{name}.hashes" for name in SPARSE_FEATURES]
    if workspace.load("vocabulary") is None:
        _run(workspace, "count", work.count_hashes, work.count_step, job, counted, jobs, console)
        kept = _fit(workspace, ids, work.stored_runs(workspace, counted), hash_files, console)
        workspace.save("vocabulary", kept)
    sizes = workspace.load("vocabulary")
    assert sizes is not None
    if ids.num_embeddings is None:
        num_embeddings = {name: int(str(sizes[name])) + FIRST_HASH_ID for name in SPARSE_FEATURES}
    else:
        num_embeddings = dict(zip(SPARSE_FEATURES, ids.num_embeddings, strict=True))
    return VocabularyEncoder(hash_files, ids.num_embeddings), num_embeddings


def _fit(
    workspace: Workspace, ids: Vocabulary, runs: Sequence[Run], hash_files: Sequence[Path], console: Console
) -> dict[str, int]:
    """Write the vocabulary of every feature; returns the number of hashes kept of each."""
    directory = workspace.output / VOCABULARY_DIRECTORY
    directory.mkdir(exist_ok=True)
    hash_files[0].parent.mkdir(exist_ok=True)
    kept = {}
    with phase(console, "vocabulary", len(SPARSE_FEATURES), unit="features") as report:
        for feature, name in enumerate(SPARSE_FEATURES):
            kept[name] = write_vocabulary(
                feature,
                runs,
                min_count=ids.min_count,
                table_file=directory / f"{name}.parquet",
                hash_file=hash_files[feature],
            )
            report(1)
    shutil.rmtree(workspace.root / "count")
    return kept


def _run(
    workspace: Workspace,
    name: str,
    function: work.PartsFunction,
    step: Callable[[Part], str],
    job: Job,
    parts: Sequence[Part],
    jobs: int,
    console: Console,
) -> None:
    """Do `function` for the parts whose `step` no earlier run finished."""
    todo = [part for part in parts if workspace.load(step(part)) is None]
    finished = sum(part.lines for part in parts) - sum(part.lines for part in todo)
    if finished:
        console.print(f"{name}: {finished:,} rows were finished earlier")
    tasks = [(job, group) for group in group_parts(todo, job.sources)]
    with phase(console, name, sum(part.lines for part in todo), unit="rows") as report:
        run_tasks(function, tasks, jobs=jobs, report=report)


def _finish(
    workspace: Workspace,
    job: Job,
    ranges: Sequence[RowRange],
    parts: Sequence[Part],
    num_embeddings: dict[str, int],
) -> DatasetMetadata:
    """Add everything up, check that no row is lost, and gather the rejects."""
    tallies = {part: Tally(**workspace.load(work.encode_step(part))) for part in parts}  # type: ignore[arg-type]
    rejected = sum(tally.rejected for tally in tallies.values())
    if rejected > (job.max_bad or 0):
        raise BadRowError(
            f"{rejected} bad rows in all, more than --max-bad {job.max_bad or 0}; "
            f"{workspace.root / 'encode'}/*.rejects.jsonl lists them. Mend the files or raise --max-bad"
        )
    splits = {item.split: _split(job, item.split, tallies) for item in ranges}
    rows_read = sum(part.lines for part in parts)
    rows_written = sum(split.rows for split in splits.values())
    assert rows_read == rows_written + rejected, "a row was lost or written twice"
    if rejected:
        _gather_rejects(workspace, parts)
    return DatasetMetadata(
        dense_features=list(DENSE_FEATURES),
        sparse_features=list(SPARSE_FEATURES),
        num_embeddings=num_embeddings,
        row_group_rows=job.recipe.row_group_rows,
        splits=splits,
        recipe=job.recipe.describe()
        | {"split_rows": {item.split: [item.first, item.last] for item in ranges}},
        source={
            "files": [_identity(source) for source in job.sources],
            "rows_read": rows_read,
            "rows_written": rows_written,
            "rows_rejected": rejected,
            "rejects_file": REJECTS_FILE if rejected else None,
            "rows_outside_splits": sum(source.lines for source in job.sources) - rows_read,
            "crlf_lines": sum(tally.crlf_lines for tally in tallies.values()),
            "blank_lines_at_end": sum(source.blank_lines_at_end for source in job.sources),
        },
    )


def _split(job: Job, name: str, tallies: dict[Part, Tally]) -> Split:
    own = {part: tally for part, tally in tallies.items() if part.split == name}
    rows = sum(tally.rows for tally in own.values())
    if not rows:
        raise DatasetError(f"split {name} has no valid row; choose other rows with --split")
    files = []
    for part, tally in own.items():
        if tally.rows:
            files.append(part.file)
        else:
            (job.output / part.file).unlink(missing_ok=True)
    positives = sum(tally.positives for tally in own.values()) if job.recipe.labelled else None
    return Split(rows=rows, positives=positives, files=files)


def _gather_rejects(workspace: Workspace, parts: Sequence[Part]) -> None:
    with (workspace.output / REJECTS_FILE).open("wb") as target:
        for part in parts:
            path = work.rejects_path(workspace, part)
            if path.exists():
                with path.open("rb") as source:
                    shutil.copyfileobj(source, target)


def _print_report(console: Console, output: Path, metadata: DatasetMetadata) -> None:
    for name, split in metadata.splits.items():
        rate = "no labels" if split.positives is None else f"click rate {split.positives / split.rows:.4f}"
        console.print(f"{name}: {split.rows:,} rows, {rate}, {len(split.files)} files")
    source = metadata.source
    console.print(
        f"{source['rows_read']:,} rows read = {source['rows_written']:,} written "
        f"+ {source['rows_rejected']:,} rejected"
    )
    if source["rows_rejected"]:
        console.print(f"rejected rows with file, line and reason: {output / REJECTS_FILE}")
    for key, meaning in (
        ("rows_outside_splits", "rows lie outside the splits and were not read"),
        ("crlf_lines", "lines ended in CRLF (accepted)"),
        ("blank_lines_at_end", "blank lines at the end of files (ignored)"),
    ):
        if source[key]:
            console.print(f"{source[key]:,} {meaning}")
    console.print(f"wrote {output}")
