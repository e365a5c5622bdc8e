"""What runs on the ranks: imports torch and the standard library, nothing of the notebook's side."""
