"""Makes the demo checkpoint: `python -m demo_voice` runs all steps, each from where it stopped last time.

    corpus    flite and espeak-ng read the phrase book           seconds
    features  the codec's encoder, quantiser and upsampler       about 20 minutes on one core
    head      its vocoder, on true spectrograms                  about 40 minutes
    vocoder   both together, at last against discriminators      about 80 minutes
    dual_ar   the transformer learns the phrase book             about 80 minutes
    export    model_store/demo/                                  seconds

`head` needs only the corpus, and `dual_ar` needs only `features`, so two terminals can share the work.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
STEPS = ("corpus", "features", "head", "vocoder", "dual_ar", "export")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo_voice", description="Makes the demo checkpoint.")
    parser.add_argument("steps", nargs="*", metavar="step", help=f"some of: {', '.join(STEPS)} (default: all)")
    parser.add_argument("--work", type=Path, default=HERE / "work", help="where intermediate files go")
    parser.add_argument("--out", type=Path, default=HERE.parent / "model_store" / "demo", help="where the result goes")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of this process")
    arguments = parser.parse_args()
    unknown = set(arguments.steps) - set(STEPS)
    if unknown:
        parser.error(f"unknown step {unknown.pop()!r}: choose from {', '.join(STEPS)}")
    torch.set_num_threads(arguments.threads)
    for step in STEPS:
        if not arguments.steps or step in arguments.steps:
            run_step(step, arguments.work, arguments.out)


def run_step(step: str, work: Path, out: Path) -> None:
    """One step; what the step before it wrote must be in `work`."""
    if step == "corpus":
        from .corpus import build_corpus

        build_corpus(work)
    elif step == "export":
        from .export import export

        export(work, out)
    elif step == "dual_ar":
        from .train_codec import write_codes
        from .train_dual_ar import train_dual_ar

        write_codes(work)
        train_dual_ar(work)
    else:
        from . import train_codec

        {"features": train_codec.train_features, "head": train_codec.train_head, "vocoder": train_codec.train_vocoder}[
            step
        ](work)


if __name__ == "__main__":
    main()
