"""Data on many ranks: seeds, shares, workers, caches."""
