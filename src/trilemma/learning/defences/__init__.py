"""Defences of a server beside its rule, whole in a file: the stage a chain names, and the server's work.

stage             what a stage is: a step of a chain that extends an algorithm's server
filter            a factor for every message of a round; 0 leaves it out
noise_test        tests each message against the law of its noise (Xiang and others 2023, first stage)
noise_test_rank   the same, then ranks clients by the server's own message (both stages)
safeguard         leaves out clients whose sums drift away from the majority's (Allen-Zhu and others 2021)
fltrust           compares messages with the server's own, from public examples (Cao and others 2021)
root_client       the server's own message, for the two filters with a root set
evidence          what is known of honest noise, added up over rounds
rehearsal         what a defended server would do, for attacks that are searched against it
"""

from trilemma.base.registry import discover

discover(__name__)
