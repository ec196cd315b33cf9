"""What keeps a party running when nobody looks: a systemd unit in its folder, a compose file for all.

Both run `trilemma federation up FOLDER --attach`, which starts again what ends and continues the run that was
under way; they start that command again when it ends itself, and after a reboot. A party that was taken down
(`trilemma federation down`) stays down: the command then ends well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from trilemma.base.errors import UserError
from trilemma.federation.party.layout import Party
from trilemma.federation.party.public_facts import Federation

COMPOSE = "compose.yaml"


def unit_file(party: Party) -> Path:
    """Return where a party's unit is; its name is that of the service."""
    return party.folder / f"trilemma-{party.name}.service"


def unit(party: Party, python: str = sys.executable) -> str:
    """Return the systemd unit of a party, for the place where its folder is now.

    >>> print(unit(Party(Path("/srv/pilot/client-3"), 3), "/opt/venv/bin/python").splitlines()[-4])
    ExecStart="/opt/venv/bin/python" -m trilemma federation up "/srv/pilot/client-3" --attach
    """
    folder = party.folder.resolve()
    return f"""\
# Install it with: sudo systemctl enable --now {unit_file(party).resolve()}
# Was the folder moved, or another Python installed: trilemma federation units FOLDER writes this anew.
[Unit]
Description=Trilemma federation, {party.name}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=exec
User={_owner(party)}
UMask=0077
NoNewPrivileges=yes
PrivateTmp=yes
KillMode=mixed
TimeoutStopSec=30
Restart=on-failure
RestartSec=3
ExecStart={_quoted(python)} -m trilemma federation up {_quoted(str(folder))} --attach

[Install]
WantedBy=multi-user.target
"""


def _quoted(word: str) -> str:
    """Return a word as a unit's command line has it: in quotes, without specifiers and variables."""
    if not word.isprintable():  # a line break in it would begin another line of the unit
        raise UserError(
            f"{word!r} holds characters that no unit can name; move the folder to a plainer place"
        )
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$") + '"'


def _owner(party: Party) -> str:
    """Return whose folder it is: nobody else can read its secrets."""
    try:
        return party.folder.owner()
    except (KeyError, NotImplementedError, OSError):
        return "root"


def compose(parties: Iterable[Party]) -> str:
    """Return a compose file with one container for each party, which sees its own folder and no other."""
    every = list(parties)
    federation = every[0].federation
    # A pilot listens on loopback, which containers have in common only where they share the machine's.
    network = "network_mode: host" if federation.on_one_machine else "networks: [federation]"
    services = "".join(
        f"""\
  {party.name}:
    <<: *party
    volumes: ["./{party.folder.name}:/party/{party.folder.name}"]
    command: ["up", "/party/{party.folder.name}", "--attach"]
"""
        for party in every
    )
    shared = "" if federation.on_one_machine else "\nnetworks:\n  federation: {}\n"
    return f"""\
# One container for each party; build the image first: docker build -t trilemma -f deploy/Dockerfile .
# Then, here: docker compose up -d, and docker compose exec server trilemma federation run /party/server
x-party: &party
  image: trilemma
  restart: unless-stopped
  init: true
  stop_grace_period: 30s
  {network}

services:
{services}{shared}"""


KUBERNETES = "kubernetes.yaml"


def kubernetes(party: Party) -> str:
    """Return the manifests of a party: its process, its folder as a volume, and who may connect.

    Every party applies its own, in a cluster of its own. Nobody may connect to a client.
    """
    check_kubernetes(party.federation)
    name, server = f"trilemma-{party.name}", party.client is None
    port = party.federation.port
    inside = (
        f"""
          ports: [{{containerPort: {port}}}]"""
        if server
        else ""
    )
    ingress = f"[{{ports: [{{port: {port}}}]}}]" if server else "[]"
    service = (
        f"""---
apiVersion: v1
kind: Service
metadata: {{name: {name}, labels: {{app: {name}}}}}
spec:
  type: LoadBalancer
  selector: {{app: {name}}}
  ports: [{{port: {port}, targetPort: {port}}}]
"""
        if server
        else ""
    )
    return f"""\
# The pod waits until this folder is in its volume, and then goes on by itself:
#   kubectl apply -f {KUBERNETES} && kubectl cp . {name}-0:/party/{party.name} -c fill
# The image: docker build -t trilemma -f deploy/Dockerfile . (then push it, and name it here).
apiVersion: apps/v1
kind: StatefulSet
metadata: {{name: {name}, labels: {{app: {name}}}}}
spec:
  serviceName: {name}
  replicas: 1
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 30
      securityContext: {{runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001}}
      initContainers:
        - name: fill
          image: trilemma
          command: [sh, -c, "until [ -f /party/{party.name}/federation.toml ]; do sleep 2; done"]
          volumeMounts: [{{name: party, mountPath: /party}}]
          securityContext: &closed
            allowPrivilegeEscalation: false
            capabilities: {{drop: [ALL]}}
            seccompProfile: {{type: RuntimeDefault}}
      containers:
        - name: party
          image: trilemma
          args: [up, /party/{party.name}, --attach]{inside}
          volumeMounts: [{{name: party, mountPath: /party}}]
          securityContext: *closed
  volumeClaimTemplates:
    - metadata: {{name: party}}
      spec:
        accessModes: [ReadWriteOncePod]
        resources: {{requests: {{storage: 10Gi}}}}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {{name: {name}}}
spec:
  podSelector: {{matchLabels: {{app: {name}}}}}
  policyTypes: [Ingress]
  ingress: {ingress}
{service}"""


def check_kubernetes(facts: Federation) -> None:
    """Refuse a pilot on one machine: pods do not share loopback."""
    if facts.on_one_machine:
        raise UserError(
            "a pilot listens on loopback, which pods do not share: init --host NAME --listen 0.0.0.0"
        )


def write_kubernetes(parties: Iterable[Party]) -> list[Path]:
    """Write every party's manifests into its folder."""
    written = [party.folder / KUBERNETES for party in parties]
    for path, party in zip(written, parties, strict=True):
        path.write_text(kubernetes(party))
    return written


def write(folder: Path, parties: Iterable[Party]) -> list[Path]:
    """Write the unit of every party and, where `folder` holds them all, the compose file."""
    every = list(parties)
    written = []
    for party in every:
        unit_file(party).write_text(unit(party))
        written.append(unit_file(party))
    if every[0].client is None and every[0].folder.parent == folder.resolve():
        (folder / COMPOSE).write_text(compose(every))
        written.append(folder / COMPOSE)
    return written
