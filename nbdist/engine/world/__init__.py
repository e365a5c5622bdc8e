"""The process group of one generation, where ranks meet, and what looks over their collectives."""
