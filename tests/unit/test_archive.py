"""What `shoal archive` puts into a .mar, and what it refuses."""

import time
import zipfile

import pytest
import yaml
from shoal import archive, project
from shoal.archive import build_archive
from shoal.errors import CheckpointError, ShoalError


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "weights"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.pth").write_bytes(b"weights")
    return directory


def config_of(path):
    with zipfile.ZipFile(path) as mar:
        return yaml.safe_load(mar.read("model-config.yaml"))


def test_the_archive_carries_handler_configuration_and_library(tmp_path, checkpoint):
    begin = time.monotonic()
    path = build_archive(tmp_path / "store", checkpoint=checkpoint)
    took = time.monotonic() - begin

    assert path == tmp_path / "store" / "fish_speech.mar"
    with zipfile.ZipFile(path) as mar:
        names = set(mar.namelist())
    assert names >= {
        "MAR-INF/MANIFEST.json",
        "fish_speech_handler.py",
        "model-config.yaml",
        "shoal/__init__.py",
        "shoal/serving/service.py",
        "shoal/model/dual_ar.py",
    }
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    assert "model.pth" not in {name.rsplit("/")[-1] for name in names}
    assert took < 20


def test_the_checkpoint_is_named_by_its_absolute_path(tmp_path, checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config_of(build_archive("store", checkpoint="weights"))["handler"]["checkpoint"] == str(checkpoint)


def test_weights_go_inside_when_asked_for(tmp_path, checkpoint):
    path = build_archive(tmp_path, checkpoint=checkpoint, include_weights=True)
    with zipfile.ZipFile(path) as mar:
        assert mar.read("checkpoint/model.pth") == b"weights"
    assert config_of(path)["handler"]["checkpoint"] == "checkpoint"


def test_overrides_replace_single_values(tmp_path, checkpoint):
    plain = config_of(build_archive(tmp_path, checkpoint=checkpoint))
    changed = config_of(
        build_archive(tmp_path, checkpoint=checkpoint, overrides={"batchSize": 3, "handler": {"cache_bytes": 0}})
    )
    expected = {**plain, "batchSize": 3, "handler": {**plain["handler"], "cache_bytes": 0}}
    assert changed == expected


def test_name_and_version_are_the_models(tmp_path, checkpoint):
    path = build_archive(tmp_path, checkpoint=checkpoint, name="other.model-2", version="2.5")
    with zipfile.ZipFile(path) as mar:
        manifest = yaml.safe_load(mar.read("MAR-INF/MANIFEST.json"))
    assert path.name == "other.model-2.mar"
    assert manifest["model"]["modelName"] == "other.model-2"
    assert manifest["model"]["modelVersion"] == "2.5"


def test_directories_in_tmpdir_named_as_the_model_survive(tmp_path, checkpoint, monkeypatch):
    precious = tmp_path / "tmp" / "fish_speech" / "file"
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    build_archive(tmp_path, checkpoint=checkpoint)
    assert precious.read_text() == "mine"


def test_paths_with_spaces_commas_and_wildcards_are_only_paths(tmp_path, checkpoint):
    path = build_archive(tmp_path / "a b, c [d]*", checkpoint=checkpoint)
    assert config_of(path)["handler"]["checkpoint"] == str(checkpoint)


def test_a_failing_build_leaves_the_old_archive(tmp_path, checkpoint, monkeypatch):
    path = build_archive(tmp_path, checkpoint=checkpoint)
    before = path.read_bytes()
    monkeypatch.setattr(archive.sys, "executable", "/bin/false")
    with pytest.raises(ShoalError, match="torch-model-archiver failed"):
        build_archive(tmp_path, checkpoint=checkpoint)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()].count("fish_speech.mar") == 1
    assert not list(tmp_path.glob(".fish_speech*"))


@pytest.mark.parametrize("name", ["", "../up", "a b", "-x", "이름"])
def test_names_that_make_no_url_are_refused(tmp_path, checkpoint, name):
    with pytest.raises(ShoalError, match="is no model name"):
        build_archive(tmp_path, checkpoint=checkpoint, name=name)


def test_a_directory_without_config_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        build_archive(tmp_path, checkpoint=tmp_path / "nowhere")


def test_without_the_handler_files_the_error_says_where_it_looked(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(project, "PACKAGE_DIR", tmp_path / "site-packages" / "shoal")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ShoalError, match="SHOAL_HANDLER_DIR"):
        build_archive(tmp_path, checkpoint=checkpoint)
