"""What else people do with ``horovod.torch``: mixed precision, shared, frozen and added parameters, checkpoints, odd tensors.

Each case stands for a row of the table in ``docs/horovod.md``.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from exact import assert_same_bits, draw_gradients, generator
from harness import case
from steps import count, integer_steps
from torch_3_training import ROW, ROWS, Model, adam, assert_same_weights, digests, momentum, sgd
from torch_common import check_steps, plain, reduce, same_everywhere, weights_of

from hvd_lhc.torch import LHC, Compression

NUMEL = 50_000


def compare(name: str, run: Callable[[str, Any], dict[str, bytes]], sketches: int) -> LHC:
    """Train with and without compression: the same weights at two ranks, equal ones on all ranks with more.

    Args:
        name: of the case.
        run: trains, with a prefix for names and a compressor; returns the bits of the weights.
        sketches: so many at least.
    """
    lhc = LHC()
    weights = run(name, lhc)
    happened = count(lhc)
    assert happened["sketch"] >= sketches, happened
    same_everywhere(digests(weights), name)
    same_everywhere(happened, f"{name} statistics")
    if hvd.size() == 2:
        assert_same_weights(weights, run(f"{name} plain", hvd.Compression.none), name)
    return lhc


def distributed(name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, compression: Any, **options: Any) -> Any:
    """A ``DistributedOptimizer`` whose names begin with the case's."""
    named = [(f"{name}.{parameter}", value) for parameter, value in model.named_parameters()]
    return hvd.DistributedOptimizer(optimizer, named, compression, **options)


@case(2, 3, 4)
def grad_scaler() -> None:
    """torch.amp.GradScaler: infinity on one rank leaves a step out on all ranks and lowers the scale; then training goes on."""
    scales: dict[str, list[float]] = {}

    def run(name: str, compression: Any) -> dict[str, bytes]:
        torch.manual_seed(1)
        model = Model(ROWS)
        optimizer = distributed(name, model, sgd(model.parameters()), compression)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
        scales[name] = []
        for step in range(8):
            optimizer.zero_grad()
            loss = model.loss((step, hvd.rank()), {0: 3})
            too_much = 2.0**120 if step < 2 and hvd.rank() == hvd.size() - 1 else 1.0
            scaler.scale(loss * too_much).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            scales[name].append(scaler.get_scale())
        return weights_of(model)

    compare("scaler", run, sketches=4)
    assert scales["scaler"][1] == 2.0**14 and scales["scaler"][-1] > 2.0**14, scales
    same_everywhere(scales["scaler"], "scales")
    if hvd.size() == 2:
        assert scales["scaler"] == scales["scaler plain"]


@case(2, 3, 4)
def tied_parameters() -> None:
    """A table that is also the output layer, as in language models, is one parameter: it is reduced once."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(ROWS, ROW)
            self.output = torch.nn.Linear(ROW, ROWS, bias=False)
            self.output.weight = self.table.weight

        def loss(self, key: object) -> torch.Tensor:
            random = generator("tied", key)
            words = torch.from_numpy(random.integers(0, ROWS, (4, 3)))
            outputs = torch.from_numpy(random.integers(0, ROWS, 20))
            return (self.table(words).mean((0, 1)) * self.output.weight[outputs]).sum()

    def run(name: str, compression: Any) -> dict[str, bytes]:
        torch.manual_seed(1)
        model = Tied()
        optimizer = distributed(name, model, momentum(model.parameters()), compression)
        for step in range(8):
            optimizer.zero_grad()
            model.loss((step, hvd.rank())).backward()
            optimizer.step()
        return weights_of(model)

    compare("tied", run, sketches=5)


@case(2, 3, 4)
def frozen_and_added_parameters() -> None:
    """A table that is frozen, one that is added later (Horovod doesn't reduce it), and groups with options of their own."""

    def run(name: str, compression: Any) -> dict[str, bytes]:
        torch.manual_seed(1)
        model = Model(ROWS, ROWS, ROWS)
        model.tables[1].weight.requires_grad_(False)
        groups = [
            {"params": [model.tables[0].weight], "lr": 0.5},
            {"params": [*model.head.parameters()], "lr": 0.01, "weight_decay": 0.1},
        ]
        named = [(f"{name}.{parameter}", value) for parameter, value in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), named, compression)
        for step in range(10):
            if step == 4:
                optimizer.add_param_group({"params": [model.tables[2].weight], "lr": 0.25})
            optimizer.zero_grad()
            words = {0: 3, 1: 2} if step < 4 else {0: 3, 1: 2, 2: 4}
            model.loss((step, hvd.rank()), words).backward()
            optimizer.step()
        weights = weights_of(model)
        added = hvd.allgather_object(weights.pop("tables.2.weight"), name=f"{name} added")
        assert len(set(added)) == hvd.size(), "Horovod has learned to reduce what add_param_group adds"
        return weights

    compare("groups of parameters", run, sketches=7)


@case(2, 3, 4)
def checkpoint_of_an_optimizer() -> None:
    """Weights and optimizer saved in the middle and loaded into new ones: training goes on as if not interrupted."""

    def run(name: str, compression: Any) -> dict[str, bytes]:
        torch.manual_seed(1)
        model = Model(ROWS)
        optimizer = distributed(name, model, adam(model.parameters()), compression)
        for step in range(10):
            if step == 5 and isinstance(compression, LHC):
                saved = io.BytesIO()
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
                saved.seek(0)
                loaded = torch.load(saved)
                model = Model(ROWS)
                optimizer = distributed(f"{name} loaded", model, adam(model.parameters()), LHC())
                model.load_state_dict(loaded["model"])
                optimizer.load_state_dict(loaded["optimizer"])
                hvd.broadcast_parameters(model.state_dict(), root_rank=0)
                hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            optimizer.zero_grad()
            model.loss((step, hvd.rank()), {0: 3}).backward()
            optimizer.step()
        return weights_of(model)

    compare("checkpoint", run, sketches=3)


