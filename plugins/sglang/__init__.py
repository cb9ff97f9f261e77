"""SGLang as a worker behind the SMG router."""
