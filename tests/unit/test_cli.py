"""The command `shoal`: doctor, make-checkpoint, say, archive."""

import importlib.metadata

import pytest
import shoal
import soundfile
from shoal import doctor
from shoal.cli import app
from shoal.random_checkpoint import write_random_checkpoint
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints") / "smoke"
    write_random_checkpoint(directory, size="smoke", seed=0)
    return directory


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_MODEL_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("SHOAL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("CHECKPOINT", raising=False)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def lines_of(output):
    """Status by subject of the doctor's report."""
    return {line[6:17].strip(): line[:4].strip() for line in output.splitlines()}


def test_version():
    assert run("--version").stdout.strip() == f"shoal {shoal.__version__}"


def test_doctor_reports_each_subject_and_succeeds(smoke):
    result = run("doctor", "--checkpoint", smoke)
    report = lines_of(result.stdout)
    assert result.exit_code == 0, result.stdout
    assert list(report) == [
        *("Python", "torch", "CUDA", "Java", "TorchServe", "archiver", "YAML", "checkpoint", "disk", "ports")
    ]
    assert report["checkpoint"] == "ok"


def test_doctor_fails_with_a_remedy_when_the_checkpoint_is_broken(smoke, tmp_path):
    (tmp_path / "config.json").write_text((smoke / "config.json").read_text())
    result = run("doctor", "--checkpoint", tmp_path)
    assert result.exit_code == 1
    assert lines_of(result.stdout)["checkpoint"] == "fail"
    assert " -> " in next(line for line in result.stdout.splitlines() if "checkpoint" in line)


def test_doctor_fails_when_yaml_is_missing(smoke, monkeypatch):
    def version(name):
        if name == "PyYAML":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    result = run("doctor", "--checkpoint", smoke)
    assert result.exit_code == 1
    assert "pip install -c constraints.txt PyYAML" in result.stdout


def test_doctor_turns_a_check_that_breaks_into_a_line(monkeypatch):
    monkeypatch.setattr(doctor, "_disk", lambda: 1 / 0)
    findings = list(doctor.examine())
    assert [f for f in findings if f.status == "fail" and "ZeroDivisionError" in f.detail]
    assert findings[-1].what == "ports"


def test_make_checkpoint_writes_the_same_bytes_for_the_same_seed(tmp_path):
    for name in ("one", "two"):
        result = run("make-checkpoint", tmp_path / name, "--size", "smoke", "--seed", 7)
        assert result.exit_code == 0, result.output
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_make_checkpoint_does_not_overwrite(tmp_path):
    (tmp_path / "file").write_text("mine")
    result = run("make-checkpoint", tmp_path)
    assert result.exit_code == 1
    assert "is not empty" in result.output
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_say_writes_sound(smoke, tmp_path):
    out = tmp_path / "out.wav"
    result = run("say", "안녕하세요", "-o", out, "--checkpoint", smoke, "--seed", 1, "--temperature", 0.5)
    assert result.exit_code == 0, result.output
    samples, rate = soundfile.read(out)
    assert rate == 44100
    assert abs(samples).max() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "{tmp}/no/such/out.wav"], "there is no directory"),
        (["-o", "{tmp}/out.txt"], "ends in .wav or .flac"),
        (["-o", "{tmp}/out.wav", "--temperature", "-1"], "temperature"),
        (["-o", "{tmp}/out.wav", "--voice", "nobody"], "nobody"),
        (["-o", "{tmp}/out.wav", "--checkpoint", "{tmp}/nowhere"], "no such directory"),
    ],
)
def test_say_says_in_one_line_what_is_wrong(smoke, tmp_path, arguments, message):
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    if "--checkpoint" not in arguments:
        arguments += ["--checkpoint", str(smoke)]
    result = run("say", "hello", *arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert not (tmp_path / "out.wav").exists()


def test_archive_is_built_in_the_model_store(smoke, tmp_path):
    result = run("archive", "--checkpoint", smoke)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "store" / "fish_speech.mar").is_file()


def test_without_any_checkpoint_a_small_random_one_is_made_once(tmp_path):
    assert run("archive").exit_code == 0
    config = tmp_path / "store" / "smoke" / "config.json"
    made = config.stat().st_mtime_ns
    assert run("archive").exit_code == 0
    assert config.stat().st_mtime_ns == made
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["fish_speech.mar", "smoke"]


def test_stop_without_a_server_is_no_error():
    result = run("stop")
    assert result.exit_code == 0
    assert "no server" in result.stdout
