"""`python -m trilemma` is the `trilemma` command."""

from trilemma.cli import main

main()
