"""A whole round of robust learning on the CPU: ours beside ByzFL's, on the same data, in one process.

    pip install --no-deps --target peer byzfl==0.0.11                  # for the benchmark only
    python benchmarks/rounds.py --peer peer

CafCor's MNIST setting: n clients, a twentieth of which flip signs, batches of 50, the CNN of 431,080
parameters, client momentum, CAF. ByzFL has neither clipping nor noise, so the row that is compared has none;
what both cost is the next row. A round is all that happens between two models: the clients' batches,
gradients and momenta, the liars' messages, the rule and the step. Rounds take turns, so that a busy machine
slows all of them; the first of each does not count.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from rule_costs import load_peer
from trilemma.experiment import Config, load
from trilemma.simulate import engine
from trilemma.simulate.experiment import Experiment, assemble
from turns import take_turns

SIZE, RATE, MOMENTUM = 50, 0.075, 0.85
BAR = 0.7
"""Ours are to take at most this part of ByzFL's time."""


def plain(clients: int, liars: int) -> Config:
    """Return the setting without clipping and noise."""
    private = load("cafcor-mnist", [f"federation={{clients={clients}, byzantine={liars}}}"])
    algorithm = f"algorithm={{name='dsgd', lr={RATE}, momentum={MOMENTUM}, batch_size={SIZE}}}"
    return private.with_("attack={name='sf'}", algorithm, "privacy={threat='none'}")


def our_round(experiment: Experiment) -> Callable[[], None]:
    """Return a function that runs the next round of an experiment."""
    progress = engine.start(experiment)

    def turn() -> None:
        nonlocal progress
        progress, _ = engine.step(experiment, progress)

    return turn


def their_round(peer: Any, experiment: Experiment) -> Callable[[], None]:
    """Return a function that runs the next round as ByzFL's own loop does, for the same clients' data."""
    data, liars = experiment.clients.data, len(experiment.byzantine)
    loaders = [
        DataLoader(
            TensorDataset(data.dataset.x_train[rows].view(-1, 1, 28, 28), data.dataset.y_train[rows]),
            batch_size=SIZE,
            shuffle=True,
        )
        for rows in (torch.from_numpy(data.holdings.train[i]) for i in experiment.honest)
    ]
    shared = {"model_name": "cnn_mnist", "device": "cpu", "optimizer_name": "SGD", "learning_rate": RATE}
    shared |= {"loss_name": "NLLLoss", "weight_decay": 0.0, "milestones": [], "learning_rate_decay": 1.0}
    own = {"LabelFlipping": False, "nb_labels": 10, "momentum": MOMENTUM, "store_per_client_metrics": False}
    clients = [peer.Client({**shared, **own, "training_dataloader": loader}) for loader in loaders]
    rule = {"aggregator_info": {"name": "CAF", "parameters": {"f": liars}}, "pre_agg_list": []}
    server = peer.Server({**shared, **rule, "test_loader": loaders[0]})
    attack = peer.ByzantineClient({"name": "SignFlipping", "f": liars, "parameters": {}})
    for client in clients:
        client.set_model_state(server.get_dict_parameters())

    def turn() -> None:
        for client in clients:
            client.compute_gradients()
        honest = [client.get_flat_gradients_with_momentum() for client in clients]
        server.update_model_with_gradients(honest + attack.apply_attack(honest))
        for client in clients:
            client.set_model_state(server.get_dict_parameters())

    return turn


def main() -> None:
    """Time the rounds and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer", type=Path, help="folder that byzfl was installed into")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    clients, liars = arguments.clients, max(1, arguments.clients // 20)
    settings = plain(clients, liars).with_("run.device=cpu")
    experiment = assemble(settings, seed=1)
    private = load("cafcor-mnist", [f"federation={{clients={clients}, byzantine={liars}}}"])
    actions = {
        "ours": our_round(experiment),
        "ours, CafCor-SecLDP (clips, adds noise)": our_round(
            assemble(private.with_("attack={name='sf'}", "run.device=cpu"), seed=1)
        ),
    }
    if arguments.peer is not None:
        load_peer(arguments.peer)
        actions["ByzFL 0.0.11"] = their_round(importlib.import_module("byzfl.fed_framework"), experiment)
    threads = torch.get_num_threads()
    print(
        f"torch {torch.__version__}, {threads} threads; n = {clients}, f = {liars}, b = {SIZE}, CNN, CAF, SF"
    )
    best = take_turns(actions, arguments.repeats)
    for name, took in best.items():
        print(f"{name:<42}{took.seconds:>8.2f} s a round {took.busy:>8.2f} s of processor time")
    if arguments.peer is not None:
        ours, theirs = best["ours"], best["ByzFL 0.0.11"]
        ratios = f"{ours.seconds / theirs.seconds:.2f}, of processor time {ours.busy / theirs.busy:.2f}"
        print(f"ours / ByzFL: {ratios} (bar: at most {BAR})")


if __name__ == "__main__":
    main()
