"""The columns of a Criteo log and the published table sizes.

A row is ``label, I1..I13, C1..C26``, tab-separated, without a header.  I are integer counts, which may be
negative; C are 32-bit hashes of 8 hexadecimal digits.  An empty field is a missing value.
"""

DENSE_FEATURES = tuple(f"I{i}" for i in range(1, 14))
SPARSE_FEATURES = tuple(f"C{i}" for i in range(1, 27))

# `num_embeddings_per_feature` of the MLPerf training benchmark's DLRM-DCNv2 (mlcommons/training,
# recommendation_v2), for hashes of the 1TB log.
MLPERF_NUM_EMBEDDINGS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip


def field_names(labelled: bool) -> tuple[str, ...]:
    """Names of the fields of a line, in order: 40 with the label, 39 without."""
    return (*(("label",) if labelled else ()), *DENSE_FEATURES, *SPARSE_FEATURES)
