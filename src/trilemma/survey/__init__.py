"""Private statistics of records with columns: what is asked, as one bounded vector, and what the sums tell.

* `columns`: a column's cells and bounds, and into which a value falls.
* `layout`: all that is asked of a record, as one vector of bounded length.
* `told`: what the server was told, and intervals that hold despite liars.
* `figures`, `sites`: the statistics, of all sites together and of single ones.
* `proposal`: what training needs, from figures that were paid for.
* `result`, `words`: all of it together, as JSON and in words.

`trilemma.task.surveyed` makes a task of it, `trilemma.learning.statistics` is the round, and
`trilemma.report.statistics` puts the answers together.
"""
