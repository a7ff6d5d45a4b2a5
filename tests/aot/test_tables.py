"""How many columns a table is split into, and which rank is compiled."""

import pytest

from recsys_tpu.errors import ConfigError


def test_columns_are_split_until_a_shard_fits_a_buffer():
    from recsys_tpu.aot.tables import _column_shards

    assert _column_shards(128, 1000) == 2
    assert _column_shards(128, 40_000_000) == 4  # 64 columns of it are 2.56 billion elements
    assert _column_shards(128, 2_000_000_000) == 128
    with pytest.raises(ConfigError, match="cannot be split into 2 columns"):
        _column_shards(5, 10)


def test_of_equally_full_ranks_the_one_that_sees_most_ids_is_compiled():
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

    from recsys_tpu.aot.tables import _fullest, _Shard

    shards = [
        _Shard(EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=10, feature_names=[name]), 10, 8)
        for name in "abc"
    ]
    local, slots = _fullest(shards, 3, {"b": 100})
    assert [shard.config.name for shard in local] == ["b"]
    assert slots == 1
