"""Names for the places where gradients are compressed: the same on all ranks, and the same when a function is traced anew."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

__all__ = ["CallSites", "is_nested"]


def is_nested() -> bool:
    """Is a function being traced that another function calls? That one may call it several times."""
    graph = _function_of(tf.compat.v1.get_default_graph())
    return isinstance(graph, FuncGraph) and isinstance(_function_of(graph.outer_graph), FuncGraph)


class CallSites:
    """Numbers the places within each function.

    A rank may trace a function anew while others do not (its last batch has another length). So numbers start again with
    every trace: what was learned in one is of use in the next, and ranks stay in step. Functions within a function are
    numbered by name; functions that are called from Python and share a name share their places.
    """

    def __init__(self) -> None:
        self._paths: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._counts: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()

    def next_label(self) -> str:
        """The name of one more place in the function that is being traced."""
        graph = _function_of(tf.compat.v1.get_default_graph())
        return f"{self._path(graph)}:{self._count(graph, '')}"

    def _path(self, graph: Any) -> str:
        path = self._paths.get(graph)
        if path is None:
            path = str(getattr(graph, "name", "graph"))
            outer = _function_of(graph.outer_graph) if isinstance(graph, FuncGraph) else None
            if isinstance(outer, FuncGraph):
                path = f"{self._path(outer)}/{path}.{self._count(outer, path)}"
            self._paths[graph] = path
        return path

    def _count(self, graph: Any, what: str) -> int:
        counts = self._counts.setdefault(graph, Counter())
        counts[what] += 1
        return counts[what]


def _function_of(graph: Any) -> Any:
    """The function that a branch or the body of a loop belongs to."""
    while isinstance(graph, ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph
