"""A page in the browser: runs as they grow, a planner for privacy, studies, and a federation from the inside.

It only reads. It listens on this machine alone unless told otherwise, answers nobody without the token that
stands in its address, and asks nothing of any other machine. What lies in a folder is shown and never run:
a configuration's plugins are not loaded here.

    index         what lies below the folders that are watched, each thing under an id of its own
    guard         who may ask: token, host, methods, and what a browser may do with an answer
    answers       what is told, as typed values
    runs, trust   a run's curves; whom the rule trusted
    planner       what `trilemma privacy` says, with controls
    studies       many runs as a table; a paper's figures beside ours
    federations   a party's own folder
    app, serving  the addresses; the server
    static/       the page itself: HTML, a style sheet and modules, as they are
"""
