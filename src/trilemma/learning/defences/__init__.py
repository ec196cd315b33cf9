"""Defences of a server beside its rule: evidence over many rounds, and screens of one."""
