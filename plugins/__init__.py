"""gRPC workers for LLM inference engines behind the SMG router."""
