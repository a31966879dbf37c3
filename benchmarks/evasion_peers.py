"""The attacks of four libraries behind one signature, with the parameters of ours; those not installed are left out."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# (N, …) inputs in [0, 1], (N,) labels -> (N, …) results.
Peer = Callable[[Tensor, Tensor], Tensor]


def peers(module: nn.Module, *, epsilon: float, batch: int) -> dict[str, dict[str, Peer]]:
    """Attack -> library -> a function; PGD takes 40 steps of epsilon / 16, C&W 3 searches of 100 steps at 0.05."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    found: dict[str, dict[str, Peer]] = {"fgsm": {}, "pgd": {}, "deepfool": {}, "cw": {}}
    for add in (_foolbox, _torchattacks, _cleverhans, _art):
        try:
            add(found, module, epsilon, batch)
        except ImportError as error:
            print("left out:", error)
    return found


def _foolbox(found: dict[str, dict[str, Peer]], module: nn.Module, epsilon: float, batch: int) -> None:
    foolbox = importlib.import_module("foolbox")
    model = foolbox.PyTorchModel(module, bounds=(0.0, 1.0), device="cpu")

    def run(attack: Any, radius: float | None) -> Peer:
        def go(x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([attack(model, a, b, epsilons=radius)[1] for a, b in _batches(x, y, batch)])

        return go

    attacks = foolbox.attacks
    found["fgsm"]["foolbox"] = run(attacks.LinfFastGradientAttack(random_start=False), epsilon)
    pgd = attacks.LinfProjectedGradientDescentAttack(steps=40, abs_stepsize=epsilon / 16)
    found["pgd"]["foolbox"] = run(pgd, epsilon)
    found["deepfool"]["foolbox"] = run(attacks.L2DeepFoolAttack(steps=50, candidates=10, overshoot=0.02), None)
    cw = attacks.L2CarliniWagnerAttack(binary_search_steps=3, steps=100, stepsize=0.05, initial_const=1.0)
    found["cw"]["foolbox"] = run(cw, None)


def _torchattacks(found: dict[str, dict[str, Peer]], module: nn.Module, epsilon: float, batch: int) -> None:
    torchattacks = importlib.import_module("torchattacks")
    for name, attack in (
        ("fgsm", torchattacks.FGSM(module, eps=epsilon)),
        ("pgd", torchattacks.PGD(module, eps=epsilon, alpha=epsilon / 16, steps=40)),
        ("deepfool", torchattacks.DeepFool(module, steps=50, overshoot=0.02)),
        ("cw", torchattacks.CW(module, c=1.0, steps=300, lr=0.05)),  # it has no bisection: one c, as many steps
    ):
        attack.set_device("cpu")
        found[name]["torchattacks"] = lambda x, y, attack=attack: torch.cat(
            [attack(a, b) for a, b in _batches(x, y, batch)]
        )


def _cleverhans(found: dict[str, dict[str, Peer]], module: nn.Module, epsilon: float, batch: int) -> None:
    root = "cleverhans.torch.attacks"
    fgm = importlib.import_module(f"{root}.fast_gradient_method").fast_gradient_method
    pgd = importlib.import_module(f"{root}.projected_gradient_descent").projected_gradient_descent
    cw = importlib.import_module(f"{root}.carlini_wagner_l2").carlini_wagner_l2
    inf, box = float("inf"), {"clip_min": 0.0, "clip_max": 1.0}

    def run(one: Callable[[Tensor, Tensor], Tensor]) -> Peer:
        return lambda x, y: torch.cat([one(a, b).detach() for a, b in _batches(x, y, batch)])

    found["fgsm"]["cleverhans"] = run(lambda x, y: fgm(module, x, epsilon, inf, y=y, **box))
    found["pgd"]["cleverhans"] = run(
        lambda x, y: pgd(module, x, epsilon, epsilon / 16, 40, inf, y=y, sanity_checks=False, **box)
    )
    search = {"binary_search_steps": 3, "max_iterations": 100, "initial_const": 1.0, "lr": 0.05}
    found["cw"]["cleverhans"] = run(lambda x, y: cw(module, x, 10, y=y, **search, **box))


def _art(found: dict[str, dict[str, Peer]], module: nn.Module, epsilon: float, batch: int) -> None:
    evasion = importlib.import_module("art.attacks.evasion")
    estimator = importlib.import_module("art.estimators.classification").PyTorchClassifier(
        module, nn.CrossEntropyLoss(), (1, 28, 28), 10, clip_values=(0.0, 1.0), device_type="cpu"
    )
    quiet = {"batch_size": batch, "verbose": False}
    for name, attack in (
        ("fgsm", evasion.FastGradientMethod(estimator, eps=epsilon, batch_size=batch)),
        (
            "pgd",
            evasion.ProjectedGradientDescent(
                estimator, eps=epsilon, eps_step=epsilon / 16, max_iter=40, num_random_init=1, **quiet
            ),
        ),
        ("deepfool", evasion.DeepFool(estimator, max_iter=50, epsilon=0.02, nb_grads=10, **quiet)),
        (
            "cw",
            evasion.CarliniL2Method(
                estimator, max_iter=100, binary_search_steps=3, learning_rate=0.05, initial_const=1.0, **quiet
            ),
        ),
    ):
        found[name]["art"] = lambda x, y, attack=attack: torch.from_numpy(attack.generate(x.numpy(), y=y.numpy()))


def _batches(x: Tensor, y: Tensor, size: int) -> zip[tuple[Tensor, Tensor]]:
    return zip(x.split(size), y.split(size), strict=True)
