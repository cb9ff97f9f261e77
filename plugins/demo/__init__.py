"""Tiny models made from nothing, and one chat request through an engine, our worker and the router."""
