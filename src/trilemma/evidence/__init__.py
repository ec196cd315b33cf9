"""The evidence pack: what a run promises and what is known of it, as one signed folder.

`facts` is the one value. `gather` makes it, every page is made from it, and `verify` computes it again.
"""
