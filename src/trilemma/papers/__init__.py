"""The papers' experiments: each one's runs, the numbers it printed, and how ours compare.

A module per paper registers its studies; what papers printed is in `published/`, what ours gave in the
repository's `results/`. Nothing here computes anything that `trilemma.simulate` does not.

>>> sorted(studies)[:3]
['byz-clip21', 'cafcor-fashion', 'cafcor-mnist']
"""

from trilemma.papers import byz_clip21, cafcor, safe_dshb
from trilemma.papers.lp_proj import study as lp_proj_tables
from trilemma.papers.study import Study, run_study, studies

__all__ = ["Study", "byz_clip21", "cafcor", "lp_proj_tables", "run_study", "safe_dshb", "studies"]
