"""What a chip's kernels refuse, and how they say it; no compiler needed."""

import jax
import jax.numpy as jnp
import pytest

from recsys_tpu.chips import CHIPS
from recsys_tpu.kernels import sparsecore, tensorcore
from recsys_tpu.kernels.arg_specs import MATRIX, OPTIMIZERS, QUICK
from recsys_tpu.kernels.variants import target_chip


def lookup_shapes(dtype, elements: int):
    ids = jnp.zeros(32, jnp.int32)
    return jnp.zeros(elements, dtype), ids, ids, jnp.zeros(9, jnp.int32), None


@pytest.mark.parametrize(
    ("kernels", "dtype", "dim", "message"),
    [
        (sparsecore.kernels_for(CHIPS["v6e"]), jnp.bfloat16, 16, "use kernels.packed"),
        (sparsecore.kernels_for(CHIPS["v6e"]), jnp.float32, 12, "multiple of 8; pad the table's dim"),
        (
            sparsecore.kernels_for(CHIPS["tpu7x"]),
            jnp.int32,
            16,
            "rows of 8 words: this chip needs a multiple of 16",
        ),
        (tensorcore.kernels_for(CHIPS["v5e"]), jnp.bfloat16, 128, "use kernels.packed"),
        (tensorcore.kernels_for(CHIPS["v5e"]), jnp.float32, 96, "got 96. Pad the table's dim"),
    ],
)
def test_tables_that_need_padding_or_packing(kernels, dtype, dim, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda *a: kernels.pooled_lookup(*a, num_bags=8, dim=dim), *lookup_shapes(dtype, 384))


def test_chips_without_sparsecores_have_no_sparsecore_kernels():
    with pytest.raises(ValueError, match="v5e has no SparseCores"):
        sparsecore.kernels_for(CHIPS["v5e"])


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_programs_lowered_for_a_chip_get_its_kernels(chip):
    with jax.sharding.use_abstract_mesh(chip.abstract_mesh()):
        assert target_chip() is chip


def test_the_matrix_covers_every_optimizer_and_names_are_unique():
    names = [program.name for program in MATRIX]
    assert len(set(names)) == len(names)
    assert {program.op for program in MATRIX} == {"pooled", "sequence", *OPTIMIZERS}
    assert len(QUICK) == 3
