"""What an operation does to sizes: pure functions of shapes."""
