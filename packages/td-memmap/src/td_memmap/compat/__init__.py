"""Readers of what old releases of tensordict wrote, imported when such a file is met."""
