"""What is observed, and under which one name."""
