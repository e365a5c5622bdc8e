"""What a rank measures and how it leaves the training thread."""
