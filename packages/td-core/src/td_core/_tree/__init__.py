"""What every node has, and the walks over nodes."""
