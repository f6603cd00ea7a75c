"""What users call: the signatures and manuals of the methods of collections."""
