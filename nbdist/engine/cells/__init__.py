"""A cell on one rank: run it, stop it, say what went wrong."""
