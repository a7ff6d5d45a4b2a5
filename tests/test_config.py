from pathlib import Path

import pytest

from recsys_tpu.config import Config, dump_config, load_config, sample_data_path
from recsys_tpu.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_load_and_survive_a_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    again = load_config(write(tmp_path, dump_config(config)))
    assert again == config


def test_overrides_are_yaml_values_and_win_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {max_steps: 5}\n")
    config = load_config(
        path, ["train.max_steps=7", "model.over_mlp=[8, 4]", "run.name=x", "data.shuffle=no"]
    )
    assert config.train.max_steps == 7
    assert config.model.over_mlp == [8, 4]
    assert config.data.shuffle is False
    assert load_config(path, ["train.max_steps=null"]).train.max_steps is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batchsize=4", r"train\.batchsize: no such key; did you mean 'batch_size'\?"),
        ("trian.max_steps=4", r"trian: no such key; did you mean 'train'\?"),
        ("train.learning_rate=1", r"did you mean 'optimizer\.\w+\.learning_rate'\?"),
        ("train.max_steps=many", r"train\.max_steps: .*integer.*found 'many'"),
        ("train.max_steps=0", r"train\.max_steps: .*greater than 0"),
        ("optimizer.dense.learning_rate=-1", r"optimizer\.dense\.learning_rate: .*greater than 0"),
        ("model.kind=dlmr", r"model\.kind"),
        ("runtime.device=gpu", r"runtime\.device"),
        ("train.batch_size=2047", r"train\.batch_size=2047 must be a multiple of data\.lanes=8"),
        ("data.kind=parquet", r"data\.kind=parquet needs data\.path"),
        ("optimizer.dense.momentum=0.9", r"momentum is used by kind=sgd only"),
        ("run.name=../x", r"run\.name"),
        ("max_steps", r"expected section\.key=value"),
        ("=3", r"expected section\.key=value"),
        ("train.x=[1", r"not valid YAML"),
    ],
)
def test_bad_overrides_are_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, "run: {name: a}\n"), [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [("- 1\n", "a config is a mapping"), ("a: [\n", "not valid YAML"), ("run: 3\n", "run")],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: no such config file"):
        load_config(tmp_path / "nothing.yaml")


def test_all_errors_of_a_file_are_shown_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, "train: {max_stps: 1, log_every: zero}\n"))
    assert "max_stps" in str(error.value)
    assert "log_every" in str(error.value)


def test_the_sample_is_found_by_environment_or_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Config().data
    monkeypatch.delenv("RECSYS_TPU_DATA", raising=False)
    with pytest.raises(ConfigError, match="RECSYS_TPU_DATA"):
        sample_data_path(data)
    monkeypatch.setenv("RECSYS_TPU_DATA", "/somewhere")
    assert sample_data_path(data) == Path("/somewhere/criteo")
