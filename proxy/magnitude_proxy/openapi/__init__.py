"""The OpenAPI document of a listener, made from its table of routes and from the structs on the wire."""
