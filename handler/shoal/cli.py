"""The command `shoal`. Each command reads its options and calls the library; errors of the library's own are one line.

What a command needs is imported when it runs, so that `shoal --help` is quick.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from shoal import __version__
from shoal.errors import ShoalError

app = typer.Typer(
    name="shoal",
    help="Fish Speech 1.5, many requests at a time: batched, cached, behind TorchServe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# typer reads annotations at run time, and on Python 3.10 needs Optional for some of them
CheckpointOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--checkpoint",
        "-c",
        metavar="DIR",
        help="Checkpoint directory. Default: $CHECKPOINT, else the demo checkpoint.",
    ),
]


class Size(str, Enum):
    """Sizes of random checkpoints."""

    smoke = "smoke"
    mid = "mid"
    real = "real"


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except ShoalError as error:
        typer.echo(f"shoal: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("shoal: stopped", err=True)
        raise typer.Exit(130) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {__version__}")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    # Read when torch is loaded. Threads that spin while they wait are many times slower beside other busy processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@app.command()
def doctor(checkpoint: CheckpointOption = None) -> None:
    """Look at what a machine needs for Shoal, and say what to do about what it lacks."""
    from shoal.doctor import examine, report

    if not report(examine(checkpoint)):
        raise typer.Exit(1)


@app.command()
def say(
    text: Annotated[str, typer.Argument(help="What to say.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Sound file to write: .wav or .flac.")],
    voice: Annotated[Optional[str], typer.Option(help="Name of a registered voice.")] = None,  # noqa: UP045
    checkpoint: CheckpointOption = None,
    seed: Annotated[Optional[int], typer.Option(help="The same seed gives the same sound.")] = None,  # noqa: UP045
    temperature: Annotated[Optional[float], typer.Option(help="0 always takes the likeliest.")] = None,  # noqa: UP045
) -> None:
    """Say one text and write it to a sound file, with no server."""
    with _errors_in_one_line():
        from shoal.errors import RequestError
        from shoal.project import ensure_checkpoint

        if not output.parent.is_dir():
            raise RequestError(f"{output}: there is no directory {output.parent}")
        if output.suffix.lower() not in (".wav", ".flac"):
            raise RequestError(f"{output}: name a file that ends in .wav or .flac")
        from shoal.sampling import SamplingParams
        from shoal.speech import FishSpeech

        path = ensure_checkpoint(checkpoint)
        begin = time.monotonic()
        model = FishSpeech.load(path)
        loaded = time.monotonic()
        given = {"seed": seed, "temperature": temperature}
        params = SamplingParams(**{key: value for key, value in given.items() if value is not None})
        speech = model.synthesize(text, voice=voice, params=params)
        took = time.monotonic() - loaded
        speech.save(output)
        typer.echo(
            f"{output}: {speech.seconds:.2f} s of sound in {took:.2f} s, seed {speech.seed} "
            f"(loading {path.name} took {loaded - begin:.2f} s)"
        )


@app.command()
def warm(
    phrases: Annotated[Path, typer.Argument(metavar="FILE", help="Phrases, one a line; # begins a comment.")],
    disk: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIR", help="Directory of the server's disk tier. Default: what model-config.yaml says"),
    ] = None,
    redis: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="URL", help="The server's Redis. Default: what model-config.yaml says"),
    ] = None,
    voice: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Voice to decode them in; may be given several times. Default: none"),
    ] = None,
    checkpoint: CheckpointOption = None,
) -> None:
    """Decode phrases into a server's disk or Redis cache, so that it never has to."""
    with _errors_in_one_line():
        from shoal.project import ensure_checkpoint
        from shoal.serving.commands import warm as run

        if not run(phrases, ensure_checkpoint(checkpoint), disk=disk, redis=redis, voices=voice or [None]):
            raise typer.Exit(1)


