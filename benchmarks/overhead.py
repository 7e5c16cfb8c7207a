"""What compression costs a model that has nothing to compress: steps with and without it, in turn, in the same run.

    python benchmarks/overhead.py [--ranks 2] [--steps 60] [--image 64] [--batch 2]

Two copies of a ResNet-50 (25.6 million parameters, none of whose gradients is sparse) train side by side under
``horovodrun``: one step of the one with ``Compression.none``, one of the other with ``Compression.lhc``, and so on, in
alternating order. Rank 0 prints medians of the step times and of the differences within a pair,
and the time inside of the compressor's two functions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HOROVODRUN = Path(sys.executable).with_name("horovodrun")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="pairs that are timed")
    parser.add_argument("--warm-up", type=int, default=5, help="pairs before them")
    parser.add_argument("--image", type=int, default=64, help="height and width")
    parser.add_argument("--batch", type=int, default=2, help="images of a rank")
    return parser.parse_args()


def resnet50() -> Any:
    """ResNet-50 (He et al. 2015) with 1000 classes."""
    from torch import nn

    class Bottleneck(nn.Module):
        def __init__(self, inside: int, width: int, stride: int) -> None:
            super().__init__()
            outside = 4 * width
            self.body = nn.Sequential(
                *(nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
                *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
                *(nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)),
            )
            self.shortcut: Any = nn.Identity()
            if stride != 1 or inside != outside:
                self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

        def forward(self, x: Any) -> Any:
            return (self.body(x) + self.shortcut(x)).relu()

    layers: list[Any] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(inside, width, stride if number == 0 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


class Trainee:
    """A model, its optimizer, and how long its steps took."""

    def __init__(self, name: str, compression: Any) -> None:
        import horovod.torch as hvd
        import torch

        torch.manual_seed(1)
        self.model = resnet50()
        parameters = [(f"{name}.{key}", value) for key, value in self.model.named_parameters()]
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)
        self.optimizer = hvd.DistributedOptimizer(optimizer, parameters, compression=compression)
        self.seconds: list[float] = []

    def step(self, images: Any, labels: Any) -> None:
        """One step, timed."""
        import torch.nn.functional

        start = time.perf_counter()
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)


def work(options: argparse.Namespace) -> None:
    """What every rank does."""
    import horovod.torch as hvd
    import torch

    from hvd_lhc.torch import LHC

    class Timed(LHC):
        """Adds up the time inside of its two functions."""

        seconds = 0.0

        def compress(self, tensor: torch.Tensor) -> Any:
            start = time.perf_counter()
            result = super().compress(tensor)
            self.seconds += time.perf_counter() - start
            return result

        def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            start = time.perf_counter()
            result = super().decompress(tensor, ctx)
            self.seconds += time.perf_counter() - start
            return result

    hvd.init()
    torch.set_num_threads(1)
    lhc = Timed()
    none, compressed = Trainee("none", hvd.Compression.none), Trainee("lhc", lhc)
    generator = torch.Generator().manual_seed(hvd.rank())
    inside = []
    for number in range(options.warm_up + options.steps):
        lhc.seconds, probes = 0.0, lhc.statistics.probes
        images = torch.randn(options.batch, 3, options.image, options.image, generator=generator)
        labels = torch.randint(1000, (options.batch,), generator=generator)
        for trainee in (none, compressed) if number % 2 else (compressed, none):
            trainee.step(images, labels)
        inside.append((lhc.seconds, lhc.statistics.probes > probes))
    if hvd.rank():
        return
    pairs = list(zip(none.seconds, compressed.seconds, strict=True))
    before, after = zip(*pairs[options.warm_up :], strict=True)
    differences = [b - a for a, b in zip(before, after, strict=True)]
    base, extra = statistics.median(before), statistics.median(differences)
    spread = statistics.quantiles(differences, n=20)
    parameters = sum(p.numel() for p in none.model.parameters())
    print(f"{parameters:,} parameters, {hvd.size()} ranks, {len(before)} pairs of steps; milliseconds per step")
    print(f"none: median {1e3 * base:.1f}")
    print(f"lhc:  median {1e3 * statistics.median(after):.1f}")
    print(f"lhc - none, within a pair: median {1e3 * extra:+.2f} ({100 * extra / base:+.2f} %)")
    print(f"    9 of 10 differences lie from {1e3 * spread[0]:+.1f} to {1e3 * spread[-1]:+.1f}")
    usual = statistics.median(seconds for seconds, probed in inside if not probed)
    probing = statistics.mean(seconds for seconds, probed in inside[1:] or inside if probed)
    print(f"inside of compress and decompress: median {1e3 * usual:.2f} per step ({100 * usual / base:.2f} %)")
    print(f"    in a step with probes (the 66th, 195th, 452nd, ..., every 1025th): {1e3 * probing:.1f}")
    print(f"first step, where all is probed: none {1e3 * pairs[0][0]:.1f}, lhc {1e3 * pairs[0][1]:.1f}")
    print(f"{lhc.statistics}")
    same = all(torch.equal(a, b) for a, b in zip(none.model.parameters(), compressed.model.parameters(), strict=True))
    print(f"weights bit-identical: {same}")


def main() -> None:
    """Start the ranks, or be one."""
    options = parse_arguments()
    if "HOROVOD_RANK" in os.environ:
        work(options)
        return
    command = [HOROVODRUN, "-np", str(options.ranks), sys.executable, *sys.argv]
    sys.exit(subprocess.run(list(map(str, command)), check=False).returncode)


if __name__ == "__main__":
    main()
