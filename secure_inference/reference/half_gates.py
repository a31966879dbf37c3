"""Half gates over a session's tweak space, one gate at a time: the reference for the engine, byte for byte.

Garbling: Zahur, Rosulek, Evans, "Two halves make a whole" (Eurocrypt 2015), on free XOR. Hash: the tweakable TMMO,
H(x, t) = pi(pi(x) xor t) xor pi(x), of Guo, Katz, Wang, Yu, "Efficient and secure multiparty computation from fixed-key
block ciphers" (IEEE S&P 2020), pi being AES-128 under a public key that changes every 4,096 AND gates.

A block is 16 bytes, read as a little-endian integer; its least significant bit is the colour. Semi-honest security, and
only if no (session seed, delta) ever serves twice. Not for use with real secrets: nothing here is constant-time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from deepseal.errors import InputError
from deepseal.secure_inference.netlist.netlist import Netlist, Op
from deepseal.secure_inference.reference.folding import folded

BLOCK = 16
TABLE = 2 * BLOCK
EPOCH_BITS = 12
Hash = Callable[[int, int], int]


class Domain(enum.IntEnum):
    """What a tweak belongs to."""

    KEY = 0
    GATE = 1
    EXTENSION = 2
    PRG = 3
    PAYLOAD = 4


def tweak(domain: int, use: int, index: int) -> bytes:
    """The tweak block: index in the low 64 bits, use in the next 56, domain in the top 8.

    Raises:
        InputError: a number that does not fit.
    """
    if not (0 <= domain < 1 << 8 and 0 <= use < 1 << 56 and 0 <= index < 1 << 64):
        raise InputError("a domain of 8, a use of 56, an index of 64 bits", found="a larger number", do="start afresh")
    return _bytes(domain << 120 | use << 64 | index)


def permutation_key(session_seed: bytes, domain: int, epoch: int) -> bytes:
    """The public AES key of a domain in an epoch: the session seed's encryption of a tweak."""
    return _aes(_block(session_seed, "the session seed"), tweak(Domain.KEY, domain, epoch))


def hash_block(session_seed: bytes, domain: int, epoch: int, x: bytes, tweak: bytes) -> bytes:
    """TMMO of one block.

    Args:
        session_seed: 16 public bytes.
        domain: what the hash is for.
        epoch: which key of the domain.
        x: 16 bytes.
        tweak: 16 bytes, never the same twice for the same secret offset.
    """
    h = tmmo(permutation_key(session_seed, domain, epoch))
    return _bytes(h(_integer(x, "x"), _integer(tweak, "the tweak")))


def tmmo(key: bytes) -> Hash:
    """H(x, t) under one AES key, on blocks as integers."""
    encrypt = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update  # noqa: S305

    def pi(x: int) -> int:
        return int.from_bytes(encrypt(_bytes(x)), "little")

    def h(x: int, t: int) -> int:
        once = pi(x)
        return pi(once ^ t) ^ once

    return h


def garbler_input_labels(seed: bytes, n: int) -> NDArray[np.uint8]:
    """(n, 16): the active labels of the garbler's own input bits, expanded from a seed that the evaluator gets too."""
    seed = _block(seed, "the seed of the garbler's labels")
    data = b"".join(_aes(seed, tweak(Domain.PRG, 0, i)) for i in range(n))
    labels: NDArray[np.uint8] = np.frombuffer(data, dtype=np.uint8).reshape(n, BLOCK).copy()
    return labels


def garble_and(h: Hash, a0: int, b0: int, delta: int, t: int, t2: int) -> tuple[int, int, int]:
    """One AND gate: the zero label of the result, and the two halves T_G and T_E of the table."""
    a1, b1 = a0 ^ delta, b0 ^ delta
    pa, pb = a0 & 1, b0 & 1
    t_g = h(a0, t) ^ h(a1, t) ^ pb * delta
    w_g = h(a0, t) ^ pa * t_g
    t_e = h(b0, t2) ^ h(b1, t2) ^ a0
    w_e = h(b0, t2) ^ pb * (t_e ^ a0)
    return w_g ^ w_e, t_g, t_e


def evaluate_and(h: Hash, a: int, b: int, t_g: int, t_e: int, t: int, t2: int) -> int:
    """One AND gate: the active label of the result."""
    w_g = h(a, t) ^ (a & 1) * t_g
    w_e = h(b, t2) ^ (b & 1) * (t_e ^ a)
    return w_g ^ w_e


def garble_own(h: Hash, a0: int, bit: int, delta: int, t: int) -> tuple[int, int]:
    """The generator's half gate, for a bit that the garbler knows: the zero label of a and bit, and the table."""
    table = h(a0, t) ^ h(a0 ^ delta, t) ^ bit * delta
    return h(a0, t) ^ (a0 & 1) * table, table