@app.command()
def archive(
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output", "-o", metavar="DIR", help="Where to put it. Default: model_store"),
    ] = None,
    checkpoint: CheckpointOption = None,
    name: Annotated[str, typer.Option(help="Name of the model in the server's URLs.")] = "fish_speech",
    include_weights: Annotated[
        bool,
        typer.Option("--include-weights", help="Copy the weights into the archive: slow, but it needs nothing else."),
    ] = False,
) -> None:
    """Build the model archive that TorchServe loads."""
    with _errors_in_one_line():
        from shoal.archive import build_archive
        from shoal.project import ensure_checkpoint, model_store

        path = build_archive(
            output or model_store(),
            name=name,
            checkpoint=ensure_checkpoint(checkpoint),
            include_weights=include_weights,
        )
        typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


@app.command("make-checkpoint")
def make_checkpoint(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write.")],
    size: Annotated[Size, typer.Option(help="smoke: under 10 MB; real: the true geometry.")] = Size.smoke,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.")] = 0,
) -> None:
    """Write a checkpoint with random weights, for tests and benchmarks. It makes noise, not speech."""
    with _errors_in_one_line():
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ShoalError(f"{directory} exists and is not empty: name a new directory")
        from shoal.random_checkpoint import write_random_checkpoint

        write_random_checkpoint(directory, size=size.value, seed=seed)
        total = sum(file.stat().st_size for file in directory.iterdir())
        typer.echo(f"{directory} ({size.value}, {total / 1e6:.1f} MB, seed {seed})")


@app.command()
def schema(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where rest.md and openapi.json go.")] = Path("docs"),
) -> None:
    """Write the REST interface as a page to read and as an OpenAPI file."""
    with _errors_in_one_line():
        from shoal.serving.openapi import write_docs

        if not directory.is_dir():
            raise ShoalError(f"{directory} is no directory: name one that exists")
        for file in write_docs(directory):
            typer.echo(file)


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(metavar="JSON...", help="One saved result, or two of one kind.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Write a report of a result that a notebook saved, or of two compared, as one HTML file with pictures."""
    with _errors_in_one_line():
        from shoal.report import export_report
        from shoal.results import load_result

        typer.echo(export_report([load_result(file) for file in results], output))


@app.command()
def quantise(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint directory to read.")],
    target: Annotated[Path, typer.Argument(metavar="NEW_DIR", help="Directory to write.")],
) -> None:
    """Write a copy of a checkpoint whose layers take one byte a weight: a third of the size, nearly the same speech."""
    with _errors_in_one_line():
        from shoal.quantise import quantise_checkpoint

        written = quantise_checkpoint(source, target)
        before, after = (sum(f.stat().st_size for f in d.rglob("*") if f.is_file()) for d in (source, written))
        typer.echo(f"{written}: {after / 1e6:.1f} MB, the original has {before / 1e6:.1f} MB")


@app.command()
def serve(
    checkpoint: CheckpointOption = None,
    background: Annotated[
        bool, typer.Option("--background", "-b", help="Return once the server is ready; `shoal stop` ends it.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until the model is loaded.")] = 600.0,
) -> None:
    """Build the archive and serve it on this machine."""
    with _errors_in_one_line():
        from shoal.serving.commands import serve as run

        run(checkpoint, background=background, timeout_s=timeout)


@app.command()
def stop() -> None:
    """Stop the server that `shoal serve --background` started."""
    with _errors_in_one_line():
        from shoal.project import state_dir
        from shoal.serving.background import stop as run

        typer.echo("stopped" if run(state_dir() / "server.json") else "no server of ours is running")


@app.command()
def demo(
    checkpoint: CheckpointOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where sounds go.")] = Path(
        "demo-output"
    ),
) -> None:
    """Serve, send texts in several languages over REST, check and keep the sounds, print a table, stop the server."""
    with _errors_in_one_line():
        from shoal.serving.demo import run

        if not run(checkpoint, output):
            sys.exit(1)
