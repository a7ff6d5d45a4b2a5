"""recsys_tpu: train recommendation and ads models on Google TPUs with TorchRec.

Importing the package imports no torch: the TPU device must be activated before torch is loaded
(see `recsys_tpu.runtime.activation`).
"""

from recsys_tpu.versions import check_versions

check_versions()
