"""Moving whole pages of the cache: page to page, out to a staging buffer, and back, with checksums."""
