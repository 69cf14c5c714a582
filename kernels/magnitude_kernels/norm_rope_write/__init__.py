"""What lies between two matrix products: rotary with the write into the cache, and residual with the norm."""
