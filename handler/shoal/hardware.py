"""What this machine is, what follows for speech on it, and how much memory a batch takes. Knows nothing of requests."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from shoal.config import FISH_SPEECH_1_5, CodecConfig, DualARConfig

# The guide's recommendation: GPU memory in GB -> batch sizes.
GUIDE_BATCH_SIZES: tuple[tuple[int, tuple[int, int]], ...] = ((8, (2, 4)), (12, (4, 6)), (16, (6, 8)), (24, (8, 12)))

_CODEC_BYTES_PER_FRAME = 0.7e6  # activations of Firefly's decoder at the published geometry, see model/firefly.py
_FRAMES_IN_FLIGHT = 1024  # frames that the codec decodes at once at most
_POSITION_BUCKET = 128


@dataclass(frozen=True)
class GPU:
    """One CUDA device. Memory in bytes."""

    name: str
    compute_capability: tuple[int, int]
    bf16: bool
    memory_total: int
    memory_free: int

    @property
    def memory_used(self) -> int:
        return self.memory_total - self.memory_free


@dataclass(frozen=True)
class Machine:
    """What `inspect_machine` found."""

    python: str
    torch: str
    cpu: str
    cores: int
    threads: int  # that PyTorch computes with
    memory_total: int  # bytes
    memory_free: int
    driver: str | None  # NVIDIA's, None where there is none
    cuda: str | None  # that this PyTorch was built for
    nvcc: str | None
    gpus: tuple[GPU, ...] = ()
    gpu_processes: tuple[str, ...] = ()  # other programs on the cards: "pid, name, memory"
    notes: tuple[str, ...] = field(default=())  # what follows from it, in sentences

    def rows(self) -> list[tuple[str, str]]:
        """(what, found) for a table."""
        rows = [
            ("Python", self.python),
            ("PyTorch", self.torch),
            ("processor", f"{self.cpu}, {self.cores} cores, {self.threads} threads in use"),
            ("memory", f"{self.memory_free / 1e9:.1f} of {self.memory_total / 1e9:.1f} GB free"),
            ("NVIDIA driver", self.driver or "none"),
            ("CUDA of PyTorch", self.cuda or "none (a CPU build)"),
            ("nvcc", self.nvcc or "none (not needed)"),
        ]
        for gpu in self.gpus:
            major, minor = gpu.compute_capability
            rows.append(
                (
                    "GPU",
                    f"{gpu.name}, compute capability {major}.{minor}, bfloat16 {'yes' if gpu.bf16 else 'no'}, "
                    f"{gpu.memory_used / 1e9:.1f} of {gpu.memory_total / 1e9:.1f} GB used",
                )
            )
        if not self.gpus:
            rows.append(("GPU", "none: everything runs on the CPU"))
        rows += [("on the GPU", process) for process in self.gpu_processes]
        return rows

    def _repr_html_(self) -> str:
        from shoal.ui.tables import html_table

        return html_table(("what", "found"), self.rows())


def inspect_machine() -> Machine:
    """Look at processor, memory, driver and cards. Never raises where something is missing: the field says so."""
    import torch

    total, free = _memory()
    gpus = tuple(_gpu(i) for i in range(torch.cuda.device_count())) if torch.cuda.is_available() else ()
    driver = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    processes = _run("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader")
    nvcc = _run("nvcc", "--version")
    machine = Machine(
        python=platform.python_version(),
        torch=torch.__version__,
        cpu=_cpu_name(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_total=total,
        memory_free=free,
        driver=driver.splitlines()[0] if driver else None,
        cuda=torch.version.cuda,
        nvcc=nvcc.splitlines()[-1] if nvcc else None,
        gpus=gpus,
        gpu_processes=tuple(processes.splitlines()) if processes else (),
    )
    return Machine(**{**vars(machine), "notes": tuple(_notes(machine))})


def recommend_batch_size(memory_gb: float) -> tuple[int, int]:
    """The guide's batch sizes (from, to) for a GPU with that much memory; below its table 1, above it its last row."""
    found = (1, 1)
    for gigabytes, sizes in GUIDE_BATCH_SIZES:
        if memory_gb >= gigabytes:
            found = sizes
    return found


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose."""

    weights: int
    kv_cache: int
    codec: int  # its weights and activations

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.codec


def estimate_memory(
    config: DualARConfig, batch: int, frames: int, *, itemsize: int = 2, codec: CodecConfig | None = None
) -> MemoryEstimate:
    """What `batch` rows of `frames` positions each (prompt included) take.

    Args:
        itemsize: bytes per weight and cache entry: 2 for bfloat16, 4 for float32.
    """
    from shoal.model.dual_ar import expected_shapes

    codec = codec or CodecConfig()
    shapes = expected_shapes(config)
    head = shapes.get("output.weight")
    weights = sum(_count(shape) for name, shape in shapes.items() if name != "output.weight")
    if head is not None:  # only the semantic rows are kept
        weights += (config.codebook_size + 1) * config.dim
    rows = 1 << (batch - 1).bit_length()  # as the cache grows, see model/kv_cache.py
    positions = min(-(-frames // _POSITION_BUCKET) * _POSITION_BUCKET, config.max_seq_len)
    scale = (codec.upsample_initial_channel / 512) * (codec.samples_per_frame / 2048)
    activations = min(batch * frames, _FRAMES_IN_FLIGHT) * _CODEC_BYTES_PER_FRAME * scale
    return MemoryEstimate(
        weights=weights * itemsize,
        kv_cache=rows * positions * config.kv_bytes_per_token(itemsize),
        codec=int(_codec_weights(codec) + activations),
    )


@functools.lru_cache(maxsize=8)
def _codec_weights(codec: CodecConfig) -> int:
    """Bytes of the codec in float32."""
    import torch

    from shoal.model.firefly import Firefly

    with torch.device("meta"):
        return 4 * sum(p.numel() for p in Firefly(codec).parameters())


def largest_batch(config: DualARConfig, memory_bytes: int, frames: int = 700, *, itemsize: int = 2) -> int:
    """The largest power of two of rows whose estimate fits into 90% of that memory; 0 if not even one does."""
    batch = 0
    while batch < 1024 and estimate_memory(config, max(1, 2 * batch), frames, itemsize=itemsize).total < (
        0.9 * memory_bytes
    ):
        batch = max(1, 2 * batch)
    return batch


@dataclass(frozen=True)
class BatchAdvice:
    """One row of the guide's table, and what this engine fits into as much memory."""

    memory_gb: int
    guide: tuple[int, int]  # batch sizes, from and to
    fits: int  # rows, see `largest_batch`


