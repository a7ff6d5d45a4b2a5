"""MovieLens archives (100k, 1M, 20M, 25M) to a folder of events: every rating is one event.

Users of the 100k and 1M sets have age, gender and occupation; items of all sets have genres and a year.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl

from recsys_tpu.data.metadata import DatasetError

_GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama",
    "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
_YEAR = r"\((\d{4})\)\s*$"


def write_movielens(source: Path, directory: Path) -> None:
    """Write events.parquet, items.parquet and, where there are any features, users.parquet.

    Raises:
        DatasetError: `source` holds none of the known sets, or a file of it is not as published.
    """
    for marker, convert in _FORMATS.items():
        if (source / marker).is_file():
            try:
                tables = convert(source)
            except (pl.exceptions.PolarsError, OSError) as error:
                raise DatasetError(f"{source}: not as GroupLens publishes it ({error})") from error
            for name, table in tables.items():
                table.write_parquet(directory / f"{name}.parquet")
            return
    raise DatasetError(
        f"{source}: no MovieLens set here (looked for {', '.join(_FORMATS)}). Unpack ml-100k, ml-1m, ml-20m "
        "or ml-25m from https://grouplens.org/datasets/movielens/ and give its folder as data.path"
    )


def _read_100k(source: Path) -> dict[str, pl.DataFrame]:
    events = _separated(source / "u.data", ["user", "item", "rating", "timestamp"], "\t")
    users = _separated(source / "u.user", ["user", "age", "gender", "occupation", "zip"], "|")
    columns = ["item", "title", "released", "video_released", "url", *_GENRES]
    items = _separated(source / "u.item", columns, "|")
    genres = pl.concat_list(
        pl.when(pl.col(genre) == 1).then(pl.lit(genre)).otherwise(None) for genre in _GENRES
    ).list.drop_nulls()
    return {
        "events": _events(events),
        "users": users.select(
            pl.col("user"),
            ("age_" + (pl.col("age") // 10).cast(pl.String)).alias("age"),
            "gender",
            "occupation",
        ),
        "items": items.select("item", genres.alias("genres"), _year(pl.col("title"))),
    }


def _read_1m(source: Path) -> dict[str, pl.DataFrame]:
    events = _separated(source / "ratings.dat", ["user", "item", "rating", "timestamp"], "::")
    users = _separated(source / "users.dat", ["user", "gender", "age", "occupation", "zip"], "::")
    movies = _separated(source / "movies.dat", ["item", "title", "genres"], "::")
    return {
        "events": _events(events),
        "users": users.select("user", "age", "gender", "occupation"),
        "items": _movies(movies),
    }


def _read_csv_set(source: Path) -> dict[str, pl.DataFrame]:
    events = pl.read_csv(source / "ratings.csv").rename({"userId": "user", "movieId": "item"})
    movies = pl.read_csv(source / "movies.csv").rename({"movieId": "item"})
    return {"events": _events(events), "items": _movies(movies)}


_FORMATS: dict[str, Callable[[Path], dict[str, pl.DataFrame]]] = {
    "u.data": _read_100k,
    "ratings.dat": _read_1m,
    "ratings.csv": _read_csv_set,
}


def _separated(path: Path, columns: list[str], separator: str) -> pl.DataFrame:
    """A Latin-1 table without header; separators may have several characters, and quotes mean nothing."""
    text = path.read_text(encoding="latin-1")
    rows = pl.DataFrame({"line": [line for line in text.split("\n") if line]})
    fields = rows.select(pl.col("line").str.split(separator).alias("fields"))
    wrong = fields.with_row_index("row").filter(pl.col("fields").list.len() != len(columns))
    if len(wrong):
        raise DatasetError(
            f"{path}, line {wrong['row'][0] + 1}: {len(wrong['fields'][0])} fields, expected {len(columns)}"
        )
    split = fields.select(pl.col("fields").list.get(i).alias(name) for i, name in enumerate(columns))
    numeric = [name for name in columns if name in ("user", "item", "age", "timestamp", *_GENRES)]
    return split.with_columns(pl.col(name).cast(pl.Int64) for name in numeric)


def _events(ratings: pl.DataFrame) -> pl.DataFrame:
    return ratings.select("user", "item", "timestamp")


def _movies(movies: pl.DataFrame) -> pl.DataFrame:
    return movies.select("item", pl.col("genres").str.split("|"), _year(pl.col("title")))


def _year(title: pl.Expr) -> pl.Expr:
    return title.str.extract(_YEAR).cast(pl.Int64).alias("year")