def evaluate_peer(h: Hash, a: int, table: int, t: int) -> int:
    """The active label of what ``garble_own`` garbled."""
    return h(a, t) ^ (a & 1) * table


def garble_peer(h: Hash, a0: int, b0: int, delta: int, t: int) -> tuple[int, int]:
    """The evaluator's half gate, for a bit b that the evaluator knows: the zero label of a and b, and the table."""
    return h(b0, t), h(b0, t) ^ h(b0 ^ delta, t) ^ a0


def evaluate_own(h: Hash, a: int, b: int, bit: int, table: int, t: int) -> int:
    """The active label of what ``garble_peer`` garbled; ``bit`` is the value of the active label b."""
    return h(b, t) ^ bit * (table ^ a)


class _Session:
    """The counter of AND gates, which goes on over all calls, and the hash that belongs to each."""

    def __init__(self, session_seed: bytes, order: str) -> None:
        self._session_seed = _block(session_seed, "the session seed")
        if order not in ("given", "depth"):
            raise InputError("the order 'given' or 'depth'", found=repr(order), do="choose one of them")
        self._order = order
        self._hashes: dict[int, Hash] = {}
        self.gates = 0

    def _hash(self, gate: int) -> tuple[Hash, int, int]:
        """The hash function of an AND gate and its two tweaks."""
        epoch = gate >> EPOCH_BITS
        if epoch not in self._hashes:
            self._hashes[epoch] = tmmo(permutation_key(self._session_seed, Domain.GATE, epoch))
        first, second = (int.from_bytes(tweak(Domain.GATE, 0, 2 * gate + half), "little") for half in (0, 1))
        return self._hashes[epoch], first, second

    def _halves(self, n: int) -> Iterator[tuple[Hash, int]]:
        """The hash function and the tweak of each of n half gates, two of which take the number of one gate."""
        for i in range(n):
            h, *tweaks = self._hash(self.gates + i // 2)
            yield h, tweaks[i % 2]
        self.gates += (n + 1) // 2


class ReferenceGarbler(_Session):
    """Garbles netlists under one offset.

    Args:
        session_seed: 16 public bytes.
        delta: the secret offset between the labels of 0 and 1: 16 bytes, least significant bit 1.
        order: which AND gate comes first: ``given`` as in the netlist, ``depth`` by AND-depth (stable).

    Attributes:
        gates: number of AND gates garbled so far.
    """

    def __init__(self, session_seed: bytes, delta: bytes, order: str = "given") -> None:
        super().__init__(session_seed, order)
        self._delta = _integer(delta, "the offset")
        if not self._delta & 1:
            raise InputError("an offset with least significant bit 1", found="0", do="set that bit")

    def garble(self, netlist: Netlist, zero_labels: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], bytes]:
        """Garble one netlist for L independent inputs.

        Args:
            netlist: any; it is folded first (see ``folded``).
            zero_labels: (input bits, L, 16) uint8.

        Returns:
            The zero labels of the outputs, (output bits, L, 16), and the tables: for each AND gate in order, for each
            lane, T_G and T_E. An output that is the constant c has the zero label c * delta (its active label is 0).
        """
        plan = folded(netlist, self._order)
        lanes = _lanes(zero_labels, netlist)
        tables = bytearray(TABLE * plan.and_gates * lanes)
        results = np.zeros((len(plan.outputs), lanes, BLOCK), dtype=np.uint8)
        for lane in range(lanes):
            wires: list[int] = _integers(zero_labels[:, lane])
            for gate in plan.gates:
                if gate.op == Op.XOR:
                    wires.append(wires[gate.a] ^ wires[gate.b])
                elif gate.op == Op.NOT:
                    wires.append(wires[gate.a] ^ self._delta)
                else:
                    row = gate.rank * lanes + lane
                    h, t, t2 = self._hash(self.gates + row)
                    c0, t_g, t_e = garble_and(h, wires[gate.a], wires[gate.b], self._delta, t, t2)
                    tables[TABLE * row : TABLE * (row + 1)] = _bytes(t_g) + _bytes(t_e)
                    wires.append(c0)
            for k, output in enumerate(plan.outputs):
                label = output.public * self._delta if output.public is not None else wires[output.wire]
                results[k, lane] = np.frombuffer(_bytes(label), dtype=np.uint8)
        self.gates += plan.and_gates * lanes
        return results, bytes(tables)

    def and_own(self, a: NDArray[np.uint8], bits: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], bytes]:
        """Zero labels (n, 16) of a and our bits (n,), and the tables, 16 bytes each; a: zero labels (n, 16)."""
        rows = zip(_integers(a), bits.tolist(), self._halves(len(a)), strict=True)
        return _split([garble_own(h, a0, bit, self._delta, t) for a0, bit, (h, t) in rows])

    def and_peer(self, a: NDArray[np.uint8], b: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], bytes]:
        """The same for bits with zero labels b (n, 16), which the evaluator knows."""
        rows = zip(_integers(a), _integers(b), self._halves(len(a)), strict=True)
        return _split([garble_peer(h, a0, b0, self._delta, t) for a0, b0, (h, t) in rows])


