"""A next-word model on the text that every Python ships, in TensorFlow 2 under Horovod.

    horovodrun -np 2 python examples/tensorflow2_text.py --compression lhc

An LSTM reads 20 words of Python's language reference (``pydoc_data.topics``) and predicts the
next one at each. Embedding and output layer hold a row per word, and a step touches few rows:
only the words of the batch, and a few sampled ones (sampled softmax, as usual for large
vocabularies). The line that changes is marked in ``main``.

Everything is plain TensorFlow, so that it runs with Keras 2 and Keras 3 alike.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from common import Recorder, make_parser, median_ms, positive_int
from numpy.typing import NDArray

import hvd_lhc.tensorflow

#: Every so-manieth window of words is held out.
HELD_OUT_EVERY = 10
#: Windows in a batch of the evaluation.
EVALUATION_BATCH = 64

Words = NDArray[np.int32]


@dataclass(frozen=True)
class Text:
    """The text as word numbers, the commonest word first, in windows of equal length."""

    vocabulary: int
    #: shape (windows, length + 1): the words of a window, and the one that follows it
    train: Words
    held_out: Words

    @classmethod
    def load(cls, length: int) -> Text:
        """Cut Python's help topics into words and punctuation marks, and these into windows."""
        text = "\n".join(topics[name] for name in sorted(topics))
        words = re.findall(r"\w+|[^\w\s]", text)
        number = {word: place for place, (word, _) in enumerate(Counter(words).most_common())}
        stream = np.array([number[word] for word in words], dtype=np.int32)
        starts = np.arange(0, len(stream) - length, length)
        windows = stream[starts[:, None] + np.arange(length + 1)]
        held_out = np.arange(len(windows)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        return cls(len(number), windows[~held_out], windows[held_out])

    def steps_per_epoch(self, batch_size: int, size: int) -> int:
        """Return the steps of an epoch, the same on all ranks; an incomplete one is left out."""
        return len(self.train) // (batch_size * size)

    def batches(self, batch_size: int, *, seed: int, epoch: int, rank: int, size: int) -> Iterator[tf.Tensor]:
        """Yield this rank's windows: all ranks shuffle alike and take turns."""
        order = np.random.default_rng([seed, epoch]).permutation(len(self.train))[rank::size]
        for step in range(self.steps_per_epoch(batch_size, size)):
            chosen = order[step * batch_size : (step + 1) * batch_size]
            yield tf.constant(self.train[chosen])


class NextWord(tf.Module):
    """Embedding, one LSTM layer, and an output row per word."""

    def __init__(self, vocabulary: int, width: int, sampled: int, seed: int) -> None:
        super().__init__()
        self.sampled = sampled
        self.seed = seed
        random = np.random.default_rng(seed)

        def weight(name: str, *shape: int, scale: float) -> tf.Variable:
            values = random.uniform(-scale, scale, shape).astype(np.float32)
            return tf.Variable(values, name=name)

        self.embedding = weight("embedding", vocabulary, width, scale=0.05)
        self.kernel = weight("kernel", 2 * width, 4 * width, scale=width**-0.5)
        self.bias = weight("bias", 4 * width, scale=0.0)
        self.output = weight("output", vocabulary, width, scale=0.05)
        self.output_bias = weight("output_bias", vocabulary, scale=0.0)

    def read(self, words: tf.Tensor) -> tf.Tensor:
        """Return what the LSTM makes of words (batch, length): shape (batch * length, width)."""
        inputs = tf.nn.embedding_lookup(self.embedding, words)
        state = memory = tf.zeros_like(inputs[:, 0])
        states = []
        for now in tf.unstack(inputs, axis=1):
            gates = tf.concat([now, state], axis=1) @ self.kernel + self.bias
            update, admit, keep, show = tf.split(gates, 4, axis=1)
            memory = tf.sigmoid(keep + 1.0) * memory + tf.sigmoid(admit) * tf.tanh(update)
            state = tf.sigmoid(show) * tf.tanh(memory)
            states.append(state)
        return tf.reshape(tf.stack(states, axis=1), [-1, state.shape[1]])

    def training_loss(self, windows: tf.Tensor) -> tf.Tensor:
        """Return the mean sampled-softmax loss: each next word against a few sampled ones."""
        losses = tf.nn.sampled_softmax_loss(
            self.output,
            self.output_bias,
            labels=tf.cast(tf.reshape(windows[:, 1:], [-1, 1]), tf.int64),
            inputs=self.read(windows[:, :-1]),
            num_sampled=self.sampled,
            num_classes=len(self.output),
            seed=self.seed,
        )
        return tf.reduce_mean(losses)

    def log_loss(self, windows: tf.Tensor) -> tf.Tensor:
        """Return the summed log loss over the whole vocabulary, which perplexity is made of."""
        scores = tf.matmul(self.read(windows[:, :-1]), self.output, transpose_b=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.reshape(windows[:, 1:], [-1]), scores + self.output_bias
        )
        return tf.reduce_sum(losses)


class Adam(tf.Module):
    """Adam (Kingma and Ba 2015, algorithm 1) on dense gradients."""

    def __init__(self, variables: Sequence[tf.Variable], lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.steps = tf.Variable(0.0, name="steps")
        self.means = [tf.Variable(tf.zeros_like(v), name="mean") for v in variables]
        self.squares = [tf.Variable(tf.zeros_like(v), name="square") for v in variables]

    def apply(self, gradients: Sequence[tf.Tensor], variables: Sequence[tf.Variable]) -> None:
        """Change the variables by one step."""
        self.steps.assign_add(1.0)
        rate = self.lr * tf.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        for g, v, m, s in zip(gradients, variables, self.means, self.squares, strict=True):
            m.assign(0.9 * m + 0.1 * g)
            s.assign(0.999 * s + 0.001 * tf.square(g))
            v.assign_sub(rate * m / (tf.sqrt(s) + 1e-8))


def evaluate(log_loss: Callable[[tf.Tensor], tf.Tensor], text: Text) -> dict[str, float]:
    """Return the perplexity of held-out text; each rank reads its share."""
    mine = text.held_out[hvd.rank() :: hvd.size()]
    parts = [mine[at : at + EVALUATION_BATCH] for at in range(0, len(mine), EVALUATION_BATCH)]
    total = sum(float(log_loss(tf.constant(part))) for part in parts)
    sums = tf.constant([total, mine.size - len(mine)], dtype=tf.float64)
    total, words = hvd.allreduce(sums, op=hvd.Sum, name="eval").numpy()
    return {"perplexity": float(np.exp(total / words))}


def parse_args() -> argparse.Namespace:
    """Return the flags."""
    parser = make_parser(
        "Next-word model on Python's help topics",
        epochs=5,
        batch_size=8,
        batch_help="windows of words per rank and step",
        lr=2e-3,
    )
    parser.add_argument("--length", type=positive_int, default=20, help="words in a window")
    parser.add_argument("--width", type=positive_int, default=128, help="of embedding and LSTM")
    parser.add_argument("--sampled", type=positive_int, default=64, help="words for the softmax")
    return parser.parse_args()


def main() -> None:
    """Train, and report on rank 0."""
    args = parse_args()
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.experimental.enable_op_determinism()
    tf.random.set_seed(args.seed)

    text = Text.load(args.length)
    model = NextWord(text.vocabulary, args.width, args.sampled, args.seed)
    variables = model.trainable_variables
    optimizer = Adam(variables, args.lr)
    compression = getattr(hvd_lhc.tensorflow.Compression, args.compression)

    @tf.function
    def train_step(windows: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = model.training_loss(windows)
        tape = hvd.DistributedGradientTape(
            tape,
            sparse_as_dense=True,  # embeddings' gradients are reduced as tensors, so compressible
            compression=compression,  # <-- hvd_lhc.tensorflow.Compression.lhc: all that changes
        )
        gradients = tape.gradient(loss, variables)
        optimizer.apply(gradients, variables)
        return loss, gradients

    @tf.function
    def local_gradients(windows: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = model.training_loss(windows)
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]

    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    recorder = Recorder(
        args,
        "tensorflow2_text",
        rank=hvd.rank(),
        size=hvd.size(),
        steps=args.epochs * text.steps_per_epoch(args.batch_size, hvd.size()),
        allgather_object=hvd.allgather_object,
    )
    shard = {"seed": args.seed, "rank": hvd.rank(), "size": hvd.size()}
    first = next(text.batches(args.batch_size, epoch=0, **shard))
    compute_ms = median_ms(lambda: local_gradients(first))
    log_loss = tf.function(model.log_loss)
    recorder.add_metrics(evaluate(log_loss, text))

    for epoch in range(args.epochs):
        for windows in recorder.steps(text.batches(args.batch_size, epoch=epoch, **shard)):
            if recorder.wants_density():
                local = local_gradients(windows)
            loss, gradients = train_step(windows)
            if recorder.wants_density():
                recorder.add_density([v.name for v in variables], local, gradients)
            recorder.add_loss(float(loss))
        recorder.add_metrics(evaluate(log_loss, text))
        if recorder.finished:
            break

    recorder.finish(
        weights=[(v.name, v.numpy()) for v in variables],
        compute_ms=compute_ms,
        gradient_bytes=sum(v.numpy().nbytes for v in variables),
        compression=compression,
    )


if __name__ == "__main__":
    main()
