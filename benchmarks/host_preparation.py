"""How many ids a second one core prepares for the device, beside TorchRec's own host work on the same batch.

    python benchmarks/host_preparation.py --features 26 --samples 8192 --pooling 4

Ours is what a rank does to the ids that it received: check every id, put bags in sample-major order, sort
by row, deduplicate, pad.  TorchRec's is `block_bucketize` (routing to --ranks ranks) and the permutation
after the exchange, which a rank of either sharder does as well.  "both" is the two together: all the host
work of a row-wise rank, without the network.  The last line is the same with deduplication before the
exchange: distinct ids are routed, an owner sorts what it gets, and bags are laid out at home; no TorchRec
part is in it.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # a CPU benchmark, also where torch_tpu is installed

import numpy as np
import torch
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.embeddings.bags import StackFeatures, sort_for_stack
from recsys_tpu.embeddings.capacity import Capacities
from recsys_tpu.embeddings.preparation import sort_ids
from recsys_tpu.sharding.lookups import jagged_features
from recsys_tpu.sharding.row_routing import RowRouting, TableShard
from recsys_tpu.sharding.source_rows import Column, in_slots, pooled_source
from recsys_tpu.sharding.validation import FeatureLimits, Validation, check_features


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=int, default=26)
    parser.add_argument("--samples", type=int, default=8192, help="of the whole exchange")
    parser.add_argument("--pooling", type=int, default=4, help="ids of the longest bag; 1: one id a bag")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--skew", type=float, default=1.1, help="Zipf exponent of the ids; 0: uniform")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batch = make_batch(arguments)
    ids = len(batch.values())
    print(f"{platform.machine()}, {os.cpu_count()} cores, one used; {vars(arguments)}; {ids:,} ids")
    works = {
        "ours: check, sort, dedup, pad": lambda: ours(batch, arguments),
        "TorchRec: bucketize, permute": lambda: torchrec(batch, arguments),
        "ours, deduplicated first": lambda: deduplicated(batch, arguments, routing),
    }
    routing = row_wise(arguments)
    seconds = side_by_side(works, arguments.rounds)
    for name, spent in seconds.items():
        print(f"{name:32} {spent * 1e3:8.1f} ms  {ids / spent / 1e6:6.2f} M ids/s")
    mine, theirs, _ = seconds.values()
    print(f"{'both':32} {(mine + theirs) * 1e3:8.1f} ms  {ids / (mine + theirs) / 1e6:6.2f} M ids/s")
    print(f"ours takes {mine / theirs:.2f} x the time of TorchRec's")


def make_batch(arguments: argparse.Namespace) -> KeyedJaggedTensor:
    rng = np.random.default_rng(0)
    bags = arguments.features * arguments.samples
    lengths = rng.integers(1, arguments.pooling + 1, bags)
    count = int(lengths.sum())
    if arguments.skew:
        ids = (rng.zipf(arguments.skew, count) * 7919) % arguments.rows
    else:
        ids = rng.integers(0, arguments.rows, count)
    return KeyedJaggedTensor(
        keys=[f"f{index}" for index in range(arguments.features)],
        values=torch.from_numpy(ids),
        lengths=torch.from_numpy(lengths),
    )


def ours(batch: KeyedJaggedTensor, arguments: argparse.Namespace) -> None:
    names = batch.keys()
    configs = [
        EmbeddingBagConfig(num_embeddings=arguments.rows, embedding_dim=8, name=key, feature_names=[key])
        for key in names
    ]
    check_features(batch, FeatureLimits.of_tables(configs), Validation.FULL)
    features = np.arange(arguments.features)
    stack = StackFeatures(features, features * arguments.rows, arguments.features * arguments.rows)
    ids = sort_for_stack(jagged_features(batch), stack, mean=False)
    ids.pad(*Capacities().hold([ids.sizes])[0])


def row_wise(arguments: argparse.Namespace) -> RowRouting:
    block = -(-arguments.rows // arguments.ranks)
    return RowRouting(
        [
            [TableShard(f"t{table}", rank * block, block, 0, 8) for table in range(arguments.features)]
            for rank in range(arguments.ranks)
        ]
    )


def deduplicated(batch: KeyedJaggedTensor, arguments: argparse.Namespace, routing: RowRouting) -> None:
    tables = [f"t{table}" for table in range(arguments.features)]
    configs = [
        EmbeddingBagConfig(num_embeddings=arguments.rows, embedding_dim=8, name=table, feature_names=[key])
        for table, key in zip(tables, batch.keys(), strict=True)
    ]
    check_features(batch, FeatureLimits.of_tables(configs), Validation.FULL)
    ends = batch.offset_per_key()
    values = batch.values().numpy()
    routed = routing.route([values[first:last] for first, last in pairwise(ends)], tables)
    # As many ids as this rank sends arrive at it, from all ranks: here its own stand for them.
    rows = (
        routed.ids
        + np.repeat(np.arange(len(routed.counts)) % arguments.features, routed.counts) * arguments.rows
    )
    count = len(rows)
    arrived = sort_ids(
        rows, num_bags=count, num_rows=arguments.features * arguments.rows, bags=np.arange(count)
    )
    columns = [Column(key, place, (tables[place], 0), 8) for place, key in enumerate(batch.keys())]
    source = pooled_source(batch, routed, columns)
    capacities = Capacities().hold([arrived.sizes, source.sizes])
    arrived.pad(*capacities[0])
    slots = routed.slots(8, routed.most_for_one_rank(8))
    in_slots(source, slots, int(slots.max()) + 1).pad(*capacities[1])


def torchrec(batch: KeyedJaggedTensor, arguments: argparse.Namespace) -> None:
    block = torch.full((arguments.features,), -(-arguments.rows // arguments.ranks))
    bucketed, _ = bucketize_kjt_before_all2all(batch, num_buckets=arguments.ranks, block_sizes=block)
    order = torch.arange(arguments.ranks * arguments.features, dtype=torch.int32)
    order = order.view(arguments.ranks, arguments.features).T.reshape(-1)
    torch.ops.fbgemm.permute_2D_sparse_data(
        order, bucketed.lengths().view(len(order), -1), bucketed.values(), None, None
    )


def side_by_side(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Best of `rounds`, taking turns."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - began)
    return best


if __name__ == "__main__":
    main()
