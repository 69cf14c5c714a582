"""`magnitude bench`: what the product costs and gains, against what a user would run instead."""
