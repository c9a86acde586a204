"""Trains the demo codec on the corpus, in three steps that each resume from their last checkpoint.

1. `features`: encoder, quantiser and upsampler, with an auxiliary 1x1 convolution to the log-mel spectrogram. Trained
   in one go with the vocoder, the quantiser never leaves its constant start; this way it learns within minutes.
2. `head`: the HiFi-GAN head on true log-mels. It needs nothing of step 1, so both can run side by side.
3. `vocoder`: the head takes the auxiliary convolution into its first layer, and learns on with the upsampler from the
   corpus's codes (which no longer change), at last against small discriminators.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import soundfile
import torch
import torch.nn.functional as F
from shoal.config import CodecConfig
from shoal.model.firefly import Firefly, Head, fold_weight_norm
from shoal.model.mel import log_mel
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from .losses import Discriminators, SpectralLoss, discriminator_loss, generator_losses

CODEC = CodecConfig(
    sample_rate=16_000,
    n_fft=1024,
    win_length=1024,
    hop_length=256,
    n_mels=80,
    depths=(1, 1, 3, 1),
    dims=(64, 96, 128, 192),
    n_groups=4,
    levels=(8, 5, 5, 5),
    downsample_factor=(2, 2),
    upsample_rates=(8, 4, 4, 2),
    upsample_kernel_sizes=(16, 8, 8, 4),
    upsample_initial_channel=128,
    resblock_kernel_sizes=(3, 7),
)
LAYER_SCALE = 0.2  # the published 1e-6 is meant for long training: here the blocks would never wake up
MEL_MEAN, MEL_STD = -5.0, 2.5  # of the corpus's log-mels, roughly; only the training sees them
HOP, FACTOR = CODEC.hop_length, CODEC.samples_per_frame // CODEC.hop_length

FEATURE_STEPS, HEAD_STEPS, VOCODER_STEPS, ADVERSARIAL_FROM = 1900, 1000, 4000, 1500
CONTEXT, TARGET = 16, 32  # mel frames of left context and of trained audio in one segment of the head's training


def load_corpus(work: Path) -> tuple[list[dict], list[Tensor]]:
    """The corpus's index and its recordings, (samples,) float32 each."""
    index = json.loads((work / "corpus" / "index.json").read_text(encoding="utf-8"))
    audio = [torch.from_numpy(soundfile.read(work / "corpus" / row["file"], dtype="float32")[0]) for row in index]
    return index, audio


def new_codec() -> Firefly:
    """An untrained codec with an initialisation that trains quickly: PyTorch's own, and awake residual blocks."""
    codec = Firefly(CODEC)
    for module in codec.modules():
        if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d, nn.Linear)):
            module.reset_parameters()
    for name, parameter in codec.named_parameters():
        if name.endswith(".gamma"):
            nn.init.constant_(parameter, LAYER_SCALE)
    return codec


def mel_of(audio: Tensor) -> Tensor:
    """The codec's own log-mel of one recording: (samples,) -> (n_mels, frames)."""
    return log_mel(CODEC, audio[None], torch.tensor([len(audio)]))[0]


def upsample(codec: Firefly, quantised: Tensor) -> Tensor:
    """Features at the frame rate -> at the mel rate: (batch, dims[-1], frames) -> (batch, dims[-1], 4 * frames)."""
    for up, block in codec.quantizer.upsample:
        quantised = block(up(quantised))
    return quantised


def run_head(head: Head, features: Tensor) -> Tensor:
    """Features at the mel rate -> audio: (batch, channels, frames) -> (batch, frames * hop_length)."""
    x = head.conv_pre(features)
    for up, block in zip(head.ups, head.resblocks, strict=True):
        x = block(up(F.silu(x)))
    return torch.tanh(head.conv_post(F.silu(x))[:, 0])


def normed(head: Head) -> Head:
    """The same head with weight norm on its convolutions, as HiFi-GAN is trained."""
    for module in list(head.modules()):
        if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
            weight_norm(module)
    return head


