"""Every rule against every adversary, and the worst case of each."""