class ReferenceEvaluator(_Session):
    """Evaluates what a ``ReferenceGarbler`` with the same seed and order garbled, call by call.

    Args:
        session_seed: 16 public bytes.
        order: as the garbler's.

    Attributes:
        gates: number of AND gates evaluated so far.
    """

    def __init__(self, session_seed: bytes, order: str = "given") -> None:
        super().__init__(session_seed, order)

    def evaluate(self, netlist: Netlist, active_labels: NDArray[np.uint8], tables: bytes) -> NDArray[np.uint8]:
        """The active labels of the outputs.

        Args:
            netlist: the one that was garbled.
            active_labels: (input bits, L, 16) uint8.
            tables: what the garbler returned.

        Returns:
            (output bits, L, 16) uint8; all zeros for an output that is a constant.

        Raises:
            InputError: tables of another length.
        """
        plan = folded(netlist, self._order)
        lanes = _lanes(active_labels, netlist)
        if len(tables) != TABLE * plan.and_gates * lanes:
            expected = f"{TABLE * plan.and_gates * lanes} bytes of tables"
            raise InputError(expected, found=f"{len(tables)}", do="pass the tables of this netlist and these lanes")
        results = np.zeros((len(plan.outputs), lanes, BLOCK), dtype=np.uint8)
        for lane in range(lanes):
            wires: list[int] = _integers(active_labels[:, lane])
            for gate in plan.gates:
                if gate.op == Op.XOR:
                    wires.append(wires[gate.a] ^ wires[gate.b])
                elif gate.op == Op.NOT:
                    wires.append(wires[gate.a])
                else:
                    row = gate.rank * lanes + lane
                    h, t, t2 = self._hash(self.gates + row)
                    t_g = int.from_bytes(tables[TABLE * row : TABLE * row + BLOCK], "little")
                    t_e = int.from_bytes(tables[TABLE * row + BLOCK : TABLE * (row + 1)], "little")
                    wires.append(evaluate_and(h, wires[gate.a], wires[gate.b], t_g, t_e, t, t2))
            for k, output in enumerate(plan.outputs):
                if output.public is None:
                    results[k, lane] = np.frombuffer(_bytes(wires[output.wire]), dtype=np.uint8)
        self.gates += plan.and_gates * lanes
        return results

    def and_peer(self, a: NDArray[np.uint8], tables: bytes) -> NDArray[np.uint8]:
        """Active labels (n, 16) of a and the garbler's bits."""
        rows = zip(_integers(a), _integers(_labels(tables)), self._halves(len(a)), strict=True)
        return _labels(b"".join(_bytes(evaluate_peer(h, x, table, t)) for x, table, (h, t) in rows))

    def and_own(
        self, a: NDArray[np.uint8], b: NDArray[np.uint8], bits: NDArray[np.uint8], tables: bytes
    ) -> NDArray[np.uint8]:
        """Active labels (n, 16) of a and b, whose bits (n,) we know."""
        halves = self._halves(len(a))
        rows = zip(_integers(a), _integers(b), bits.tolist(), _integers(_labels(tables)), halves, strict=True)
        return _labels(b"".join(_bytes(evaluate_own(h, x, y, bit, table, t)) for x, y, bit, table, (h, t) in rows))


def _aes(key: bytes, block: bytes) -> bytes:
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(block)  # noqa: S305


def _bytes(block: int) -> bytes:
    return block.to_bytes(BLOCK, "little")


def _block(data: bytes, what: str) -> bytes:
    if len(data) != BLOCK:
        raise InputError(f"{BLOCK} bytes as {what}", found=f"{len(data)} bytes", do="pass one block")
    return bytes(data)


def _integer(data: bytes, what: str) -> int:
    return int.from_bytes(_block(data, what), "little")


def _integers(labels: NDArray[np.uint8]) -> list[int]:
    return [int.from_bytes(label.tobytes(), "little") for label in labels]


def _labels(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, BLOCK)


def _split(gates: list[tuple[int, int]]) -> tuple[NDArray[np.uint8], bytes]:
    """Zero labels and tables."""
    return _labels(b"".join(_bytes(c0) for c0, _ in gates)), b"".join(_bytes(table) for _, table in gates)


def _lanes(labels: NDArray[np.uint8], netlist: Netlist) -> int:
    shape, n = labels.shape, netlist.input_bits
    if labels.dtype != np.uint8 or len(shape) != 3 or shape[0] != n or shape[2] != BLOCK:
        found = f"{labels.dtype} of shape {shape}"
        raise InputError(f"labels as uint8 of shape ({n}, lanes, {BLOCK})", found=found, do="pass one label a bit")
    return int(shape[1])
