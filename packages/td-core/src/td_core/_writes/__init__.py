"""Write one tree into another: pair their leaves, check all writes, then run them."""
