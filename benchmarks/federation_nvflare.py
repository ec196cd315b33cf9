"""Seconds per round of NVFlare's simulator with the messages of `federation.py`, and nothing computed.

    python benchmarks/federation_nvflare.py [--clients 5] [--rounds 8] [--size 431972]

Needs an environment of its own with `pip install nvflare`. FedAvg of a model of so many numbers, there and
back; clients are processes of its simulator, without TLS. A round is the time between two aggregations.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from itertools import pairwise
from pathlib import Path

CLIENT = """
import nvflare.client as flare
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

flare.init()
while flare.is_running() and (model := flare.receive()) is not None:
    flare.send(FLModel(params=model.params, params_type=ParamsType.FULL, meta={"NUM_STEPS_CURRENT_ROUND": 1}))
"""
JOB = """
import sys
import numpy as np
from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.fuel.utils.constants import FrameworkType
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner

clients, rounds, size = map(int, sys.argv[1:])
np.save("start.npy", np.zeros(size, dtype=np.float32))
job = FedJob(name="plain", min_clients=clients)
job.to_server(NPModelPersistor(source_ckpt_file_full_name=f"{sys.path[0]}/start.npy"), id="persistor")
job.to_server(FedAvg(num_clients=clients, num_rounds=rounds, persistor_id="persistor"))
for number in range(clients):
    job.to(ScriptRunner(script="client.py", framework=FrameworkType.NUMPY), f"site-{number + 1}")
job.simulator_run(f"{sys.path[0]}/workspace", threads=clients)
"""


def measure(clients: int, rounds: int, size: int) -> list[float]:
    """Return the seconds of each round but the first."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("client.py", CLIENT), ("job.py", JOB)):
            (Path(folder) / name).write_text(text)
        command = [sys.executable, "job.py", str(clients), str(rounds), str(size)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=True)
    said = re.findall(rf"(\S+ \S+) - INFO - Aggregated {clients}/{clients}", done.stdout + done.stderr)
    times = [datetime.strptime(one, "%Y-%m-%d %H:%M:%S,%f").timestamp() for one in said]
    return [after - before for before, after in pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--size", type=int, default=431_972)
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    seconds = measure(options.clients, options.rounds, options.size)
    print(f"{statistics.median(seconds):.2f} s a round, the median of {len(seconds)}")


if __name__ == "__main__":
    main()
