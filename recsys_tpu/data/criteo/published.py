"""What is known of the published Criteo logs, to compare a download with.

Rows per day of the 1TB log: the sizes that HugeCTR's, TorchRec's and NVIDIA's loaders have in common (their
sum is MLPerf's 4,195,197,692 training rows and day 23). Click rates are approximate: no source gives counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_DAYS = (
    195_841_983, 199_563_535, 196_792_019, 181_115_208, 152_115_810, 172_548_507, 204_846_845, 200_801_003,
    193_772_492, 198_424_372, 185_778_055, 153_588_700, 169_003_364, 194_216_520, 194_081_279, 187_154_596,
    177_984_934, 163_382_602, 142_061_091, 156_534_237, 193_627_464, 192_215_183, 189_747_893, 178_274_637,
)  # fmt: skip


@dataclass(frozen=True)
class PublishedLog:
    """One log and its published protocol.

    Attributes:
        rows: by stem of the file's name (``day_0`` for day_0.gz), in order.
        splits: rows of each split, ``val`` being the first half of the last day.
        click_rates: lowest and highest plausible share of clicks in a split.
    """

    rows: dict[str, int]
    splits: dict[str, int]
    click_rates: tuple[float, float]


def _halved(train: int, last_day: int) -> dict[str, int]:
    return {"train": train, "first half": (last_day + 1) // 2, "second half": last_day // 2}


PUBLISHED_LOGS = {
    "kaggle": PublishedLog(
        {"train": 45_840_617}, _halved(39_291_958, 45_840_617 - 39_291_958), (0.245, 0.267)
    ),
    "1tb": PublishedLog(
        {f"day_{day}": rows for day, rows in enumerate(_DAYS)},
        _halved(sum(_DAYS[:-1]), _DAYS[-1]),
        (0.02, 0.05),
    ),
}


def mlperf_checksums() -> dict[str, str]:
    """MD5 by name of the files that MLPerf distributes, one-hot (.npy) and multi-hot (.npz)."""
    lines = Path(__file__).with_name("mlperf.md5").read_text(encoding="ascii").splitlines()
    pairs = [line.split() for line in lines if not line.startswith("#")]
    return {name: digest for digest, name in pairs}
