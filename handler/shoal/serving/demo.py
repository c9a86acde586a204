"""What `make demo` runs: a real TorchServe, requests over REST, sounds that were checked, a table of it all."""

from __future__ import annotations

import io
import json
import time
import unicodedata
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shoal.archive import build_archive
from shoal.project import ensure_checkpoint, model_store, state_dir
from shoal.serving.commands import config_file, wait_with_progress
from shoal.serving.processes import signals_as_exit
from shoal.serving.server import TorchServe

# All from the demo checkpoint's phrase book (model_store/demo/phrases.tsv), so that it says them clearly.
ALONE = (
    "안녕하세요, 반갑습니다.",
    "Hello, nice to meet you.",
    "こんにちは、はじめまして。",
    "안녕하세요, welcome to the demo.",
)
TOGETHER = (
    "오늘 날씨가 참 좋네요.",
    "How can I help you today?",
    "お電話ありがとうございます。",
    "Thank you, 감사합니다.",
)
# The same seed in every request: then the same text is the same request, and the cache may answer it.
SEED = 42
REQUEST_TIMEOUT_S = 600.0
# Full scale is 1: below this peak nobody hears anything.
SILENCE = 1e-3


@dataclass(frozen=True)
class Reply:
    """One request's answer, as the client saw it."""

    text: str
    milliseconds: float
    batch: str
    cache: str
    seconds: float = 0.0  # of sound
    error: str = ""

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of this reply in the table."""
        if self.error:
            return (self.text, self.batch, f"{self.milliseconds:.0f}", "-", "-", f"FAILED: {self.error}")
        factor = self.milliseconds / 1000 / self.seconds
        batch = "-" if self.batch == "0" else self.batch  # the cache answered: no batch
        return (self.text, batch, f"{self.milliseconds:.0f}", f"{self.seconds:.2f}", f"{factor:.2f}", self.cache)


def run(checkpoint: Path | None, output_dir: Path) -> bool:
    """Run the demo. True where every text gave sound."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for old in output_dir.glob("[0-9][0-9].wav"):
        old.unlink()
    path = ensure_checkpoint(checkpoint)
    archive = build_archive(model_store(), checkpoint=path)
    print(f"checkpoint {path}, archive {archive.name} ({archive.stat().st_size / 1e6:.1f} MB)")
    if path.name == "smoke":
        print("its weights are random, so the sounds are noise; CHECKPOINT=DIR make demo uses real ones")
    log_dir = state_dir() / "logs" / "demo"
    with signals_as_exit(), TorchServe(archive, config=config_file(), log_dir=log_dir) as server:
        wait_with_progress(server, timeout_s=600.0)
        print(f"ready at {server.predict_url}; {len(ALONE)} texts one by one, {len(TOGETHER)} at once, then one again")
        numbered = [
            (text, output_dir / f"{i:02d}.wav") for i, text in enumerate((*ALONE, *TOGETHER, ALONE[0]), start=1)
        ]
        together = slice(len(ALONE), len(ALONE) + len(TOGETHER))
        replies = [ask(server.predict_url, *item) for item in numbered[: together.start]]
        pool = ThreadPoolExecutor(len(TOGETHER))
        try:
            replies += pool.map(lambda item: ask(server.predict_url, *item), numbered[together])
        finally:
            pool.shutdown(wait=False)  # after Ctrl-C the server stops next, which ends these requests
        replies += [ask(server.predict_url, *item) for item in numbered[together.stop :]]
    print()
    print(table(replies))
    failed = sum(bool(reply.error) for reply in replies)
    if failed:
        print(f"\n{failed} of {len(replies)} requests failed; logs in {log_dir}")
    else:
        print(f"\n{len(replies)} sounds in {output_dir}/")
    return not failed


def ask(url: str, text: str, output: Path) -> Reply:
    """Send one text, check the sound that comes back and keep it. Never raises: a failure is part of the reply."""
    body = json.dumps({"text": text, "format": "wav", "seed": SEED}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    begin = time.monotonic()
    try:
        with opener.open(request, timeout=REQUEST_TIMEOUT_S) as answer:
            sound, headers = answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        words = error.read().decode(errors="replace").strip()
        return Reply(text, _ms_since(begin), "-", "-", error=f"{error.code} {words[:300]}")
    except OSError as error:
        return Reply(text, _ms_since(begin), "-", "-", error=str(error))
    took = _ms_since(begin)
    batch, cache = headers.get("X-Shoal-Batch-Size", "-"), headers.get("X-Shoal-Cache", "-")
    try:
        seconds = check_wav(sound)
        announced = headers.get("X-Shoal-Audio-Seconds")
        if announced is not None and abs(float(announced) - seconds) > 0.01:
            raise ValueError(f"the header says {announced} s, the sound has {seconds:.3f} s")
    except ValueError as error:
        return Reply(text, took, batch, cache, error=str(error))
    output.write_bytes(sound)
    return Reply(text, took, batch, cache, seconds)


def check_wav(sound: bytes) -> float:
    """Seconds of a WAV file's sound.

    Raises:
        ValueError: no WAV file, sizes in the header that are wrong, no sound, or silence.
    """
    import numpy as np
    import soundfile

    if sound[:4] != b"RIFF" or sound[8:12] != b"WAVE":
        raise ValueError(f"no WAV file: it starts with {sound[:12]!r}")
    size = int.from_bytes(sound[4:8], "little")
    if size != len(sound) - 8:
        raise ValueError(f"the RIFF header says {size} bytes follow, {len(sound) - 8} do")
    try:
        samples, rate = soundfile.read(io.BytesIO(sound), dtype="float32")
    except soundfile.LibsndfileError as error:
        raise ValueError(f"the WAV file cannot be read: {error}") from None
    if not len(samples):
        raise ValueError("the WAV file has no samples")
    peak = float(np.abs(samples).max())
    if peak < SILENCE:
        raise ValueError(f"the sound is silent (peak {peak:.1e})")
    return len(samples) / rate


def table(replies: Sequence[Reply]) -> str:
    """The replies as lines of aligned columns; Korean and Japanese letters count two columns."""
    rows = [("text", "batch", "ms", "audio s", "RTF", "cache"), *(reply.row for reply in replies)]
    widths = [max(_width(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        text = row[0] + " " * (widths[0] - _width(row[0]))
        numbers = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)]
        lines.append("  ".join([text, *numbers, row[-1]]))
    lines.insert(1, "-" * max(_width(line) for line in lines))
    return "\n".join(lines)


def _width(text: str) -> int:
    """Columns that a text takes on a terminal."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _ms_since(begin: float) -> float:
    return (time.monotonic() - begin) * 1000