@case(2, 3, 4)
def copies_of_an_optimizer() -> None:
    """copy.deepcopy of a model and its optimizer together: the copy has a compressor of its own, that starts afresh."""
    torch.manual_seed(1)
    model = Model(ROWS)
    lhc = LHC()
    optimizer = distributed("copied", model, sgd(model.parameters()), lhc)
    for step in range(3):
        optimizer.zero_grad()
        model.loss((step, hvd.rank()), {0: 3}).backward()
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    assert state["param_groups"] and copy.deepcopy(lhc).statistics.sketches == 0 < lhc.statistics.sketches
    twin = Model(ROWS)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    other = distributed("copy", twin, sgd(twin.parameters()), copy.deepcopy(lhc))
    other.load_state_dict(state)
    for one, module in ((optimizer, model), (other, twin)):
        for step in range(3, 6):
            one.zero_grad()
            module.loss((step, hvd.rank()), {0: 3}).backward()
            one.step()
    if hvd.size() == 2:
        assert_same_weights(weights_of(model), weights_of(twin), "copy")


@case(2, 3, 4)
def class_attribute_in_many_optimizers() -> None:
    """Compression.lhc, which everybody shares, in three optimizers that are used in turn and at once."""
    before = Compression.lhc.statistics.sketches

    def run(name: str, compression: Any) -> dict[str, bytes]:
        chosen = Compression.lhc if isinstance(compression, LHC) else compression
        torch.manual_seed(1)
        models = [Model(ROWS) for _ in range(3)]
        makers = (sgd, momentum, adam)
        optimizers = [
            distributed(f"{name}.{i}", model, make(model.parameters()), chosen)
            for i, (model, make) in enumerate(zip(models, makers, strict=True))
        ]
        for step in range(6):
            for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                model.loss((step, i, hvd.rank()), {0: 3}).backward()
            for optimizer in optimizers:
                optimizer.step()
        return {f"{i}.{key}": bits for i, model in enumerate(models) for key, bits in weights_of(model).items()}

    compare("shared by many", run, sketches=0)
    assert Compression.lhc.statistics.sketches - before >= 3 * 4, Compression.lhc.statistics


@case(2, 3, 4)
def odd_tensors() -> None:
    """Transposed, strided, expanded, empty and scalar tensors, and such that need a gradient: reduced, whatever their layout."""
    base = torch.from_numpy(draw_gradients("odd", 4 * NUMEL, 400, hvd.size())[hvd.rank()])
    tensors = {
        "transposed": base.view(400, 500).t(),
        "strided": base[::2],
        "offset": base[1:],
        "expanded": base[:200].view(1, 200).expand(300, 200),
        "channels_last": base.view(1, 20, 100, 100).contiguous(memory_format=torch.channels_last),
        "empty": torch.zeros(0),
        "empty rows": torch.zeros(0, 16),
        "scalar": torch.tensor(2.5),
        "one": torch.tensor([2.5]),
    }
    for name, tensor in tensors.items():
        lhc = LHC(min_numel=1)
        for _ in range(3):
            expected = plain(tensor.contiguous(), name, op=hvd.Sum)  # it takes no others
            assert_same_bits(reduce(tensor, lhc, name, op=hvd.Sum), expected, name)
    leaf = base[:NUMEL].clone().requires_grad_()
    lhc = LHC()
    for _ in range(3):
        result = hvd.allreduce(leaf.detach(), compression=lhc, name="detached", op=hvd.Sum)
        assert_same_bits(result.numpy(), plain(leaf.detach(), "leaf", op=hvd.Sum), "detached")
    total = hvd.allreduce(leaf, compression=lhc, name="with a derivative", op=hvd.Sum)
    # Not followed backwards: Horovod names the reduction of a derivative by a counter of each rank, and earlier cases have put
    # these apart (process sets, joins), so that ranks would wait for each other without compression, too.
    assert total.grad_fn is not None
    assert_same_bits(total.detach().numpy(), plain(leaf.detach(), "leaf again", op=hvd.Sum), "with a derivative")


@case(2)
def more_than_two_gibibytes() -> None:
    """A gradient of 2**31 bytes and more, whose positions don't fit into 31 bits of bytes."""
    numel = 2**29 + 12_345
    lhc = LHC()
    gradient = torch.zeros(numel)
    for step in range(2):
        positions = torch.tensor([0, 5, 2**29 - 1, 2**29, numel - 1]) - (step and torch.tensor([0, 0, 0, 0, 1]))
        gradient.zero_()
        gradient[positions] = float(hvd.rank() + 1)
        result = hvd.allreduce(gradient, compression=lhc, name="large", op=hvd.Sum)
        assert torch.equal(result[positions], torch.full((5,), 3.0)), f"step {step}"
        assert int(torch.count_nonzero(result)) == 5, f"step {step}"
        del result
    assert lhc.statistics.sketches == 1 and lhc.statistics.wire_bytes < 1.01 * numel * 4, lhc.statistics


@case(2, 3, 4)
def steps_of_one_tensor() -> None:
    """A tensor in many steps, with every kind of refusal, at 2, 3 and 4 ranks."""
    steps = integer_steps("many", NUMEL, [100, 100, 1000, 100, 200, 100, 100])
    steps[4][0][7] = np.nan
    steps[5][hvd.size() - 1][9] = 2.0**100
    happened = check_steps("many", steps, LHC(), hvd.Sum)
    assert {"probe", "sketch", "nonfinite"} <= set(happened), happened
