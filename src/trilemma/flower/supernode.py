"""`flower-supernode`, asking for work more often.

python -m trilemma.flower.supernode --superlink HOST:PORT …      (every option of flower-supernode)
"""

from __future__ import annotations

from trilemma.flower.supernode_internals import run_supernode

if __name__ == "__main__":
    run_supernode()
