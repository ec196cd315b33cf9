"""`flower-supernode`, asking for work more often.

    python -m trilemma.flower.supernode --superlink HOST:PORT …      (every option of flower-supernode)

Runs Flower's command unchanged, with the waits of `trilemma.flower.tuning`.
"""

from __future__ import annotations

from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode

from trilemma.flower.tuning import (
    answer_in_step,
    beat_faster,
    bound_pulls,
    bounded_clock,
    keep_knocking,
    poll_seconds,
)


def main() -> None:
    """Run flower-supernode with bounded waits."""
    bound_pulls()
    beat_faster()
    keep_knocking()
    answer_in_step()
    start_client_internal.time = bounded_clock(poll_seconds())
    flower_supernode()


if __name__ == "__main__":
    main()
