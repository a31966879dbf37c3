"""Netlists that hypothesis draws, and what they mean."""

from __future__ import annotations

from hypothesis import strategies as st

from deepseal.secure_inference.netlist import Netlist, Op


@st.composite
def netlists(draw: st.DrawFn, max_gates: int = 40) -> Netlist:
    """Any netlist: all five kinds of gates, constants among the operands, dead gates, outputs used twice."""
    inputs = draw(st.lists(st.integers(1, 4), max_size=3))
    first = sum(inputs)
    ops, a, b = [], [], []
    for wire in range(first, first + draw(st.integers(0 if first else 1, max_gates))):
        op = draw(st.sampled_from(list(Op) if wire else [Op.CONST]))
        earlier = st.integers(0, wire - 1) if wire else st.just(0)
        ops.append(op)
        a.append(draw(st.integers(0, 1) if op == Op.CONST else earlier))
        b.append(draw(earlier) if op in (Op.XOR, Op.AND) else 0)
    outputs = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    wires = draw(st.lists(st.integers(0, first + len(ops) - 1), min_size=sum(outputs), max_size=sum(outputs)))
    return Netlist(tuple(inputs), tuple(outputs), ops, a, b, wires)


def clear(netlist: Netlist, bits: list[bool]) -> list[bool]:
    """What the netlist means, one gate at a time."""
    wires = list(bits)
    for op, x, y in zip(netlist.ops, netlist.a, netlist.b, strict=True):
        match op:
            case Op.XOR:
                wires.append(wires[x] != wires[y])
            case Op.AND:
                wires.append(wires[x] and wires[y])
            case Op.NOT:
                wires.append(not wires[x])
            case Op.CONST:
                wires.append(bool(x))
            case Op.COPY:
                wires.append(wires[x])
    return [wires[wire] for wire in netlist.output_wires]
