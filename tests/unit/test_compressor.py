"""The life of a step, with the reduction played by a sum of the simulated ranks' wires."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_lhc import DecodeError, UnsupportedError
from hvd_lhc.compressor import Engine, Outcome, Phase, Ticket
from hvd_lhc.settings import Settings
from hvd_lhc.sizing import Tensor

NUMEL = 40_000
TENSOR = Tensor(numel=NUMEL, row=1, element_bytes=4)


class Rank(Engine):
    """An engine, and the one phase of what its rank reduces."""

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings or Settings())
        self.phase = Phase()

    def start(self, key: str, tensor: Tensor, world_size: int, *, header_always: bool = False) -> Ticket | None:
        """Begin a tensor of the phase."""
        return self.begin(self.phase, key, tensor, world_size, header_always=header_always)


class Cluster:
    """Some ranks in one process: every rank has its own engine, and must come to the same plans."""

    def __init__(self, size: int, settings: Settings | None = None) -> None:
        self.engines = [Rank(settings) for _ in range(size)]

    def step(self, gradients: list[np.ndarray], key: str = "w", scale: float = 1) -> list[Outcome | None]:
        """One allreduce of one tensor on all ranks; ``None`` for a dense one."""
        size = len(self.engines)
        tickets = [engine.start(key, TENSOR, size) for engine in self.engines]
        if tickets[0] is None:
            assert all(ticket is None for ticket in tickets)
            return [None] * size
        wires = []
        for rank, (engine, ticket) in enumerate(zip(self.engines, tickets, strict=True)):
            assert ticket is not None and tickets[0] is not None and ticket.plan == tickets[0].plan
            wires.append(engine.encode(ticket, gradients[rank], rank))
        total = np.sum(wires, axis=0) * scale
        return [e.finish(t, total, "float32") for e, t in zip(self.engines, tickets, strict=True) if t is not None]


def sparse(rng: np.random.Generator, count: int) -> np.ndarray:
    """A float32 array of NUMEL with ``count`` small integers."""
    x = np.zeros(NUMEL, np.float32)
    x[rng.choice(NUMEL, count, replace=False)] = rng.integers(1, 100, count)
    return x


def test_probe_then_sketches_that_are_exact() -> None:
    """The first step learns, the following ones decode the exact sum on every rank."""
    rng = np.random.default_rng(1)
    cluster = Cluster(3)
    for step in range(5):
        gradients = [sparse(rng, 200) for _ in range(3)]
        outcomes = cluster.step(gradients)
        for outcome in outcomes:
            assert outcome is not None
            if step == 0:
                assert outcome.decoded is None and outcome.reason == "header_only"
            else:
                assert outcome.decoded is not None
                np.testing.assert_array_equal(outcome.decoded.values, np.sum(gradients, axis=0))
    statistics = cluster.engines[0].statistics
    assert (statistics.probes, statistics.sketches, statistics.retries) == (1, 4, 0)


def test_a_burst_costs_one_retry_and_all_ranks_name_it_alike() -> None:
    """From 200 to 3,000 nonzeros on one rank: one refusal, then a plan that fits."""
    rng = np.random.default_rng(2)
    cluster = Cluster(3)
    for _ in range(3):
        cluster.step([sparse(rng, 200) for _ in range(3)])
    burst = [sparse(rng, 3000), sparse(rng, 200), sparse(rng, 200)]
    outcomes = cluster.step(burst)
    names = {outcome.dense_name for outcome in outcomes if outcome is not None}
    assert len(names) == 1 and names != {""}
    assert all(outcome is not None and outcome.decoded is None for outcome in outcomes)
    outcomes = cluster.step(burst)
    assert outcomes[0] is not None and outcomes[0].decoded is not None
    assert cluster.engines[0].statistics.refusals == {"over_capacity": 1}


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_nonfinite_gradients_go_dense_and_are_forgotten(poison: float) -> None:
    """One rank's NaN refuses the step on all ranks; the next step is a sketch again."""
    rng = np.random.default_rng(3)
    cluster = Cluster(2)
    for _ in range(3):
        cluster.step([sparse(rng, 200) for _ in range(2)])
    bad = sparse(rng, 200)
    bad[7] = poison
    outcomes = cluster.step([bad, sparse(rng, 200)])
    assert all(outcome is not None and outcome.reason == "nonfinite" for outcome in outcomes)
    outcomes = cluster.step([sparse(rng, 200) for _ in range(2)])
    assert all(outcome is not None and outcome.decoded is not None for outcome in outcomes)


