"""What is left of a netlist to garble: no constants, no copies, no gates without a path to an output; and its order.

Written apart from ``netlist.context.simplify`` on purpose, so that each is a test of the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from deepseal.secure_inference.netlist.netlist import Netlist, Op


@dataclasses.dataclass(frozen=True)
class Gate:
    """XOR, AND or NOT; gate i of a plan writes wire n + i. ``rank`` numbers the AND gates in the chosen order."""

    op: Op
    a: int
    b: int
    rank: int = -1


@dataclasses.dataclass(frozen=True)
class Output:
    """A wire, or a public bit."""

    wire: int
    public: int | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The gates that are left, the outputs, and the number of AND gates."""

    gates: tuple[Gate, ...]
    outputs: tuple[Output, ...]
    and_gates: int


@dataclasses.dataclass(frozen=True)
class _Wire:
    """What a wire of the netlist stands for: a public bit, an input, or a gate that had to be made."""

    public: int | None = None
    node: int = -1


def folded(netlist: Netlist, order: str = "given") -> Plan:
    """Fold constants and copies, gate by gate, then drop what no output needs, then number the AND gates.

    Args:
        netlist: any.
        order: ``given``, or ``depth`` (by AND-depth, stable).
    """
    n = netlist.input_bits
    nodes: list[tuple[Op, int, int]] = []  # node n + i
    wires = [_Wire(node=i) for i in range(n)]

    def made(op: Op, a: int, b: int) -> _Wire:
        nodes.append((op, a, b))
        return _Wire(node=n + len(nodes) - 1)

    def inverse(x: _Wire) -> _Wire:
        return made(Op.NOT, x.node, 0) if x.public is None else _Wire(public=1 - x.public)

    for kind, a, b in zip(netlist.ops.tolist(), netlist.a.tolist(), netlist.b.tolist(), strict=True):
        if kind == Op.CONST:
            wires.append(_Wire(public=a))
        elif kind == Op.COPY:
            wires.append(wires[a])
        elif kind == Op.NOT:
            wires.append(inverse(wires[a]))
        elif kind == Op.XOR:
            wires.append(_xor(wires[a], wires[b], made, inverse))
        else:
            wires.append(_and(wires[a], wires[b], made))
    outputs = [wires[wire] for wire in netlist.output_wires.tolist()]

    needed = {wire.node for wire in outputs if wire.public is None}
    for node in range(n + len(nodes) - 1, n - 1, -1):
        if node in needed:
            op, a, b = nodes[node - n]
            needed |= {a} if op == Op.NOT else {a, b}
    kept = [node for node in range(n, n + len(nodes)) if node in needed]
    number = {node: node for node in range(n)} | {node: n + i for i, node in enumerate(kept)}

    depth = dict.fromkeys(range(n), 0)
    for node in kept:
        op, a, b = nodes[node - n]
        depth[node] = depth[a] if op == Op.NOT else max(depth[a], depth[b]) + (op == Op.AND)
    ands = [node for node in kept if nodes[node - n][0] == Op.AND]
    if order == "depth":
        ands.sort(key=lambda node: depth[node])
    rank = {node: i for i, node in enumerate(ands)}

    gates = []
    for node in kept:
        op, a, b = nodes[node - n]
        gates.append(Gate(op, number[a], 0 if op == Op.NOT else number[b], rank.get(node, -1)))
    finals = (Output(-1, wire.public) if wire.public is not None else Output(number[wire.node]) for wire in outputs)
    return Plan(tuple(gates), tuple(finals), len(ands))


def _xor(x: _Wire, y: _Wire, made: Callable[[Op, int, int], _Wire], inverse: Callable[[_Wire], _Wire]) -> _Wire:
    if x == y:
        return _Wire(public=0)
    if x.public is not None:
        return inverse(y) if x.public else y
    if y.public is not None:
        return inverse(x) if y.public else x
    return made(Op.XOR, x.node, y.node)


def _and(x: _Wire, y: _Wire, made: Callable[[Op, int, int], _Wire]) -> _Wire:
    if x == y:
        return x
    if x.public is not None:
        return y if x.public else x
    if y.public is not None:
        return x if y.public else y
    return made(Op.AND, x.node, y.node)
