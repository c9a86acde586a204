"""Reading checkpoint directories: every option of the format loads, and what is wrong is said in one clear error."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from shoal.checkpoint import open_checkpoint, read_tensors
from shoal.errors import CheckpointError
from shoal.random_checkpoint import write_random_checkpoint
from shoal.speech import FishSpeech
from shoal.tokenizer import Tokenizer

CODEC = "firefly-gan-vq-fsq-8x1024-21hz-generator.pth"


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("smoke"), seed=1)


@pytest.fixture
def copy(smoke, tmp_path):
    return shutil.copytree(smoke, tmp_path / "checkpoint")


def error_of(path) -> str:
    with pytest.raises(CheckpointError) as caught:
        FishSpeech.load(path, device="cpu")
    return str(caught.value)


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def test_the_smoke_checkpoint_is_small_and_reproducible(smoke, tmp_path):
    assert sum(f.stat().st_size for f in smoke.iterdir()) < 10e6
    again = write_random_checkpoint(tmp_path / "again", seed=1)
    other = write_random_checkpoint(tmp_path / "other", seed=2)
    first, same = read_tensors(smoke / "model.pth"), read_tensors(again / "model.pth")
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert open_checkpoint(smoke).fingerprint == open_checkpoint(again).fingerprint
    assert open_checkpoint(smoke).fingerprint != open_checkpoint(other).fingerprint


@pytest.mark.parametrize(
    ("overrides", "codec"),
    [
        ({"tie_word_embeddings": True}, {}),
        ({"fast_dim": 32, "fast_n_head": 2, "fast_n_local_heads": 1, "fast_intermediate_size": 64}, {}),
        ({"attention_qkv_bias": True}, {}),
        ({"num_codebooks": 4}, {"n_groups": 4}),
        (
            {"n_layer": 1, "n_fast_layer": 1},
            {"sample_rate": 16000, "hop_length": 256, "upsample_rates": (8, 4, 2, 2, 2)},
        ),
    ],
    ids=["tied", "narrow-fast", "bias", "four-codebooks", "other-codec"],
)
@pytest.mark.parametrize("safetensors", [False, True], ids=["pth", "safetensors"])
def test_every_option_of_the_format_speaks(tmp_path, overrides, codec, safetensors):
    write_random_checkpoint(tmp_path, overrides=overrides, codec_overrides=codec, safetensors=safetensors)
    speech = FishSpeech.load(tmp_path, device="cpu").synthesize("Hello there.", params=greedy())
    assert len(speech.audio) == speech.features.frames * open_checkpoint(tmp_path).codec.samples_per_frame
    assert speech.audio.std() > 1e-3


def test_wrapped_and_prefixed_weights_load(copy):
    plain = torch.load(copy / "model.pth", weights_only=True)
    codec = torch.load(copy / CODEC, weights_only=True)
    before = FishSpeech.load(copy, device="cpu").extract_features("Same words.", params=greedy())
    torch.save({"state_dict": {f"model.{k}": v for k, v in plain.items()}}, copy / "model.pth")
    torch.save(
        {"state_dict": {f"generator.{k}": v for k, v in codec.items()} | {"other.x": torch.ones(1)}}, copy / CODEC
    )
    after = FishSpeech.load(copy, device="cpu").extract_features("Same words.", params=greedy())
    assert (before.codes == after.codes).all()


def greedy():
    from shoal.sampling import SamplingParams

    return SamplingParams(temperature=0, max_new_tokens=20)


def test_a_missing_directory_or_file_names_the_download_command(smoke, copy, tmp_path):
    assert "hf download fishaudio/fish-speech-1.5" in error_of(tmp_path / "nowhere")
    for name in ("config.json", "model.pth", CODEC, "tokenizer.tiktoken"):
        (copy / name).unlink()
        message = error_of(copy)
        assert name in message and "hf download" in message
        shutil.copy(smoke / name, copy / name)
    assert "is a file" in error_of(copy / "config.json")


@pytest.mark.parametrize("name", ["model.pth", CODEC])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"PK\x03\x04 nonsense", "truncated or damaged"),
    ],
    ids=["empty", "html", "lfs", "damaged"],
)
def test_files_that_are_not_what_their_name_says(copy, name, content, said):
    (copy / name).write_bytes(content)
    message = error_of(copy)
    assert name in message and said in message


@pytest.mark.parametrize("safetensors", [False, True])
def test_a_truncated_file(tmp_path, safetensors):
    write_random_checkpoint(tmp_path, safetensors=safetensors)
    file = open_checkpoint(tmp_path).model_file
    file.write_bytes(file.read_bytes()[:-5000])
    assert file.name in (message := error_of(tmp_path)) and "truncated" in message


def test_pickled_code_is_refused(copy):
    torch.save({"weights": Tokenizer}, copy / "model.pth")
    assert "can run code" in error_of(copy)
    torch.save([torch.ones(1)], copy / "model.pth")
    assert "instead of named tensors" in error_of(copy)


def test_missing_surplus_and_misshapen_tensors(copy):
    state = torch.load(copy / "model.pth", weights_only=True)
    torch.save({k: v for k, v in state.items() if k != "norm.weight"}, copy / "model.pth")
    assert "1 tensors are missing (norm.weight)" in error_of(copy)
    torch.save({**state, "extra.weight": torch.ones(1)}, copy / "model.pth")
    assert "1 tensors are unknown (extra.weight)" in error_of(copy)
    torch.save({**state, "norm.weight": torch.ones(7)}, copy / "model.pth")
    assert "norm.weight is (7,), the configuration says (64,)" in error_of(copy)
    torch.save(state, copy / "model.pth")
    codec = torch.load(copy / CODEC, weights_only=True)
    name = next(k for k in codec if k.endswith("original0"))
    torch.save({k: v for k, v in codec.items() if k != name}, copy / CODEC)
    assert CODEC in (message := error_of(copy)) and "missing" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "naive"}, "only 'dual_ar'"),
        ({"attention_qk_norm": True}, "newer Fish Speech generation"),
        ({"dim": "wide"}, "dim"),
        ({"n_head": 7}, "does not split"),
        ({"num_codebooks": 9}, "do not belong together"),
    ],
)
def test_configurations_that_cannot_be_used(copy, changes, said):
    edit_config(copy, **changes)
    assert said in error_of(copy)


def test_a_configuration_that_is_no_json(copy):
    (copy / "config.json").write_text("{")
    assert "not valid JSON" in error_of(copy)


_PEAK = """
import sys, resource, torch
from pathlib import Path
from shoal.checkpoint import open_checkpoint
from shoal.model.dual_ar import load_dual_ar
from shoal.model.linear import weight_bytes
load_dual_ar(open_checkpoint(sys.argv[2]), range(1000), "cpu", torch.float32)  # what torch loads lazily
checkpoint = open_checkpoint(sys.argv[1])
before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
Path("/proc/self/clear_refs").write_text("5")
model = load_dual_ar(checkpoint, range(1000), "cpu", torch.float32)
peak = next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM")) - before
weights = weight_bytes(model)
print(peak / weights)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_peaks_little_above_the_weights(smoke, tmp_path, dtype):
    import subprocess
    import sys

    write_random_checkpoint(tmp_path, overrides={"dim": 512, "n_layer": 12, "intermediate_size": 2048})
    if dtype == "bfloat16":
        state = torch.load(tmp_path / "model.pth", weights_only=True)
        torch.save({k: v.bfloat16() for k, v in state.items()}, tmp_path / "model.pth")
    out = subprocess.run(
        [sys.executable, "-c", _PEAK, tmp_path, smoke], capture_output=True, text=True, check=True
    ).stdout
    assert float(out) < 1.3, "loading holds file and weights in memory together"
