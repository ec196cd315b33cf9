"""Attacks on a final model: what somebody who has it can find out about the records behind it."""
