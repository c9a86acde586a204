"""Time to the first frame with a reference voice, cold and warm: the voice's KV is computed once and reused.

    python -m benchmarks.prefix --size real --seconds 10

Cold: the voice is prefilled, then the text. Warm: the text alone, behind a copy of the voice's prefix. Both are
measured in turn, with a short text and a longer one, for each of `--batch` requests at a time, until all of them have
their first frame; ends in one JSON line. Upstream prefills the voice always.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Annotated

import torch
import typer
from shoal.engine import Engine
from shoal.prompt import VoicePrompt, text_prompt, voice_prefix
from shoal.sampling import SamplingParams
from shoal.speech import FishSpeech

from benchmarks import common
from benchmarks.engine import new_engine

_SHORT = "Hello, nice to meet you."
_SPOKEN = "This is what the reference recording says, about ten seconds of it, so that the voice is known well enough."


def main(
    size: Annotated[str, typer.Option(help="smoke, mid or real; or a checkpoint directory")] = "real",
    seconds: Annotated[float, typer.Option(help="length of the reference voice")] = 10.0,
    batch: Annotated[str, typer.Option(help="requests that start together, by commas")] = "1,4",
    repeats: int = 5,
    threads: Annotated[int, typer.Option(help="CPU threads, 0: PyTorch's choice")] = 0,
    device: str = "cpu",
    dtype: str = "auto",
) -> None:
    """Measure; see the module's text."""
    directory = common.checkpoint_of(size) if size in ("smoke", "mid", "real") else size
    speech = FishSpeech.load(directory, device=device, dtype=dtype, threads=threads or None)
    frames = round(seconds * speech.codec.config.frames_per_second)
    codes = torch.randint(0, 1000, (speech.num_codebooks, frames), dtype=torch.int16)
    voice = voice_prefix(speech.tokenizer, speech.num_codebooks, VoicePrompt((_SPOKEN,), (codes,)))
    texts = [text_prompt(speech.tokenizer, speech.num_codebooks, line) for line in (_SHORT, common.TEXT)]
    rows_out = []
    for text, rows in itertools.product(texts, map(int, batch.split(","))):
        cold, warm = [], []
        for round_ in range(repeats + 1):
            engine = new_engine(speech, rows)
            prefix = engine.compute_prefix(voice)
            times = {}
            for name, prompt, known in (("cold", torch.cat([voice, text], dim=1), None), ("warm", text, prefix)):
                for i in range(rows):
                    engine.submit(prompt, SamplingParams(seed=i), prefix=known, force_frames=1)
                times[name] = common.timed(lambda engine=engine: first_frames(engine), device)
            if round_:  # the first warms up
                cold.append(times["cold"])
                warm.append(times["warm"])
        before, after = statistics.median(cold), statistics.median(warm)
        rows_out.append(
            {
                "text_positions": text.shape[1],
                "batch": rows,
                "cold_ms": round(1000 * before, 1),
                "warm_ms": round(1000 * after, 1),
                "warm_over_cold": round(after / before, 3),
                "prefix_mb": round(prefix.nbytes / 1e6, 2),
            }
        )
    print(f"{size}, {speech.precision}, {device}: {voice.shape[1]} positions of voice")
    print(common.table(rows_out[0], [row.values() for row in rows_out]))
    print(
        common.closing_line(
            "prefix",
            size=str(size),
            device=device,
            dtype=speech.precision,
            seconds=seconds,
            repeats=repeats,
            rows=rows_out,
        )
    )


def first_frames(engine: Engine) -> None:
    """Step until every request that was waiting has had a frame: long prompts are not all prefilled in one step."""
    while engine.waiting:
        engine.step()


if __name__ == "__main__":
    typer.run(main)
