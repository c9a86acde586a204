"""Encoding replies and decoding reference audio, with real files made here."""

from __future__ import annotations

import io
import struct
import wave

import numpy as np
import pytest
import soundfile as sf
from shoal.errors import RequestError, TooLargeError
from shoal.serving.audio import CONTENT_TYPES, StreamEncoder, decode_reference, encode_audio, to_int16

RATE = 44100
SECONDS = 2.0
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(500)


def tone(seconds=SECONDS, rate=RATE, hertz=440.0):
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def file_of(audio, rate=RATE, fmt="WAV", subtype=None):
    out = io.BytesIO()
    sf.write(out, audio, rate, format=fmt, subtype=subtype)
    return out.getvalue()


def pitch_of(audio, rate):
    spectrum = np.abs(np.fft.rfft(audio * np.hanning(len(audio))))
    return spectrum.argmax() * rate / len(audio)


def read(data, fmt, rate):
    if fmt == "pcm":
        return np.frombuffer(data, "<i2") / 32768, rate
    return sf.read(io.BytesIO(data))


@pytest.mark.parametrize("rate", [None, 16000, 24000])
@pytest.mark.parametrize("fmt", CONTENT_TYPES)
def test_every_format_holds_the_sound_that_went_in(fmt, rate):
    data, samples = encode_audio(tone(), RATE, fmt, rate)
    audio, found_rate = read(data, fmt, rate or RATE)
    assert samples == len(tone())
    assert found_rate == (48000 if fmt == "opus" and rate is None else rate or RATE)
    assert len(audio) / found_rate == pytest.approx(SECONDS, abs=0.001)
    assert pitch_of(audio, found_rate) == pytest.approx(440, abs=1)
    assert np.abs(audio[found_rate // 2 : -found_rate // 2]).max() == pytest.approx(0.5, abs=0.12)


def test_a_wav_has_a_header_that_pythons_own_reader_believes():
    data, _ = encode_audio(tone(), RATE, "wav")
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
        assert file.getnframes() == len(tone())


@pytest.mark.parametrize("fmt", ["wav", "pcm"])
def test_streamed_samples_are_those_of_the_whole_file(fmt):
    encoder, audio = StreamEncoder(fmt, RATE), tone()
    parts = [encoder.push(audio[i : i + 5000]) for i in range(0, len(audio), 5000)] + [encoder.finish()]
    head = 44 if fmt == "wav" else 0
    assert b"".join(parts)[head:] == encode_audio(audio, RATE, fmt)[0][head:]
    assert all(parts[:-1]), "each piece leaves at once"


@pytest.mark.parametrize("fmt", CONTENT_TYPES)
def test_a_stream_is_a_playable_file(fmt):
    encoder, audio = StreamEncoder(fmt, RATE, 24000), tone()
    data = b"".join([encoder.push(audio[i : i + 3000]) for i in range(0, len(audio), 3000)] + [encoder.finish()])
    if fmt == "pcm":
        assert len(data) == pytest.approx(SECONDS * 24000 * 2, abs=4)
    else:
        again = decode_reference(data, RATE, 60, 10**7)
        assert len(again) / RATE == pytest.approx(SECONDS, abs=0.1)  # mp3 adds its padding
        assert pitch_of(again[RATE // 2 : RATE], RATE) == pytest.approx(440, abs=3)


@pytest.mark.parametrize("fmt", CONTENT_TYPES)
def test_no_samples_make_an_empty_file_and_no_crash(fmt):
    data, _ = encode_audio(np.zeros(0, dtype=np.float32), RATE, fmt)
    assert isinstance(data, bytes)


def test_what_is_out_of_range_is_clipped_and_what_is_no_number_is_silent():
    samples = to_int16(np.array([2, -2, np.nan, np.inf, -np.inf, 0.5], dtype=np.float32))
    assert samples.tolist() == [32767, -32767, 0, 32767, -32767, 16384]


@pytest.mark.parametrize(
    ("fmt", "subtype", "rate"),
    [
        ("WAV", "PCM_16", 16000),
        ("WAV", "FLOAT", 48000),
        ("WAV", "PCM_24", RATE),
        ("FLAC", None, 22050),
        ("OGG", "OPUS", 48000),
        ("OGG", "VORBIS", RATE),
        ("MP3", None, RATE),
    ],
)
@pytest.mark.parametrize("channels", [1, 2])
def test_common_recordings_are_read_as_mono_at_the_models_rate(fmt, subtype, rate, channels):
    data = file_of(np.repeat(tone(rate=rate)[:, None], channels, axis=1), rate, fmt, subtype)
    audio = decode_reference(data, RATE, 10, 10**7)
    assert audio.dtype == np.float32 and audio.ndim == 1
    assert len(audio) / RATE == pytest.approx(SECONDS, abs=0.06)
    assert pitch_of(audio[RATE // 2 : -RATE // 2], RATE) == pytest.approx(440, abs=1)


def wav_that_claims(data_bytes, channels=1, rate=RATE, body=bytes(1000)):
    block = channels * 2
    head = struct.pack("<4sI4s4sI", b"RIFF", 36 + data_bytes, b"WAVE", b"fmt ", 16)
    head += struct.pack("<HHIIHH", 1, channels, rate, (rate * block) & 0xFFFFFFFF, block & 0xFFFF, 16)
    return head + struct.pack("<4sI", b"data", data_bytes) + body


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (PNG, "not a sound file"),
        (b"", "not a sound file"),
        (b"hello", "not a sound file"),
        (np.random.default_rng(0).bytes(100_000), "sound"),
        (b"RIFF\xff\xff\xff\xffWAVE", "not a sound file"),
        (b"fLaC" + bytes(200), "not a sound file"),
        (b"OggS" + bytes(200), "not a sound file"),
        (wav_that_claims(4_000_000_000), "0.01 s of sound"),
        (wav_that_claims(1000, channels=200), "200 channels"),
        (wav_that_claims(1000, rate=4_000_000_000), "sound"),
        (wav_that_claims(1000, rate=1), "1 Hz"),
        (file_of(np.zeros(RATE, dtype=np.float32)), "silent"),
        (file_of(np.full(RATE, np.nan, dtype=np.float32), subtype="FLOAT"), "no numbers"),
        (file_of(np.full(RATE, np.inf, dtype=np.float32), subtype="FLOAT"), "no numbers"),
        (file_of(tone(0.05)), "0.05 s"),
        (file_of(np.repeat(tone(1)[:, None], 9, axis=1)), "9 channels"),
    ],
)
def test_what_is_no_recording_is_refused_with_a_400(data, said):
    with pytest.raises(RequestError, match=said) as caught:
        decode_reference(data, RATE, 10, 10**7)
    assert caught.value.status == 400


def test_a_flac_cut_short_is_refused_or_read_as_far_as_it_goes():
    data = file_of(np.random.default_rng(0).normal(0, 0.1, RATE).astype(np.float32), fmt="FLAC")
    try:
        assert 0 < len(decode_reference(data[: len(data) // 2], RATE, 10, 10**7)) < RATE
    except RequestError as error:
        assert error.status == 400


def test_too_long_or_too_large_a_recording_is_a_413():
    with pytest.raises(TooLargeError, match="longer than the 1 s"):
        decode_reference(file_of(tone(2)), RATE, 1, 10**7)
    with pytest.raises(TooLargeError, match="100 are allowed"):
        decode_reference(file_of(tone(1)), RATE, 10, 100)


def test_a_decompression_bomb_is_refused_before_it_unfolds():
    bomb = file_of(np.zeros((RATE * 300, 2), dtype=np.int16), fmt="FLAC")
    assert len(bomb) < 200_000
    with pytest.raises(TooLargeError, match="longer than"):
        decode_reference(bomb, RATE, 30, 10**7)


def test_a_recording_above_full_scale_is_brought_down():
    audio = decode_reference(file_of(tone() * 8, subtype="FLOAT"), RATE, 10, 10**7)
    assert np.abs(audio).max() == pytest.approx(1.0, abs=1e-3)
