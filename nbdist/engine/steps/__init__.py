"""Optimizer steps over many ranks: the Trainer and the pieces it is made of."""
