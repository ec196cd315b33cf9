"""The laboratory's commands: `trilemma papers` and `trilemma arena`."""
