"""What a request may have done to its sound before it is encoded: tempo and loudness. Knows nothing of formats."""

from __future__ import annotations

import warnings

import numpy as np

_FRAME_S = 0.04  # of WSOLA: two to four periods of a voice
_PEAK = 0.98  # of full scale: how far a gain may lift the largest sample
_LEAST_S = 0.4  # the block over which BS.1770 measures loudness


class Tempo:
    """Changes the tempo of sound that comes piece by piece, and not its pitch: WSOLA (Verhelst and Roelands 1993).

    The pieces joined are the same however the sound was cut.

    Args:
        sample_rate: Hz.
        speed: 2.0 is twice as fast, half as long.
    """

    def __init__(self, sample_rate: int, speed: float) -> None:
        from audiotsm import wsola

        self._speed = speed
        self._frame = 4 * round(_FRAME_S * sample_rate / 4)
        self._wsola = wsola(1, speed=speed, frame_length=self._frame)
        self._taken = self._given = 0  # samples

    def push(self, audio: np.ndarray) -> np.ndarray:
        """(samples,) float32 -> what has become ready; some tens of milliseconds stay for the next call."""
        if not len(audio):
            return audio
        self._taken += len(audio)
        out = self._run(audio)
        self._given += len(out)
        return out

    def finish(self) -> np.ndarray:
        """The rest, so that all together are 1 / speed of the samples."""
        silence = np.zeros(int((2 + 2 * self._speed) * self._frame), dtype=np.float32)
        rest = np.zeros(0, dtype=np.float32)
        while len(rest) < (left := self._due()):
            rest = np.concatenate([rest, self._run(silence)])
        return rest[:left]

    def _due(self) -> int:
        return round(self._taken / self._speed) - self._given

    def _run(self, audio: np.ndarray) -> np.ndarray:
        from audiotsm.io.array import ArrayReader, ArrayWriter

        reader, writer, finished = ArrayReader(audio[None].astype(np.float32)), ArrayWriter(1), False
        while not (finished and reader.empty):
            self._wsola.read_from(reader)
            _, finished = self._wsola.write_to(writer)
        return writer.data[0].astype(np.float32)


def set_loudness(audio: np.ndarray, sample_rate: int, target: float) -> np.ndarray:
    """Sound of `target` LUFS (ITU-R BS.1770, by pyloudnorm), or as near as full scale allows; silence stays silent.

    audio: (samples,) float32. What is shorter than the 0.4 s that a measurement takes is repeated to be measured.
    """
    import pyloudnorm

    if not len(audio):
        return audio
    block = int(np.ceil(_LEAST_S * sample_rate)) + 1
    heard = np.resize(audio, block) if len(audio) < block else audio
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the logarithm of silence
        loudness = pyloudnorm.Meter(sample_rate).integrated_loudness(heard.astype(np.float64))
    peak = float(np.abs(audio).max())
    if not np.isfinite(loudness) or peak == 0.0:
        return audio
    gain = min(10 ** ((target - loudness) / 20), _PEAK / peak)
    return (audio * gain).astype(np.float32)
