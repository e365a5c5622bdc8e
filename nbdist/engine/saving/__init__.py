"""Checkpoints: written whole by all ranks, read by any other layout."""