def warm_cosine(optimiser: torch.optim.Optimizer, warm: int, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The optimiser's rate, reached linearly in `warm` steps, then let down to 1% along a cosine."""

    def share(step: int) -> float:
        done = min(1.0, max(0, step - warm) / max(1, steps - warm))
        return min(1.0, (step + 1) / warm) * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)

    return torch.optim.lr_scheduler.LambdaLR(optimiser, share)


class Run:
    """One resumable training run: modules, optimisers, schedulers and the step, in one file."""

    def __init__(self, path: Path, parts: dict[str, object], steps: int, save_every: int = 200) -> None:
        self.path, self.parts, self.steps, self.save_every = path, parts, steps, save_every
        self.step, self._means, self._started = 0, {}, time.time()
        if path.exists():
            saved = torch.load(path, weights_only=False)
            self.step = saved.pop("step")
            for name, state in saved.items():
                parts[name].load_state_dict(state)
            print(f"{path.stem}: resuming at step {self.step} of {steps}", flush=True)

    def __iter__(self) -> Iterator[int]:
        while self.step < self.steps:
            yield self.step
            self.step += 1
            if self.step % self.save_every == 0 or self.step == self.steps:
                self.save()

    def save(self) -> None:
        state = {name: part.state_dict() for name, part in self.parts.items()}
        temporary = self.path.with_suffix(".tmp")
        torch.save({**state, "step": self.step}, temporary)
        temporary.replace(self.path)

    def log(self, every: int = 50, **values: float) -> None:
        """Print running means every so many steps."""
        for key, value in values.items():
            self._means[key] = 0.97 * self._means.get(key, value) + 0.03 * value
        if (self.step + 1) % every == 0:
            shown = "  ".join(f"{key} {value:.4f}" for key, value in self._means.items())
            minutes = (time.time() - self._started) / 60
            print(f"{self.path.stem}: step {self.step + 1}/{self.steps}  {shown}  {minutes:.1f} min", flush=True)


def _seeded(step: int, seed: int) -> np.random.Generator:
    # Drawn from the step, not from a running stream, so that a resumed run sees the same batches.
    return np.random.default_rng((seed, step))


class FeatureModel(nn.Module):
    """The codec without its head, and the convolution that shows its features as a log-mel spectrogram."""

    def __init__(self, codec: Firefly) -> None:
        super().__init__()
        self.codec = codec
        self.to_mel = nn.Conv1d(CODEC.dims[-1], CODEC.n_mels, 1)

    def forward(self, mel: Tensor) -> Tensor:
        """mel: (batch, n_mels, frames), frames a multiple of 4. Returns the standardised log-mel, same shape."""
        return self.to_mel(upsample(self.codec, self.codec.quantize(mel)[0]))


