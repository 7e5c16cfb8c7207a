"""Steps that differ from those after them, and calls in another order than Horovod asks for."""

from __future__ import annotations

import warnings
from typing import Any

import horovod.torch as hvd
import torch
from harness import case
from steps import count
from torch_3_training import ROWS, Model, assert_same_weights, digests, sgd
from torch_7_matrix import distributed
from torch_common import same_everywhere, weights_of

from hvd_lhc.torch import LHC


@case(2, 3)
def odd_first_steps() -> None:
    """A first step without gradient, with huge ones, or with a dense one: compressed within 16 steps of the others."""

    def run(name: str, compression: Any) -> dict[str, bytes]:
        torch.manual_seed(1)
        model = Model(ROWS)
        optimizer = distributed(name, model, sgd(model.parameters()), compression)
        for step in range(24):
            optimizer.zero_grad()
            loss = model.loss((step, hvd.rank()), {0: 3})
            if step == 0:
                odd = {"zero": loss * 0, "huge": loss * 2.0**40, "dense": loss + model.tables[0].weight.sum()}
                loss = odd[name.split()[0]]
            loss.backward()
            if step == 0:
                optimizer.synchronize()  # and leave it at that
            else:
                optimizer.step()
            if step == 16 and isinstance(compression, LHC):
                sketches[name] = count(compression)["sketch"]
        return weights_of(model)

    sketches: dict[str, int] = {}
    for name in ("zero", "huge", "dense"):
        lhc = LHC()
        weights = run(name, lhc)
        late = count(lhc)["sketch"] - sketches[name]
        assert late == 7, (name, late, lhc.statistics)
        same_everywhere(digests(weights), f"odd {name}")
        if hvd.size() == 2:
            assert_same_weights(weights, run(f"{name} plain", hvd.Compression.none), name)


@case(2)
def gradients_changed_on_their_way() -> None:
    """Unscaling before ``synchronize``: Horovod has taken the gradients by then. It is said once, and what to do instead."""
    lhc = LHC()
    model = Model(ROWS)
    optimizer = distributed("late", model, sgd(model.parameters()), lhc)
    said = []
    for step in range(8):
        optimizer.zero_grad()
        model.loss((step, hvd.rank()), {0: 3}).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if step >= 4:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(0.5)
            optimizer.step()
        said.append([str(warning.message) for warning in caught if "hvd_lhc" in str(warning.message)])
    assert [len(messages) for messages in said] == [0, 0, 0, 0, 1, 0, 0, 0], said
    message = said[4][0]
    assert "'late.tables.0.weight'" in message and "optimizer.synchronize() first" in message, message
    assert count(lhc)["sketch"] >= 6, lhc.statistics


#: What a user may do in the wrong order, in a loop that is otherwise right.
MISTAKES = ("one backward pass too many", "no step", "scaler without synchronize")


@case(2)
def advice_of_horovod() -> None:
    """Calls in an order that Horovod forbids: its own advice is seen, word by word as without compression."""

    def run(mistake: str, at: int, compression: Any, **options: Any) -> list[str]:
        torch.manual_seed(1)
        model = Model(ROWS)
        name = f"{mistake} {at} {options} {isinstance(compression, LHC)}"
        optimizer = distributed(name, model, sgd(model.parameters()), compression, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        passes = options.get("backward_passes_per_step", 1)

        def take(step: int) -> None:
            optimizer.zero_grad()
            for number in range(passes + (step == at and mistake == MISTAKES[0])):
                loss = model.loss((step, number, hvd.rank()), {0: 3})
                if mistake == MISTAKES[2] and step == at:
                    scaler.scale(loss * 2.0**126).backward()  # which overflows, so that the scaler leaves the step out
                else:
                    loss.backward()
            if mistake == MISTAKES[2] and step == at:
                scaler.step(optimizer)
            elif not (mistake == MISTAKES[1] and step == at):
                optimizer.step()

        said = []
        for step in range(at + 4):
            try:
                take(step)
            except Exception as error:
                said.append(f"step {step}: {type(error).__name__}: {error}")
                optimizer.synchronize()  # and go on
        return said

    for mistake in MISTAKES:
        for at in (0, 5):
            for options in ({}, {"backward_passes_per_step": 2}, {"groups": 1}):
                plain = run(mistake, at, hvd.Compression.none, **options)
                assert len(plain) == 1 and "AssertionError" in plain[0], (mistake, at, options, plain)
                compressed = run(mistake, at, LHC(), **options)
                assert compressed == plain, (mistake, at, options, compressed, plain)


@case(2)
def header_left_behind() -> None:
    """A step fails in which only one rank had a header to send; training of tensors of that name goes on nevertheless."""

    def run(rows: int, steps: int) -> LHC:
        torch.manual_seed(1)
        lhc = LHC()
        model = Model(rows)
        optimizer = distributed("left behind", model, sgd(model.parameters()), lhc)
        for step in range(steps):
            optimizer.zero_grad()
            model.loss((step, hvd.rank()), {0: 3}).backward()
            optimizer.step()
        same_everywhere(digests(weights_of(model)), f"left behind {steps}")
        return lhc

    for sizes in ((10, ROWS), (ROWS, ROWS + 10), (ROWS, 10)):
        message = "no error"
        try:
            run(sizes[hvd.rank()], 1)
        except hvd.HorovodInternalError as error:
            message = str(error)
        assert "tensor shapes" in message, message
        assert count(run(ROWS, 6))["sketch"] >= 4
