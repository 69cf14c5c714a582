"""The proxy: agents speak HTTP to it, it speaks to the worker, to upstreams and to the session store."""
