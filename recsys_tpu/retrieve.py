"""Index, query and serve a two-tower model: `python -m recsys_tpu.retrieve --help`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from recsys_tpu.checkpoint_command import trainer_of
from recsys_tpu.errors import ConfigError, run_command
from recsys_tpu.quiet import quiet_libraries
from recsys_tpu.runtime.activation import activate

_KINDS = ("flat", "ivfpq", "hnsw")  # as in retrieval/index.py, which imports faiss
_EXAMPLES = """examples:
  python -m recsys_tpu.retrieve --checkpoint runs/two-tower/checkpoints/step_00000576 --user 42 --k 10
  python -m recsys_tpu.retrieve index --checkpoint runs/two-tower/checkpoints/step_00000576 --output bundle
  python -m recsys_tpu.retrieve query --bundle bundle --user 42 --k 10 --index hnsw
  python -m recsys_tpu.retrieve query --bundle bundle --history 50 172 181
  python -m recsys_tpu.retrieve serve --bundle bundle --port 8000

`index` writes a bundle: the query tower, the item vectors and FAISS indexes with a report of their recall
and speed. `query` and `serve` read a bundle and need no TorchRec; `query --checkpoint` makes one for the
occasion. Without a subcommand, `query` is meant.
"""


def main() -> None:
    arguments = _parse(sys.argv[1:])
    activate("cpu")  # before anything imports torch; the towers of a bundle run on the host
    quiet_libraries()
    arguments.run(arguments)


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recsys_tpu.retrieve",
        description="Index, query and serve a two-tower model.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="{index,query,serve}")

    index = commands.add_parser("index", help="write a bundle from a checkpoint")
    index.add_argument("--checkpoint", type=Path, required=True, help="folder step_N of a two-tower run")
    index.add_argument("--output", type=Path, required=True, help="folder of the bundle")
    index.add_argument("--kind", choices=_KINDS, nargs="+", default=["flat", "hnsw"], help="indexes to build")
    index.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the stored config")
    index.set_defaults(run=_index)

    query = commands.add_parser("query", help="print the best items of a user or a history")
    source = query.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", type=Path, help="folder step_N of a two-tower run")
    source.add_argument("--bundle", type=Path, help="folder that `index` wrote")
    query.add_argument("--user", help="key of a known user")
    query.add_argument("--history", nargs="+", default=[], help="keys of items, oldest first")
    query.add_argument("--k", type=int, default=10)
    query.add_argument("--index", choices=_KINDS, default="flat")
    query.set_defaults(run=_query)

    serve = commands.add_parser("serve", help="answer queries over HTTP")
    serve.add_argument("--bundle", type=Path, required=True, help="folder that `index` wrote")
    serve.add_argument("--index", choices=_KINDS, default="flat")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000)
    serve.set_defaults(run=_serve)

    if words and words[0].startswith("--") and words[0] != "--help":
        words = ["query", *words]
    return parser.parse_args(words)


def _index(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    reports = _export(arguments.checkpoint, arguments.output, arguments.kind, arguments.overrides)
    table = Table(title=f"{reports[0].items:,} items, {reports[0].queries:,} queries, {reports[0].k} best")
    for name in ("index", "bytes", "recall against exact", "ms p50", "ms p99", "ms a query in one batch"):
        table.add_column(name, justify="left" if name == "index" else "right")
    for report in reports:
        times = (report.single_ms_p50, report.single_ms_p99, report.batch_ms_per_query)
        table.add_row(
            report.kind, f"{report.bytes:,}", f"{report.recall:.4f}", *(f"{value:.3f}" for value in times)
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(f"wrote {arguments.output}")


def _export(checkpoint: Path, output: Path, kinds: list[Any], overrides: list[str]) -> list[Any]:
    from recsys_tpu.retrieval.export import export_bundle

    with trainer_of(checkpoint, [*overrides, "runtime.device=cpu", "runtime.compile=false"]) as trainer:
        return export_bundle(trainer, checkpoint, output, kinds)


def _query(arguments: argparse.Namespace) -> None:
    if arguments.user is None and not arguments.history:
        raise ConfigError("give --user KEY, --history KEY ..., or both")
    if arguments.k < 1:
        raise ConfigError(f"--k {arguments.k}: ask for 1 item or more")
    if arguments.bundle is not None:
        return _print_best(arguments.bundle, arguments)
    with tempfile.TemporaryDirectory() as folder:
        _export(arguments.checkpoint, Path(folder), [arguments.index], [])
        return _print_best(Path(folder), arguments)


def _print_best(bundle: Path, arguments: argparse.Namespace) -> None:
    from recsys_tpu.retrieval.recommender import Query, Recommender

    recommender = Recommender(bundle, arguments.index)
    query = Query(
        user=recommender.user_key(arguments.user) if arguments.user is not None else None,
        history=[recommender.item_key(text) for text in arguments.history],
    )
    for place, found in enumerate(recommender.recommend([query], arguments.k)[0], start=1):
        print(f"{place:>4}  item {found.item}  score {found.score:.5f}")


def _serve(arguments: argparse.Namespace) -> None:
    import uvicorn

    from recsys_tpu.retrieval.recommender import Recommender
    from recsys_tpu.retrieval.service import create_app

    app = create_app(Recommender(arguments.bundle, arguments.index))
    # longer than clients and proxies keep an idle connection, so that none sends into a closed one
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning", timeout_keep_alive=75)


if __name__ == "__main__":
    run_command(main)
