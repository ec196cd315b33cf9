"""Another configuration for a federation that exists: after statistics a training, with the same ledgers.

Every party reads its own copy, so each puts it into its own folder: `configure` does it for the folders that
are here. What was allowed was another plan, so owners allow the new one, as they would any. Only where all
folders are on one machine it is allowed at once, as `init` allows what it makes. Budgets stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller
from pathlib import Path

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.experiment import Config
from trilemma.federation.identity.authority import FOLDER, Authority
from trilemma.federation.party.layout import Party, parties
from trilemma.federation.party.permission import amend
from trilemma.federation.party.task import load_task
from trilemma.federation.server.under_way import run_under_way


def configure(folder: Path, config: Config) -> list[Party]:
    """Put a configuration into the parties' folders here; where one cannot load it, all stay as they were."""
    found = parties(folder)
    under_way = None if found[0].client is not None else run_under_way(found[0])
    if under_way is not None:
        raise UserError(f"run {under_way!r} is under way, and of another plan: let it end, or stop it, first")
    for plugin in config.plugins:
        for party in found:
            plugin.copy_into(party.folder)
    before = [party.config.read_bytes() for party in found]
    try:
        _write(found, [config.toml().encode()] * len(found))
        for party in found:
            load_task(party)
    except BaseException:
        _write(found, before)
        raise
    authority = folder / FOLDER
    if authority.is_dir():
        Authority(authority).hand_out(config.toml())
    if found[0].federation.on_one_machine:
        for party in found:
            if party.client is not None:
                amend(party.allowed, methodcaller("with_plan", party.agreed.plan))
    return found


def _write(found: Sequence[Party], texts: Sequence[bytes]) -> None:
    for party, text in zip(found, texts, strict=True):
        files.write_atomically(party.config, text)
