import sys

import numpy as np
import psutil
import pytest

from recsys_tpu.host_memory import release_free_memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures with /proc")
def test_freed_memory_goes_back_to_the_system():
    """Small blocks below one that stays: free() alone keeps them, since the heap shrinks at its end only."""
    process = psutil.Process()
    blocks = [np.ones(8_000) for _ in range(2_000)]  # 64 KB each: under the threshold of mmap
    kept = np.ones(8_000)
    del blocks
    before = process.memory_info().rss
    release_free_memory()
    assert before - process.memory_info().rss > 64 * 2**20
    assert kept.sum() == 8_000
