"""The peers of ``private_peers.py``: one party of SPU (CHEETAH) and of CrypTen, on an exported network."""

import json
import os
import sys
import time
import types

import numpy as np

LIMIT = 900.0  # seconds of one setting


class Peer:
    """One party of a peer: ``run`` takes a sample (1, …) and gives logits on rank 0."""

    def __init__(self, rank, folder, setting, inbox):
        content = json.loads((folder / "network.json").read_text())
        stored = np.load(folder / "arrays.npz")
        self.rank, self.layers, self.setting, self.inbox = rank, content["layers"], setting, inbox
        self.arrays = {name: stored[name] for name in stored.files}
        self.x, self.logits = self.arrays.pop("x"), self.arrays.pop("logits")

    def meet(self):
        """Wait for the other party."""
        self.setting["barrier"].wait(LIMIT)


class Spu(Peer):
    """CHEETAH; the server (rank 0) owns the weights, the client the input, shared as what they own."""

    def __init__(self, rank, folder, setting, inbox):
        super().__init__(rank, folder, setting, inbox)
        import spu

        desc = spu.libspu.link.Desc()
        for party in range(2):
            desc.add_party(f"id_{party}", f"127.0.0.1:{setting['port'] + party}")
        desc.recv_timeout_ms = int(1000 * LIMIT)  # the default gives up on large networks
        self.link = spu.libspu.link.create_brpc(desc, rank)
        self.runtime = spu.Runtime(self.link, spu_config(setting))
        self.executable, weights = inbox.get()
        for name, share in weights.items():
            self.runtime.set_var(name, share)

    def run(self, index):
        self.runtime.set_var("in0", self.inbox.get())
        self.meet()
        clock = time.perf_counter()
        self.runtime.run(self.executable)
        share = self.runtime.get_var(self.executable.output_names[0])
        return time.perf_counter() - clock, share


class Crypten(Peer):
    """CrypTen; the trusted first party is rank 0 itself."""

    def __init__(self, rank, folder, setting, inbox):
        super().__init__(rank, folder, setting, inbox)
        os.environ.update(WORLD_SIZE="2", RANK=str(rank), RENDEZVOUS=f"file://{setting['meeting']}")
        import torch
        import torch.onnx

        torch.set_num_threads(1)
        # CrypTen 0.4.1 imports a registry that newer releases of torch do not have, for a converter that we do not use.
        absent = types.ModuleType("torch.onnx._internal.registration")
        absent.registry = None
        sys.modules.setdefault("torch.onnx._internal.registration", absent)
        import crypten

        crypten.init()
        self.crypten, self.torch = crypten, torch
        self.weights = {name: crypten.cryptensor(torch.from_numpy(value), src=0) for name, value in self.arrays.items()}

    def run(self, index):
        x = self.torch.from_numpy(self.x[index : index + 1])
        self.meet()
        clock = time.perf_counter()
        logits = self.forward(self.layers, self.crypten.cryptensor(x, src=1)).get_plain_text()
        return time.perf_counter() - clock, logits.numpy()

    def forward(self, layers, x):
        def weight(layer, name):
            return self.weights[layer[name]["array"]]

        for layer in layers:
            op = layer["op"]
            if op == "conv":
                bias = weight(layer, "bias").view(1, -1, 1, 1)
                x = x.conv2d(weight(layer, "weight"), stride=layer["stride"], padding=layer["padding"]) + bias
            elif op == "linear":
                x = x.matmul(weight(layer, "weight").t()) + weight(layer, "bias")
            elif op == "max":
                x = x.max_pool2d(layer["size"], stride=layer["size"])
            elif op == "mean":
                x = x.mean(3, keepdim=True).mean(2, keepdim=True)
            elif op == "flatten":
                x = x.view(x.size(0), -1)
            elif op == "residual":
                x = self.forward(layer["inner"], x) + self.forward(layer["shortcut"], x)
            else:
                x = getattr(x, op)()
        return x


def spu_config(setting):
    import spu

    config = spu.RuntimeConfig(protocol=spu.ProtocolKind.CHEETAH, field=getattr(spu.FieldType, setting["field"]))
    config.fxp_fraction_bits = setting["fraction"]
    return config


def spu_program(folder, setting):
    """The compiled network, shares of its weights for each party, and shares of each sample."""
    import jax.numpy as jnp
    import spu
    import spu.utils.frontend as frontend
    from jax import lax
    from jax.nn import sigmoid

    content, stored = json.loads((folder / "network.json").read_text()), np.load(folder / "arrays.npz")
    names = [name for name in stored.files if name not in ("x", "logits")]

    def forward(layers, x, weights):
        for layer in layers:
            op = layer["op"]
            if op == "conv":
                w, pad = weights[layer["weight"]["array"]], [(layer["padding"],) * 2] * 2
                x = lax.conv_general_dilated(
                    x, w, (layer["stride"],) * 2, pad, dimension_numbers=("NHWC", "HWIO", "NHWC")
                ) + weights[layer["bias"]["array"]].reshape(1, 1, 1, -1)
            elif op == "linear":
                x = x @ weights[layer["weight"]["array"]] + weights[layer["bias"]["array"]]
            elif op == "max":
                window = (1, layer["size"], layer["size"], 1)
                x = lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")
            elif op == "mean":
                x = x.mean((1, 2), keepdims=True)
            elif op == "flatten":
                x = (x.transpose(0, 3, 1, 2) if x.ndim == 4 else x).reshape(len(x), -1)
            elif op == "residual":
                x = forward(layer["inner"], x, weights) + forward(layer["shortcut"], x, weights)
            else:
                x = {"relu": lambda x: jnp.maximum(x, 0), "sigmoid": sigmoid, "tanh": jnp.tanh}[op](x)
        return x

    def arranged(value):
        """Kernels as HWIO, matrices as (inputs, outputs)."""
        return value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T if value.ndim == 2 else value

    arrays = [np.ascontiguousarray(arranged(stored[name])) for name in names]
    x = stored["x"].transpose(0, 2, 3, 1) if stored["x"].ndim == 4 else stored["x"]

    def whole(x, *weights):
        return forward(content["layers"], x, dict(zip(names, weights, strict=True)))

    inputs = [f"in{i}" for i in range(1 + len(arrays))]
    executable, _ = frontend.compile(
        frontend.Kind.JAX,
        whole,
        (x[:1], *arrays),
        {},
        inputs,
        [spu.Visibility.VIS_SECRET] * len(inputs),
        lambda out: [f"out{i}" for i in range(len(out))],
    )
    io = spu.Io(2, spu_config(setting))
    secret = spu.Visibility.VIS_SECRET
    weights = [io.make_shares(value, secret, 0) for value in arrays]
    samples = [io.make_shares(np.ascontiguousarray(x[i : i + 1]), secret, 1) for i in range(len(x))]
    by_party = [{name: both[party] for name, both in zip(inputs[1:], weights, strict=True)} for party in range(2)]
    return executable, by_party, samples, io.reconstruct
