"""What Python lacks: names, settings, processes, files."""
