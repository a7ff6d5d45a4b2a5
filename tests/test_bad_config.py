"""Bad configs by name: every case ends in an error that names the place, or in a documented result.

Public bug reports that a case stands for are in its name.
"""

from __future__ import annotations

import pytest

from recsys_tpu.config import load_config
from recsys_tpu.errors import ConfigError

BAD_CONFIGS = {
    "unknown section": ("trian: {}", "trian: no such key; did you mean 'train'"),
    "unknown key": ("train: {batchsize: 8}", "train.batchsize: no such key; did you mean 'batch_size'"),
    "key of another section": ("train: {seed: 1}", "train.seed: no such key; did you mean 'run.seed'"),
    "key twice": ("train: {epochs: 1, epochs: 2}", "epochs.*twice"),
    "section twice": ("run: {seed: 1}\nrun: {seed: 2}", "run.*twice"),
    "batch of 0": ("train: {batch_size: 0}", "train.batch_size"),
    "batch negative": ("train: {batch_size: -8}", "train.batch_size"),
    "batch true": ("train: {batch_size: true}", "batch_size"),
    "batch a list": ("train: {batch_size: [8]}", "train.batch_size"),
    "batch 8.5": ("train: {batch_size: 8.5}", "train.batch_size"),
    "epochs null": ("train: {epochs: null}", "train.epochs"),
    "learning rate nan": ("optimizer: {dense: {learning_rate: .nan}}", "optimizer.dense.learning_rate"),
    "learning rate infinite": ("optimizer: {dense: {learning_rate: .inf}}", "optimizer.dense.learning_rate"),
    "learning rate 0": ("optimizer: {sparse: {learning_rate: 0}}", "optimizer.sparse.learning_rate"),
    "learning rate text": ("optimizer: {sparse: {learning_rate: high}}", "optimizer.sparse.learning_rate"),
    "learning rate true": ("optimizer: {sparse: {learning_rate: true}}", "learning_rate"),
    "momentum for adamw": ("optimizer: {dense: {momentum: 0.9}}", "momentum is used by kind=sgd only"),
    "unknown optimizer": ("optimizer: {dense: {kind: adma}}", "optimizer.dense.kind"),
    "unknown model": ("model: {kind: dlmr}", "model.kind"),
    "unknown data": ("data: {kind: avazu}", "data.kind"),
    "unknown device": ("runtime: {device: gpu}", "runtime.device"),
    "parquet without path": ("data: {kind: parquet}", "needs data.path"),
    "lanes do not divide": ("train: {batch_size: 100}\ndata: {lanes: 8}", "multiple of data.lanes=8"),
    "name with a slash": ("run: {name: a/b}", "run.name"),
    "name of dots": ("run: {name: ..}", "run.name"),
    "seed negative": ("run: {seed: -1}", "run.seed"),
    "seed over 64 bits": ("run: {seed: 99999999999999999999999}", "run.seed"),
    "table of 0 rows": ("model: {num_embeddings: {C1: 0}}", "model.num_embeddings.C1"),
    "layer of 0": ("model: {over_mlp: [0]}", r"model.over_mlp.0"),
    "section a list": ("train: [1]", "train"),
    "section null": ("data: null", "data.kind is none of synthetic"),
    "a list": ("- 1", "a config is a mapping of sections, found list"),
    "text": ("hello", "found str"),
    "tabs": ("train:\n\tepochs: 1", "not valid YAML"),
    "unclosed": ("train: {", "not valid YAML"),
    "python object": ("run: !!python/object/apply:os.system ['true']", "not valid YAML"),
    "control characters": ("run: \x00", "not valid YAML"),
    "alias bomb": (
        "a: &a [1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nrun: {name: *b}",
        "run.name|no such key",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_config(tmp_path, case):
    text, message = BAD_CONFIGS[case]
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"(?s)c\.yaml: .*{message}"):
        load_config(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"run: {name: \xe9}"], ids=["binary", "Latin-1"])
def test_config_that_is_no_utf8(tmp_path, content):
    (tmp_path / "c.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.yaml: cannot be read"):
        load_config(tmp_path / "c.yaml")