def test_plans_change_only_between_steps() -> None:
    """While a wire of the site is under way, a further tensor gets the same plan, on every rank, in any order."""
    rng = np.random.default_rng(4)
    engines = [Rank() for _ in range(2)]
    gradients = {name: [sparse(rng, count) for _ in range(2)] for name, count in (("a", 50), ("b", 400))}
    for _ in range(4):
        tickets: list[dict[str, object]] = [{}, {}]
        for rank, order in ((0, "ab"), (1, "ba")):
            for name in order:
                tickets[rank][name] = engines[rank].start("same shape", TENSOR, 2)
        plans = {t.plan for by_name in tickets for t in by_name.values()}  # type: ignore[attr-defined]
        assert len(plans) == 1
        totals = {
            name: sum(engines[r].encode(tickets[r][name], gradients[name][r], r) for r in range(2))  # type: ignore[arg-type]
            for name in "ab"
        }
        for rank, order in ((0, "ba"), (1, "ba")):
            for name in order:
                engines[rank].finish(tickets[rank][name], totals[name], "float32")  # type: ignore[arg-type]
    assert engines[0].statistics == engines[1].statistics


def test_equal_wires_of_a_step_get_different_names() -> None:
    """Two tensors with equal content need two dense reductions; the names of both are the same on all ranks."""
    engines = [Rank() for _ in range(2)]
    x = np.full(NUMEL, np.nan, np.float32)
    names = []
    for _ in range(2):
        for engine in engines:
            engine.start("w", TENSOR, 2)
        tickets = [[engine.start("w", TENSOR, 2) for _ in range(2)] for engine in engines]
        total = sum(engines[r].encode(tickets[r][0], x, r) for r in range(2))  # type: ignore[arg-type]
        names.append(
            [[engines[r].finish(t, total, "float32").dense_name for t in tickets[r]] for r in range(2)]  # type: ignore[arg-type]
        )
    for step in names:
        assert step[0] == step[1] and len(set(step[0])) == 2


def test_a_dropped_ticket_is_no_wire_under_way() -> None:
    """An exception between compress and decompress must not freeze the plan."""
    rng = np.random.default_rng(5)
    cluster = Cluster(2)
    for engine in cluster.engines:
        engine.start("w", TENSOR, 2)  # dropped at once
    cluster.step([sparse(rng, 10) for _ in range(2)])
    outcomes = cluster.step([sparse(rng, 10) for _ in range(2)])
    assert outcomes[0] is not None and outcomes[0].decoded is not None


def test_a_dense_tensor_is_handed_through() -> None:
    """After the probe the gradient itself is reduced, without a header if another tensor sends one."""
    rng = np.random.default_rng(9)
    cluster = Cluster(2)
    ones = np.ones(NUMEL, np.float32)
    for step in range(4):
        cluster.step([sparse(rng, 20), sparse(rng, 20)], "sparse")
        assert (cluster.step([ones, ones], "dense") == [None, None]) == (step > 0)


def test_a_dense_tensor_sends_a_header_where_the_adapter_needs_one() -> None:
    """header_always: a ticket for every step; the header does not cost a look at the gradient."""
    cluster = Cluster(2)
    for step in range(3):
        tickets = [engine.start("w", TENSOR, 2, header_always=True) for engine in cluster.engines]
        assert tickets[0] is not None and tickets[0].kind == ("probe", "dense", "dense")[step]
        assert tickets[0].plan.wire_bytes < 1000
        total = sum(e.encode(t, np.ones(NUMEL, np.float32), r) for r, (e, t) in enumerate(zip(cluster.engines, tickets)))  # type: ignore[arg-type]
        outcomes = [e.finish(t, total, "float32") for e, t in zip(cluster.engines, tickets)]  # type: ignore[arg-type]
        assert all(outcome.reason == "header_only" for outcome in outcomes)


def begin_all(engine: Rank, sizes: dict[str, int], order: str) -> dict[str, Ticket | None]:
    """A step's tickets for tensors of several sizes, in an order."""
    return {name: engine.start(name, Tensor(sizes[name], 1, 4), 2) for name in order}


def test_where_all_go_dense_the_smallest_sends_a_header() -> None:
    """On every rank the same tensor, whatever the order; so that ranks know in every step that all took part."""
    sizes = {"a": 30_000, "b": 20_000, "c": 40_000}
    engines = [Rank(Settings(reprobe_steps=24)) for _ in range(2)]
    seen = []
    for _ in range(6):
        tickets = [begin_all(engine, sizes, order) for engine, order in zip(engines, ("abc", "cba"), strict=True)]
        kinds = [{name: t and t.kind for name, t in by_name.items()} for by_name in tickets]
        assert kinds[0] == kinds[1]
        seen.append({name: kind for name, kind in kinds[0].items() if kind})
        for name in seen[-1]:
            ones = np.ones(sizes[name], np.float32)
            total = sum(engines[r].encode(tickets[r][name], ones, r) for r in range(2))  # type: ignore[arg-type]
            for rank in range(2):
                engines[rank].finish(tickets[rank][name], total, "float32")  # type: ignore[arg-type]
    probe = dict.fromkeys("abc", "probe")
    assert seen == [probe, {"b": "dense"}, {"b": "dense"}, {"b": "dense"}, probe, {"b": "dense"}]


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_what_a_joined_rank_did_not_see_is_not_learned(kind: str) -> None:
    """While one rank has joined, the others' plans stay as that rank left them: it can come back."""
    rng = np.random.default_rng(10)
    cluster = Cluster(2, Settings(reprobe_steps=4))

    def draw() -> np.ndarray:
        return sparse(rng, 100) if kind == "sparse" else np.ones(NUMEL, np.float32)

    for _ in range(3):
        cluster.step([draw(), draw()])
    engine = cluster.engines[0]
    for _ in range(6):
        ticket = engine.start("w", TENSOR, 2)
        assert ticket is not None
        gradient = sparse(rng, 3000)
        outcome = engine.finish(ticket, engine.encode(ticket, gradient, 0), "float32")
        assert outcome.header.participants == 1
    for _ in range(6):  # Cluster.step finds that plans are equal
        outcomes = cluster.step([draw(), draw()])
    assert outcomes[0] is not None
    assert kind == "dense" or outcomes[0].decoded is not None


