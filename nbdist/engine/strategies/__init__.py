"""Models over many ranks: how they are laid out, split, reduced and compared."""
