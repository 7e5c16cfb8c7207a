"""The MovieLens-100K ratings, split as in the paper on neural collaborative filtering.

The ratings (GroupLens Research, https://grouplens.org/datasets/movielens/100k/, whose terms
allow research use) are not shipped here. They are taken out of the wheel of RecBole, which pip
downloads once from the package index it is set up for, without its dependencies. Wheel and
ratings are checked against the hashes below.

Split and evaluation follow He et al., Neural Collaborative Filtering (WWW 2017), section 4.1:
the latest interaction of each user is held out and ranked among 99 items the user never met.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import cache_folder
from numpy.typing import NDArray

REQUIREMENT = "recbole==1.2.1"
WHEEL = "recbole-1.2.1-py3-none-any.whl"
WHEEL_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
MEMBER = "recbole/dataset_example/ml-100k/ml-100k.inter"
RATINGS_SHA256 = "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff"

#: Unseen items beside which the held-out one is ranked.
RIVALS = 99

Ids = NDArray[np.int64]
Score = Callable[[Ids, Ids], NDArray[np.float32]]


class DatasetError(Exception):
    """The ratings could not be had, or aren't the ones we know; the message says what to do."""


def fetch(folder: Path | None = None) -> Path:
    """Return the path of the ratings, downloading them (2 MB) when they aren't in the cache.

    Several processes may call this at once: each works in a folder of its own, and the finished
    file appears under its name in one step.

    Raises DatasetError when the download fails or a hash is wrong.
    """
    folder = folder or cache_folder() / "movielens"
    ratings = folder / "ml-100k.inter"
    if ratings.exists() and sha256(ratings) == RATINGS_SHA256:
        return ratings
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as scratch:
        wheel = folder / WHEEL
        if not wheel.exists():
            wheel = download(Path(scratch), by_hand=wheel)
        check(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            fresh = Path(archive.extract(MEMBER, scratch))
        check(fresh, RATINGS_SHA256)
        os.replace(fresh, ratings)
    return ratings


def download(scratch: Path, *, by_hand: Path) -> Path:
    """Let pip download the wheel alone into a folder, and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(scratch), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise DatasetError(
            f"could not download {REQUIREMENT}, whose wheel holds the MovieLens-100K ratings.\n"
            f"pip says: {reason}\n"
            f"Without a network, copy {WHEEL} from another machine to {by_hand}"
        )
    return scratch / WHEEL


def check(path: Path, expected: str) -> None:
    """Raise DatasetError when a file isn't the one we know."""
    found = sha256(path)
    if found != expected:
        raise DatasetError(
            f"{path} is not the file this example was written for, so it isn't used.\n"
            f"SHA-256 expected {expected}\n        found    {found}\nRemove it and try again."
        )


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Batch:
    """Samples of one step: user and item ids (int64) and whether the two met (float32, 0 or 1)."""

    users: Ids
    items: Ids
    labels: NDArray[np.float32]


@dataclass(frozen=True)
class MovieLens:
    """Interactions for training, and for each user the held-out item among its rivals."""

    users: int
    items: int
    #: shape (interactions, 2): user, item
    train: Ids
    #: shape (users, 1 + RIVALS): the held-out item, then items the user never met
    candidates: Ids
    #: shape (users, items): what was met in training, and is no negative sample
    met: NDArray[np.bool_]

    @classmethod
    def load(cls, path: Path, seed: int) -> MovieLens:
        """Read the ratings and split them. The seed draws the rivals; every rank gets the same."""
        table = np.loadtxt(path, skiprows=1, dtype=np.int64)
        _, user = np.unique(table[:, 0], return_inverse=True)
        _, item = np.unique(table[:, 1], return_inverse=True)
        order = np.lexsort((item, table[:, 3], user))
        user, item = user[order], item[order]
        latest = np.append(user[1:] != user[:-1], True)
        users, items = int(user.max()) + 1, int(item.max()) + 1

        met = np.zeros((users, items), dtype=np.bool_)
        met[user, item] = True
        random = np.random.default_rng(seed)
        rivals = [random.choice(np.flatnonzero(~row), RIVALS, replace=False) for row in met]
        held_out = item[latest]
        met[user[latest], held_out] = False
        return cls(
            users=users,
            items=items,
            train=np.stack([user, item], axis=1)[~latest],
            candidates=np.column_stack([held_out, np.stack(rivals)]),
            met=met,
        )

    def steps_per_epoch(self, batch_size: int, size: int) -> int:
        """Return the steps of an epoch, the same on all ranks; an incomplete one is left out."""
        return len(self.train) // (batch_size * size)

    def batches(
        self, batch_size: int, negatives: int, *, seed: int, epoch: int, rank: int, size: int
    ) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch.

        All ranks shuffle the interactions alike and take turns. ``batch_size`` interactions
        make a batch, each followed by ``negatives`` sampled items that its user never met.
        """
        order = np.random.default_rng([seed, epoch]).permutation(len(self.train))[rank::size]
        random = np.random.default_rng([seed, epoch, 1 + rank])
        labels = np.zeros((batch_size, 1 + negatives), dtype=np.float32)
        labels[:, 0] = 1
        for step in range(self.steps_per_epoch(batch_size, size)):
            chosen = self.train[order[step * batch_size : (step + 1) * batch_size]]
            users = np.repeat(chosen[:, :1], 1 + negatives, axis=1)
            items = random.integers(self.items, size=users.shape)
            while (wrong := self.met[users, items]).any():
                items[wrong] = random.integers(self.items, size=np.count_nonzero(wrong))
            items[:, 0] = chosen[:, 1]
            yield Batch(users.ravel(), items.ravel(), labels.ravel())

    def evaluate(self, score: Score, *, rank: int = 0, size: int = 1) -> NDArray[np.float64]:
        """Rank the held-out item of this rank's share of the users.

        ``score(users, items)`` takes two int64 arrays of one length and returns float32 scores.
        Returns the sums [hits at 10, discounted gains at 10, users], to be added over the ranks.
        """
        users = np.arange(rank, self.users, size)
        shown = self.candidates[users]
        scores = score(np.repeat(users, shown.shape[1]), shown.ravel()).reshape(shown.shape)
        # A rival with the same score counts as better: a model that can't tell scores nothing.
        place = np.count_nonzero(scores[:, 1:] >= scores[:, :1], axis=1)
        hit = place < 10
        return np.array([hit.sum(), (hit / np.log2(place + 2)).sum(), len(users)], np.float64)


if __name__ == "__main__":
    print(fetch())
