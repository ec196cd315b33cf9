"""`flower-superlink`, for many clients on few cores.

python -m trilemma.flower.superlink --host HOST --port PORT …      (every option of flower-superlink)
"""

from __future__ import annotations

from trilemma.flower.superlink_internals import run_superlink

if __name__ == "__main__":
    run_superlink()
