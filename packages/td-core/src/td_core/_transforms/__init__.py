"""Collections under vmap, grad and export: pytrees of torch, and what mapped dims do to them."""