def train_features(work: Path, steps: int = FEATURE_STEPS, seed: int = 1) -> None:
    """Step 1; writes work/features.pt."""
    torch.manual_seed(seed)
    _, audio = load_corpus(work)
    codec = new_codec()
    mels = [mel_of(a) for a in audio]
    model = FeatureModel(codec)
    codec.head.requires_grad_(False)  # its turn comes later
    decay = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    optimiser = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=2e-3, betas=(0.9, 0.98)
    )
    schedule = warm_cosine(optimiser, 200, steps)
    run = Run(work / "features.pt", {"model": model, "optimiser": optimiser, "schedule": schedule}, steps)
    length, batch = 92, 16  # 1.5 s
    weights = np.array([m.shape[1] for m in mels], float)
    weights /= weights.sum()
    for step in run:
        rng = _seeded(step, seed)
        rows = []
        for i in rng.choice(len(mels), batch, p=weights):
            m = mels[i]
            start = int(rng.integers(0, max(m.shape[1] - length, 0) // FACTOR + 1)) * FACTOR
            # Left edges as they are at a file's start: the networks are causal, so the rest is context.
            piece = m[:, start : start + length]
            rows.append(F.pad(piece, (0, length - piece.shape[1]), value=float(np.log(1e-5))))
        target = torch.stack(rows)
        loss = F.l1_loss(model(target), (target - MEL_MEAN) / MEL_STD)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        run.log(log_mel_l1=loss.item() * MEL_STD)


def _segments(
    inputs: list[Tensor], audio: list[Tensor], rng: np.random.Generator, batch: int, context: int
) -> tuple[Tensor, Tensor]:
    """A batch of input frames with left context, and the audio of all of them.

    inputs: (channels, frames) each, one frame per hop.
    """
    xs, ys = [], []
    weights = np.array([x.shape[1] for x in inputs], float)
    for i in rng.choice(len(inputs), batch, p=weights / weights.sum()):
        frames = inputs[i].shape[1]
        start = int(rng.integers(0, max(frames - context - TARGET, 0) + 1))
        x = inputs[i][:, start : start + context + TARGET]
        xs.append(F.pad(x, (0, context + TARGET - x.shape[1])))
        y = audio[i][start * HOP : (start + context + TARGET) * HOP]
        ys.append(F.pad(y, (0, (context + TARGET) * HOP - len(y))))
    return torch.stack(xs), torch.stack(ys)


def _spectral_step(
    render: Callable[[Tensor], Tensor], spectral: SpectralLoss, batch: tuple[Tensor, Tensor, Tensor], context: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y = batch
    made = render(x)[:, context * HOP :]
    real = y[:, context * HOP :]
    mel, stft = spectral(made, real)
    return mel, stft, made, real


def train_head(work: Path, steps: int = HEAD_STEPS, seed: int = 2) -> None:
    """Step 2; writes work/head.pt: a head over standardised true log-mels."""
    torch.manual_seed(seed)
    _, audio = load_corpus(work)
    head = normed(Head(CODEC.model_copy(update={"dims": (*CODEC.dims[:-1], CODEC.n_mels)})))
    mels = [(mel_of(a) - MEL_MEAN) / MEL_STD for a in audio]
    spectral = SpectralLoss(CODEC.sample_rate)
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-3, betas=(0.8, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: min(1, (s + 1) / 100) * 0.9997**s)
    run = Run(work / "head.pt", {"head": head, "optimiser": optimiser, "schedule": schedule}, steps)
    for step in run:
        batch = _segments(mels, audio, _seeded(step, seed), 8, CONTEXT)
        mel, stft, _, _ = _spectral_step(lambda x: run_head(head, x), spectral, batch, CONTEXT)
        optimiser.zero_grad(set_to_none=True)
        (mel + stft).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 5.0)
        optimiser.step()
        schedule.step()
        run.log(mel=mel.item(), stft=stft.item())


def load_codec(work: Path, *, vocoder: bool) -> Firefly:
    """The codec as trained so far, with weight norm folded; `vocoder` takes step 3's decoder, else step 1's.

    Encoder and quantiser are rounded to half precision, as they will be stored: a code near a boundary must fall to the
    same side here and in serving.
    """
    codec = Firefly(CODEC)
    if vocoder:
        state = fold_weight_norm(torch.load(work / "vocoder.pt", weights_only=False)["average"])
    else:
        saved = torch.load(work / "features.pt", weights_only=False)["model"]
        state = {k.removeprefix("codec."): v for k, v in saved.items() if k.startswith("codec.")}
    codec.load_state_dict(state)
    return codec.half().float().eval()


@torch.inference_mode()
def write_codes(work: Path) -> list[Tensor]:
    """Encode the corpus with the finished quantiser: work/codes.pt, (num_codebooks, frames) int16 per recording."""
    path = work / "codes.pt"
    if path.exists():
        return torch.load(path)
    _, audio = load_corpus(work)
    codec = load_codec(work, vocoder=False)
    codes = [codec.encode(a[None])[0][0].clone() for a in audio]
    used = [len(torch.cat(codes, dim=1)[k].unique()) for k in range(CODEC.num_codebooks)]
    print(f"codes: {sum(c.shape[1] for c in codes)} frames; codes in use per codebook: {used} of {CODEC.codebook_size}")
    torch.save(codes, path)
    return codes


def _absorb_to_mel(head: Head, to_mel: dict[str, Tensor]) -> Head:
    """A head over features from a head over mels: the 1x1 convolution between them goes into its first layer."""
    wide = Head(CODEC)
    state = fold_weight_norm(head.state_dict())
    first = state["conv_pre.conv.weight"]  # (width, n_mels, kernel)
    state["conv_pre.conv.weight"] = torch.einsum("omk,mc->ock", first, to_mel["weight"][:, :, 0])
    state["conv_pre.conv.bias"] = state["conv_pre.conv.bias"] + torch.einsum("omk,m->o", first, to_mel["bias"])
    wide.load_state_dict(state)
    return wide


def train_vocoder(
    work: Path, steps: int = VOCODER_STEPS, adversarial_from: int = ADVERSARIAL_FROM, seed: int = 3
) -> None:
    """Step 3; writes work/vocoder.pt, whose "average" (a running mean of the weights) is what will be shipped."""
    torch.manual_seed(seed)
    _, audio = load_corpus(work)
    codes = write_codes(work)
    codec = load_codec(work, vocoder=False)
    features = torch.load(work / "features.pt", weights_only=False)["model"]
    mel_head = normed(Head(CODEC.model_copy(update={"dims": (*CODEC.dims[:-1], CODEC.n_mels)})))
    mel_head.load_state_dict(torch.load(work / "head.pt", weights_only=False)["head"])
    codec.head = _absorb_to_mel(mel_head, {k: features[f"to_mel.{k}"] for k in ("weight", "bias")})
    normed(codec.head)
    decoder = [*codec.head.parameters(), *codec.quantizer.upsample.parameters()]
    decoder += [p for group in codec.quantizer.residual_fsq.rvqs for p in group.project_out.parameters()]
    optimiser = torch.optim.AdamW(decoder, lr=5e-4, betas=(0.8, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: min(1, (s + 1) / 100) * 0.9998**s)
    judges, spectral = Discriminators(), SpectralLoss(CODEC.sample_rate)
    judge_optimiser = torch.optim.AdamW(judges.parameters(), lr=4e-4, betas=(0.8, 0.98))
    average = torch.optim.swa_utils.AveragedModel(codec, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998))
    parts = {"codec": codec, "optimiser": optimiser, "schedule": schedule, "judges": judges}
    parts |= {"judge_optimiser": judge_optimiser, "average": average.module}
    run = Run(work / "vocoder.pt", parts, steps)
    for step in run:
        rng = _seeded(step, seed)
        # Now and then all segments start where recordings start, so that the silence of the padding is learned too.
        context = 0 if rng.random() < 0.15 else CONTEXT // FACTOR
        x, real = _code_segments(codes, audio, rng, 8, context)
        made = codec.synthesize(codec.quantizer.residual_fsq.lookup(x, torch.float32), context)
        mel, stft = spectral(made, real)
        loss = 3 * mel + stft
        logged = {"mel": mel.item(), "stft": stft.item()}
        if step >= adversarial_from:
            judge_optimiser.zero_grad(set_to_none=True)
            judge_loss = discriminator_loss(judges(real), judges(made.detach()))
            judge_loss.backward()
            judge_optimiser.step()
            judges.requires_grad_(False)
            with torch.no_grad():
                real_views = judges(real)
            adversarial, matching = generator_losses(real_views, judges(made))
            judges.requires_grad_(True)
            loss = loss + 0.3 * adversarial + 0.3 * matching
            logged |= {"judge": judge_loss.item(), "adversarial": adversarial.item(), "matching": matching.item()}
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(decoder, 10.0)
        optimiser.step()
        schedule.step()
        average.update_parameters(codec)
        run.log(**logged)


def _code_segments(
    codes: list[Tensor], audio: list[Tensor], rng: np.random.Generator, batch: int, context: int
) -> tuple[Tensor, Tensor]:
    """(batch, num_codebooks, context + frames) codes and the audio of the last `frames` of them; frames = 0.5 s."""
    frames, samples = TARGET // FACTOR, CODEC.samples_per_frame
    xs, ys = [], []
    weights = np.array([c.shape[1] for c in codes], float)
    for i in rng.choice(len(codes), batch, p=weights / weights.sum()):
        start = int(rng.integers(0, codes[i].shape[1] - frames - context + 1)) if context else 0
        xs.append(codes[i][:, start : start + context + frames])
        ys.append(audio[i][(start + context) * samples : (start + context + frames) * samples])
    return torch.stack(xs), torch.stack(ys)
