"""What an adapter does for `hvdkit profile`: a module a framework, the marks of a step and its details."""
