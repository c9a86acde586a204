"""Tempo changes and the pitch stays; loudness is what was asked for, and full scale is never passed."""

from __future__ import annotations

import io

import numpy as np
import pyloudnorm
import pytest
import soundfile as sf
from shoal.errors import RequestError
from shoal.serving.audio import StreamEncoder, encode_audio
from shoal.serving.effects import Tempo, set_loudness
from shoal.serving.schema import parse_request

RATE = 24000


def voice(seconds=3.0, pitch=150.0):
    """A buzz like a voice's, of a few harmonics, that swells."""
    t = np.arange(int(seconds * RATE)) / RATE
    tone = sum(np.sin(2 * np.pi * pitch * k * t) / k for k in range(1, 8))
    return (0.15 * tone * (0.7 + 0.3 * np.sin(2 * np.pi * 2 * t))).astype(np.float32)


def pitch_of(audio):
    middle = audio[len(audio) // 3 : len(audio) // 3 + 4096]
    correlation = np.correlate(middle, middle, "full")[len(middle) - 1 :]
    low, high = RATE // 400, RATE // 60
    return RATE / (low + np.argmax(correlation[low:high]))


@pytest.mark.parametrize("speed", [0.25, 0.5, 0.8, 1.25, 2.0, 4.0])
@pytest.mark.parametrize("piece", [None, 7000, 333])
def test_tempo_changes_and_the_pitch_stays(speed, piece):
    audio, tempo = voice(), Tempo(RATE, speed)
    step = piece or len(audio)
    out = np.concatenate([*(tempo.push(audio[i : i + step]) for i in range(0, len(audio), step)), tempo.finish()])
    assert abs(len(out) - len(audio) / speed) <= 1
    whole = Tempo(RATE, speed)
    np.testing.assert_array_equal(out, np.concatenate([whole.push(audio), whole.finish()]))
    assert pitch_of(out) == pytest.approx(150, rel=0.03)
    level = np.sqrt(np.mean(out**2)) / np.sqrt(np.mean(audio**2))
    assert 0.7 < level < 1.3


@pytest.mark.parametrize("fmt", ["wav", "flac", "mp3"])
def test_whole_and_streamed_files_have_the_new_length(fmt):
    whole, samples = encode_audio(voice(), RATE, fmt, speed=1.5)
    encoder, audio = StreamEncoder(fmt, RATE, speed=1.5), voice()
    streamed = b"".join([encoder.push(audio[i : i + 5000]) for i in range(0, len(audio), 5000)] + [encoder.finish()])
    assert samples == pytest.approx(2 * RATE, rel=0.01) and encoder.samples == pytest.approx(2 * RATE, rel=0.01)
    heard, rate = sf.read(io.BytesIO(whole))
    assert rate == RATE and len(heard) / RATE == pytest.approx(2.0, abs=0.1)
    assert pitch_of(heard) == pytest.approx(150, rel=0.03) and len(streamed) > 1000


@pytest.mark.parametrize("target", [-30.0, -23.0, -16.0])
def test_loudness_is_what_was_asked_for(target):
    out = set_loudness(voice(), RATE, target)
    assert pyloudnorm.Meter(RATE).integrated_loudness(out.astype(np.float64)) == pytest.approx(target, abs=0.2)


def test_full_scale_is_never_passed_and_silence_stays_silent():
    assert np.abs(set_loudness(voice(), RATE, -5.0)).max() <= 0.98 + 1e-6
    assert not set_loudness(np.zeros(RATE, dtype=np.float32), RATE, -16.0).any()
    assert len(set_loudness(np.zeros(0, dtype=np.float32), RATE, -16.0)) == 0
    short = set_loudness(voice(0.1), RATE, -20.0)
    assert len(short) == len(voice(0.1)) and 0 < np.abs(short).max() <= 0.98


@pytest.mark.parametrize("rate", [8000, 24000, 44100, 48000])
def test_peaks_between_the_samples_do_not_clip_at_another_rate(rate):
    audio = 0.05 * np.sin(2 * np.pi * 200 * np.arange(88200) / 44100)
    for start in range(0, 80001, 20000):  # a quarter of the rate, sampled beside its peaks
        audio[start : start + 40] += 0.9 * np.sin(np.pi / 2 * np.arange(40) + np.pi / 4)
    data, samples = encode_audio(audio.astype(np.float32), 44100, "pcm", rate, loudness=-8.0)
    heard = np.abs(np.frombuffer(data, "<i2").astype(int))
    assert samples == 88200 and len(heard) == pytest.approx(2 * rate, abs=1)
    assert 0.9 * 32767 < heard.max() <= 0.98 * 32767 + 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"text": "a", "speed": 0.2}, "speed"),
        ({"text": "a", "speed": 5}, "speed"),
        ({"text": "a", "speed": "fast"}, "speed"),
        ({"text": "a", "loudness": 3}, "loudness"),
        ({"text": "a", "loudness": -20, "streaming": True}, "without streaming"),
        ({"text": "a", "loudness": -20, "stream_format": "sse"}, "without streaming"),
    ],
)
def test_what_cannot_be_done_is_said(body, said):
    with pytest.raises(RequestError, match=said):
        parse_request(body, "application/json", None)
