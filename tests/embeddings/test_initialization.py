import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from recsys_tpu.embeddings import initialization
from recsys_tpu.embeddings.initialization import initialize_tables

ROWS, DIM = 1000, 6
CONFIG = EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"])


def filled(seed: int = 1, name: str = "t") -> torch.Tensor:
    table = torch.full((ROWS, DIM), torch.nan)
    config = EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"])
    initialize_tables({f"ebc.{name}.weight": table}, {name: config}, seed)
    return table


def test_uniform_within_the_bound() -> None:
    table = filled()
    bound = ROWS**-0.5
    assert table.abs().max() <= bound
    assert table.std() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert table.mean().abs() < 0.05 * bound
    assert len(table.unique()) > 0.99 * table.numel()


def test_decided_by_seed_and_table() -> None:
    assert torch.equal(filled(), filled())
    assert not torch.equal(filled(), filled(seed=2))
    assert not torch.equal(filled(), filled(name="u"))


@pytest.mark.parametrize(
    ("row", "column", "rows", "columns"), [(0, 0, 7, 6), (13, 2, 100, 3), (990, 0, 10, 1)]
)
def test_a_shard_gets_its_part_of_the_table(
    monkeypatch: pytest.MonkeyPatch, row: int, column: int, rows: int, columns: int
) -> None:
    monkeypatch.setattr(initialization, "_BLOCK_ROWS", 64)  # shards begin and end inside blocks
    whole = filled()
    shard = torch.full((rows, columns), torch.nan)
    monkeypatch.setattr(initialization, "_local_shards", lambda value: [(value, (row, column))])
    initialize_tables({"ebc.t.weight": shard}, {"t": CONFIG}, seed=1)
    assert torch.equal(shard, whole[row : row + rows, column : column + columns])


def test_a_table_that_is_not_in_the_state_is_an_error() -> None:
    with pytest.raises(KeyError, match="table t is not in the model's state"):
        initialize_tables({"ebc.other.weight": torch.zeros(2, 2)}, {"t": CONFIG}, seed=1)
