"""What torch has, lacks or hides: no tree and no plan."""