def compare_with_guide(
    config: DualARConfig = FISH_SPEECH_1_5, frames: int = 700, *, itemsize: int = 2
) -> list[BatchAdvice]:
    """The guide's batch sizes by GPU memory beside what fits by our estimate.

    Args:
        frames: positions a row, prompt included; 700 are about half a minute of speech.
        itemsize: bytes per weight and cache entry: 2 for bfloat16, 4 for float32.
    """
    return [
        BatchAdvice(gb, sizes, largest_batch(config, gb * 10**9, frames, itemsize=itemsize))
        for gb, sizes in GUIDE_BATCH_SIZES
    ]


def _notes(machine: Machine) -> list[str]:
    if not machine.gpus:
        notes = [
            "No GPU: the CPU speaks in float32. The demo checkpoint runs faster than real time, the real one slower."
        ]
        if machine.driver and machine.cuda is None:
            notes.append(
                "There is an NVIDIA driver, but this PyTorch is a CPU build: install a CUDA build to use the GPU."
            )
        return notes
    gpu = machine.gpus[0]
    low, high = recommend_batch_size(gpu.memory_total / 1e9)
    notes = [f"The guide recommends batches of {low} to {high} for {gpu.memory_total / 1e9:.0f} GB."]
    if not gpu.bf16:
        notes.append("The card has no bfloat16: load with dtype='float16' or 'float32'.")
    if gpu.memory_used > 0.2 * gpu.memory_total:
        notes.append("Another program holds a good part of the card's memory: see the list, or choose smaller batches.")
    return notes


def _gpu(index: int) -> GPU:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    with torch.cuda.device(index):
        bf16 = torch.cuda.is_bf16_supported()
    return GPU(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), bf16, total, free)


def _memory() -> tuple[int, int]:
    """Total and available bytes."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return found["MemTotal"], found["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        try:
            import psutil

            memory = psutil.virtual_memory()
            return memory.total, memory.available
        except ImportError:
            return 0, 0


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _run(*command: str) -> str | None:
    """What a program prints; None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
