"""Python objects and text, in and out of collections."""
