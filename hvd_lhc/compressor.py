"""The life of a step, for any framework: which plan a tensor has, who is under way, what was learned.

The rule that keeps ranks in step: all wires of a step that belong to the same :class:`Site` use the same plan. Plans change
only when a :class:`Phase` has no wire under way, by :func:`~hvd_lhc.planner.next_state`, from the facts of all wires since
the last change. Facts come out of reduced wires, which are equal on all ranks. What belongs into one phase is for the
adapter to say: wires that all begin before the first of them ends, on every rank.

No framework and no Horovod in here: adapters hand in float32 arrays, send the wires and reduce dense where told so.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from hvd_lhc.codec import Codec, Decoded, Header
from hvd_lhc.errors import DecodeError, WireError
from hvd_lhc.participants import are_one_of, moments_of_wire
from hvd_lhc.planner import first_state, next_state
from hvd_lhc.refusals import not_a_sum
from hvd_lhc.settings import Settings
from hvd_lhc.sizing import Tensor, header_plan
from hvd_lhc.state import Facts, State, merge

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hvd_lhc.plan import Plan

__all__ = ["Engine", "Outcome", "Phase", "Site", "Statistics", "Ticket"]


@dataclass
class Statistics:
    """What went over the wire on this rank since the start. Counts of tensors and bytes handed to allreduce.

    Attributes:
        wire_bytes: bytes handed to allreduce, headers, probes and retries included.
        dense_bytes: bytes that the same tensors have uncompressed.
        sketches: tensors that were reduced as sketches and verified.
        probes: tensors that were probed (a header, then a dense reduction).
        dense: tensors that went dense as they were.
        retries: sketches that could not be verified and were reduced dense.
        wire_changes: times that the shape of a tensor's wire changed.
        refusals: retries by reason.
    """

    wire_bytes: int = 0
    dense_bytes: int = 0
    sketches: int = 0
    probes: int = 0
    dense: int = 0
    retries: int = 0
    wire_changes: int = 0
    refusals: dict[str, int] = field(default_factory=dict)


class Ticket:
    """One wire under way: from ``begin`` to ``finish``. Dropping it counts as finished.

    Attributes:
        phase, site: where it belongs.
        plan: what it is encoded under.
        kind: ``"sketch"``, or ``"probe"`` or ``"dense"`` for a header that is followed by a dense reduction.
        negative_zeros: does what was encoded hold elements that are -0?
    """

    __slots__ = ("__weakref__", "kind", "negative_zeros", "phase", "plan", "site")

    def __init__(self, phase: Phase, site: Site, plan: Plan, kind: str) -> None:
        self.phase = phase
        self.site = site
        self.plan = plan
        self.kind = kind
        self.negative_zeros = False

    @property
    def is_under_way(self) -> bool:
        """Neither finished nor abandoned."""
        return self.phase.waits_for(self)


@dataclass(frozen=True)
class Outcome:
    """What a reduced wire turned into.

    Attributes:
        decoded: the verified gradient, or ``None``: reduce the original gradient dense.
        header: the header of the wire; its scale says how to reduce dense.
        reason: why there is no gradient (``"header_only"`` for a probe), or ``None``.
        dense_name: a name for the dense reduction, equal on all ranks; empty where none is needed.
    """

    decoded: Decoded | None
    header: Header
    reason: str | None
    dense_name: str = ""


class Site:
    """All tensors that share a plan: those of one shape and dtype, or those of one place in a traced graph."""

    def __init__(self, label: str, tensor: Tensor, world_size: int, settings: Settings) -> None:
        self.label = label
        self.tensor = tensor
        self.world_size = world_size
        self.settings = settings
        self.state = first_state(tensor, world_size, settings)
        self.used = False  # in this phase
        self._facts: list[Facts] = []
        self._dense_names: Counter[str] = Counter()

    @property
    def sends_header(self) -> bool:
        """Does every wire tell all ranks something?"""
        return self.state.plan is not None

    @property
    def waits_for_probe(self) -> bool:
        """Does it go dense, but not for good?"""
        return self.state.kind == "dense" and self.state.steps_left >= 0

    def advance(self, all_ranks: bool) -> bool:
        """Go on to the plan of the next phase. Returns whether the shape of the wire changed.

        Args:
            all_ranks: every rank saw the wires of this phase.
        """
        before = self.state
        if self._facts or (self.waits_for_probe and self.used and all_ranks):
            facts = merge(self._facts) if self._facts else None
            self.state = next_state(self.state, facts, self.tensor, self.world_size, self.settings)
        self.used = False
        self._facts.clear()
        self._dense_names.clear()
        return _wire_size(before) != _wire_size(self.state)

    def learn(self, facts: Facts) -> None:
        """Remember what a reduced wire told until the phase ends."""
        self._facts.append(facts)

    def dense_name(self, wire: NDArray[np.float64]) -> str:
        """A name for the dense reduction that replaces a wire of this phase.

        It is made of the reduced wire, which is equal on all ranks and differs between tensors: the order in which ranks
        come here doesn't matter. Wires that are equal have equal content on every rank (``Header.content`` sees to that),
        and are numbered.
        """
        digest = hashlib.blake2b(wire.tobytes(), digest_size=12).hexdigest()
        name = f"hvd_lhc.dense.{self.label}.{digest}"
        self._dense_names[name] += 1
        return f"{name}.{self._dense_names[name]}"


class Phase:
    """Sites whose plans change together: between two steps, when none of their wires is under way.

    An optimizer's tensors are a phase, and so is one place in a traced graph. Forgetting all that was learned is leaving
    the phase for a new one; wires still under way then teach nobody.

    A rank that has joined (Horovod's ``join``) sees nothing of the others' wires until it comes back. So wires in which not
    all ranks took part teach nothing, and a step in which there is no other kind does not count as one. This needs a header
    in every step: where all sites go dense, the smallest of them sends one all the same.
    """

    def __init__(self) -> None:
        self._sites: dict[Hashable, Site] = {}
        self._sentinel: Site | None = None
        self._under_way: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._finished = 0
        self._all_ranks = True

    @property
    def is_under_way(self) -> bool:
        """Is any of its wires?"""
        return len(self._under_way) > 0

    def waits_for(self, ticket: Ticket) -> bool:
        """Is this one of them?"""
        return ticket in self._under_way

    def abandon(self) -> None:
        """Nobody waits for the wires that are under way."""
        self._under_way.clear()

    def site(self, key: Hashable, tensor: Tensor, world_size: int, settings: Settings) -> Site:
        """Found or made. The world size is part of the key: an elastic job of another size starts afresh."""
        site = self._sites.get((key, world_size))
        if site is None:
            site = Site(f"{key}.{world_size}", tensor, world_size, settings)
            self._sites[key, world_size] = site
        return site

    def turn(self) -> int:
        """Begin the next phase if this one has ended. Returns how many sites changed the shape of their wires."""
        if self.is_under_way or not self._finished:
            return 0
        used = [site for site in self._sites.values() if site.used]
        changes = sum(site.advance(self._all_ranks) for site in self._sites.values())
        waiting = [site for site in used if site.waits_for_probe]
        self._sentinel = None
        if waiting and not any(site.sends_header for site in used):
            self._sentinel = min(waiting, key=lambda site: (site.tensor.dense_bytes, site.label))
        self._finished, self._all_ranks = 0, True
        return changes

    def begin(self, site: Site, header_always: bool) -> Ticket | None:
        """A ticket for one more tensor, or ``None`` if it goes dense without a header."""
        site.used = True
        plan = site.state.plan
        if plan is None:
            if not header_always and site is not self._sentinel:
                return None
            # Where the sites' dense reductions have names of their own, nobody needs to know the content: no scan.
            tensor = replace(site.tensor, numel=1, row=1) if header_always else site.tensor
            plan = header_plan(tensor, site.world_size, site.settings)
        ticket = Ticket(self, site, plan, site.state.kind)
        self._under_way.add(ticket)
        return ticket

    def finish(self, ticket: Ticket, facts: Facts, participants: int) -> None:
        """The ticket's wire came back and told ``facts``."""
        if not ticket.is_under_way:  # abandoned
            return
        self._under_way.discard(ticket)
        self._finished += 1
        if participants < ticket.plan.world_size:
            self._all_ranks = False
        elif ticket.kind != "dense":
            ticket.site.learn(facts)


class Engine:
    """What the phases of one compressor share: settings, statistics, codecs. Frameworks call it from any thread."""

    def __init__(self, settings: Settings, process_sets: Callable[[], Iterable[Sequence[int]]] = tuple) -> None:
        """Start with nothing counted.

        Args:
            settings: equal on all ranks.
            process_sets: gives the ranks of every process set within the ranks that reduce, as numbers among these.
        """
        self.settings = settings
        self.statistics = Statistics()
        self._process_sets = process_sets
        self._codecs: dict[Plan, Codec] = {}
        self._lock = threading.RLock()

    def begin(
        self, phase: Phase, key: Hashable, tensor: Tensor, world_size: int, *, header_always: bool = False
    ) -> Ticket | None:
        """Start one tensor of a site.

        Args:
            phase: what the tensor is reduced together with.
            key: which site of the phase; the same on all ranks.
            tensor: its shape.
            world_size: ranks that reduce it.
            header_always: give a ticket to a tensor that goes dense, too (where the adapter can't change what it sends).

        Returns:
            A ticket to encode under, or ``None``: reduce the tensor as it is.
        """
        return self.begin_at(phase, self.site(phase, key, tensor, world_size), header_always=header_always)

    def site(self, phase: Phase, key: Hashable, tensor: Tensor, world_size: int) -> Site:
        """The site of a key, to begin tensors at as long as the phase is in use; arguments as in :meth:`begin`."""
        with self._lock:
            return phase.site(key, tensor, world_size, self.settings)

    def begin_at(self, phase: Phase, site: Site, *, header_always: bool = False) -> Ticket | None:
        """As :meth:`begin`, for a site that is at hand."""
        with self._lock:
            self.statistics.wire_changes += phase.turn()
            ticket = phase.begin(site, header_always)
            dense_bytes = site.tensor.dense_bytes
            self.statistics.dense_bytes += dense_bytes
            if ticket is None:
                self.statistics.dense += 1
                self.statistics.wire_bytes += dense_bytes
            else:
                self.statistics.wire_bytes += ticket.plan.wire_bytes
            return ticket

    def encode(self, ticket: Ticket, x: NDArray[np.float32], rank: int) -> NDArray[np.float64]:
        """Encode a flat float32 gradient under a ticket."""
        encoded = self._codec(ticket.plan).encode_with_facts(x[: ticket.plan.numel], rank=rank)
        ticket.negative_zeros = encoded.negative_zeros
        return encoded.wire

    def finish(
        self, ticket: Ticket, wire: NDArray[np.float64], dtype: str, out: NDArray[np.float32] | None = None
    ) -> Outcome:
        """Decode the reduced wire of a ticket and remember what it told.

        Args:
            ticket: of the wire.
            wire: reduced.
            dtype: what values are rounded to.
            out: as for ``Codec.decode``.

        Raises:
            UnsupportedError: the reduction was not a sum over the ranks that the plan was made for.
            DecodeError: not verified, and the settings say ``fallback="error"``.
        """
        try:
            decoded = self._codec(ticket.plan).decode_with_facts(wire, dtype=dtype, out=out)
            outcome = Outcome(decoded, decoded.header, None)
        except DecodeError as error:
            if error.header is None:
                raise not_a_sum(ticket.site.tensor.numel, ticket.plan.world_size, error) from error
            # A probe's header counts elements under a plan that holds none of them: what it says of the fit means nothing.
            outcome = Outcome(None, error.header, error.reason if ticket.kind == "sketch" else "header_only")
        except WireError as error:
            raise not_a_sum(ticket.site.tensor.numel, ticket.plan.world_size, error) from error
        if outcome.decoded is None:
            self._refuse_other_process_set(ticket, wire, outcome.header.participants)
        with self._lock:
            ticket.phase.finish(ticket, _facts_of(ticket, outcome), outcome.header.participants)
            self._count(ticket, outcome)
            if outcome.decoded is None:
                outcome = replace(outcome, dense_name=ticket.site.dense_name(wire))
        if outcome.decoded is None and ticket.kind == "sketch" and self.settings.fallback == "error":
            raise DecodeError(
                f"hvd_lhc: a gradient of {ticket.site.tensor.numel} elements could not be decoded and verified "
                f"({outcome.reason}); use fallback='dense' to have it reduced uncompressed instead",
                reason=str(outcome.reason),
                header=outcome.header,
            )
        return outcome

    def _refuse_other_process_set(self, ticket: Ticket, wire: NDArray[np.float64], participants: int) -> None:
        """Refuse a dense reduction for which ranks outside of the process set would be waited for."""
        if participants == ticket.plan.world_size:
            return
        if are_one_of(moments_of_wire(wire, participants), self._process_sets()):
            reason = f"it came from a process set of {participants} ranks"
            raise not_a_sum(ticket.site.tensor.numel, ticket.plan.world_size, reason)

    def _count(self, ticket: Ticket, outcome: Outcome) -> None:
        statistics = self.statistics
        if outcome.decoded is not None:
            statistics.sketches += 1
            return
        statistics.wire_bytes += ticket.site.tensor.dense_bytes
        if ticket.kind == "probe":
            statistics.probes += 1
        elif ticket.kind == "dense":
            statistics.dense += 1
        else:
            statistics.retries += 1
            reason = str(outcome.reason)
            statistics.refusals[reason] = statistics.refusals.get(reason, 0) + 1

    def _codec(self, plan: Plan) -> Codec:
        with self._lock:
            codec = self._codecs.get(plan)
            if codec is None:
                if len(self._codecs) > 64:
                    self._codecs.clear()
                codec = self._codecs[plan] = Codec(plan)
            return codec


def _facts_of(ticket: Ticket, outcome: Outcome) -> Facts:
    header = outcome.header
    if ticket.kind != "sketch":  # carries no gradient, so that most flags mean nothing
        reason = "nonfinite" if header.nonfinite else None
    else:
        reason = outcome.reason
    return Facts(
        reason=reason,
        union_keys=0 if outcome.decoded is None else outcome.decoded.union_keys,
        nonzero_elements=header.nonzero_elements,
        nonzero_keys=header.nonzero_keys,
        nonzero_rows=header.nonzero_probe_blocks,
        inexact_single=header.inexact_single,
        magnitude_exponent=header.magnitude_exponent,
    )


def _wire_size(state: State) -> int:
    return 0 if state.plan is None else state.plan.wire_size