def test_another_world_size_starts_afresh() -> None:
    """An elastic job that shrinks probes again instead of using a plan for more ranks."""
    rng = np.random.default_rng(6)
    cluster = Cluster(3)
    for _ in range(3):
        cluster.step([sparse(rng, 200) for _ in range(3)])
    smaller = Cluster(2)
    smaller.engines = cluster.engines[:2]
    outcomes = smaller.step([sparse(rng, 200) for _ in range(2)])
    assert outcomes[0] is not None and outcomes[0].decoded is None


def test_what_is_not_a_sum_is_unsupported() -> None:
    """A maximum of wires is refused with a message that names the way out."""
    rng = np.random.default_rng(7)
    engines = [Rank() for _ in range(2)]
    tickets = [engine.start("w", TENSOR, 2) for engine in engines]
    wires = [engines[r].encode(tickets[r], sparse(rng, 9), r) for r in range(2)]  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"op=Sum or op=Average.*process_set"):
        engines[0].finish(tickets[0], np.maximum(*wires), "float32")  # type: ignore[arg-type]


def test_fallback_error_raises_on_every_rank() -> None:
    """With fallback='error' a refusal is an exception; the probe before it is not."""
    rng = np.random.default_rng(8)
    cluster = Cluster(2, Settings(fallback="error"))
    cluster.step([sparse(rng, 20) for _ in range(2)])
    engines = cluster.engines
    tickets = [engine.start("w", TENSOR, 2) for engine in engines]
    bad = sparse(rng, 20)
    bad[0] = np.nan
    total = sum(engines[r].encode(tickets[r], bad, r) for r in range(2))  # type: ignore[arg-type]
    for engine, ticket in zip(engines, tickets, strict=True):
        with pytest.raises(DecodeError) as caught:
            engine.finish(ticket, total, "float32")  # type: ignore[arg-type]
        assert caught.value.reason == "nonfinite"


def test_exchanged_contents_have_different_names() -> None:
    """What rank 0 holds in one tensor and rank 1 in the other, and the reverse: the sums are equal, the names are not."""
    rng = np.random.default_rng(8)
    first, second = sparse(rng, 200), sparse(rng, 200)
    names = {
        outcome.dense_name
        for gradients in ([first, second], [second, first])
        for outcome in Cluster(2).step(gradients)
        if outcome is not None
    }
    assert len(names) == 2, names


def test_phases_don_t_wait_for_each_other() -> None:
    """A wire that is under way for ever (its optimizer was dropped) holds up nothing but its own phase."""
    rng = np.random.default_rng(11)
    cluster = Cluster(2)
    forgotten = [engine.begin(Phase(), "w", TENSOR, 2) for engine in cluster.engines[:1]]
    for step in range(4):
        outcomes = cluster.step([sparse(rng, 200) for _ in range(2)])
        assert outcomes[0] is not None and (outcomes[0].decoded is not None) == (step > 0)
    assert forgotten[0] is not None


def test_an_abandoned_wire_teaches_nothing() -> None:
    """Its plan stays as it was, on the rank where the wire comes back after all and on the one where it doesn't."""
    rng = np.random.default_rng(12)
    cluster = Cluster(2)
    for _ in range(3):
        cluster.step([sparse(rng, 200) for _ in range(2)])
    gradients = [sparse(rng, 9000) for _ in range(2)]
    tickets = [engine.start("w", TENSOR, 2) for engine in cluster.engines]
    total = sum(e.encode(t, x, r) for r, (e, t, x) in enumerate(zip(cluster.engines, tickets, gradients)))  # type: ignore[arg-type]
    for engine in cluster.engines:
        assert engine.phase.is_under_way
        engine.phase.abandon()
        assert not engine.phase.is_under_way
    outcome = cluster.engines[0].finish(tickets[0], total, "float32")  # type: ignore[arg-type]
    assert outcome.decoded is None
    for _ in range(2):  # Cluster.step finds that plans are equal
        outcomes = cluster.step([sparse(rng, 200) for _ in range(2)])
        assert outcomes[0] is not None and outcomes[0].decoded is not None
