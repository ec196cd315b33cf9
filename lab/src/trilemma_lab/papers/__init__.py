"""The papers' experiments: each one's runs, the numbers it printed, and how ours compare.

A module per paper registers its studies; what papers printed is in `published/`, what ours gave in the
`lab/results/`. Runs are `trilemma.simulate`'s; what has none, times and formulas, is computed here.

>>> sorted(studies)[:3]
['byz-clip21', 'byz-clip21-figure1', 'byz-clip21-figure2']
"""

from trilemma_lab.papers import byz_clip21, cafcor, costs, heterogeneity, safe_dshb, short_clip
from trilemma_lab.papers.lp_proj import study as lp_proj_tables
from trilemma_lab.papers.lp_proj import theory as lp_proj_theory
from trilemma_lab.studies.study import Study, run_studies, studies

__all__ = [
    "Study",
    "byz_clip21",
    "cafcor",
    "costs",
    "heterogeneity",
    "lp_proj_tables",
    "lp_proj_theory",
    "run_studies",
    "safe_dshb",
    "short_clip",
    "studies",
]
